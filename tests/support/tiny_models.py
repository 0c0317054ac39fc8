"""What each architecture is made of: tensor names, metadata and the sizes that it needs. No code: see ``tiny_gguf.py``.

Sizes are chosen so that every peculiarity of an architecture shows: partial rotation, grouped heads, heads
wider than the embedding, norms of queries and keys, scales, fused and biased projections, experts.
"""

from dataclasses import replace

from random_model import ATTENTION, GATED, LLAMA, PHI2, QKV_BIAS, QWEN2, Recipe, biased
from tiny_hybrids import HYBRIDS
from tiny_indexed import INDEXED
from tiny_latent import LATENT
from tiny_nextn import NEXTN
from tiny_plain import OTHER_POSITIONS, PLAIN_MORE, UNCAUSAL
from tiny_sections import NOPE, SECTIONS
from tiny_windows import WINDOWS
from tiny_words import (
    EXPERTS,
    FINE_MOE,
    FUSED,
    GATES,
    HEAD_NORMS,
    MHA,
    MIXTURE,
    MOE,
    PACKED,
    PARTIAL,
    PLAIN,
    PROJECTIONS,
    SCALES,
    SHARED,
    SHARED_MOE,
    STEEP,
    STEEP_GATE,
    STEEP_UP,
    WIDE,
    WIDE_NORMS,
)

