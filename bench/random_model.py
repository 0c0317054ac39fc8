"""GGUF files with random weights: real sizes for benchmarks, tiny ones for tests.

Weights are scaled so that logits are of order one and attention is far from uniform, so a position error shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from random_blocks import (
    BLOCKS,
    F16,
    F32,
    MXFP4,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    Array,
    gguf,
    normal,
)

SHARPNESS = 2.0  # factor on q and k: attention scores get a standard deviation of about its square
N_EXPERT = 4
SHARP = ("attn_q", "attn_k", "attn_q_b", "attn_kv_a_mqa")
ALWAYS_F32 = ("ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")  # as in llama.cpp's quantization
NOT_WEIGHTS = ("exp_probs_b.bias", "ssm_a", "ssm_d", "ssm_dt.bias")  # complete names


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer; the names are llama.cpp's. ``key_length`` and ``n_rot`` are derived if 0."""

    n_vocab: int = 288
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 96
    n_ctx_train: int = 64
    freq_base: float = 10000.0
    key_length: int = 0
    n_rot: int = 0

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.key_length or self.n_embd // max(1, self.n_head)

    @property
    def n_embd_q(self) -> int:
        """The total size of all query heads."""
        return self.head_dim * self.n_head

    @property
    def n_embd_kv(self) -> int:
        """The total size of all KV heads."""
        return self.head_dim * self.n_head_kv


@dataclass(frozen=True)
class Recipe:
    """The tensors of one architecture, listed by name.

    ``name=a,b`` overrides the usual size (rows, columns; see ``dims``), ``+b`` adds a bias, and ``!name`` is the whole
    name: the tensor is a norm that the architecture stores without ``.weight``.

    Attributes
    ----------
    layer : str or tuple of str
        Tensors of every block, or a tuple with one entry per block, repeated.
    outer : str
        Tensors after the blocks; the token embedding is always included.
    arch : str
        The name in the file, if the recipe is a variant.
    shape : dict
        Fields of ``Shape`` that the architecture requires.
    meta : dict
        Additional metadata, named without the architecture.
    embedding : float
        Deviation of the token embedding, for models that scale it up.
    sharpness : float
        Factor on normed q and k, for models that do not divide scores by the root of the head's width.
    gains : dict
        Additional factors of matrices and their biases, by name.
    """

    layer: str | tuple[str, ...]
    outer: str = "output_norm output"
    arch: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    embedding: float = 1.0
    sharpness: float = SHARPNESS
    gains: dict[str, float] = field(default_factory=dict)


def biased(words: str) -> str:
    """Return the words of a recipe with a bias for each."""
    return " ".join(f"{word}+b" for word in words.split())


ATTENTION = "attn_norm attn_q attn_k attn_v attn_output"
QKV_BIAS = "attn_norm attn_q+b attn_k+b attn_v+b attn_output"
GATED = "ffn_norm ffn_gate ffn_up ffn_down"
LLAMA = Recipe(f"{ATTENTION} {GATED}", arch="llama")
QWEN2 = Recipe(f"{QKV_BIAS} {GATED}", arch="qwen2")
PHI2 = Recipe(biased(f"{ATTENTION} ffn_up ffn_down"), biased("output_norm output"), "phi2")

# ---- metadata ----


