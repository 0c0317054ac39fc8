"""Options that override a model's metadata and the placement of its tensors."""

import argparse
import csv
import os
from collections.abc import Callable, Iterator
from typing import Any

from pylongctx.cli.arguments import Options, integer
from pylongctx.model_files.overrides import EXPERTS, first_layers

VARIABLE = "LLAMA_ARG_OVERRIDE_TENSOR"
MAX_LAYERS = 512
DENSE = r"\.ffn_(up|down|gate)\."
WORDS = {"true": True, "false": False}
TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": WORDS.__getitem__, "str": str}


def add_override_options(options: Options) -> None:
    """Add the options, see ``override_arguments``."""
    help = "override metadata of the file; TYPE is int, float, bool or str"
    options.several("--override-kv", parse=_pairs, metavar="KEY=TYPE:VALUE,...", help=help)


def add_tensor_options(options: Options) -> None:
    """Add the placement of tensors, see ``override_arguments``."""
    help = f"buffer types, such as CPU, for tensors whose names match regular expressions [{VARIABLE}]"
    options.several("-ot", "--override-tensor", parse=_buffers, metavar="PATTERN=TYPE,...", help=help)
    env = "LLAMA_ARG_CPU_MOE"
    options.switch("-cmoe", "--cpu-moe", env=env, help="keep the experts of all layers in host memory")
    help = "keep the experts of the first N layers in host memory"
    options.add("-ncmoe", "--n-cpu-moe", parse=_layers, env="LLAMA_ARG_N_CPU_MOE", help=help)
    help = "keep the dense feed-forward weights of the first N layers in host memory"
    options.add("-ncffn", "--n-cpu-ffn", parse=_layers, env="LLAMA_ARG_N_CPU_FFN", help=help)


def override_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of Llama that were given."""
    metadata = {key: value for pairs in getattr(args, "override_kv", None) or () for key, value in pairs}
    given = getattr(args, "override_tensor", None)
    if given is None and hasattr(args, "override_tensor") and (text := os.environ.get(VARIABLE)):
        given = [_buffers(text)]
    tensors = {pattern: kind for pairs in given or () for pattern, kind in pairs}
    if getattr(args, "cpu_moe", None):
        tensors[EXPERTS] = "CPU"
    for name, pattern in (("n_cpu_moe", EXPERTS), ("n_cpu_ffn", DENSE)):
        if n := getattr(args, name, None):
            tensors[first_layers(n, pattern)] = "CPU"
    both = {"kv_overrides": metadata, "override_tensor": tensors}
    return {name: found for name, found in both.items() if found}


def _items(text: str) -> list[str]:
    """Return the parts between commas; a part with a comma is quoted, as in CSV."""
    return next(csv.reader([text]), [])


def _pairs(text: str) -> list[tuple[str, Any]]:
    return [_pair(item) for item in _items(text)]


def _pair(item: str) -> tuple[str, Any]:
    key, _, typed = item.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and colon and kind in TYPES):
        raise ValueError(f"{item!r} is not KEY=TYPE:VALUE, where TYPE is {', '.join(TYPES)}")
    try:
        return key, TYPES[kind](value)
    except (ValueError, KeyError):
        raise ValueError(f"{value!r}, the value of {key}, is not a valid {kind}") from None


def _buffers(text: str) -> list[tuple[str, str]]:
    return list(_buffer_pairs(text))


def _buffer_pairs(text: str) -> Iterator[tuple[str, str]]:
    for item in text.split(","):
        pattern, equals, kind = item.rpartition("=")
        if not (pattern and equals and kind):
            raise ValueError(f"{item!r} is not PATTERN=TYPE, such as blk\\.0\\.=CPU")
        yield pattern, kind


def _layers(text: str) -> int:
    n = integer(text)
    if not 0 <= n <= MAX_LAYERS:
        raise ValueError(f"{n} layers: the number must be from 0 to {MAX_LAYERS}")
    return n
