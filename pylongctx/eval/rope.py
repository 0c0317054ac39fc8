"""RoPE scalings as baselines: the arguments of Llama that a name, a text length and a model stand for.

With s = length / trained length: ``linear`` divides positions by s (Position Interpolation, Chen et al., arXiv
2306.15595). ``ntk`` raises the base to base * s^(d / (d - 2)), d the rotated channels of a head (NTK-aware scaling,
bloc97, 2023; YaRN's section 3.1, arXiv 2309.00071). ``dynamic`` is the same with the length of the text itself, the
"Dynamic NTK" of Emozilla, 2023, that LongHeads and SelfExtend compare with. ``yarn`` is llama.cpp's, with s and the
trained length (arXiv 2309.00071). All but ``dynamic`` are fixed for the longest text, as they are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pylongctx._enums import ROPE_SCALINGS
from pylongctx.llama import Llama

DEFAULT_BASE = 10000.0
LINEAR, YARN = ROPE_SCALINGS["linear"], ROPE_SCALINGS["yarn"]  # of rope_scaling_type


@dataclass(frozen=True)
class Positions:
    """Properties of a model that RoPE scalings depend on.

    Attributes
    ----------
    n_ctx_train : int
        Trained length.
    n_rot : int
        Rotated channels of a head.
    base : float
        Base of the angles.
    scaled : str
        The scaling that the model was made with, "" for none.

    Examples
    --------
    >>> Positions(n_ctx_train=4096, n_rot=128).base
    10000.0
    """

    n_ctx_train: int
    n_rot: int
    base: float = DEFAULT_BASE
    scaled: str = ""


def positions_of(llm: Llama) -> Positions:
    """Return the positions of a model from its metadata.

    Examples
    --------
    >>> positions_of(llm).n_ctx_train
    512
    """
    meta = llm.metadata
    arch = meta["general.architecture"]

    def number(name: str, default: float) -> float:
        return float(meta.get(f"{arch}.{name}", default))

    n_head = number("attention.head_count", 1)
    n_rot = number("rope.dimension_count", number("attention.key_length", number("embedding_length", 0) / n_head))
    scaled = meta.get(f"{arch}.rope.scaling.type", "none")
    base = number("rope.freq_base", DEFAULT_BASE)
    return Positions(int(number("context_length", 0)), int(n_rot), base, "" if scaled == "none" else scaled)


def ntk_base(base: float, n_rot: int, factor: float) -> float:
    """Return the base with which the slowest channel turns ``factor`` times slower, the fastest as before.

    Examples
    --------
    >>> round(ntk_base(10000.0, n_rot=128, factor=4))
    40890
    """
    return float(base * factor ** (n_rot / (n_rot - 2)))


def _ntk(model: Positions, factor: float) -> dict[str, Any]:
    return {"rope_freq_base": ntk_base(model.base, model.n_rot, factor)}


def _linear(model: Positions, factor: float) -> dict[str, Any]:
    return {"rope_scaling_type": LINEAR, "rope_freq_scale": 1 / factor}


def _yarn(model: Positions, factor: float) -> dict[str, Any]:
    return {
        "rope_scaling_type": YARN,
        "rope_freq_scale": 1 / factor,
        "yarn_orig_ctx": model.n_ctx_train,
    }


SCALINGS: dict[str, Callable[[Positions, float], dict[str, Any]]] = {
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _ntk,
    "yarn": _yarn,
}


def scaling(name: str, model: Positions, length: int, longest: int) -> dict[str, Any]:
    """Return the arguments of Llama; none where the text is not longer than the trained length.

    Raises
    ------
    ValueError
        When the name is unknown, or the model was made with a scaling of its own.

    Examples
    --------
    >>> scaling("yarn", Positions(4096, 128), length=8192, longest=16384)
    {'rope_scaling_type': 2, 'rope_freq_scale': 0.25, 'yarn_orig_ctx': 4096}
    """
    if name not in SCALINGS:
        raise ValueError(f"unknown rope scaling {name!r}; available: {', '.join(SCALINGS)}")
    if model.scaled:
        raise ValueError(f"the model is made with rope scaling {model.scaled!r}; {name!r} on top of it means nothing")
    factor = (length if name == "dynamic" else longest) / model.n_ctx_train
    return SCALINGS[name](model, factor) if factor > 1 else {}
