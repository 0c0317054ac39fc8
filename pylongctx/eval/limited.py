"""Run Python code that a model wrote: in a separate process with limits, which do not stop malicious code."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

MIB = 1 << 20
# reads the code and its limits, applies them, and tells at the end that nothing was raised
RUNNER = """
import json, resource, sys
given = json.load(sys.stdin)
for name, value in given["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
exec(compile(given["code"], "answer", "exec"), {"__name__": "answer"})
sys.__stdout__.write(given["end"])
"""


def run_limited(code: str, seconds: float = 10.0, memory_mib: int = 4096) -> str:
    """Run code to its end; return "" when it came there, otherwise what stopped it.

    The process is isolated from the environment and from user packages (``python -I``), works in an empty folder that
    is removed, and has limits of time, memory and file sizes (1 MiB). One that it started and that still runs counts as
    too long, and is ended. The network is not closed, and files that the user may read can be read: run it where that
    does no harm.

    Raises
    ------
    OSError
        When the system has no limits for processes, as Windows.

    Examples
    --------
    >>> run_limited("x = 1")
    ''
    >>> run_limited("assert 1 == 2")
    'AssertionError'
    """
    if os.name != "posix":
        raise OSError("code of models runs with the limits of a Unix system only: leave execute out")
    limits = {"RLIMIT_CPU": int(seconds) + 1, "RLIMIT_AS": memory_mib * MIB, "RLIMIT_FSIZE": MIB, "RLIMIT_CORE": 0}
    end = secrets.token_hex(16)
    given = json.dumps({"code": code, "limits": limits, "end": end}).encode()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HOME": folder, "PATH": os.defpath}
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it took more than {seconds:g} seconds"
        finally:
            _end(process)
    if out.endswith(end.encode()):
        return ""
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"it ended early with status {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
