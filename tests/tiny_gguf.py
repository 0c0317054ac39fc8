"""GGUF files with random weights: tiny ones for tests, ones of real width for the benchmarks.

Weights are scaled so that logits are of order one and attention is far from uniform, so a position error shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

Q8_0, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "F16", "F32"))
SHARPNESS = 2.0  # factor on q and k: attention scores get a standard deviation of about its square


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer; the names are llama.cpp's."""

    n_vocab: int = 288
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 96
    n_ctx_train: int = 64
    freq_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_embd_kv(self) -> int:
        return self.head_dim * self.n_head_kv


# ---- pieces ----


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
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Add the hyperparameters that every transformer has."""
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)


class Weights:
    """Random tensors on their way into a file."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int, qtype: gguf.GGMLQuantizationType = F32):
        self.writer, self.rng, self.qtype = writer, np.random.default_rng(seed), qtype

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """Add a matrix that keeps the variance of its input, times ``gain`` squared."""
        make = {Q8_0: self._q8_0, F16: self._f16, F32: self._f32}[self.qtype]
        self.writer.add_tensor(f"{name}.weight", make(n_out, n_in, gain * n_in**-0.5), raw_dtype=self.qtype)

    def vector(self, name: str, n: int, mean: float = 1.0, deviation: float = 0.1) -> None:
        values = mean + deviation * self.rng.standard_normal(n)
        self.writer.add_tensor(name, values.astype(np.float32))

    def table(self, name: str, n_out: int, n_in: int) -> None:
        """Add an f32 matrix of unit variance."""
        self.writer.add_tensor(f"{name}.weight", self._f32(n_out, n_in, 1.0))

    def _f32(self, n_out: int, n_in: int, std: float) -> np.ndarray:
        return std * self.rng.standard_normal((n_out, n_in), dtype=np.float32)

    def _f16(self, n_out: int, n_in: int, std: float) -> np.ndarray:
        return self._f32(n_out, n_in, std).astype(np.float16)

    def _q8_0(self, n_out: int, n_in: int, std: float) -> np.ndarray:
        """Return q8_0 blocks (scale, 32 bytes) drawn directly: uniform bytes have a deviation of about 74."""
        blocks = self.rng.integers(0, 256, (n_out, n_in // 32, 34), dtype=np.uint8)
        blocks[..., :2] = np.array([std / 74], dtype=np.float16).view(np.uint8)
        return blocks.reshape(n_out, -1)


def open_file(path: Path | str, arch: str) -> gguf.GGUFWriter:
    return gguf.GGUFWriter(str(path), arch)


def close_file(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(shape: Shape) -> Iterator[str]:
    return (f"blk.{i}" for i in range(shape.n_layer))


def add_attention(w: Weights, blk: str, shape: Shape, bias: bool = False) -> None:
    for part, n_out, gain in (
        ("attn_q", shape.n_embd, SHARPNESS),
        ("attn_k", shape.n_embd_kv, SHARPNESS),
        ("attn_v", shape.n_embd_kv, 1.0),
    ):
        w.matrix(f"{blk}.{part}", n_out, shape.n_embd, gain)
        if bias:
            w.vector(f"{blk}.{part}.bias", n_out, mean=0.0, deviation=0.3)
    w.matrix(f"{blk}.attn_output", shape.n_embd, shape.n_embd)


def add_gated_ffn(w: Weights, blk: str, shape: Shape) -> None:
    w.matrix(f"{blk}.ffn_gate", shape.n_ff, shape.n_embd)
    w.matrix(f"{blk}.ffn_up", shape.n_ff, shape.n_embd)
    w.matrix(f"{blk}.ffn_down", shape.n_embd, shape.n_ff)


def add_rope_scaling(writer: gguf.GGUFWriter, kind: str, factor: float, n_ctx_orig: int) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(n_ctx_orig)


# ---- supported ----


def make_llama(
    path: Path | str,
    shape: Shape = Shape(),
    *,
    arch: str = "llama",
    seed: int = 0,
    rope_freqs: bool = False,
    rope_scaling: tuple[str, float, int] | None = None,
    rope_sections: list[int] | None = None,
    qtype: gguf.GGMLQuantizationType = F32,
) -> Path:
    """Write a llama (NORM RoPE) or, with ``arch="qwen2"``, a qwen2 model (NEOX RoPE, biases on q, k, v).

    Parameters
    ----------
    rope_freqs : bool
        Add per-pair frequency factors as Llama 3.1 has them.
    rope_scaling : (type, factor, original context), optional
        Metadata for linear or YaRN scaling.
    rope_sections : list of int, optional
        Sections of M-RoPE, for ``arch="qwen2vl"``.
    """
    writer = open_file(path, arch)
    add_shape(writer, shape)
    add_vocab(writer, shape.n_vocab)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.freq_base)
    if rope_scaling:
        add_rope_scaling(writer, *rope_scaling)
    if rope_sections:
        writer.add_rope_dimension_sections(rope_sections)
    w = Weights(writer, seed, qtype)
    w.table("token_embd", shape.n_vocab, shape.n_embd)
    if rope_freqs:
        factors = np.linspace(1.0, 8.0, shape.head_dim // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for blk in blocks(shape):
        w.vector(f"{blk}.attn_norm.weight", shape.n_embd)
        add_attention(w, blk, shape, bias=arch.startswith("qwen2"))
        w.vector(f"{blk}.ffn_norm.weight", shape.n_embd)
        add_gated_ffn(w, blk, shape)
    w.vector("output_norm.weight", shape.n_embd)
    w.matrix("output", shape.n_vocab, shape.n_embd)
    close_file(writer)
    return Path(path)


# ---- not supported: what a method must refuse ----


def make_gemma2(path: Path | str, shape: Shape = Shape()) -> Path:
    """Write a model with sliding-window layers."""
    writer = open_file(path, "gemma2")
    add_shape(writer, shape)
    add_vocab(writer, shape.n_vocab)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_sliding_window(32)
    w = Weights(writer, 0)
    w.table("token_embd", shape.n_vocab, shape.n_embd)
    for blk in blocks(shape):
        add_attention(w, blk, shape)
        add_gated_ffn(w, blk, shape)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            w.vector(f"{blk}.{name}.weight", shape.n_embd)
    w.vector("output_norm.weight", shape.n_embd)
    close_file(writer)
    return Path(path)


def make_gpt2(path: Path | str, shape: Shape = Shape(n_head_kv=4)) -> Path:
    """Write a model with learned positions and no RoPE."""
    writer = open_file(path, "gpt2")
    add_shape(writer, shape)
    add_vocab(writer, shape.n_vocab)
    w = Weights(writer, 0)
    w.table("token_embd", shape.n_vocab, shape.n_embd)
    w.table("position_embd", shape.n_ctx_train, shape.n_embd)
    for blk in blocks(shape):
        for name, n_out, n_in in (
            ("attn_qkv", shape.n_embd + 2 * shape.n_embd_kv, shape.n_embd),
            ("attn_output", shape.n_embd, shape.n_embd),
            ("ffn_up", shape.n_ff, shape.n_embd),
            ("ffn_down", shape.n_embd, shape.n_ff),
        ):
            w.matrix(f"{blk}.{name}", n_out, n_in)
            w.vector(f"{blk}.{name}.bias", n_out, mean=0.0)
        add_layer_norm(w, f"{blk}.attn_norm", shape.n_embd)
        add_layer_norm(w, f"{blk}.ffn_norm", shape.n_embd)
    add_layer_norm(w, "output_norm", shape.n_embd)
    close_file(writer)
    return Path(path)


def add_layer_norm(w: Weights, name: str, n: int) -> None:
    w.vector(f"{name}.weight", n)
    w.vector(f"{name}.bias", n, mean=0.0)


def make_mamba(path: Path | str, shape: Shape = Shape()) -> Path:
    """Write a recurrent model."""
    d_inner, d_conv, d_state, dt_rank = 2 * shape.n_embd, 4, 8, 4
    writer = open_file(path, "mamba")
    add_shape(writer, replace(shape, n_head=0, n_head_kv=0, n_ff=0))
    add_vocab(writer, shape.n_vocab)
    writer.add_ssm_conv_kernel(d_conv)
    writer.add_ssm_inner_size(d_inner)
    writer.add_ssm_state_size(d_state)
    writer.add_ssm_time_step_rank(dt_rank)
    w = Weights(writer, 0)
    w.table("token_embd", shape.n_vocab, shape.n_embd)
    for blk in blocks(shape):
        w.vector(f"{blk}.attn_norm.weight", shape.n_embd)
        w.matrix(f"{blk}.ssm_in", 2 * d_inner, shape.n_embd)
        w.table(f"{blk}.ssm_conv1d", d_inner, d_conv)
        w.vector(f"{blk}.ssm_conv1d.bias", d_inner)
        w.matrix(f"{blk}.ssm_x", dt_rank + 2 * d_state, d_inner)
        w.matrix(f"{blk}.ssm_dt", d_inner, dt_rank)
        w.vector(f"{blk}.ssm_dt.bias", d_inner)
        writer.add_tensor(f"{blk}.ssm_a", -np.ones((d_inner, d_state), dtype=np.float32))
        w.vector(f"{blk}.ssm_d", d_inner)
        w.matrix(f"{blk}.ssm_out", shape.n_embd, d_inner)
    w.vector("output_norm.weight", shape.n_embd)
    close_file(writer)
    return Path(path)


def make_bert(path: Path | str, shape: Shape = Shape(n_head_kv=4)) -> Path:
    """Write an encoder."""
    writer = open_file(path, "bert")
    add_shape(writer, shape)
    add_vocab(writer, shape.n_vocab)
    writer.add_token_type_count(2)
    writer.add_causal_attention(False)
    w = Weights(writer, 0)
    w.table("token_embd", shape.n_vocab, shape.n_embd)
    w.table("token_types", 2, shape.n_embd)
    w.table("position_embd", shape.n_ctx_train, shape.n_embd)
    add_layer_norm(w, "token_embd_norm", shape.n_embd)
    for blk in blocks(shape):
        add_attention(w, blk, shape, bias=True)
        w.matrix(f"{blk}.ffn_up", shape.n_ff, shape.n_embd)
        w.matrix(f"{blk}.ffn_down", shape.n_embd, shape.n_ff)
        add_layer_norm(w, f"{blk}.attn_output_norm", shape.n_embd)
        add_layer_norm(w, f"{blk}.layer_output_norm", shape.n_embd)
    close_file(writer)
    return Path(path)


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
    return make_llama(path, replace(shape, n_layer=n_layer), arch=arch, qtype=qtype)
