"""Words that recipes of many architectures share: parts of a block, metadata; see ``tiny_models.py``."""

PROJECTIONS = "attn_q attn_k attn_v attn_output"
FUSED = "attn_norm attn_qkv attn_output"
HEAD_NORMS = "attn_q_norm attn_k_norm"
WIDE_NORMS = "attn_q_norm=q attn_k_norm=kv"
GATES = "ffn_gate ffn_up ffn_down"
PLAIN = "ffn_norm ffn_up ffn_down"
PACKED = "ffn_norm ffn_up=2ff,embd ffn_down"  # gate and up in one matrix
MIXTURE = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
EXPERTS = f"ffn_norm {MIXTURE}"
SHARED = "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"

MHA = {"n_head_kv": 4}
PARTIAL = {"n_rot": 8}
WIDE = {"key_length": 32}
MOE = {"expert_count": 4, "expert_used_count": 2}
FINE_MOE = MOE | {"expert_feed_forward_length": 96}
SHARED_MOE = FINE_MOE | {"expert_shared_count": 1, "leading_dense_block_count": 0}
SCALES = {"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 2.0}

# ggml looks GELU up in a table of f16 between -10 and 10, where a rounding that falls the other way moves an activation
# by 5e-4. Nearly all activations are outside with these factors, and what is left is float rounding.
STEEP = 300.0
STEEP_GATE = {"ffn_gate": STEEP}  # for models that norm what the block adds
STEEP_UP = {"ffn_up": STEEP, "ffn_down": 1 / STEEP}