ORDINARY = {
    "llama": LLAMA,
    "llama-freqs": Recipe(f"{ATTENTION} {GATED}", "output_norm output rope_freqs", "llama"),
    "mistral": Recipe(f"{ATTENTION} {GATED}", arch="llama", shape={"n_head_kv": 1, "freq_base": 1e6}),
    "mixtral": Recipe(f"{ATTENTION} {EXPERTS}", arch="llama", meta=MOE),
    "arcee": Recipe(f"{ATTENTION} {PLAIN}"),
    "arctic": Recipe(
        f"{ATTENTION} ffn_norm ffn_gate=embd,embd ffn_up=embd,embd ffn_down=embd,embd ffn_norm_exps {MIXTURE}",
        meta=MOE,
    ),
    "baichuan": Recipe(f"{ATTENTION} {GATED}", shape={"n_layer": 32} | MHA),
    "bailingmoe": Recipe(f"{ATTENTION} {EXPERTS} {SHARED}", meta=SHARED_MOE | {"expert_weights_scale": 1.5}),
    "bailingmoe2": Recipe(
        f"{FUSED} {HEAD_NORMS} {EXPERTS} {SHARED} exp_probs_b.bias=expert",
        shape=PARTIAL,
        meta=SHARED_MOE | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2},
    ),
    "bitnet": Recipe(f"{ATTENTION} attn_sub_norm {GATED} ffn_sub_norm=ff", "output_norm"),
    "chatglm": Recipe(f"attn_norm attn_qkv+b attn_output {PACKED}", shape=PARTIAL),
    "codeshell": Recipe(biased(f"{FUSED} {PLAIN}"), "output_norm+b output", gains=STEEP_UP),
    "command-r": Recipe(f"{ATTENTION} {GATES}", "output_norm", meta={"logit_scale": 0.5}),
    "dbrx": Recipe(f"{FUSED} attn_output_norm {MIXTURE}", meta=MOE | {"attention.clamp_kqv": 4.0}),
    "deci": Recipe(
        (f"{ATTENTION} {GATED}", f"attn_norm attn_output=embd,embd {GATED}", GATED),  # ordinary, linear, no attention
        shape={"n_layer": 3},
        meta={"attention.head_count": [4, 4, 0], "attention.head_count_kv": [2, 0, 0]},
    ),
    "deepseek": Recipe(f"{ATTENTION} {EXPERTS} {SHARED}", meta=SHARED_MOE | {"expert_weights_scale": 1.5}),
    "dots1": Recipe(
        f"{ATTENTION} {HEAD_NORMS} {EXPERTS} {SHARED}", shape=MHA, meta=SHARED_MOE | {"expert_gating_func": 2}
    ),
    "ernie4_5": Recipe(f"{ATTENTION} {GATED}"),
    "ernie4_5-moe": Recipe(
        f"{ATTENTION} {EXPERTS} {SHARED}",
        meta=SHARED_MOE | {"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 96},
    ),
    "exaone": Recipe(f"{ATTENTION} {GATED}", "output_norm output rope_freqs"),
    "exaone4": Recipe(f"{PROJECTIONS} {HEAD_NORMS} post_attention_norm {GATES} post_ffw_norm"),
    "falcon": Recipe(
        "attn_norm+b attn_norm_2+b attn_qkv attn_output ffn_up ffn_down", "output_norm+b output", gains=STEEP_UP
    ),
    "gemma": Recipe(
        f"{ATTENTION} {GATED}",
        "output_norm",
        shape=WIDE,
        embedding=0.125,
        gains=STEEP_GATE | {"ffn_down": 1 / STEEP},
    ),
    "glm4": Recipe(f"{QKV_BIAS} post_attention_norm {PACKED} post_ffw_norm", shape=PARTIAL),
    "glm4moe": Recipe(
        f"{ATTENTION} {HEAD_NORMS} post_attention_norm {MIXTURE} exp_probs_b.bias=expert " + SHARED,
        shape=PARTIAL,
        meta=SHARED_MOE | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2},
    ),
    "gptneox": Recipe(
        biased(f"{FUSED} {PLAIN}"),
        "output_norm+b output",
        shape=PARTIAL | MHA,
        meta={"use_parallel_residual": True},
        gains=STEEP_UP,
    ),
    "granite": Recipe(f"{ATTENTION} {GATED}", meta=SCALES | {"attention.scale": 0.2}),
    "granitemoe": Recipe(
        f"{ATTENTION} {EXPERTS} {SHARED}",
        meta=MOE | SCALES | {"attention.scale": 0.2, "expert_shared_feed_forward_length": 96},
    ),
    "internlm2": Recipe(f"{ATTENTION} {GATED}"),
    "jais2": Recipe(biased(f"{ATTENTION} {PLAIN}"), "output_norm+b output"),
    "minicpm": Recipe(f"{ATTENTION} {GATED}", meta=SCALES),
    "minimax-m2": Recipe(
        f"{ATTENTION} {WIDE_NORMS} {EXPERTS} exp_probs_b.bias=expert",
        shape=PARTIAL,
        meta=FINE_MOE | {"expert_gating_func": 2},
    ),
    "mistral3": Recipe(f"{ATTENTION} {GATED}"),
    "mistral3-temperature": Recipe(
        f"{ATTENTION} {GATED}",
        arch="mistral3",
        meta={"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 64},
    ),
    "nemotron": Recipe(
        f"attn_norm+b {PROJECTIONS} ffn_norm+b ffn_up ffn_down",
        "output_norm+b output",
        shape=PARTIAL,
    ),
    "olmo": Recipe(f"{PROJECTIONS} {GATES}", "output", meta={"attention.clamp_kqv": 4.0}),
    "olmo2": Recipe(f"{PROJECTIONS} {WIDE_NORMS} post_attention_norm {GATES} post_ffw_norm"),
    "olmoe": Recipe(f"{ATTENTION} {WIDE_NORMS} {EXPERTS}", shape=MHA, meta=MOE),
    "openelm": Recipe(
        (
            f"{FUSED} {HEAD_NORMS} {GATED}",
            f"attn_norm attn_qkv=2qkv,embd attn_output=embd,2q {HEAD_NORMS} {GATED}",  # twice as many heads
        ),
        "output_norm",
        meta={"attention.head_count": [4, 8], "attention.head_count_kv": [2, 4]},
    ),
    "orion": Recipe(f"attn_norm+b {PROJECTIONS} ffn_norm+b {GATES}", "output_norm+b output"),
    "pangu-embedded": Recipe(f"{QKV_BIAS}+b {GATED}"),
    "phi2": replace(PHI2, shape=PARTIAL | MHA, gains=STEEP_UP),
    "phi3": Recipe(
        f"{FUSED} {PACKED}",
        "output_norm output rope_factors_long rope_factors_short",
        meta={"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19},
    ),
    "phimoe": Recipe(f"{biased(ATTENTION)} ffn_norm+b {MIXTURE}", biased("output_norm output"), meta=MOE),
    "plamo": Recipe(f"{ATTENTION} {GATES}"),
    "qwen": Recipe(
        "attn_norm attn_qkv+b attn_output ffn_norm ffn_gate=ff/2,embd ffn_up=ff/2,embd ffn_down=embd,ff/2", shape=MHA
    ),
    "qwen2": QWEN2,
    "qwen2moe": Recipe(
        f"{QKV_BIAS} {EXPERTS} ffn_gate_inp_shexp=embd {SHARED}",
        meta=FINE_MOE | {"expert_shared_feed_forward_length": 96},
    ),
    "qwen3": Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}", shape=WIDE),
    "qwen3moe": Recipe(f"{ATTENTION} {HEAD_NORMS} {EXPERTS}", shape=WIDE, meta=FINE_MOE),
    "seed_oss": Recipe(f"{QKV_BIAS} post_attention_norm {GATES}"),
    "stablelm": Recipe(
        f"attn_norm+b {PROJECTIONS} attn_q_norm=n_head,head attn_k_norm=n_head_kv,head ffn_norm+b {GATES}",
        "output_norm+b output",
        shape=PARTIAL,
    ),
    "starcoder2": Recipe(biased(f"{ATTENTION} {PLAIN}"), "output_norm+b output", gains=STEEP_UP),
    "xverse": Recipe(f"{ATTENTION} {GATED}"),
}

