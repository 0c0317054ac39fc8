"""The transformer in torch, as llama.cpp computes it; its state dict has the tensor names of a GGUF file."""

import torch
from random_model import Shape
from torch import Tensor, nn
from torch.nn import functional

from tiny.start import EMBEDDING, begin, look_back

EPSILON = 1e-5  # what shape_meta writes
INTERLEAVED = {"llama": True, "qwen2": False}  # RoPE turns pairs (2i, 2i+1): NORM, or (i, i+d/2): NEOX
BIASED = {"llama": False, "qwen2": True}


def rotation(shape: Shape, n: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles, [n, head_dim / 2] each."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(n, dtype=torch.float64)[:, None] * shape.freq_base**-exponents
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn heads [..., position, head_dim] by their positions."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = a * cos - b * sin, a * sin + b * cos
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPSILON)


class Block(nn.Module):
    """Attention and a gated feed-forward network, each added to what comes in."""

    def __init__(self, arch: str, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.interleaved, bias = shape.head_dim, INTERLEAVED[arch], BIASED[arch]
        self.attn_norm, self.ffn_norm = Norm(shape.n_embd), Norm(shape.n_embd)
        self.attn_q = nn.Linear(shape.n_embd, shape.n_embd_q, bias)
        self.attn_k = nn.Linear(shape.n_embd, shape.n_embd_kv, bias)
        self.attn_v = nn.Linear(shape.n_embd, shape.n_embd_kv, bias)
        self.attn_output = nn.Linear(shape.n_embd_q, shape.n_embd, False)
        self.ffn_gate = nn.Linear(shape.n_embd, shape.n_ff, False)
        self.ffn_up = nn.Linear(shape.n_embd, shape.n_ff, False)
        self.ffn_down = nn.Linear(shape.n_ff, shape.n_embd, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attend(self.attn_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = (rotate(heads, cos, sin, self.interleaved).to(v.dtype) for heads in (q, k))
        return self.attn_output(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(-2)
        )


class Model(nn.Module):
    """A llama or a qwen2 whose output matrix is its embedding.

    Parameters
    ----------
    arch : str
        "llama": RoPE of the kind NORM; "qwen2": NEOX, and biases of queries, keys and values.

    Raises
    ------
    ValueError
        When the heads of a qwen2 are not as wide as its embedding: llama.cpp loads no others.
    """

    def __init__(self, arch: str, shape: Shape) -> None:
        if arch == "qwen2" and shape.n_embd_q != shape.n_embd:
            raise ValueError(
                f"qwen2: {shape.n_head} heads of {shape.head_dim} are not as wide as the embedding, {shape.n_embd}"
            )
        super().__init__()
        self.arch, self.shape = arch, shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Block(arch, shape) for _ in range(shape.n_layer))
        self.output_norm = Norm(shape.n_embd)
        self.register_buffer("angles", torch.stack(rotation(shape, shape.n_ctx_train)), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        common = torch.randn(self.shape.n_embd).sign()
        nn.init.normal_(self.token_embd.weight, std=EMBEDDING)
        self.token_embd.weight.data.add_(EMBEDDING * common)
        for name, values in self.blk.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(values)
        for block in self.blk:
            begin(block, self.shape)
        cos, sin = rotation(self.shape, 2)
        look_back(self.blk[0], common / common.norm(), self.shape, (cos[1], sin[1]), INTERLEAVED[self.arch])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of int64 tokens [batch, position], [batch, position, n_vocab]."""
        x = self.token_embd(tokens)
        cos, sin = self.angles[:, : tokens.shape[1]]
        for block in self.blk:
            x = block(x, cos, sin)
        return functional.linear(self.output_norm(x), self.token_embd.weight)
