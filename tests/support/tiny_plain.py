"""Decoders with one plain cache that no other file has: see ``tiny_models.py``."""

from dataclasses import replace

from random_model import ATTENTION, GATED, QKV_BIAS, Recipe, biased
from tiny_windows import ROUTER, SIGMOID, WINDOW, WINDOWS
from tiny_words import (
    EXPERTS,
    FINE_MOE,
    FUSED,
    GATES,
    HEAD_NORMS,
    MHA,
    MOE,
    PLAIN,
    PROJECTIONS,
    SCALES,
    SHARED,
    SHARED_MOE,
    STEEP,
    STEEP_UP,
)

PICTURES = "vis_attn_qkv=qkv,embd vis_attn_output=embd,q vis_gate=ff,embd vis_up=ff,embd vis_down=embd,ff"
XIELU = {".xielu.alpha_n": 0.8, ".xielu.alpha_p": 0.8, ".xielu.beta": 0.5, ".xielu.eps": -1e-6}

ADAPTERS, RANK = 2, 8
# Of each matrix with its columns and rows; an adapter is switched on by a token.
SWITCHED = {
    "attn_q": "embd q",
    "attn_k": "embd kv",
    "attn_v": "embd kv",
    "attn_output": "q embd",
    "ffn_gate": "embd ff",
    "ffn_up": "embd ff",
    "ffn_down": "ff embd",
}
LORA = " ".join(
    f"{name}.lora_a={ADAPTERS + 1},{RANK},{size.split()[0]} {name}.lora_b={ADAPTERS + 1},{size.split()[1]},{RANK}"
    for name, size in SWITCHED.items()
)
SWITCH = SCALES | {
    "attention.scale": 0.2,
    "adapters.count": ADAPTERS,
    "adapters.lora_rank": RANK,
    "adapters.token_ids_activate": [70, 150],
    "adapters.token_ids_substitute": [71, 151],
}


def without_window(name: str, **shape: int) -> Recipe:
    """Return an architecture of ``WINDOWS`` without a window, which has a plain cache then."""
    recipe = WINDOWS[name]
    window = ("attention.sliding_window", "rope.freq_base_swa", "rope.dimension_count_swa")
    meta = {key: value for key, value in recipe.meta.items() if not key.startswith(window)}
    return replace(recipe, arch=recipe.arch or name, shape=recipe.shape | shape, meta=meta)


FIXED_BASE = ("cogvlm", "deepseek2-ocr")  # these rotate by 10000, whatever the file says
ROTATED = {
    "apertus": Recipe(f"{ATTENTION} {HEAD_NORMS} {PLAIN}", meta=XIELU),
    "chameleon": Recipe(  # it has a token for each part of a picture
        f"{ATTENTION} attn_q_norm=n_head,head attn_k_norm=n_head_kv,head {GATED}", shape={"n_vocab": 8200}
    ),
    "cogvlm": Recipe(f"{FUSED} {GATED} {PICTURES}", shape=MHA),
    "deepseek2-ocr": Recipe(
        (f"{ATTENTION} {GATED}", f"{ATTENTION} {EXPERTS} {SHARED}"),
        shape=MHA,
        meta=SHARED_MOE | {"leading_dense_block_count": 1},
    ),
    "gemma3-full": without_window("gemma3"),
    "graniteswitch": Recipe(f"{FUSED} {GATED} {LORA}", meta=SWITCH),
    "grok": Recipe(
        f"{ATTENTION} attn_output_norm {EXPERTS} layer_output_norm",
        meta=MOE | {"embedding_scale": 2.0, "attention.output_scale": 0.2, "attn_logit_softcapping": 5.0},
        gains={"ffn_gate_exps": STEEP},
    ),
    "grovemoe": Recipe(
        f"{ATTENTION} {HEAD_NORMS} {EXPERTS} "
        "ffn_gate_chexps=2,32,embd ffn_up_chexps=2,32,embd ffn_down_chexps=2,embd,32",
        meta=FINE_MOE | {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.5, "experts_per_group": 2},
    ),
    "hrm_text": Recipe(  # six layers, whose weights are those of the first two
        (*[f"{PROJECTIONS} attn_gate {GATES}"] * 2, "", "", "", ""),
        "output !hrm.z_l_init",
        shape={"n_layer": 6},
        meta={"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
    ),
    "hunyuan-dense": Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}"),
    "hunyuan-moe": Recipe(
        f"{ATTENTION} {HEAD_NORMS} {EXPERTS} {SHARED}",
        meta=FINE_MOE | {"expert_shared_feed_forward_length": 96},
    ),
    "hunyuan_vl-plain": Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}", arch="hunyuan_vl"),
    "hy_v3": Recipe(
        (f"{ATTENTION} {HEAD_NORMS} {GATED}", f"{ATTENTION} {HEAD_NORMS} {EXPERTS} {SHARED} !exp_probs_b=expert"),
        meta=FINE_MOE | SIGMOID | {"expert_shared_feed_forward_length": 96},
    ),
    "laguna-full": Recipe(f"{ATTENTION} attn_gate {HEAD_NORMS} {ROUTER}", arch="laguna", meta=SHARED_MOE | SIGMOID),
    "maincoder": Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}"),
    "mellum-full": without_window("mellum"),
    "nanbeige": Recipe(f"{ATTENTION} {GATED}", meta={"num_loops": 2}),
    "phi3-window": Recipe(
        "attn_norm attn_qkv attn_output ffn_norm ffn_up=2ff,embd ffn_down", arch="phi3", meta=WINDOW
    ),  # llama.cpp turns this window off
    "plamo3-full": without_window("plamo3"),
    "pockettts": Recipe(
        f"attn_norm+b {PROJECTIONS} ffn_norm+b ffn_up ffn_down", "output_norm+b", embedding=0.125, gains=STEEP_UP
    ),
    "smallthinker-full": without_window("smallthinker"),
    "talkie": Recipe(
        f"{PROJECTIONS} attn_q_norm=n_head,1 {GATES} layer_output_scale", "output", meta={"logit_scale": 0.5}
    ),
}

# Positions are learned, or a bias on distance (ALiBi).
OTHER_POSITIONS = {
    "jais": Recipe(
        biased(f"{FUSED} {GATED}"), "output_norm+b output", shape=MHA, meta={"attention.max_alibi_bias": 8.0}
    ),
    "refact": Recipe(f"{ATTENTION} {GATED}", shape={"n_head_kv": 1}),
    "starcoder": Recipe(
        biased(f"{FUSED} {PLAIN}"),
        "output_norm+b output position_embd=n_ctx_train,embd",
        shape={"n_head_kv": 1, "n_ctx_train": 256},
    ),
}

# Every token sees every other, and there is no cache.
UNCAUSAL = {
    "dream": Recipe(f"{QKV_BIAS} {GATED}"),
    "llada": Recipe(f"{ATTENTION} {GATED}"),
    "llada-moe": Recipe(f"{ATTENTION} {HEAD_NORMS} {EXPERTS}", meta=FINE_MOE),
    "rnd1": Recipe(f"{ATTENTION} {HEAD_NORMS} {EXPERTS}", meta=FINE_MOE),
}

PLAIN_MORE = ROTATED | OTHER_POSITIONS
