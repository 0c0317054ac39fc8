"""What fits on GPUs of 8 to 24 GB: the longest context by model, type of K and V, and method. Nothing is allocated.

    python bench/cards.py                       # the table of docs/gpu.md, in minutes
    python bench/cards.py --gb 12 --model llama-3.1-8b

The sizes are those of the library's own estimate, as in ``pylongctx doctor``, of files with the shapes of real models
in Q4_K_M whose weights are holes: such a file takes a few MiB of disk. RESERVED bytes of a card are for CUDA and a
desktop. The numbers are predictions, not measured on such cards.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from geometries import QWEN3
from random_blocks import F32, Q4_K, Q6_K, gguf
from random_model import FILE_TYPES, LLAMA, Recipe, Shape, Weights, add_meta, add_tensors, add_vocab, shape_meta
from report import table

from pylongctx import _arguments as arguments
from pylongctx.eval.runner import plan_of
from pylongctx.planning import Plan

GIB = 2**30
RESERVED = GIB
CARDS = (8, 12, 16, 24)
TYPES = ("f16", "q8_0", "q4_0")
METHODS = ("full", "longheads")
SHORT, LONG = 8192, 32768  # contexts between and beyond which memory grows evenly
STEP = 1024  # tokens
EXTENDED = 4  # times the trained context, of longheads
ALIGNMENT = 32  # of tensors in a file
BATCH = 512
ONE = (1, 1)  # threads, on which the sizes do not depend


@dataclass(frozen=True)
class Model:
    """The shape of a real model, whose context is the one that it was trained for."""

    recipe: Recipe
    shape: Shape

    @property
    def is_tied(self) -> bool:
        """Whether the output is the embedding."""
        return "output" not in self.recipe.outer.split()


LLAMA_TIED = replace(LLAMA, outer="output_norm")
QWEN3_UNTIED = replace(QWEN3, outer="output_norm output")
MODELS = {
    "llama-3.2-1b": Model(LLAMA_TIED, Shape(128256, 2048, 16, 32, 8, 8192, 131072, 500000.0)),
    "qwen3-4b": Model(QWEN3, Shape(151936, 2560, 36, 32, 8, 9728, 40960, 1e6, key_length=128)),
    "llama-3.1-8b": Model(LLAMA, Shape(128256, 4096, 32, 32, 8, 14336, 131072, 500000.0)),
    "qwen3-14b": Model(QWEN3_UNTIED, Shape(151936, 5120, 40, 40, 8, 17408, 40960, 1e6, key_length=128)),
    "qwen3-32b": Model(QWEN3_UNTIED, Shape(151936, 5120, 64, 64, 8, 25600, 40960, 1e6, key_length=128)),
}


# ---- files of holes ----


class Holes(Weights):
    """Adds tensors without data: names, sizes and types."""

    def __init__(self, writer: gguf.GGUFWriter, model: Model):
        super().__init__(writer, model.shape, 0, Q4_K)
        self.is_tied, self.n_bytes = model.is_tied, 0

    def embedding(self, deviation: float) -> None:
        """Add the token embedding with the type that Q4_K_M gives it."""
        self._hole("token_embd.weight", [self.shape.n_vocab, self.shape.n_embd], Q6_K if self.is_tied else Q4_K)

    def matrix(self, name: str, sizes: list[int], gain: Any = 1.0) -> None:
        self._hole(name, sizes, self._type(name))

    def vector(self, name: str, sizes: list[int], mean: float = 1.0, deviation: float = 0.1) -> None:
        self._hole(name, sizes, F32)

    def _hole(self, name: str, sizes: list[int], qtype: gguf.GGMLQuantizationType) -> None:
        n_block, size = gguf.GGML_QUANT_SIZES[qtype]
        n = int(np.prod(sizes)) // n_block * size
        self.writer.add_tensor_info(name, sizes, np.dtype(np.float16), n, raw_dtype=qtype)
        self.n_bytes += -(-n // ALIGNMENT) * ALIGNMENT


def write_holes(path: Path, model: Model) -> Path:
    """Write a file that has all of a model but its weights, which read as zeros."""
    writer = gguf.GGUFWriter(str(path), model.recipe.arch)
    add_meta(writer, model.recipe.arch, shape_meta(model.shape) | model.recipe.meta)
    writer.add_file_type(FILE_TYPES[Q4_K])
    add_vocab(writer, model.shape.n_vocab)
    holes = Holes(writer, model)
    add_tensors(holes, model.recipe, False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        start = -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT
        file.truncate(start + holes.n_bytes)
    return path


# ---- what fits ----


@dataclass(frozen=True)
class Memory:
    """Bytes of a model with all layers on a card: those without a context, and those of each of its tokens."""

    base: float
    token: float

    @classmethod
    def of(cls, plan: Plan, kv: str) -> "Memory":
        types = {name: arguments.kv_type(name, kv) for name in ("type_k", "type_v")}
        short, long = (sum(size.total for size in plan.sizes(**types, n_ctx=n)) for n in (SHORT, LONG))
        token = (long - short) / (LONG - SHORT)
        return cls(short - SHORT * token, token)

    def longest(self, room: float) -> int:
        """Return the longest context that fits, a multiple of STEP."""
        return max(0, int((room - self.base) / self.token) // STEP * STEP)


def memories(path: Path) -> dict[tuple[str, str], Memory]:
    """Return what a model takes by method and type of K and V."""
    found = {}
    for method in METHODS:
        with plan_of(str(path), method, ONE, {"n_ctx": SHORT, "n_batch": BATCH, "n_ubatch": BATCH}) as plan:
            found |= {(method, kv): Memory.of(plan, kv) for kv in TYPES}
    return found


def shown(method: str, n: int, n_train: int) -> str:
    """Return a context as the table has it, at most what the method reads well."""
    most = n_train * (EXTENDED if method == "longheads" else 1)
    return "-" if n < SHORT else f"{min(n, most) // STEP}k"


def lines(names: Sequence[str], cards: Sequence[float]) -> Iterator[list[str]]:
    """Yield a line per card and model that fits."""
    with tempfile.TemporaryDirectory() as folder:
        of = {name: memories(write_holes(Path(folder) / f"{name}.gguf", MODELS[name])) for name in names}
    for gb in cards:
        for name in names:
            n_train = MODELS[name].shape.n_ctx_train
            longest = {key: memory.longest(gb * GIB - RESERVED) for key, memory in of[name].items()}
            if max(longest.values()) >= SHORT:
                cells = (shown(method, longest[method, kv], n_train) for method in METHODS for kv in TYPES)
                weights = f"{of[name]['full', 'f16'].base / GIB:.1f}"
                yield [f"{gb:g}", name, weights, f"{n_train // STEP}k", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, action="append", help="of a card; may be repeated (default: 8, 12, 16, 24)")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated (default: all)")
    args = parser.parse_args()
    heads = [f"`{method}`, {kv}" for method in METHODS for kv in TYPES]
    rows = list(lines(args.model or list(MODELS), args.gb or CARDS))
    print(table(("GB", "model, Q4_K_M", "GiB without context", "trained for", *heads), rows))


if __name__ == "__main__":
    main()
