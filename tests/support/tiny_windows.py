"""Decoders of which some layers slide: see ``tiny_models.py``.

Every file has at least two sliding and two full layers, and a window that is odd and far shorter than the texts of the
tests, unless the code of llama.cpp fixes it (``FIXED_WINDOWS``). Layers differ wherever they may.
"""

from random_model import ATTENTION, GATED, QKV_BIAS, Recipe
from tiny_words import (
    EXPERTS,
    FINE_MOE,
    FUSED,
    GATES,
    HEAD_NORMS,
    MIXTURE,
    PACKED,
    PARTIAL,
    PROJECTIONS,
    SHARED,
    SHARED_MOE,
    STEEP,
    STEEP_GATE,
    WIDE,
    WIDE_NORMS,
)

FOUR, FIVE, EIGHT = ({"n_layer": n} for n in (4, 5, 8))
WINDOW = {"attention.sliding_window": 37}
EVERY_SECOND = WINDOW | {"attention.sliding_window_pattern": 2}  # one of two is full
ANY = WINDOW | {"attention.sliding_window_pattern": [True, False, True, True, False]}  # any layer may slide
OTHER_BASE = {"rope.freq_base_swa": 500.0}  # of sliding layers
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
POST_NORMS = "post_attention_norm post_ffw_norm"
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True}
ROUTER = f"{EXPERTS} {SHARED} exp_probs_b.bias=expert"
DEFAULT_WINDOW = {"attention.sliding_window": 1}  # any number turns the window of the code on


def heads(n: int, n_kv: int, width: int = 32, v_width: int = 0) -> str:
    """Return the projections of a layer that has heads of its own."""
    v_width = v_width or width
    sizes = {"attn_q": n * width, "attn_k": n_kv * width, "attn_v": n_kv * v_width}
    return " ".join(f"{name}={rows},embd" for name, rows in sizes.items()) + f" attn_output=embd,{n * v_width}"


# ---- Gemma ----

LAUREL = "laurel_l=64,embd laurel_r=embd,64 laurel_post_norm"
ALTUP = (
    "altup_correct_coef=4,4 altup_correct_scale altup_predict_coef=16,4 altup_router=4,embd altup_router_norm "
    "inp_gate=256,embd proj=embd,256 post_norm"
)
GEMMA3N = Recipe(
    f"{ATTENTION} {HEAD_NORMS} {GATED} {POST_NORMS} {LAUREL} {ALTUP}",
    "output_norm altup_proj=3,embd,embd altup_unembd_proj=3,embd,embd per_layer_token_embd=n_vocab,6400 "
    "per_layer_model_proj=6400,embd per_layer_proj_norm=256",
    # the first 20 layers have K and V, whatever the file says; half of them keep one of twenty activations
    shape={"n_layer": 25, "n_ff": 384},
    meta=WINDOW | OTHER_BASE,
    embedding=0.125,
    sharpness=0.5,
    gains=STEEP_GATE | {"inp_gate": STEEP},
)

# Full layers have wider heads, and one KV head whose values are its keys before their norm.
SLIDING4, FULL4 = heads(4, 2), "attn_q=256,embd attn_k=64,embd attn_output=embd,256"
SLIDING4_NORMS, FULL4_NORMS = "attn_q_norm=32 attn_k_norm=32", "attn_q_norm=64 attn_k_norm=64"
GEMMA4_META = WINDOW | OTHER_BASE | {
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "rope.dimension_count_swa": 32,
    "final_logit_softcapping": 20.0,
}  # fmt: skip
GEMMA4_END = f"{GATED} {POST_NORMS} inp_gate=24,embd proj=embd,24 post_norm layer_output_scale"
GEMMA4 = Recipe(
    (
        f"attn_norm {SLIDING4} {SLIDING4_NORMS} {GEMMA4_END}",
        f"attn_norm {SLIDING4} {SLIDING4_NORMS} {GEMMA4_END}",
        f"attn_norm {heads(4, 1, 64)} {FULL4_NORMS} {GEMMA4_END}",
        f"attn_norm {SLIDING4} {SLIDING4_NORMS} {GEMMA4_END}",
        f"attn_norm {FULL4} {FULL4_NORMS} {GEMMA4_END}",
        f"attn_norm attn_q=128,embd attn_output=embd,128 attn_q_norm=32 {GEMMA4_END}",  # reads layer 3
        f"attn_norm attn_q=128,embd attn_output=embd,128 attn_q_norm=32 {GEMMA4_END}",
        f"attn_norm attn_q=256,embd attn_output=embd,256 attn_q_norm=64 {GEMMA4_END}",  # reads layer 4
    ),
    "output_norm rope_freqs=32 per_layer_token_embd=n_vocab,192 per_layer_model_proj=192,embd per_layer_proj_norm=24",
    shape=EIGHT | {"key_length": 64},
    meta=GEMMA4_META
    | {
        "attention.sliding_window_pattern": [True, True, False, True, False, True, True, False],
        "attention.head_count_kv": [2, 2, 1, 2, 1, 2, 2, 1],
        "attention.shared_kv_layers": 3,
        "embedding_length_per_layer_input": 24,
    },
    embedding=0.125,
    sharpness=0.8,
    gains=STEEP_GATE | {"inp_gate": STEEP},
)
MIXTURE4 = (
    f"{GATED} ffn_gate_inp=expert,embd !ffn_gate_inp.scale pre_ffw_norm_2 post_ffw_norm_1 post_ffw_norm_2 "
    f"ffn_gate_up_exps=expert,192,embd ffn_down_exps {POST_NORMS}"
)
GEMMA4_MOE = Recipe(
    (
        f"attn_norm {SLIDING4} {SLIDING4_NORMS} {MIXTURE4}",
        f"attn_norm {FULL4} {FULL4_NORMS} {MIXTURE4}",
    ),
    "output_norm rope_freqs=32",
    "gemma4",
    shape=FOUR | {"key_length": 64},
    meta=GEMMA4_META
    | FINE_MOE
    | {
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.head_count_kv": [2, 1, 2, 1],
        "embedding_length_per_layer_input": 0,
    },
    embedding=0.125,
    sharpness=0.8,
    gains=STEEP_GATE | {"ffn_gate_up_exps": STEEP},
)

