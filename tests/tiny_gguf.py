"""GGUF files with random weights: tiny ones for tests, ones of real width for the benchmarks.

Weights are scaled so that logits are of order one and attention is far from uniform, so a position error shows.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from tiny_models import RECIPES, Recipe

Q8_0, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "F16", "F32"))
SHARPNESS = 2.0  # factor on q and k: attention scores get a standard deviation of about its square
N_EXPERT = 4
NOT_WEIGHTS = ("exp_probs_b.bias", "ssm_a", "ssm_d")  # names that stand as they are


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer; the names are llama.cpp's. ``key_length`` and ``n_rot`` follow from the rest when 0."""

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
        return self.key_length or self.n_embd // max(1, self.n_head)

    @property
    def n_embd_q(self) -> int:
        return self.head_dim * self.n_head

    @property
    def n_embd_kv(self) -> int:
        return self.head_dim * self.n_head_kv


# ---- metadata ----


def add_vocab(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Add a SentencePiece vocabulary: specials, 256 byte tokens, then single characters."""
    assert n_vocab >= 259
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


def add_meta(writer: gguf.GGUFWriter, arch: str, values: dict) -> None:
    """Add metadata of one architecture with the types that llama.cpp expects."""
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in values.items():
        add[type(value)](f"{arch}.{name}", value)


def shape_meta(shape: Shape) -> dict:
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


def scaling_meta(kind: str, factor: float, n_ctx_orig: int) -> dict:
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
}  # every other one is a vector of the embedding's size


def dims(shape: Shape) -> dict[str, int]:
    """Return the sizes that a recipe may name."""
    return vars(shape) | {
        "embd": shape.n_embd,
        "q": shape.n_embd_q,
        "kv": shape.n_embd_kv,
        "qkv": shape.n_embd_q + 2 * shape.n_embd_kv,
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
    """Random tensors on their way into a file."""

    def __init__(self, writer: gguf.GGUFWriter, shape: Shape, seed: int, qtype: gguf.GGMLQuantizationType = F32):
        self.writer, self.shape, self.qtype = writer, shape, qtype
        self.rng, self.dims = np.random.default_rng(seed), dims(shape)

    def add(self, prefix: str, word: str) -> None:
        """Add the tensor that a word of a recipe describes, and its bias."""
        word, _, bias = word.partition("+")
        name, _, size = word.partition("=")
        sizes = [int(d) if d.isdigit() else self.dims[d] for d in (size or SIZES.get(name, "embd")).split(",")]
        full = prefix + name
        if name.startswith("rope_f"):
            self.writer.add_tensor(f"{full}.weight", np.linspace(1.0, 8.0, sizes[0], dtype=np.float32))
        elif "norm" in name:
            self.vector(f"{full}.weight", sizes, SHARPNESS if name.endswith(("q_norm", "k_norm")) else 1.0)
        elif name in NOT_WEIGHTS:
            self.vector(full, sizes, mean=-1.0)
        else:
            self.matrix(f"{full}.weight", sizes, self._gain(name, sizes[0]))
        if bias:
            self.vector(f"{full}.bias", sizes[:1], mean=0.0, deviation=0.3)

    def embedding(self, deviation: float) -> None:
        """Add the token embedding; rows are looked up, so f32 whatever the type of the rest."""
        values = deviation * self._normal([self.shape.n_vocab, self.shape.n_embd])
        self.writer.add_tensor("token_embd.weight", values)

    def matrix(self, name: str, sizes: list[int], gain: np.ndarray | float = 1.0) -> None:
        """Add a matrix that keeps the variance of its input, times ``gain`` (of each row) squared."""
        make = {Q8_0: self._q8_0, F16: self._f16, F32: self._f32}[self.qtype]
        self.writer.add_tensor(name, make(sizes, gain * sizes[-1] ** -0.5), raw_dtype=self.qtype)

    def vector(self, name: str, sizes: list[int], mean: float = 1.0, deviation: float = 0.1) -> None:
        values = mean + deviation * self.rng.standard_normal(sizes)
        self.writer.add_tensor(name, values.astype(np.float32))

    def _gain(self, name: str, n_rows: int) -> np.ndarray | float:
        """Return how much sharper than ordinary rows are: those that make queries and keys."""
        if name == "attn_qkv":
            n_v = n_rows * self.shape.n_embd_kv // self.dims["qkv"]
            return np.repeat([SHARPNESS, 1.0], [n_rows - n_v, n_v])[:, None].astype(np.float32)
        return SHARPNESS if name in ("attn_q", "attn_k") else 1.0

    def _normal(self, sizes: list[int]) -> np.ndarray:
        return self.rng.standard_normal(sizes, dtype=np.float32)

    def _f32(self, sizes: list[int], std: np.ndarray | float) -> np.ndarray:
        return std * self._normal(sizes)

    def _f16(self, sizes: list[int], std: np.ndarray | float) -> np.ndarray:
        return self._f32(sizes, std).astype(np.float16)

    def _q8_0(self, sizes: list[int], std: float) -> np.ndarray:
        """Return q8_0 blocks (scale, 32 bytes) drawn directly: uniform bytes have a deviation of about 74."""
        *rows, columns = sizes
        blocks = self.rng.integers(0, 256, (*rows, columns // 32, 34), dtype=np.uint8)
        blocks[..., :2] = np.array([std / 74], dtype=np.float16).view(np.uint8)
        return blocks.reshape(*rows, -1)


# ---- models ----


def make_model(
    path: Path | str,
    shape: Shape = Shape(),
    *,
    arch: str = "llama",
    seed: int = 0,
    rope_freqs: bool = False,
    rope_scaling: tuple[str, float, int] | None = None,
    qtype: gguf.GGMLQuantizationType = F32,
) -> Path:
    """Write a model of the recipe named ``arch`` (see ``tiny_models.py``).

    Parameters
    ----------
    rope_freqs : bool
        Add per-pair frequency factors as Llama 3.1 has them.
    rope_scaling : (type, factor, original context), optional
        Metadata for linear or YaRN scaling.
    """
    recipe = RECIPES[arch]
    shape, arch = replace(shape, **recipe.shape), recipe.arch or arch
    writer = gguf.GGUFWriter(str(path), arch)
    add_meta(writer, arch, shape_meta(shape) | (scaling_meta(*rope_scaling) if rope_scaling else {}) | recipe.meta)
    add_vocab(writer, shape.n_vocab)
    add_tensors(Weights(writer, shape, seed, qtype), recipe, rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def add_tensors(w: Weights, recipe: Recipe, rope_freqs: bool) -> None:
    w.embedding(recipe.embedding)
    if rope_freqs:
        w.add("", "rope_freqs")
    layers = (recipe.layer,) if isinstance(recipe.layer, str) else recipe.layer
    for i in range(w.shape.n_layer):
        for word in layers[i % len(layers)].split():
            w.add(f"blk.{i}.", word)
    for word in recipe.outer.split():
        w.add("", word)


# ---- real widths, for bench/ ----

GEOMETRIES = {
    "llama-3-8b": ("llama", Shape(512, 4096, 32, 32, 8, 14336, 8192, 500000.0)),
    "llama-3.2-1b": ("llama", Shape(512, 2048, 16, 32, 8, 8192, 8192, 500000.0)),
    "qwen2.5-7b": ("qwen2", Shape(512, 3584, 28, 28, 4, 18944, 32768, 1000000.0)),
}


def make_geometry(path: Path | str, name: str, n_layer: int, weights: str = "q8_0") -> Path:
    """Write the first ``n_layer`` layers of a real geometry with random q8_0 or f16 weights and a small vocabulary."""
    arch, shape = GEOMETRIES[name]
    qtype = {"q8_0": Q8_0, "f16": F16}[weights]
    return make_model(path, replace(shape, n_layer=n_layer), arch=arch, qtype=qtype)
