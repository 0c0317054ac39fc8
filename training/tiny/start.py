"""Weights to begin with: what an induction head is made of is there from the start, so copying is learned in minutes.

Copying needs a head that attends to the token before, and one that finds what followed the same token earlier and
passes it on. From random weights a llama finds neither for millions of tokens: without biases its queries and keys
have no constant part, so a head cannot attend by distance alone. So all embeddings share a vector ``common``, half of
the first layer's heads look one token back by it, and what a head passes on is the identity (as in Mimetic
Initialization, Trockman and Kolter, arXiv 2305.09828).
"""

import torch
from random_model import Shape
from torch import Tensor, nn

EMBEDDING = 0.02  # standard deviation, and size of what all embeddings share
PASSED = 0.25  # by each head, of what it attends to
SCORE = 20.0  # with which a head looks one token back
NOISE = 0.3  # of what is random in those heads
N_PAIRS = 8  # fastest channel pairs, which tell one token's distance from two


def begin(block: nn.Module, shape: Shape) -> None:
    """Let a block pass on, in part, what its heads attend to; its feed-forward part begins as nothing."""
    for layer in (block.attn_q, block.attn_k, block.ffn_gate, block.ffn_up):
        nn.init.normal_(layer.weight, std=layer.weight.shape[1] ** -0.5)
    nn.init.orthogonal_(block.attn_v.weight)
    values = block.attn_v.weight.detach().unflatten(0, (shape.n_head_kv, shape.head_dim))
    n_share = shape.n_head // shape.n_head_kv
    passed = values.repeat_interleave(n_share, 0).flatten(0, 1).T
    block.attn_output.weight.data.copy_(PASSED * passed)
    nn.init.zeros_(block.ffn_down.weight)


def look_back(block: nn.Module, common: Tensor, shape: Shape, turn: tuple[Tensor, Tensor], interleaved: bool) -> None:
    """Let the first half of a block's heads attend to the token before.

    A key is the vector e in the directions of ``N_PAIRS`` pairs; the query is e turned back by one position, so that
    their product under RoPE is largest at distance one.

    Parameters
    ----------
    common : Tensor
        What all embeddings share, [n_embd], of length 1.
    turn : tuple of Tensor
        Cosine and sine of one position's angles, [head_dim / 2] each.
    """
    d, n_share = shape.head_dim, shape.n_head // shape.n_head_kv
    n_pairs = min(N_PAIRS, d // 2)
    pairs = torch.zeros(2, d // 2)
    pairs[0, :n_pairs] = n_pairs**-0.5
    back = torch.stack([turn[0] * pairs[0], -turn[1] * pairs[0]])
    # a normalized input has sqrt(n_embd / 2) of the common vector: the rest is as large
    size = (SCORE * d**0.5 * 2 / shape.n_embd) ** 0.5
    for layer, vector, n_heads in ((block.attn_k, pairs, 1), (block.attn_q, back, n_share)):
        channels = (vector.T if interleaved else vector).flatten()
        rows = layer.weight.data[: max(1, shape.n_head_kv // 2) * n_heads * d]
        rows.mul_(NOISE).add_(size * torch.outer(channels.repeat(len(rows) // d), common))
