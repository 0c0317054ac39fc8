"""Header values of a GGUF file on which llama.cpp's assertions fail."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_TOKEN = 4096  # bytes: llama.cpp matches grammars by recursion over the characters of a token
MAX_VOCAB = 2**22
ALIGNMENT = 32  # of a mapped tensor in memory, and the default in a file
# ggml types that no matrix product supports: q8_1 and q8_K are intermediate, the others are integers and f64.
NO_WEIGHTS = {9: "q8_1", 15: "q8_K", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64"}
F32 = 0  # the type of vectors and of the factors of recurrent layers, as their operands have it
TABLES = ("tid2eid", "d2t", "t2d")  # integer tables: experts by token, tokens of a draft vocabulary
NO_VOCABULARY = (b"none", b"no_vocab")
ESCAPED = re.compile(rb"\\(?:x(..)|x.?\Z|(.)|\Z)", re.DOTALL)  # bytes in tokens of RWKV
ROPE_NUMBERS = (("rope.freq_base", 1.01, 1e18), ("rope.freq_base_swa", 1.01, 1e18), ("rope.scaling.factor", 0, 1e9))
ROPE_SCALINGS = (b"none", b"linear", b"yarn", b"longrope")
# Architectures that llama.cpp asserts to rotate whole heads (GGML_ASSERT(n_embd_head == n_rot) in src/models/).
WHOLE_HEADS = frozenset(
    """
    apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 dream ernie4_5
    ernie4_5-moe exaone exaone-moe exaone4 falcon granite grok grovemoe hunyuan-moe internlm2 jais2 llada llada-moe
    llama llama4 maincoder mellum mistral3 olmo olmo2 olmoe orion paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl
    qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss smallthinker smollm3 starcoder2 talkie xverse
    """.split()
)

# Words in keys of files whose weights were transformed, so that a runtime must transform the activations as well; no
# key of llama.cpp has one. Other unknown keys are harmless: converters add their own facts.
TRANSFORMS = re.compile(r"hadamard|fwht|quarot|spinquant|rotat(?:ed|ion)", re.IGNORECASE)
# what people write about a file, not about its tensors
PROSE = ("general.", "tokenizer.", "quantize.")


class Tensor(NamedTuple):
    """A tensor of a file: its type is ggml's number, its offset counts from the start of all tensor data."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """Metadata (strings as bytes) and tensors of a file, and the offset at which the header ends."""

    meta: dict[str, Any]
    tensors: list[Tensor]
    end: int

    @property
    def arch(self) -> str:
        """The architecture."""
        name = self.meta.get("general.architecture")
        return name.decode("utf-8", "replace") if isinstance(name, bytes) else ""

    def number(self, key: str) -> int | None:
        """Return an integer of the architecture; None for another type, which llama.cpp refuses."""
        value = self.meta.get(f"{self.arch}.{key}")
        return value if type(value) is int else None

    def numbers(self, key: str) -> list[int]:
        """Return the integers of an array of the architecture, or a single one."""
        value = self.meta.get(f"{self.arch}.{key}")
        return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]


def problems(header: Header) -> Iterator[str]:
    """Yield the faults of a file."""
    for check in (_transforms, _layers, _heads, _experts, _numbers, _vocabulary, _tensors):
        yield from check(header)


def _transforms(header: Header) -> Iterator[str]:
    """Yield the keys, by namespace, that say that weights are stored in a basis which this runtime does not know."""
    found = (key for key in header.meta if not key.startswith(PROSE) and TRANSFORMS.search(key))
    for name in dict.fromkeys(key.rpartition(".")[0] or key for key in found):
        yield (
            f"its keys {name}.* say that its weights were transformed before they were quantized, "
            "and pylongctx would read them as noise: use a file without this transform"
        )


def _layers(header: Header) -> Iterator[str]:
    n_layer = header.number("block_count")
    if n_layer is not None and not 1 <= n_layer <= MAX_LAYERS:
        yield f"block_count must be from 1 to {MAX_LAYERS}, not {n_layer}"
    for name, left in (("nextn_predict_layers", 1), ("posnet.block_count", 0), ("convnext.block_count", 0)):
        n = header.number(name)
        if n and n_layer is not None and n > n_layer - left:
            yield f"{name} must be at most {n_layer - left} of block_count, {n_layer}, not {n}"


def _heads(header: Header) -> Iterator[str]:
    n_rot, head_dim = header.number("rope.dimension_count"), _head_dim(header)
    if header.arch in WHOLE_HEADS and n_rot is not None and head_dim is not None and n_rot != head_dim:
        yield f"rope.dimension_count must equal the head size, {head_dim}, not {n_rot}"
    for swa in ("", "_swa"):
        n_rot = header.number(f"rope.dimension_count{swa}")
        width = header.number(f"attention.key_length{swa}") or head_dim
        if n_rot is not None and (n_rot % 2 or (width is not None and n_rot > width)):
            yield f"rope.dimension_count{swa} must be even and at most the head size, {width}, not {n_rot}"
    n_heads, n_kv = header.numbers("attention.head_count"), header.numbers("attention.head_count_kv")
    for layer, kv in enumerate(n_kv):
        n = n_heads[layer % len(n_heads)] if n_heads else 0
        if kv > 0 and n % kv:
            yield f"attention.head_count must be a multiple of attention.head_count_kv, {kv}, not {n}"
            return


