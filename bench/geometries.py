"""Models with random weights and the sizes of real ones: write one, and print its path.

    pylongctx bench -m "$(python bench/geometries.py llama-3-8b:2:q4_k_m)"

Programs of this folder take ``random:`` and such a name as a model. A file is written on first use.

Names that end in ``-quarter`` have a quarter of the heads of the real model, and fewer and narrower experts, so that
filling a long context takes minutes: one full layer has 1024 query channels. Widths of heads, windows, the kinds of
layers and their order are those of the real model.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from random_blocks import F16, MXFP4, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0
from random_model import (
    ATTENTION,
    GATED,
    LLAMA,
    PHI2,
    QKV_BIAS,
    QWEN2,
    Recipe,
    Shape,
    biased,
    write_model,
)

from pylongctx._cache_folder import cache_folder
from pylongctx.catalog import resolve

WEIGHTS = {
    "q4_0": Q4_0,
    "q4_1": Q4_1,
    "q4_k_m": Q4_K,
    "q5_k_s": Q5_K,
    "q6_k": Q6_K,
    "q8_0": Q8_0,
    "mxfp4": MXFP4,
    "f16": F16,
}
HEAD_NORMS = "attn_q_norm attn_k_norm"


def experts(count: int, used: int, width: int) -> dict[str, Any]:
    """Return the metadata of a mixture of experts."""
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


# ---- delta-net layers, and one with gated attention after three of them ----


def qwen3_next(n_k: int, n_v: int, n_expert: int, n_used: int) -> Recipe:
    """Return the recipe of a Qwen3-Next whose delta nets have ``n_k`` heads of keys and ``n_v`` of values."""
    n_qkv, n_values = 128 * (2 * n_k + n_v), 128 * n_v
    delta = (
        f"attn_norm attn_qkv={n_qkv},embd attn_gate={n_values},embd ssm_conv1d={n_qkv},4 ssm_ba={2 * n_v},embd "
        f"ssm_dt.bias={n_v} ssm_a={n_v} ssm_norm=128 ssm_out=embd,{n_values} post_attention_norm"
    )
    attention = f"attn_norm attn_q=2q,embd attn_k attn_v attn_output {HEAD_NORMS} post_attention_norm"
    mixture = (
        f"ffn_gate_inp={n_expert},embd ffn_gate_exps={n_expert},ff,embd ffn_up_exps={n_expert},ff,embd "
        f"ffn_down_exps={n_expert},embd,ff ffn_gate_inp_shexp=embd ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
    )
    return Recipe(
        (*[f"{delta} {mixture}"] * 3, f"{attention} {mixture}"),
        arch="qwen3next",
        meta=experts(n_expert, n_used, 512)
        | {
            "expert_shared_feed_forward_length": 512,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": n_values,
            "ssm.state_size": 128,
            "ssm.time_step_rank": n_v,
            "ssm.group_count": n_k,
            "full_attention_interval": 4,
        },
    )


QWEN3_NEXT = qwen3_next(16, 32, n_expert=4, n_used=2)  # the real model has 512 experts and uses 10
QWEN3_NEXT_QUARTER = qwen3_next(4, 8, n_expert=16, n_used=10)

# ---- alternating sliding and full layers, with sinks ----

GPT_OSS = Recipe(
    f"{QKV_BIAS}+b attn_sinks post_attention_norm "
    + biased("ffn_gate_inp=8,embd ffn_gate_exps=8,ff,embd ffn_up_exps=8,ff,embd ffn_down_exps=8,embd,ff"),
    arch="gpt-oss",
    meta=experts(8, 4, 1024)  # the real model has 32, of 2880
    | {
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    },
)


# ---- sliding layers, and a full one after five of them ----


def gemma3(n_embd: int, window: int, **meta: Any) -> Recipe:
    """Return the recipe of a Gemma 3; the model scales the embedding up by the root of its width."""
    return Recipe(
        f"{ATTENTION} {HEAD_NORMS} {GATED} post_attention_norm post_ffw_norm",
        "output_norm",
        "gemma3",
        meta={"attention.sliding_window": window, "rope.freq_base_swa": 10000.0} | meta,
        embedding=n_embd**-0.5,
    )


LINEAR8 = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}  # of full layers

QWEN3 = Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}", "output_norm", "qwen3", embedding=2560**-0.5)

# vocabulary (small, the output matrix is not compared), n_embd, n_layer, heads, KV heads, n_ff, context
GEOMETRIES = {
    "gemma-3-270m": (gemma3(640, 512), Shape(512, 640, 18, 4, 1, 2048, 32768, 1e6, key_length=256)),
    "gemma-3-4b": (gemma3(2560, 1024, **LINEAR8), Shape(512, 2560, 34, 8, 4, 10240, 131072, 1e6, key_length=256)),
    "gpt-oss-quarter": (GPT_OSS, Shape(512, 1024, 24, 16, 2, 1024, 131072, 150000.0, key_length=64)),
    "llama-2-7b": (LLAMA, Shape(512, 4096, 32, 32, 32, 11008, 4096)),
    "llama-3-8b": (LLAMA, Shape(512, 4096, 32, 32, 8, 14336, 8192, 500000.0)),
    "llama-3.2-1b": (LLAMA, Shape(512, 2048, 16, 32, 8, 8192, 8192, 500000.0)),
    "phi-2": (PHI2, Shape(512, 2560, 32, 32, 32, 10240, 2048, n_rot=32)),
    "qwen2.5-1.5b": (QWEN2, Shape(512, 1536, 28, 12, 2, 8960, 32768, 1000000.0)),
    "qwen2.5-7b": (QWEN2, Shape(512, 3584, 28, 28, 4, 18944, 32768, 1000000.0)),
    "qwen3-4b": (QWEN3, Shape(512, 2560, 36, 32, 8, 9728, 40960, 1e6, key_length=128)),
    "qwen3-next-80b": (QWEN3_NEXT, Shape(512, 2048, 48, 16, 2, 512, 262144, 1e7, key_length=256, n_rot=64)),
    "qwen3-next-quarter": (QWEN3_NEXT_QUARTER, Shape(512, 1024, 48, 4, 1, 512, 262144, 1e7, key_length=256, n_rot=64)),
}


def cached_model(name: str) -> Path:
    """Return the file of ``geometry:layers[:weights]``, for instance ``llama-3-8b:2:q8_0``; written on first use.

    Raises
    ------
    ValueError
        When the name is invalid; the message explains its parts.
    """
    geometry, _, rest = name.partition(":")
    layers, _, weights = rest.partition(":")
    weights = weights or "q4_k_m"
    if geometry not in GEOMETRIES or weights not in WEIGHTS or not layers.isdecimal() or not int(layers):
        raise ValueError(
            f"{name} is not geometry:layers[:weights]; geometries: {', '.join(GEOMETRIES)}; "
            f"weights: {', '.join(WEIGHTS)}"
        )
    folder = cache_folder()
    path = folder / f"{geometry}-{int(layers)}-{weights}.gguf"
    if not path.exists():
        recipe, shape = GEOMETRIES[geometry]
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        write_model(part, recipe, replace(shape, n_layer=int(layers)), qtype=WEIGHTS[weights])
        part.rename(path)
    return path


def model_file(name: str) -> str:
    """Return the file of a model: of ``random:...`` one with random weights, else as ``pylongctx`` finds it."""
    return str(cached_model(name.removeprefix("random:"))) if name.startswith("random:") else resolve(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="geometry:layers[:weights], for instance llama-3-8b:2:q4_k_m")
    print(cached_model(parser.parse_args().name))


if __name__ == "__main__":
    main()
