"""The parameters of one test, and their parsing from options."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from pylongctx.catalog import resolve


@dataclass(frozen=True)
class Case:
    """One test of one model, without the engine that runs it. The names are those of llama-bench's fields."""

    model_filename: str
    n_prompt: int
    n_gen: int
    n_depth: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int = 0
    load_mode: str = "auto"

    @property
    def name(self) -> str:
        """llama-bench's name of the test, such as ``"pp512 @ d16384"``."""
        return label(self.n_prompt, self.n_gen, self.n_depth)

    @property
    def n_ctx(self) -> int:
        """The tokens that the test evaluates."""
        return self.n_prompt + self.n_gen + self.n_depth


def label(n_prompt: int, n_gen: int, n_depth: int) -> str:
    """Return llama-bench's name of a test."""
    parts = ([f"pp{n_prompt}"] if n_prompt else []) + ([f"tg{n_gen}"] if n_gen else [])
    return "+".join(parts) + (f" @ d{n_depth}" if n_depth else "")


def model_file(name: str) -> str:
    """Return the file of a model, as ``catalog.resolve``.

    Raises
    ------
    ValueError
        When it is a model with random weights, which another program writes.
    """
    if name.startswith("random:"):
        program = f"python bench/geometries.py {name.removeprefix('random:')}"
        raise ValueError(f"{name}: models with random weights are written by '{program}' of the repository, as a file")
    return resolve(name)


def pair(text: str) -> tuple[int, int]:
    """Return the tokens of a prompt and of a generation, given as ``"512,128"``."""
    match = re.fullmatch(r"(\d+),(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is not a pair such as 512,128")
    return int(match[1]), int(match[2])


def wanted(
    prompts: Sequence[int], generations: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return (n_prompt, n_gen) of every test, in the order of llama-bench; tests with 0 tokens are skipped."""
    every = [*((p, 0) for p in prompts), *((0, n) for n in generations), *pairs]
    return [test for test in every if test != (0, 0)]


def cases(tests: Sequence[tuple[int, int]], **values: Sequence[object]) -> list[Case]:
    """Return all combinations of values, fields of ``Case``; the last one changes fastest, then the test."""
    combinations = (dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))
    return [
        Case(n_prompt=n_prompt, n_gen=n_gen, **fields)  # type: ignore[arg-type]
        for fields in combinations
        for n_prompt, n_gen in tests
    ]
