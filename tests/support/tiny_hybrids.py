"""What hybrids of recurrent and attention layers are made of: see ``tiny_models.py``.

The files have at least two layers of each kind. Where an architecture allows it, attention layers differ in their
number of KV heads, and the first layer is a recurrent one, which has none.
"""

from random_model import ATTENTION, GATED, Recipe
from tiny_words import (
    EXPERTS,
    FINE_MOE,
    GATES,
    HEAD_NORMS,
    MIXTURE,
    MOE,
    PROJECTIONS,
    SCALES,
    SHARED,
    SHARED_MOE,
)

WIDTH = {"n_embd": 128}  # the sizes of recurrent layers below go with it
FOUR = WIDTH | {"n_layer": 4}
ONE_KV_HEAD = "attn_norm attn_q attn_k=head,embd attn_v=head,embd attn_output"
IN_TURN = {"attention.head_count_kv": [0, 2, 0, 1]}  # 0: a recurrent layer

# ---- recurrent layers ----

MAMBA = (
    "attn_norm ssm_in=512,embd ssm_conv1d=256,4+b ssm_x=24,256 ssm_dt=256,8+b ssm_a=256,8 ssm_d=256 ssm_out=embd,256 "
    "ssm_dt_norm=8 ssm_b_norm=8 ssm_c_norm=8"
)
MAMBA_META = {"ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 8, "ssm.time_step_rank": 8}

MAMBA2 = (
    "attn_norm ssm_in=584,embd ssm_conv1d=320,4+b ssm_dt.bias=8 ssm_a=8,1 ssm_d=8,1 ssm_norm=2,128 ssm_out=embd,256"
)
MAMBA2_META = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 256,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,  # heads
    "ssm.group_count": 2,
}

PLAMO2_MAMBA = (
    "attn_norm ssm_in=512,embd ssm_conv1d=256,4 ssm_x=80,256 ssm_dt=4,64+b ssm_a=4 ssm_d=4 ssm_out=embd,256 "
    "!ssm_dt_norm=64 !ssm_b_norm=8 !ssm_c_norm=8"
)
PLAMO2_FFN = "!post_attention_norm ffn_norm ffn_up=2ff,embd ffn_down !post_ffw_norm"
PLAMO2_NORMS = "attn_q_norm=n_head,head attn_k_norm=n_head_kv,head"

SHORT_CONV = "attn_norm shortconv.conv=embd,3 shortconv.in_proj=384,embd shortconv.out_proj=embd,embd"

# the gated delta net: 2 heads of keys, 4 of values, of 16 channels each
DELTA_META = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "full_attention_interval": 2,
}
DELTA = (
    "attn_norm attn_qkv=128,embd attn_gate=64,embd ssm_conv1d=128,4 ssm_dt.bias=4 ssm_a=4 ssm_norm=16 ssm_out=embd,64 "
    "post_attention_norm"
)
BETA_ALPHA = "ssm_beta=4,embd ssm_alpha=4,embd"
LIGHTNING = "attn_norm attn_qkv=384,embd attn_gate=q,embd attn_norm_2=q attn_output"

# ---- attention layers ----

GATED_ATTENTION = f"attn_norm attn_q=2q,embd attn_k attn_v attn_output {HEAD_NORMS} post_attention_norm"
WIDE_PARTIAL = FOUR | {"key_length": 64, "n_rot": 16}
SECTIONS = {"rope.dimension_sections": [4, 2, 2, 0]}
QWEN_MOE = f"{MIXTURE} ffn_gate_inp_shexp=embd {SHARED}"
QWEN_MOE_META = FINE_MOE | {"expert_shared_feed_forward_length": 96}
NEXTN = "nextn.eh_proj=embd,256 nextn.enorm nextn.hnorm"
SIX = WIDTH | {"n_layer": 6}
THREE_KINDS = {"attention.head_count_kv": [0, 2, 0, 0, 1, 0], "feed_forward_length": [0, 0, 96, 0, 0, 96]}
NARROW_EXPERTS = (
    "attn_norm ffn_gate_inp exp_probs_b.bias=expert ffn_latent_down=64,embd ffn_latent_up=embd,64 "
    "ffn_up_exps=expert,ff,64 ffn_down_exps=expert,64,ff ffn_up_shexp ffn_down_shexp"
)

