"""What models with latent attention (MLA) are made of: see ``tiny_models.py``.

Keys are 64 latent channels and 32 rotated ones (stored as one KV head of 96), or heads of 32 and 32 channels where a
file has the projections joined. Queries come from a projection of rank 48.
"""

from random_model import GATED, Recipe
from tiny_hybrids import NEXTN, WIDTH
from tiny_words import EXPERTS, PLAIN, SHARED, SHARED_MOE

# ---- attention ----

QUERIES = "attn_q_a=48,embd attn_q_a_norm=48 attn_q_b=192,48"
LATENTS = "attn_kv_a_mqa=96,embd attn_kv_a_norm=64 attn_k_b=n_head,64,16 attn_v_b=n_head,32,64"
MLA = f"attn_norm {QUERIES} {LATENTS} attn_output"
LITE = f"attn_norm attn_q=192,embd {LATENTS} attn_output"
ONE_KEY = WIDTH | {"n_head_kv": 1, "n_rot": 32, "n_layer": 3}
MLA_META = {
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
}
RANK = {"attention.q_lora_rank": 48}

WIDE_QUERIES = "attn_q_a=48,embd attn_q_a_norm=48 attn_q_b=256,48"
JOINED = "attn_kv_a_mqa=96,embd attn_kv_a_norm=64 attn_kv_b=256,64 attn_output=embd,128"
HEADS = WIDTH | {"n_head_kv": 4, "n_rot": 32, "key_length": 64}
JOINED_META = {"attention.kv_lora_rank": 64, "attention.value_length": 32}

# ---- the rest ----

DENSE = {"leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True}
DEEPSEEK_META = SHARED_MOE | DENSE | {"expert_weights_scale": 1.5}
BIASED_EXPERTS = f"{EXPERTS} exp_probs_b.bias=expert {SHARED}"
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_log_multiplier": 0.1,
}
TEMPERATURE = {"attention.temperature_scale": 0.1, "attention.temperature_length": 64}


def dense_first(attention: str) -> tuple[str, ...]:
    """Return three layers, of which the first has no experts."""
    return (f"{attention} {GATED}", *2 * (f"{attention} {BIASED_EXPERTS}",))


# Kimi's recurrent layers: 4 heads of 16 channels
CONVOLUTIONS = "ssm_conv1d_q=64,1,4 ssm_conv1d_k=64,1,4 ssm_conv1d_v=64,1,4"
KDA = (
    f"attn_norm attn_q=64,embd attn_k=64,embd attn_v=64,embd {CONVOLUTIONS} ssm_beta=4,embd ssm_dt.bias=64 ssm_norm=16 "
    "attn_output=embd,64"
)
FORGET = "ssm_f_a=16,embd ssm_f_b=64,16"
LOW_RANK_GATE = "ssm_g_a=16,embd ssm_g_b=64,16"
KDA_META = {"ssm.conv_kernel": 4, "kda.head_dim": 16, "attention.head_count_kv": [0, 1, 0, 1]}
LOWER_BOUND = {"kda.gate_lower_bound": -5.0}
SCORES = "attn_res_score ffn_res_score"
ROUTED = (
    "ffn_gate_inp exp_probs_b.bias=expert ffn_gate_exps=expert,ff,64 ffn_up_exps=expert,ff,64 "
    f"ffn_down_exps=expert,64,ff ffn_routed_down=64,embd ffn_routed_up=embd,64 ffn_routed_norm=64 {SHARED}"
)
STREAMS = "hc_attn_fn=4,256 hc_attn_base=4 hc_attn_scale=2 hc_ffn_fn=4,256 hc_ffn_base=4 hc_ffn_scale=2"
STREAMS_META = {
    "hyper_connection.count": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.magnitude": 2.0,
}
STREAMS_OUTER = "output_norm output output_hc_fn=2,256 output_hc_base=2 output_hc_scale=1"
HY_V4 = f"{MLA} attn_sinks=n_head attn_gate=128,embd {STREAMS}"


def in_turn(recurrent: str, attention: str, experts: str = BIASED_EXPERTS) -> tuple[str, ...]:
    """Return four layers of two kinds, of which the first has no experts."""
    return f"{recurrent} {GATED}", *(f"{layer} {experts}" for layer in (attention, recurrent, attention))


