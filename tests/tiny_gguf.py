"""Tiny GGUF files with random weights, and large ones without any."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_models import RECIPES

from pylongctx.bench.random_model import LLAMA, SIZES, Shape, add_meta, add_vocab, dims, shape_meta, write_model

TINY = Shape()


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
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, value in reader.fields.items():
        if not name.startswith(("GGUF.", "general.")):
            writer.add_key_value(name, value.contents(), value.types[0], value.types[-1])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = qtype if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
