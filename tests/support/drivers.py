"""Run programs that try many damaged inputs, in processes that may die: ``states_driver.py``, ``calls_driver.py``."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from hybrid_files import path_of
from tiny_gguf import make_model
from tries import HANGS, Line

EVICTING = "corm,window=8,recent=24,evict_every=16"
ATTENTION = "longheads,chunk_size=16,window=64,representation=attention"
CASES = {
    "states": [
        ("llama", "full"),
        ("llama", "window,n_sink=4,window=40"),
        ("llama", "selfextend,group_size=8,neighbor_window=21"),
        ("llama", "longheads,chunk_size=16,window=64"),
        ("llama", "full,spans=3"),
        ("llama", f"{ATTENTION}+h2o,budget=40"),
        ("llama", EVICTING),
        ("llama", "scissorhands,budget=40,window=8"),
        ("llama", "h2o,budget=40,heads=adaptive"),
        ("llama", "kvzip"),
        ("llama", "full,spans=3+kvzip"),
        ("llama", ""),
        ("gemma3", "full"),
        ("gemma3", EVICTING),
        ("gemma3", ""),
        ("qwen3next", EVICTING),
        ("qwen3next", ""),
        ("mamba", ""),
        # memories of models that select keys themselves
        ("deepseek32", ""),
        ("deepseek4", ""),
        ("dots3note", ""),
        ("glm5-next", ""),
        ("minimax-m3", ""),
        ("qwen4exp", ""),
    ],
    "calls": [
        ("llama", ""),
        ("llama", "full"),
        ("llama", "full,spans=3"),
        ("llama", ATTENTION),
        ("llama", EVICTING),
        ("llama", "kvzip"),
        ("llama", f"{ATTENTION}+kvzip"),
        ("gemma3", ""),
        ("gemma3", "full"),
        ("qwen3next", ""),
        ("qwen3next", EVICTING),
        ("qwen3next", "kvzip"),
        ("deepseek4", ""),
        ("glm4moe-nextn", "full"),
        ("step35-nextn", ""),
        ("qwen35-nextn", "full"),
    ],
}


def model_of(folder: Path, name: str) -> Path:
    """Return the file of a tiny model."""
    return path_of(folder, name) if name != "mamba" else make_model(folder / "mamba.gguf", arch=name)


def run(name: str, path: Path, case: str, method: str, seeds: range) -> Generator[Line]:
    """Yield a line per seed: the seed, the case, how it ended, its MiB, and the end of stderr if its process ended."""
    env = os.environ | {"LCTX_STRICT_ARENA": "1", "GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, str(Path(__file__).parent / f"{name}_driver.py"), str(path), method]
    errors = path.with_suffix(".err")
    while seeds:
        numbers = [str(number) for number in (seeds.start, seeds.stop, seeds.step)]
        with (
            errors.open("w") as stderr,
            subprocess.Popen([*command, *numbers], stdout=subprocess.PIPE, stderr=stderr, env=env) as child,
        ):
            try:
                for line in child.stdout or ():
                    yield [seeds[0], case, *map(int, line.split())]
                    seeds = seeds[1:]
                child.wait()
            finally:
                child.kill()  # when the caller takes no more lines
        if seeds:
            code = "hang" if child.returncode in HANGS else child.returncode
            yield [seeds[0], case, code, 0, errors.read_text(errors="replace")[-2000:]]
            seeds = seeds[1:]


def drive(name: str, folder: Path, model: str, method: str, n: int) -> Counter:
    """Return how often ``n`` inputs of a case ended how; none ends its process."""
    lines = list(run(name, model_of(folder, model), model, method, range(n)))
    bad = [line for line in lines if line[2] not in (0, 3)]
    assert not bad, bad[:3]
    return Counter(line[2] for line in lines)
