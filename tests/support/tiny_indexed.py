"""What models are made of that select keys themselves, with an indexer: see ``tiny_models.py``.

No method has a place in them. The indexer has 2 heads of 64 channels and chooses 16 keys.
"""

from random_model import ATTENTION, GATED, Recipe
from tiny_hybrids import BETA_ALPHA, DELTA_META, QWEN_MOE, QWEN_MOE_META, SECTIONS, WIDE_PARTIAL
from tiny_latent import (
    BIASED_EXPERTS,
    DEEPSEEK_META,
    FORGET,
    HY_V4,
    KDA,
    KDA_META,
    LOW_RANK_GATE,
    LOWER_BOUND,
    MLA,
    MLA_META,
    ONE_KEY,
    QUERIES,
    RANK,
    STREAMS_META,
    STREAMS_OUTER,
    dense_first,
    in_turn,
)
from tiny_words import HEAD_NORMS, PARTIAL

INDEXER = "indexer.k_norm=64+b indexer.proj=2,embd indexer.attn_k=64,embd indexer.attn_q_b=128,48"
INDEXER_META = {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 16,
}
DSA_META = MLA_META | RANK | DEEPSEEK_META | INDEXER_META

# every other layer has a window, and latents of its own
WINDOW_LATENTS = "attn_kv_a_mqa=64,embd attn_kv_a_norm=32 attn_k_b=n_head,32,16 attn_v_b=n_head,32,32"
NOTE = "attn_k_norm=32 attn_gate=n_head,embd"
WINDOW_META = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [0, 1, 0],
    "attention.kv_lora_rank_swa": 32,
    "attention.key_length_mla_swa": 48,
    "attention.value_length_mla_swa": 32,
    "attention.key_length_swa": 64,
    "attention.value_length_swa": 32,
    "rope.freq_base_swa": 5000.0,
    "attention.indexer.types": [1, 0, 1],
}

FOUR_STREAMS = "hc_attn_fn=24,512 hc_attn_base=24 hc_attn_scale=3 hc_ffn_fn=24,512 hc_ffn_base=24 hc_ffn_scale=3"
FOUR_STREAMS_META = STREAMS_META | {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3}
UNROTATED = (
    f"attn_norm {QUERIES} attn_kv_a_mqa=64,embd attn_kv_a_norm=64 attn_k_b=n_head,64,48 attn_v_b=n_head,32,64 "
    f"attn_output {INDEXER} indexer_compressor_gate=64,embd indexer_compressor_ape=4,64"
)

NARROW_STREAMS = " ".join(
    f"hc_{part}_norm=2,embd hc_{part}_down=16,256 hc_{part}_up=256,16 hc_{part}_inject=2,256"
    for part in ("attn", "ffn")
)
BARE_DELTA = "attn_qkv=128,embd attn_gate=64,embd ssm_conv1d=128,4 ssm_dt.bias=4 ssm_a=4 ssm_norm=16 ssm_out=embd,64"
POOLED_INDEXER = "indexer.q_proj=128,embd indexer.k_proj=64,embd indexer.q_norm=64 indexer.k_norm=64"

COMPRESSOR = (
    "attn_compressor_kv=128,embd attn_compressor_gate=128,embd attn_compressor_ape=4,128 attn_compressor_norm=64 "
    "indexer.proj=2,embd indexer.attn_q_b=128,48 indexer_compressor_kv=128,embd indexer_compressor_gate=128,embd "
    "indexer_compressor_ape=4,128 indexer_compressor_norm=64"
)
LONG_COMPRESSOR = (
    "attn_compressor_kv=64,embd attn_compressor_gate=64,embd attn_compressor_ape=128,64 attn_compressor_norm=64"
)
DEEPSEEK4 = (
    "attn_norm attn_sinks=n_head attn_q_a=48,embd attn_q_a_norm=48 attn_q_b=256,48 attn_kv=64,embd attn_kv_a_norm=64 "
    f"attn_output_a=32,128 attn_output_b=embd,32 {FOUR_STREAMS} {BIASED_EXPERTS}"
)