def _head_dim(header: Header) -> int | None:
    """Return the head size; None when heads differ between layers or the file does not define it."""
    width, n_head = header.number("embedding_length"), header.number("attention.head_count")
    return header.number("attention.key_length") or (width // n_head if width and n_head else None)


def _experts(header: Header) -> Iterator[str]:
    n = header.number("expert_count") or 0
    used = max(header.numbers("expert_used_count"), default=0)
    groups, used_groups = header.number("expert_group_count") or 0, header.number("expert_group_used_count") or 0
    if n > MAX_EXPERTS:
        yield f"expert_count must be at most {MAX_EXPERTS}, not {n}"
    if used > n or (n > 0 and used == 0 and not header.arch.startswith("hunyuan")):
        yield f"expert_used_count must be from 1 to expert_count, {n}, not {used}"
    if groups >= max(n, 1) and groups > 0:
        yield f"expert_group_count must be less than expert_count, {n}, not {groups}"
    elif groups > 1 and (n % groups or not 0 < used_groups < groups):
        yield f"expert_group_count {groups} with expert_group_used_count {used_groups} does not divide {n} experts"


def _numbers(header: Header) -> Iterator[str]:
    for key, value in header.meta.items():
        if key.endswith("epsilon") and not _is_epsilon(value):
            yield f"{key} must be at least 0, not {value}"
    for key, least, most in ROPE_NUMBERS:
        value = header.meta.get(f"{header.arch}.{key}")
        if isinstance(value, float) and not least <= value <= most:
            yield f"{key} must be from {least:g} to {most:g}, not {value:g}"
    scaling = header.meta.get(f"{header.arch}.rope.scaling.type")
    if isinstance(scaling, bytes) and scaling not in ROPE_SCALINGS:
        yield f"rope.scaling.type {scaling.decode('utf-8', 'backslashreplace')[:40]!r} is unknown"
    alignment = header.meta.get("general.alignment")
    if type(alignment) is int and alignment % ALIGNMENT:
        yield f"general.alignment must be a multiple of {ALIGNMENT}, not {alignment}"


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _vocabulary(header: Header) -> Iterator[str]:
    words = header.meta.get("tokenizer.ggml.tokens")
    words = words if isinstance(words, list) and all(isinstance(word, bytes) for word in words[:1]) else []
    if word := _repeated(words):
        yield f"token {word[:40]!r} occurs twice in the vocabulary"
    if len(max(words, key=len, default=b"")) > MAX_TOKEN:
        yield f"a token is longer than {MAX_TOKEN} bytes"
    yield from _tokenizer(header, words)
    n_vocab = header.number("vocab_size")
    if n_vocab is not None and n_vocab > MAX_VOCAB:
        yield f"vocab_size must be at most {MAX_VOCAB}, not {n_vocab}"


def _tokenizer(header: Header, words: list[bytes]) -> Iterator[str]:
    kind = header.meta.get("tokenizer.ggml.model")
    if kind in NO_VOCABULARY:
        yield f"it has no vocabulary (tokenizer.ggml.model is {kind.decode()}), so it cannot process text"
    if kind == b"rwkv":
        # llama.cpp backtracks to the first byte when a text begins like a token but then differs
        texts = {ESCAPED.sub(_unescaped, word.partition(b"\0")[0]) for word in words}
        if lost := {text[:1] for text in texts if text} - texts:
            yield f"tokens begin with the byte {min(lost)!r}, which is not a token, so some texts cannot be tokenized"


def _unescaped(match: "re.Match[bytes]") -> bytes:
    if match[1]:  # llama.cpp reads two characters without checking that they are digits
        high, low = (c - 87 if 97 <= c < 128 else c - 48 for c in match[1])
        return bytes([(16 * high + low) % 256])
    return {b"t": b"\t", b"n": b"\n", b"r": b"\r"}.get(match[2], match[2] or b"")


def _repeated(words: list[bytes]) -> bytes | None:
    """Return a token that is a duplicate for llama.cpp, which cuts tokens at a NUL and names empty ones."""
    seen = [word.partition(b"\0")[0] or b"[EMPTY_%d]" % i for i, word in enumerate(words)]
    return Counter(seen).most_common(1)[0][0] if len(set(seen)) < len(seen) else None


def _tensors(header: Header) -> Iterator[str]:
    for name, dims, kind, _ in header.tensors:
        if any(table in name for table in TABLES):
            continue
        if kind in NO_WEIGHTS:
            yield f"tensor {name} has type {NO_WEIGHTS[kind]}, which no computation supports"
        elif kind != F32 and (len(dims) == 1 or not name.endswith((".weight", ".bias"))):
            yield f"tensor {name} is a vector whose type is not f32"
