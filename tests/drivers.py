"""Programs that try many damaged inputs in a process of their own, which must not end before its time."""

import os
import subprocess
import sys
from pathlib import Path

from test_checkpoints import path_of


def drive(name: str, model_path, folder: Path, model: str, method: str, n: int) -> list[str]:
    """Run ``name``_driver.py on a tiny model with ``n`` inputs; returns the lines that it printed."""
    path = model_path(model) if model == "llama" else path_of(folder, model)
    env = os.environ | {"LCTX_STRICT_ARENA": "1", "GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, str(Path(__file__).with_name(f"{name}_driver.py")), str(path), method, "0", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"seed {lines[-1:]}: {done.stderr[-2000:]}"
    return lines