MAMBA = (
    "attn_norm ssm_in=256,embd ssm_conv1d=128,4+b ssm_x=20,128 ssm_dt=128,4+b ssm_a=128,8 ssm_d=128 ssm_out=embd,128"
)
MAMBA_META = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 8, "ssm.time_step_rank": 4}
UNSERVED = {  # for reasons of their own
    "bert": Recipe(
        biased("attn_q attn_k attn_v attn_output attn_output_norm ffn_up ffn_down layer_output_norm"),
        "token_types=2,embd position_embd=n_ctx_train,embd token_embd_norm+b",
        shape=MHA,
        meta={"attention.causal": False},
    ),
    "baichuan-13b": Recipe(f"{ATTENTION} {GATED}", arch="baichuan", shape={"n_layer": 40} | MHA),
    "bloom": Recipe(biased(f"{FUSED} {PLAIN}"), "token_embd_norm+b output_norm+b output", shape=MHA),
    "gpt2": Recipe(biased(f"{FUSED} {PLAIN}"), "output_norm+b position_embd=n_ctx_train,embd", shape=MHA),
    "graniteswitch": PLAIN_MORE["graniteswitch"],
    "mamba": Recipe(MAMBA, "output_norm", shape={"n_head": 0, "n_head_kv": 0, "n_ff": 0}, meta=MAMBA_META),
    "mpt": Recipe(f"{FUSED} {PLAIN}", "output_norm output", shape=MHA, meta={"attention.max_alibi_bias": 8.0}),
}
REFUSED = UNSERVED | OTHER_POSITIONS | UNCAUSAL | INDEXED  # a method must

# What methods serve, by what it has in addition to ordinary attention.
GROUPS = {
    "plain": ORDINARY | {name: recipe for name, recipe in PLAIN_MORE.items() if name not in REFUSED},
    "layers without rotation": NOPE,
    "sections": SECTIONS,
    "windows": WINDOWS,
    "hybrids": HYBRIDS,
    "latent": LATENT,
    "drafts": NEXTN,
}
GROUP = {name: group for group, recipes in GROUPS.items() for name in recipes}
PROVEN = {name: recipe for recipes in GROUPS.values() for name, recipe in recipes.items()}
RECIPES = PROVEN | REFUSED

# Norms with weights after the rotation: methods that move keys refuse these.
FIXED_KEYS = ("hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hunyuan_vl-plain", "maincoder")
NARROW_VALUES = ("mimo2", "mimo2-nextn", *LATENT)  # keys and values differ in width
# No full layer rotates, so methods that only move keys change nothing.
STILL = ("afmoe", "cohere2", "exaone-moe", "exaone-moe-nextn", "exaone4-window", "granite-nope", "granitehybrid",
         "jamba", "kimi-k3", "kimi-linear", "llama4", "maple", "muse-glimmer", "nemotron_h", "nemotron_h_moe",
         "smallthinker")  # fmt: skip