def add_vocab(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Add a SentencePiece vocabulary of at least 260: specials, 256 byte tokens, a space, single characters."""
    kind = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + ["\u2581"]
    tokens += [chr(ord("a") + i) if i < 26 else f"[{i}]" for i in range(n_vocab - len(tokens))]
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256
    types += [kind.NORMAL] * (n_vocab - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens[:n_vocab])
    writer.add_token_scores([-float(i) for i in range(n_vocab)])
    writer.add_token_types(types)
    writer.add_token_type_count(2)  # sentence types, for encoders
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def add_meta(writer: gguf.GGUFWriter, arch: str, values: dict[str, Any]) -> None:
    """Add metadata of one architecture with the types that llama.cpp expects; a name after ``.`` is the whole name."""
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in values.items():
        add[type(value)](name[1:] if name.startswith(".") else f"{arch}.{name}", value)


def shape_meta(shape: Shape) -> dict[str, Any]:
    """Return the hyperparameters that every transformer has."""
    return {
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": shape.n_rot or shape.head_dim,
        "rope.freq_base": shape.freq_base,
    }


def scaling_meta(kind: str, factor: float, n_ctx_orig: int) -> dict[str, Any]:
    """Return the metadata of linear or YaRN scaling."""
    return {
        "rope.scaling.type": kind,
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": n_ctx_orig,
    }


# ---- tensors ----

SIZES = {
    "token_embd": "n_vocab,embd",
    "output": "n_vocab,embd",
    "attn_q": "q,embd",
    "attn_k": "kv,embd",
    "attn_v": "kv,embd",
    "attn_qkv": "qkv,embd",
    "attn_output": "embd,q",
    "attn_gate": "q,embd",
    "attn_sinks": "n_head",
    "layer_output_scale": "1",
    "attn_q_norm": "head",
    "attn_k_norm": "head",
    "ffn_gate": "ff,embd",
    "ffn_up": "ff,embd",
    "ffn_down": "embd,ff",
    "ffn_gate_inp": "expert,embd",
    "ffn_gate_exps": "expert,ff,embd",
    "ffn_up_exps": "expert,ff,embd",
    "ffn_down_exps": "expert,embd,ff",
    "ffn_gate_shexp": "ff,embd",
    "ffn_up_shexp": "ff,embd",
    "ffn_down_shexp": "embd,ff",
    "rope_freqs": "rot/2",
    "rope_factors_long": "rot/2",
    "rope_factors_short": "rot/2",
}  # all others are vectors of the embedding's size
MEANS = {  # means and deviations of vectors that are not norms
    "attn_sinks": (2.0, 1.0),
    "altup_correct_scale": (1.0, 0.1),
    "layer_output_scale": (0.8, 0.1),
}


def dims(shape: Shape) -> dict[str, int]:
    """Return the sizes that a recipe can refer to."""
    return vars(shape) | {
        "embd": shape.n_embd,
        "q": shape.n_embd_q,
        "kv": shape.n_embd_kv,
        "qkv": shape.n_embd_q + 2 * shape.n_embd_kv,
        "2embd": 2 * shape.n_embd,
        "2q": 2 * shape.n_embd_q,
        "2qkv": 2 * (shape.n_embd_q + 2 * shape.n_embd_kv),
        "head": shape.head_dim,
        "rot/2": (shape.n_rot or shape.head_dim) // 2,
        "ff": shape.n_ff,
        "ff/2": shape.n_ff // 2,
        "2ff": 2 * shape.n_ff,
        "expert": N_EXPERT,
    }


class Weights:
    """Adds random tensors to a file."""

    def __init__(
        self,
        writer: gguf.GGUFWriter,
        shape: Shape,
        seed: int,
        qtype: gguf.GGMLQuantizationType = F32,
        sharpness: float = SHARPNESS,
        gains: dict[str, float] | None = None,
    ):
        self.writer, self.shape, self.qtype, self.sharpness = writer, shape, qtype, sharpness
        self.gains = gains or {}
        self.rng, self.dims = np.random.default_rng(seed), dims(shape)

    def add(self, prefix: str, word: str) -> None:
        """Add the tensor described by a word of a recipe, and its bias."""
        word, _, bias = word.partition("+")
        name, _, size = word.partition("=")
        sizes = [int(d) if d.isdigit() else self.dims[d] for d in (size or SIZES.get(name, "embd")).split(",")]
        full = prefix + name
        if name.startswith("!"):
            self.vector(prefix + name[1:], sizes)
        elif name.startswith("rope_f"):
            self.writer.add_tensor(f"{full}.weight", np.linspace(1.0, 8.0, sizes[0], dtype=np.float32))
        elif "norm" in name:
            self.vector(f"{full}.weight", sizes, self.sharpness if name.endswith(("q_norm", "k_norm")) else 1.0)
        elif name in NOT_WEIGHTS:
            self.vector(full, sizes, mean=-1.0)
        elif name in MEANS:
            self.vector(f"{full}.weight", sizes, *MEANS[name])
        elif name.endswith((".lora_a", ".lora_b")):
            self.matrix(full, sizes)
        else:
            self.matrix(f"{full}.weight", sizes, self._gain(name, sizes[0]))
        if bias:
            self.vector(f"{full}.bias", sizes[:-1] or sizes, mean=0.0, deviation=0.3 * self.gains.get(name, 1.0))

    def embedding(self, deviation: float) -> None:
        """Add the token embedding; always f32, since its rows are looked up."""
        values = deviation * normal(self.rng, [self.shape.n_vocab, self.shape.n_embd])
        self.writer.add_tensor("token_embd.weight", values)

    def matrix(self, name: str, sizes: list[int], gain: Array | float = 1.0) -> None:
        """Add a matrix that keeps the variance of its input, times ``gain`` (of each row) squared."""
        qtype = self._type(name)
        self.writer.add_tensor(name, BLOCKS[qtype](self.rng, sizes, gain * sizes[-1] ** -0.5), raw_dtype=qtype)

    def vector(self, name: str, sizes: list[int], mean: float = 1.0, deviation: float = 0.1) -> None:
        """Add a vector, f32 in every model."""
        values = mean + deviation * self.rng.standard_normal(sizes)
        self.writer.add_tensor(name, values.astype(np.float32))

    def _type(self, name: str) -> gguf.GGMLQuantizationType:
        """Return the type of a matrix: Q4_K and Q6_K as in llama.cpp's Q4_K_M; MXFP4 only for experts."""
        _, _, rest = name.partition("blk.")
        number, _, part = rest.partition(".")
        if part in ALWAYS_F32:
            return F32
        if self.qtype is MXFP4:
            return MXFP4 if "_exps" in name else Q8_0
        if self.qtype is not Q4_K or name == "output.weight":
            return Q6_K if self.qtype is Q4_K else self.qtype
        finer = part in ("attn_v.weight", "ffn_down.weight") and _more_bits(int(number), self.shape.n_layer)
        return Q6_K if finer else Q4_K

    def _gain(self, name: str, n_rows: int) -> Array | float:
        """Return the sharpness factors of rows, above 1 for those of queries and keys."""
        if name == "attn_qkv" and self.qtype in (F16, F32):  # quantized blocks all have the same scale
            n_v = n_rows * self.shape.n_embd_kv // self.dims["qkv"]
            return np.repeat([SHARPNESS, 1.0], [n_rows - n_v, n_v])[:, None].astype(np.float32)
        return (SHARPNESS if name in SHARP else 1.0) * self.gains.get(name, 1.0)


def _more_bits(layer: int, n_layer: int) -> bool:
    """Return True for the half of layers with more bits in Q4_K_M (use_more_bits in llama-quant.cpp)."""
    return layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2


# ---- models ----

FILE_TYPES = {
    F32: gguf.LlamaFileType.ALL_F32,
    F16: gguf.LlamaFileType.MOSTLY_F16,
    Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1,
    MXFP4: gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    Q5_K: gguf.LlamaFileType.MOSTLY_Q5_K_S,
    Q6_K: gguf.LlamaFileType.MOSTLY_Q6_K,
    Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_M,
}


def write_model(
    path: Path | str,
    recipe: Recipe,
    shape: Shape,
    *,
    seed: int = 0,
    rope_freqs: bool = False,
    rope_scaling: tuple[str, float, int] | None = None,
    qtype: gguf.GGMLQuantizationType = F32,
) -> Path:
    """Write a model.

    Parameters
    ----------
    rope_freqs : bool
        Add per-pair frequency factors as in Llama 3.1.
    rope_scaling : (type, factor, original context), optional
        Metadata for linear or YaRN scaling.
    """
    writer = gguf.GGUFWriter(str(path), recipe.arch)
    scaling = scaling_meta(*rope_scaling) if rope_scaling else {}
    add_meta(writer, recipe.arch, shape_meta(shape) | scaling | recipe.meta)
    writer.add_file_type(FILE_TYPES[qtype])
    add_vocab(writer, shape.n_vocab)
    add_tensors(Weights(writer, shape, seed, qtype, recipe.sharpness, recipe.gains), recipe, rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def add_tensors(w: Weights, recipe: Recipe, rope_freqs: bool) -> None:
    """Add the tensors of a recipe."""
    w.embedding(recipe.embedding)
    if rope_freqs:
        w.add("", "rope_freqs")
    layers = (recipe.layer,) if isinstance(recipe.layer, str) else recipe.layer
    for i in range(w.shape.n_layer):
        for word in layers[i % len(layers)].split():
            w.add(f"blk.{i}.", word)
    for word in recipe.outer.split():
        w.add("", word)