HYBRIDS = {
    "falcon-h1": Recipe(
        # both kinds in every layer
        f"{ATTENTION} !ffn_norm {GATES} "
        "ssm_in=422,embd ssm_conv1d=224,4+b ssm_dt.bias=6 ssm_a=6,1 ssm_d=6,1 ssm_out=embd,192",
        shape=WIDTH | {"n_layer": 3},
        meta=MAMBA2_META | {"ssm.inner_size": 192, "ssm.time_step_rank": 6, "ssm.group_count": 1},
    ),
    "granitehybrid": Recipe(
        # no rotation at all
        (f"{MAMBA2} {GATED}", f"{ATTENTION} {GATED}", f"{MAMBA2} {GATED}", f"{ONE_KV_HEAD} {GATED}"),
        shape=FOUR,
        meta=MAMBA2_META | IN_TURN | SCALES | {"attention.scale": 0.2, "rope.scaling.finetuned": False},
    ),
    "granitehybrid-rope": Recipe(
        tuple(f"{layer} {EXPERTS} {SHARED}" for layer in (MAMBA2, ATTENTION, MAMBA2, ONE_KV_HEAD)),
        "output_norm output rope_freqs",
        "granitehybrid",
        shape=FOUR,
        meta=MAMBA2_META | IN_TURN | SCALES | MOE | {"expert_shared_feed_forward_length": 96},
    ),
    "jamba": Recipe(
        (f"{MAMBA} {GATED}", f"{ATTENTION} {EXPERTS}", f"{MAMBA} {EXPERTS}", f"{ONE_KV_HEAD} {GATED}"),
        shape=FOUR,
        meta=MAMBA_META | IN_TURN | MOE,
    ),
    "lfm2": Recipe(
        tuple(f"{layer} {GATED}" for layer in (
            SHORT_CONV, f"{ATTENTION} {HEAD_NORMS}", SHORT_CONV, f"{ONE_KV_HEAD} {HEAD_NORMS}")),
        "token_embd_norm",
        shape=FOUR,
        meta={"shortconv.l_cache": 3} | IN_TURN,
    ),
    "lfm2moe": Recipe(
        (f"{SHORT_CONV} {GATED}",
         *(f"{layer} {EXPERTS} exp_probs_b.bias=expert" for layer in (
             f"{ATTENTION} {HEAD_NORMS}", SHORT_CONV, f"{ONE_KV_HEAD} {HEAD_NORMS}"))),
        "token_embd_norm",
        shape=FOUR,
        meta={"shortconv.l_cache": 3, "leading_dense_block_count": 1, "expert_gating_func": 2} | FINE_MOE | IN_TURN,
    ),
    "minimax-01": Recipe(
        (f"{LIGHTNING} {EXPERTS}", f"{ATTENTION} {EXPERTS}"),
        shape=FOUR | {"n_rot": 8},
        meta=MOE | {"residual_scale": 1.5, "full_attention_interval": 2},
    ),
    "nemotron_h": Recipe(
        # a layer is one of three: recurrent, attention, feed-forward
        (MAMBA2, f"attn_norm {PROJECTIONS}+b", "attn_norm ffn_up ffn_down", MAMBA2, ONE_KV_HEAD,
         "attn_norm ffn_up+b ffn_down+b"),
        shape=SIX,
        meta=MAMBA2_META | THREE_KINDS,
    ),
    "nemotron_h_moe": Recipe(
        (MAMBA2, ATTENTION, NARROW_EXPERTS, MAMBA2, ONE_KV_HEAD, NARROW_EXPERTS),
        shape=SIX,
        meta=MAMBA2_META | THREE_KINDS | SHARED_MOE | {
            "expert_shared_feed_forward_length": 96, "expert_weights_norm": True, "expert_weights_scale": 1.5,
            "moe_latent_size": 64},
    ),
    "plamo2": Recipe(
        (f"{PLAMO2_MAMBA} {PLAMO2_FFN}",
         f"attn_norm attn_qkv attn_output {PLAMO2_NORMS} {PLAMO2_FFN}",
         f"{PLAMO2_MAMBA} {PLAMO2_FFN}",
         f"attn_norm attn_qkv=192,embd attn_output attn_q_norm=n_head,head attn_k_norm=1,head {PLAMO2_FFN}"),
        shape=FOUR,
        meta=IN_TURN | MAMBA_META | {"ssm.time_step_rank": 4, "ssm.group_count": 0},
    ),
    "qwen3next": Recipe(
        (f"{DELTA} ssm_ba=8,embd {QWEN_MOE}", f"{GATED_ATTENTION} {QWEN_MOE}"),
        shape=WIDE_PARTIAL,
        meta=DELTA_META | QWEN_MOE_META,
    ),
    "qwen35": Recipe(
        (f"{DELTA} {BETA_ALPHA} {GATES}", f"{GATED_ATTENTION} {GATES}"),
        shape=WIDE_PARTIAL,
        meta=DELTA_META | SECTIONS,
    ),
    "qwen35-nextn": Recipe(
        # a block after the last layer that drafts a second token, unused unless requested
        (*2 * (f"{DELTA} {BETA_ALPHA} {GATES}", f"{GATED_ATTENTION} {GATES}"), f"{GATED_ATTENTION} {GATES} {NEXTN}"),
        arch="qwen35",
        shape=WIDE_PARTIAL | {"n_layer": 5},
        meta=DELTA_META | SECTIONS | {"nextn_predict_layers": 1},
    ),
    "qwen35moe": Recipe(
        (f"{DELTA} {BETA_ALPHA} {QWEN_MOE}", f"{GATED_ATTENTION} {QWEN_MOE}"),
        shape=WIDE_PARTIAL,
        meta=DELTA_META | SECTIONS | QWEN_MOE_META,
    ),
}  # fmt: skip