# ---- others ----

GPT_OSS = Recipe(
    f"{QKV_BIAS}+b attn_sinks post_attention_norm ffn_gate_inp+b ffn_gate_exps+b ffn_up_exps+b ffn_down_exps+b",
    arch="gpt-oss",
    shape=FOUR,
    meta=WINDOW | YARN | FINE_MOE,
)
LAGUNA_END = f"{HEAD_NORMS} {ROUTER}"
LAGUNA = Recipe(
    (
        f"attn_norm {heads(4, 2)} attn_gate=4,embd {HEAD_NORMS} {GATED}",  # full
        f"attn_norm {heads(6, 2)} attn_gate=6,embd {LAGUNA_END}",
        f"attn_norm {heads(4, 2)} attn_gate=128,embd {LAGUNA_END}",  # full, a gate for each channel
        f"attn_norm {heads(6, 2)} attn_gate=6,embd {LAGUNA_END}",
    ),
    shape=FOUR | PARTIAL | WIDE,
    meta=EVERY_SECOND
    | OTHER_BASE
    | YARN
    | SHARED_MOE
    | SIGMOID
    | {"attention.head_count": [4, 6, 4, 6], "rope.dimension_count_swa": 16, "leading_dense_block_count": 1},
)
MIMO2 = Recipe(
    (
        f"attn_norm {heads(4, 2, 64, 32)} attn_sinks {GATED}",
        f"attn_norm {heads(4, 1, 64, 32)} {EXPERTS} exp_probs_b.bias=expert",  # full
    ),
    shape=FOUR | {"key_length": 64, "n_rot": 24},
    meta=WINDOW
    | OTHER_BASE
    | FINE_MOE
    | {
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.head_count_kv": [2, 1, 2, 1],
        "attention.value_length": 32,
        "attention.value_scale": 0.7,
    },
)
SPARK = Recipe(
    (
        f"attn_norm {heads(6, 2)} attn_gate=6,embd {GATED}",
        f"attn_norm {heads(4, 1)} attn_gate=4,embd {GATED}",  # full
    ),
    arch="spark2_5",
    shape=FOUR | WIDE | {"n_rot": 12},
    meta=WINDOW
    | OTHER_BASE
    | {
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.head_count": [6, 4, 6, 4],
        "attention.head_count_kv": [2, 1, 2, 1],
        "rope.dimension_count_swa": 16,
    },
    gains=STEEP_GATE | {"ffn_down": 1 / STEEP},
)
STEP = Recipe(
    (
        f"attn_norm {heads(4, 2)} attn_gate=4,embd {HEAD_NORMS} {GATED}",  # full
        f"attn_norm {heads(6, 1)} attn_gate=6,embd {HEAD_NORMS} {ROUTER}",
        f"attn_norm {heads(6, 1)} attn_gate=6,embd {HEAD_NORMS} {ROUTER}",
        f"attn_norm {heads(4, 2)} {ROUTER}",  # full, without a gate or norms
    ),
    "output_norm output rope_freqs",
    arch="step35",
    shape=FOUR | WIDE,  # full layers rotate half of what the file says
    meta=WINDOW
    | OTHER_BASE
    | FINE_MOE
    | {
        "attention.sliding_window_pattern": [False, True, True, False],
        "attention.head_count": [4, 6, 6, 4],
        "attention.head_count_kv": [2, 1, 1, 2],
        "expert_shared_feed_forward_length": 96,
    },
)

