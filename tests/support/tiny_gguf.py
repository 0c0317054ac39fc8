"""Tiny GGUF files with random weights, and large ones without any."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from random_model import LLAMA, SIZES, Shape, add_meta, add_vocab, dims, shape_meta, write_model
from tiny_models import RECIPES

TINY = Shape()
MASK = 0x41  # turns bits of mantissas, so that weights stay finite


def make_model(path: Path | str, shape: Shape = TINY, *, arch: str = "llama", **options: Any) -> Path:
    """Write a model of the recipe named ``arch`` (see ``tiny_models.py``); options are those of ``write_model``."""
    recipe = RECIPES[arch]
    return write_model(path, replace(recipe, arch=recipe.arch or arch), replace(shape, **recipe.shape), **options)


def sparse_model(path: Path, shape: Shape) -> Path:
    """Write the header of a llama model in f16, and a hole where its weights would be: no disk is used for them."""
    writer, sizes = gguf.GGUFWriter(path, "llama"), dims(shape)
    add_vocab(writer, shape.n_vocab)
    add_meta(writer, "llama", shape_meta(shape))
    layers = [f"blk.{i}.{name}" for i in range(shape.n_layer) for name in LLAMA.layer.split()]
    n_bytes = 0
    for name in ["token_embd", "output_norm", "output", *layers]:
        lengths = [sizes[word] for word in SIZES.get(name.rpartition(".")[2], "embd").split(",")]
        dtype = np.dtype(np.float32 if "norm" in name else np.float16)
        writer.add_tensor_info(f"{name}.weight", lengths, dtype, math.prod(lengths) * dtype.itemsize)
        n_bytes += gguf.GGUFWriter.ggml_pad(math.prod(lengths) * dtype.itemsize, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = gguf.GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment)
    os.truncate(path, header + n_bytes)
    return path


def unquantized(path: Path | str, source: Path | str) -> Path:
    """Write a model again with its weights in f32, for which llama.cpp rounds no activations."""
    return requantized(path, source, gguf.GGMLQuantizationType.F32)


def requantized(path: Path | str, source: Path | str, qtype: gguf.GGMLQuantizationType) -> Path:
    """Write a model again with its matrices in a type; vectors are f32."""
    reader = gguf.GGUFReader(str(source))
    writer = _writer(path, reader)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = qtype if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    _write(writer)
    return Path(path)


def split_model(path: Path, source: Path | str, n_tensor: int) -> list[Path]:
    """Write a model again as files of ``n_tensor`` tensors each; returns their paths."""
    reader = gguf.GGUFReader(str(source))
    writer = _writer(path, reader, split_max_tensors=n_tensor)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _write(writer)
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def tensor_ranges(paths: Iterable[Path]) -> Iterator[tuple[Path, str, int, int]]:
    """Yield file, name, and first and last byte of all tensors of a model's files."""
    for path in paths:
        for tensor in gguf.GGUFReader(str(path)).tensors:
            yield path, tensor.name, int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)


def flip(path: Path, start: int, end: int) -> None:
    """Change every byte of a range, so that neither size nor mtime of the file says it; twice is as before."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(start)
        data = np.frombuffer(file.read(end - start), np.uint8) ^ MASK
        file.seek(start)
        file.write(data.tobytes())
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def set_number(path: Path, key: str, change: Callable[[float], float]) -> None:
    """Change a number in the header of a file."""
    reader = gguf.GGUFReader(str(path), "r+")
    value = reader.fields[key].parts[reader.fields[key].data[0]]
    value[0] = change(value[0])


def _writer(path: Path | str, reader: gguf.GGUFReader, **options: Any) -> gguf.GGUFWriter:
    """Return a writer of a model with the metadata of another."""
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents(), **options)
    for name, value in reader.fields.items():
        if not name.startswith(("GGUF.", "general.")):
            writer.add_key_value(name, value.contents(), value.types[0], value.types[-1])
    return writer


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