INDEXED = {
    "deepseek32": Recipe(dense_first(f"{MLA} {INDEXER}"), shape=ONE_KEY, meta=DSA_META),
    "deepseek4": Recipe(
        (DEEPSEEK4, f"{DEEPSEEK4} {COMPRESSOR}", f"{DEEPSEEK4} {LONG_COMPRESSOR}"),
        STREAMS_OUTER.replace("=2,256", "=4,512").replace("base=2", "base=4"),
        shape=ONE_KEY | {"key_length": 64},
        meta=RANK | DEEPSEEK_META | INDEXER_META | FOUR_STREAMS_META | {
            "attention.sliding_window": 24, "attention.compress_ratios": [0, 4, 128], "hash_layer_count": 0,
            "attention.compress_rope_freq_base": 5000.0, "attention.output_group_count": 2,
            "attention.output_lora_rank": 16, "expert_gating_func": 4, "swiglu_clamp_exp": [7.0, 7.0, 7.0]},
    ),
    "dots3note": Recipe(
        (f"{MLA} {NOTE} {INDEXER} {GATED}",
         f"attn_norm {QUERIES} {WINDOW_LATENTS} attn_output {NOTE} {BIASED_EXPERTS}",
         f"{MLA} {NOTE} {INDEXER} {BIASED_EXPERTS}"),
        shape=ONE_KEY,
        meta=DSA_META | WINDOW_META,
    ),
    "glm-dsa": Recipe(dense_first(f"{MLA} {INDEXER}"), shape=ONE_KEY, meta=DSA_META),
    "glm5-next": Recipe(
        in_turn(f"{KDA} {FORGET} ssm_a=4 {LOW_RANK_GATE} {FOUR_STREAMS}", f"{UNROTATED} {FOUR_STREAMS}"),
        shape=ONE_KEY | {"n_layer": 4},
        meta=DSA_META | KDA_META | LOWER_BOUND | FOUR_STREAMS_META | {
            "attention.key_length": 64, "rope.dimension_count": 0, "attention.indexer.kpool": 4},
    ),
    "hy_v4-indexer": Recipe(
        (f"{HY_V4} {INDEXER} {GATED}", f"{HY_V4} {BIASED_EXPERTS}"),
        STREAMS_OUTER,
        "hy_v4",
        shape=ONE_KEY | {"n_layer": 2},
        meta=DSA_META | STREAMS_META | {"attention.indexer.types": [1, 0]},
    ),
    "minimax-m3": Recipe(
        (f"{ATTENTION} {HEAD_NORMS} {GATED}",
         f"{ATTENTION} {HEAD_NORMS} {BIASED_EXPERTS} {POOLED_INDEXER}"),
        shape=PARTIAL,
        meta=DEEPSEEK_META | INDEXER_META | {
            "expert_gating_func": 2, "attention.indexer.top_k": 2, "attention.indexer.block_size": 16,
            "attention.indexer.local_blocks": 1},
    ),
    "qwen4exp": Recipe(
        (f"{NARROW_STREAMS} {BARE_DELTA} {BETA_ALPHA} {QWEN_MOE}",
         f"{NARROW_STREAMS} attn_q=2q,embd attn_k attn_v attn_output {HEAD_NORMS} {POOLED_INDEXER} {QWEN_MOE}"),
        "output output_hc_norm=2,embd output_hc_down=16,256 output_hc_up=256,16",
        shape=WIDE_PARTIAL,
        meta=DELTA_META | SECTIONS | QWEN_MOE_META | INDEXER_META | {
            "hyper_connection.count": 2, "hyper_connection.low_rank": 16, "attention.compress_ratios": [0, 4, 0, 4]},
    ),
}  # fmt: skip