LATENT = {
    "bailingmoe3": Recipe(
        in_turn(
            f"{KDA} ssm_f_a=64,embd ssm_a=4,1 ssm_g_a=64,embd".replace("=64,1,4", "=1,64,1,4"),
            f"{MLA} attn_gate=n_head,embd",
        ),
        shape=ONE_KEY | {"n_layer": 4},
        meta=MLA_META | RANK | KDA_META | LOWER_BOUND | DEEPSEEK_META,
    ),
    "deepseek2": Recipe(dense_first(MLA), shape=ONE_KEY, meta=MLA_META | RANK | DEEPSEEK_META),
    "deepseek2-joined": Recipe(
        # as old files have it: keys and values are unfolded before they are stored
        dense_first(f"attn_norm {WIDE_QUERIES} {JOINED}"),
        arch="deepseek2",
        shape=HEADS | {"n_layer": 3},
        meta=JOINED_META | RANK | DEEPSEEK_META,
    ),
    "deepseek2-lite": Recipe(
        # recognized by its number of layers
        f"{LITE} {GATED}",
        arch="deepseek2",
        shape=ONE_KEY | {"n_layer": 26},
        meta=MLA_META | DEEPSEEK_META | {"leading_dense_block_count": 26},
    ),
    "deepseek2-nextn": Recipe(
        (*dense_first(MLA), f"{MLA} {BIASED_EXPERTS} {NEXTN}"),
        arch="deepseek2",
        shape=ONE_KEY | {"n_layer": 4},
        meta=MLA_META | RANK | DEEPSEEK_META | {"nextn_predict_layers": 1},
    ),
    "deepseek2-yarn": Recipe(
        dense_first(MLA), arch="deepseek2", shape=ONE_KEY, meta=MLA_META | RANK | DEEPSEEK_META | YARN
    ),
    "hy_v4": Recipe(
        (f"{HY_V4} {GATED}", f"{HY_V4} {BIASED_EXPERTS}"),
        STREAMS_OUTER,
        shape=ONE_KEY | {"n_layer": 2},
        meta=MLA_META | RANK | DEEPSEEK_META | STREAMS_META,
    ),
    "kimi-k3": Recipe(
        in_turn(
            f"{KDA} {FORGET} ssm_a=4 ssm_g=64,embd {SCORES}", f"{MLA} attn_gate=128,embd {SCORES}", f"ffn_norm {ROUTED}"
        ),
        "output_norm output output_res_score",
        shape=ONE_KEY | {"n_layer": 4},
        meta=MLA_META | RANK | KDA_META | LOWER_BOUND | DEEPSEEK_META | {
            "expert_latent_length": 64, "attn_res.block_size": 2, "activation.situ_beta": 2.0,
            "activation.situ_linear_beta": 3.0},
    ),
    "kimi-linear": Recipe(
        in_turn(f"{KDA} {FORGET} ssm_a=4,1 {LOW_RANK_GATE}", LITE),
        shape=ONE_KEY | {"n_layer": 4},
        meta=MLA_META | KDA_META | DEEPSEEK_META,
    ),
    "minicpm3": Recipe(
        f"attn_norm {WIDE_QUERIES} {JOINED} {GATED}",
        shape=HEADS,
        meta=JOINED_META | RANK,
        embedding=0.125,
    ),
    "minicpm3-factors": Recipe(
        f"attn_norm {WIDE_QUERIES} {JOINED} {GATED}",
        "output_norm output rope_factors_long rope_factors_short",
        "minicpm3",
        shape=HEADS,
        meta=JOINED_META | RANK | {"rope.scaling.original_context_length": 32},
        embedding=0.125,
    ),
    "mistral4": Recipe(dense_first(MLA), shape=ONE_KEY, meta=MLA_META | RANK | DEEPSEEK_META | TEMPERATURE),
    "plm": Recipe(f"attn_norm attn_q=256,embd {JOINED} {PLAIN}", "output_norm", shape=HEADS, meta=JOINED_META),
}  # fmt: skip
