"""Decoders that rotate by sections (M-RoPE, IMROPE), and those of which some layers, or all, do not rotate."""

from random_model import ATTENTION, GATED, QKV_BIAS, Recipe
from tiny_words import EXPERTS, FINE_MOE, HEAD_NORMS, MIXTURE, PACKED, PARTIAL, SCALES, SHARED, SHARED_MOE, WIDE

WHOLE = {"rope.dimension_sections": [4, 2, 2, 0]}  # time, height, width: every pair has one of them
# Interleaved: pairs 13 and 14 have none, as pairs 61 and 62 of Qwen3-VL, so they stand still in a text.
GAPS = {"rope.dimension_sections": [8, 4, 4, 0]}
DEEP = {"n_deepstack_layers": 1}  # of pictures: a text has none
GLM_END = f"post_attention_norm {PACKED} post_ffw_norm"

SECTIONS = {
    "qwen2vl": Recipe(f"{QKV_BIAS} {GATED}", meta=WHOLE),
    "paddleocr": Recipe(f"{ATTENTION} {GATED}", meta=WHOLE),
    "qwen3vl": Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}", shape=WIDE, meta=GAPS | DEEP),
    "qwen3vlmoe": Recipe(f"{ATTENTION} {HEAD_NORMS} {EXPERTS}", shape=WIDE, meta=GAPS | DEEP | FINE_MOE),
    # its output matrix has 3072 rows, whatever its vocabulary
    "qwen3tts": Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}", shape=WIDE | {"n_vocab": 3072}, meta=GAPS),
    "hunyuan_vl": Recipe(f"{ATTENTION} {HEAD_NORMS} {GATED}", meta=WHOLE),
    "glm4-sections": Recipe(
        f"{QKV_BIAS} {GLM_END}", arch="glm4", shape=PARTIAL, meta={"rope.dimension_sections": [2, 1, 1, 0]}
    ),
    "glm4moe-sections": Recipe(
        f"{ATTENTION} {HEAD_NORMS} post_attention_norm {MIXTURE} exp_probs_b.bias=expert {SHARED}",
        arch="glm4moe",
        shape=PARTIAL,
        meta=SHARED_MOE | {"expert_gating_func": 2, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
}

NOPE = {
    "smollm3": Recipe(f"{ATTENTION} {GATED}", shape={"n_layer": 8}),  # layers 3 and 7 do not rotate
    "granite-nope": Recipe(  # no layer rotates
        f"{ATTENTION} {GATED}",
        arch="granite",
        meta=SCALES | {"rope.scaling.finetuned": False, "attention.scale": 0.2},
    ),
}
