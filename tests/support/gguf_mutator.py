"""Mutations of GGUF files: of bytes, and of what the header says."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SIZES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, FLOAT = 8, 9, (6, 12)
INTEGERS = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    31,
    63,
    100,
    255,
    256,
    1000,
    4096,
    65535,
    2**20,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
]
NUMBERS = [0.0, -1.0, 1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"), 1e-5, 1e6]
WORDS = [
    *(b"", b"none", b"linear", b"yarn", b"longrope", b"llama", b"bert", b"gpt2", b"t5", b"rwkv", b"plamo2", b"gemma4"),
    *(
        b"no_vocab",
        b"default",
        b"llama-bpe",
        b"qwen2",
        b"mamba",
        b"clip",
        b"deepseek2",
        b"gemma3",
        b"x" * 5000,
        b"\xff\xfe",
    ),
    *(
        b"test",
        b"hybriddna",
        b"whitespace",
        b"kimi-k2",
        b"a b",
        b"\xe2\x96\x81",
        b"<0x41>",
        b"jamba",
        b"lfm2",
        b"gpt-oss",
    ),
]
NEW_KEYS = [
    (b"bad.epsilon", STRING, b"x"),
    (b"\xff\xfe", 4, 1),
    (b"general.alignment", 4, 1),
    (b"general.alignment", 4, 8),
    (b"tokenizer.chat_template", STRING, b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    (b"tokenizer.ggml.add_bos_token", 7, 1),
    (b"tokenizer.ggml.add_eos_token", 7, 1),
    (b"tokenizer.ggml.add_sep_token", 7, 1),
    (b"tokenizer.ggml.eos_token_id", 4, 2**32 - 1),
    (b"tokenizer.ggml.bos_token_id", 4, 2**32 - 1),
    (b"tokenizer.ggml.merges", ARRAY, (STRING, [b"a b", b"", b"\xff"])),
]
ARCH_KEYS = """
expert_count expert_used_count expert_group_count expert_group_used_count nextn_predict_layers vocab_size
attention.key_length attention.value_length attention.head_count attention.head_count_kv attention.sliding_window
attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla rope.dimension_count
rope.scaling.original_context_length attention.shared_kv_layers full_attention_interval embedding_length_out
ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count leading_dense_block_count
""".split()


@dataclass
class Gguf:
    """A file in parts that can be changed."""

    version: int
    meta: list[tuple[bytes, int, object]]  # of an array: its type and values
    tensors: list[tuple[bytes, list[int], int, int]]  # name, dims, type, offset
    data: bytes
    at: int = field(default=0, repr=False)

    @classmethod
    def read(cls, path: Path) -> "Gguf":
        raw = path.read_bytes()
        found = cls(0, [], [], raw)
        _, found.version, n_tensor, n_meta = found._take("4sIQQ")
        for _ in range(n_meta):
            key, kind = found._string(), found._take("I")[0]
            found.meta.append((key, kind, found._value(kind)))
        for _ in range(n_tensor):
            name, n_dims = found._string(), found._take("I")[0]
            found.tensors.append((name, list(found._take(f"{n_dims}Q")), *found._take("IQ")))
        found.data = raw[-(-found.at // 32) * 32 :]
        return found

    def _take(self, layout: str) -> tuple:
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> bytes:
        (n,) = self._take("Q")
        self.at += n
        return self.data[self.at - n : self.at]

    def _value(self, kind: int) -> object:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            kind, n = self._take("IQ")
            return kind, [self._value(kind) for _ in range(n)]
        return self._take(SIZES[kind])[0]

    def write(self) -> bytes:
        out = struct.pack("<4sIQQ", b"GGUF", self.version, len(self.tensors), len(self.meta))
        for key, kind, value in self.meta:
            out += _packed(STRING, key) + struct.pack("<I", kind) + _packed(kind, value)
        for name, dims, kind, offset in self.tensors:
            out += _packed(STRING, name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        return out + bytes(-len(out) % 32) + self.data


def _packed(kind: int, value: object) -> bytes:
    if kind == STRING:
        return struct.pack("<Q", len(value)) + value
    if kind == ARRAY:
        return struct.pack("<IQ", value[0], len(value[1])) + b"".join(_packed(value[0], one) for one in value[1])
    if kind in FLOAT:
        return struct.pack("<" + SIZES[kind], max(-3e38, min(3e38, value)) if abs(value) < float("inf") else value)
    size = struct.calcsize(SIZES[kind])
    return (int(value) % 2 ** (8 * size)).to_bytes(size, "little")


def _number(rng: random.Random, kind: int, old: object) -> object:
    if kind in FLOAT:
        return rng.choice([*NUMBERS, old * 2])
    return rng.choice([*INTEGERS, old + 1, max(0, old - 1), old * 2, old // 2])


def _other(rng: random.Random, kind: int, value: object) -> tuple[int, object]:
    """Return another value, seldom of another type."""
    if rng.random() < 0.06:
        return rng.choice([(STRING, b"x"), (4, 1), (6, 1.0), (ARRAY, (4, [1, 0])), (ARRAY, (STRING, [b"a"]))])
    if kind == STRING:
        return kind, rng.choice(WORDS)
    if kind != ARRAY:
        if kind in (4, 5) and rng.random() < 0.1:
            return ARRAY, (kind, [rng.choice([value, 0, 1]) for _ in range(rng.choice([1, 2, 4, 5, 600]))])
        return kind, _number(rng, kind, value)
    inner, values = value[0], list(value[1])
    if not values or rng.random() < 0.15:
        return kind, (inner, values[: len(values) // 2] if rng.random() < 0.5 else values * 2)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(values))
        values[at] = rng.choice([*WORDS, rng.choice(values)]) if inner == STRING else _number(rng, inner, values[at])
    return kind, (inner, values)


def _of_value(file: Gguf, rng: random.Random) -> None:
    at = rng.randrange(len(file.meta))
    if file.meta[at][0] == b"general.architecture" and rng.random() < 0.7:
        at = rng.randrange(len(file.meta))
    key, kind, value = file.meta[at]
    file.meta[at] = (key, *_other(rng, kind, value))


def _of_key(file: Gguf, rng: random.Random) -> None:
    at = rng.randrange(len(file.meta))
    if rng.random() < 0.6:
        del file.meta[at]
    else:
        file.meta[at] = (rng.choice(file.meta)[0], *file.meta[at][1:])


def _of_new_key(file: Gguf, rng: random.Random) -> None:
    arch = next((value for key, _, value in file.meta if key == b"general.architecture"), b"llama")
    added = rng.choice(NEW_KEYS)
    if rng.random() < 0.7:
        added = (arch + b"." + rng.choice(ARCH_KEYS).encode(), 4, rng.choice(INTEGERS))
    file.meta = [one for one in file.meta if one[0] != added[0]]
    file.meta.insert(rng.randrange(len(file.meta) + 1), added)


def _of_tensor(file: Gguf, rng: random.Random) -> None:
    at = rng.randrange(len(file.tensors))
    name, dims, kind, offset = file.tensors[at]
    what = rng.randrange(6)
    if what == 0:
        del file.tensors[at]
        return
    if what == 1:
        kind = rng.choice([*range(40), 255])
    elif what == 2:
        rng.shuffle(dims)
    elif what == 3:
        i = rng.randrange(len(dims))
        dims[i] = rng.choice([0, 1, dims[i] // 2, dims[i] * 2, 2**31, 2**62])
    elif what == 4:
        name = rng.choice(file.tensors)[0]
    else:
        offset = rng.choice([0, 1, 32, offset + 1, 2**40])
    file.tensors[at] = (name, dims, kind, offset)


def _of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Truncate, or change a few bytes of header, metadata and tensor infos."""
    end = data.rindex(b".weight") + 64
    if rng.random() < 0.25:
        return data[: rng.randrange(end if rng.random() < 0.5 else len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(24 if rng.random() < 0.1 else end)
        width = rng.choice([1, 1, 4, 8])
        changed[at : at + width] = rng.choice([rng.randbytes(width), *(bytes([b] * width) for b in (0, 1, 0x7F, 255))])
    return bytes(changed)


KINDS: list[Callable[[Gguf, random.Random], None]] = [_of_value, _of_value, _of_value, _of_key, _of_new_key, _of_tensor]


def mutate(path: Path, seed: int) -> bytes:
    """Return a damaged file; the same seed damages it in the same way."""
    rng = random.Random(seed)
    if rng.random() < 0.25:
        return _of_bytes(path.read_bytes(), rng)
    file = Gguf.read(path)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(KINDS)(file, rng)
    return file.write()
