"""Decoders whose file ends with blocks that predict tokens further on (NextN, MTP), which an ordinary context skips."""

from dataclasses import replace
from typing import Any

from random_model import ATTENTION, Recipe
from tiny_plain import PLAIN_MORE
from tiny_windows import SIGMOID, WINDOWS
from tiny_words import GATES, HEAD_NORMS, MIXTURE, PARTIAL, SHARED, SHARED_MOE

HEAD = "nextn.eh_proj=embd,2embd nextn.enorm nextn.hnorm"


def with_head(recipe: Recipe, name: str, n_layer: int, block: int, **meta: Any) -> Recipe:
    """Return a recipe of ``n_layer`` layers with one block more, which is made as layer ``block`` is."""
    layers = (recipe.layer,) if isinstance(recipe.layer, str) else recipe.layer
    blocks = [layers[i % len(layers)] for i in range(n_layer)]
    return replace(
        recipe,
        layer=(*blocks, f"{blocks[block]} {HEAD}"),
        arch=recipe.arch or name,
        shape=recipe.shape | {"n_layer": n_layer + 1},
        meta=recipe.meta | {"nextn_predict_layers": 1} | meta,
    )


GLM = f"{ATTENTION} {HEAD_NORMS} post_attention_norm"
NEXTN = {
    "cohere2moe-nextn": with_head(WINDOWS["cohere2moe"], "cohere2moe", 5, 1),
    "exaone-moe-nextn": with_head(WINDOWS["exaone-moe"], "exaone-moe", 4, 0),
    "glm4moe-nextn": with_head(
        Recipe(
            (f"{GLM} {GATES}", f"{GLM} {MIXTURE} exp_probs_b.bias=expert {SHARED}"),
            shape=PARTIAL,
            meta=SHARED_MOE | SIGMOID | {"leading_dense_block_count": 1},
        ),
        "glm4moe",
        2,
        1,
    ),
    "hy_v3-nextn": with_head(PLAIN_MORE["hy_v3"], "hy_v3", 2, 1),
    "mimo2-nextn": with_head(WINDOWS["mimo2"], "mimo2", 4, 0, **{"attention.head_count_kv": [2, 1, 2, 1, 2]}),
    "step35-nextn": with_head(
        WINDOWS["step35"],
        "step35",
        4,
        0,
        **{"attention.head_count": [4, 6, 6, 4, 4], "attention.head_count_kv": [2, 1, 1, 2, 2]},
    ),
}