# No rotation on full layers unless a comment says otherwise.
UNROTATED = {
    "afmoe": Recipe(
        f"{ATTENTION} attn_gate {HEAD_NORMS} {ROUTER} {POST_NORMS}",
        shape=EIGHT,  # layers 3 and 7 do not rotate
        meta=WINDOW | OTHER_BASE | SHARED_MOE | SIGMOID,
        embedding=0.125,
    ),
    "cohere2": Recipe(f"{ATTENTION} {GATES}", "output_norm", shape=FOUR, meta=EVERY_SECOND | {"logit_scale": 0.25}),
    "cohere2moe": Recipe(
        (f"{ATTENTION} {GATES}", *[f"{ATTENTION} {MIXTURE} {SHARED}"] * 4),
        shape=FIVE,  # layer 0 is full and rotates, layers 2 and 4 do not
        meta=EVERY_SECOND | SHARED_MOE | {"leading_dense_block_count": 1, "logit_scale": 0.5},
    ),
    "exaone4-window": Recipe(
        f"{PROJECTIONS} {HEAD_NORMS} post_attention_norm {GATES} post_ffw_norm",
        arch="exaone4",
        shape={"n_layer": 64},  # others have no window
        meta=WINDOW,
        sharpness=1.4,  # if sharper, 64 layers multiply float rounding
    ),
    "exaone-moe": Recipe(
        (f"{ATTENTION} {HEAD_NORMS} {GATED}", *[f"{ATTENTION} {HEAD_NORMS} {ROUTER}"] * 3),
        shape=FOUR,
        meta=EVERY_SECOND | SHARED_MOE | SIGMOID | {"leading_dense_block_count": 1},
    ),
    "granite_swa": Recipe(
        f"{ATTENTION} attn_sinks {GATED}",
        shape=FIVE,
        # layers 1 (full) and 3 (sliding) do not rotate
        meta=ANY | {"attention.rope_pattern": [1, 0, 1, 0, 1], "attention.scale": 0.2, "logit_scale": 2.0},
    ),
    "llama4": Recipe(
        (f"{ATTENTION} {GATED}", f"{ATTENTION} {EXPERTS} {SHARED}"),
        shape=EIGHT,  # layers 3 and 7 are full
        meta=FINE_MOE | {"interleave_moe_layer_step": 2},
    ),
    "maple": Recipe(
        f"{ATTENTION} {HEAD_NORMS} {EXPERTS}",
        shape=FIVE,
        meta=ANY | OTHER_BASE | FINE_MOE | {"swiglu_clamp_exp": 2.0, "rope.dimension_count_swa": 8},
    ),
    "muse-glimmer": Recipe(
        f"{ATTENTION} attn_gate {HEAD_NORMS} {GATED} {POST_NORMS}",
        shape=FOUR,
        meta=EVERY_SECOND | OTHER_BASE | {"logit_scale": 0.5},
    ),
    "smallthinker": Recipe(
        f"{ATTENTION} {EXPERTS}",
        shape=EIGHT,  # layers 0 and 4 are full
        meta=DEFAULT_WINDOW | OTHER_BASE | FINE_MOE | {"expert_gating_func": 2},
    ),
}

WINDOWS = UNROTATED | {
    "gemma2": Recipe(
        f"{ATTENTION} {GATED} {POST_NORMS}",
        "output_norm",
        shape=FOUR,
        meta=WINDOW | OTHER_BASE | {"attn_logit_softcapping": 5.0},
        embedding=0.125,
        gains=STEEP_GATE,
    ),
    "gemma3": Recipe(
        f"{ATTENTION} {HEAD_NORMS} {GATED} {POST_NORMS}",
        "output_norm",
        shape=FIVE,
        meta=ANY | OTHER_BASE | {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},  # of full layers
        embedding=0.125,
        gains=STEEP_GATE,
    ),
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4-moe": GEMMA4_MOE,
    "gpt-oss": GPT_OSS,
    "laguna": LAGUNA,
    "mellum": Recipe(f"{ATTENTION} {HEAD_NORMS} {EXPERTS}", shape=FOUR, meta=EVERY_SECOND | YARN | FINE_MOE),
    "mimo2": MIMO2,
    "olmo2-window": Recipe(
        f"{PROJECTIONS} {WIDE_NORMS} post_attention_norm {GATES} post_ffw_norm",
        arch="olmo2",
        shape=FIVE,
        meta=ANY | YARN,
    ),
    "plamo3": Recipe(
        f"{FUSED} {HEAD_NORMS} {PACKED} !post_attention_norm !post_ffw_norm", shape=FIVE, meta=ANY | OTHER_BASE
    ),
    "spark2_5": SPARK,
    "step35": STEP,
}

FIXED_WINDOWS = {"llama4": 8192, "smallthinker": 4096}
