"""Checks of a GGUF file for what makes llama.cpp end the process instead of refusing the file.

llama.cpp itself checks the structure: magic, counts, lengths, sizes and offsets against the file, shapes of tensors.
A file that cannot be read here is left to it, since it says precisely what is wrong.
"""

import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from pylongctx._lib import error, lib

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_LAYERS = 512
ADAPTER_KINDS = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": 6,  # f32
}
# ggml types that no matrix product reads: q8_1 and q8_K are intermediate results, the others are integers and f64.
NO_WEIGHTS = {9: "q8_1", 15: "q8_K", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64"}
PLAIN = (0, 1, 30)  # f32, f16, bf16: the types of vectors
# Architectures that llama.cpp asserts to rotate whole heads (GGML_ASSERT(n_embd_head == n_rot) in src/models/).
WHOLE_HEADS = frozenset(
    """
    apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 dream ernie4_5
    ernie4_5-moe exaone exaone-moe exaone4 falcon granite grok grovemoe hunyuan-moe internlm2 jais2 llada llada-moe
    llama llama4 maincoder mellum mistral3 olmo olmo2 olmoe orion paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl
    qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss smallthinker smollm3 starcoder2 talkie xverse
    """.split()
)

Tensor = tuple[str, int, int]  # name, number of dimensions, type


def check_gguf(path: str) -> None:
    """Raise InvalidInput when loading the file, or running the model, would end the process."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = list(_problems(*_read(data)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, struct.error):
        return  # cut off, or a value of another type than its key has: refused by llama.cpp
    if found:
        raise error(lib.LCTX_INVALID, f"{path} cannot be used: {'; '.join(found[:3])}")


def check_adapter(path: str) -> None:
    """Raise InvalidInput when loading the file as a LoRA adapter would end the process."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            wrong = list(_wrong_kinds(_Reader(data)))
    except (OSError, ValueError, KeyError, UnicodeDecodeError, OverflowError, struct.error):
        return  # cut off or no GGUF file: refused by llama.cpp
    if wrong:
        raise error(lib.LCTX_INVALID, f"{path} cannot be used: the value of {wrong[0]} has the wrong type")


def _wrong_kinds(reader: "_Reader") -> Iterator[str]:
    _, _, _, n_meta = reader.struct("<4sIQQ")
    for _ in range(n_meta):
        key = reader.string().decode()
        (kind,) = reader.struct("<I")
        reader.value(kind)
        if kind != ADAPTER_KINDS.get(key, kind):
            yield key


def _problems(meta: dict[str, Any], tensors: list[Tensor]) -> Iterator[str]:
    arch = meta.get("general.architecture", b"").decode()
    n_layer = meta.get(f"{arch}.block_count")
    if n_layer is not None and not 1 <= n_layer <= MAX_LAYERS:
        yield f"block_count must be from 1 to {MAX_LAYERS}, not {n_layer}"
    n_rot, head_dim = meta.get(f"{arch}.rope.dimension_count"), _head_dim(meta, arch)
    if arch in WHOLE_HEADS and n_rot is not None and head_dim is not None and n_rot != head_dim:
        yield f"rope.dimension_count must be that of a head, {head_dim}, not {n_rot}"
    for key, value in meta.items():
        if key.endswith("epsilon") and not (value >= 0 and math.isfinite(value)):
            yield f"{key} must be a number from 0, not {value}"
    if word := _repeated(meta.get("tokenizer.ggml.tokens") or []):
        yield f"token {word!r} is twice in the vocabulary"
    for name, n_dims, kind in tensors:
        if "tid2eid" in name or not name.endswith((".weight", ".bias")):
            continue  # a table of expert numbers, or no weights
        if kind in NO_WEIGHTS:
            yield f"tensor {name} has type {NO_WEIGHTS[kind]}, which no computation reads"
        elif n_dims == 1 and kind not in PLAIN:
            yield f"tensor {name} is a vector of a quantized type"


def _head_dim(meta: dict[str, Any], arch: str) -> int | None:
    """Return the width of a head; None when heads differ between layers or the file does not say."""
    width, n_head = meta.get(f"{arch}.embedding_length"), meta.get(f"{arch}.attention.head_count")
    known: int | None = meta.get(f"{arch}.attention.key_length", width // n_head if width and n_head else None)
    return known


def _repeated(words: list[bytes]) -> bytes | None:
    """Return a token that llama.cpp would meet twice: it cuts them at a NUL and gives empty ones a name."""
    seen = [word.partition(b"\0")[0] or b"[EMPTY_%d]" % i for i, word in enumerate(words)]
    return Counter(seen).most_common(1)[0][0] if len(set(seen)) < len(seen) else None


def _read(data: mmap.mmap) -> tuple[dict[str, Any], list[Tensor]]:
    reader = _Reader(data)
    magic, _, n_tensors, n_meta = reader.struct("<4sIQQ")
    if magic != b"GGUF":
        raise ValueError("no GGUF file")
    meta = {}
    for _ in range(n_meta):
        key = reader.string().decode()
        meta[key] = reader.value(*reader.struct("<I"))
    return meta, [reader.tensor() for _ in range(n_tensors)]


class _Reader:
    """Walk through the header of a file; struct.error at its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._pos = 0

    def struct(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._pos)
        self._pos += struct.calcsize(layout)
        return values

    def string(self) -> bytes:
        return self.strings(1)[0]

    def strings(self, n: int) -> list[bytes]:
        # Without a method call per string: a vocabulary has hundreds of thousands.
        data, pos, found = self._data, self._pos, []
        length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(n):
            (size,) = length(data, pos)
            found.append(data[pos + 8 : pos + 8 + size])
            pos += 8 + size
        self._pos = pos
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.struct("<" + SCALARS[kind])[0]
        kind, n = self.struct("<IQ")
        if kind == STRING:
            return self.strings(n)
        self._pos += n * struct.calcsize("<" + SCALARS[kind])
        return None

    def tensor(self) -> Tensor:
        name = self.string().decode()
        (n_dims,) = self.struct("<I")
        self.struct(f"<{n_dims}Q")
        kind, _ = self.struct("<IQ")
        return name, n_dims, kind
