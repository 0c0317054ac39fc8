"""A warning for keys of few bits whose bias is large, where it is stored with them."""

from pylongctx.methods import Full, LongHeads, Method, Window

# their keys have a bias that is many times as large as the rest (Qwen2.5-Coder-1.5B: up to 912)
LARGE_BIAS = ("qwen2", "qwen2moe", "qwen2vl")
FEW_BITS = ("q4_0", "q4_1")


def few_bits_for_a_bias(architecture: str, type_k: str, method: Method | None) -> str:
    """Return a warning if K has too few bits for the bias of its keys, or the empty string.

    The mean of the bias is not stored where every query sees all keys from one position.

    Examples
    --------
    >>> few_bits_for_a_bias("qwen2", "q4_0", Full())
    ''
    >>> few_bits_for_a_bias("qwen2", "q4_0", None)[:36]
    'K in q4_0 is too coarse for the bias'
    """
    if architecture not in LARGE_BIAS or type_k not in FEW_BITS or (method is not None and _has_one_angle(method)):
        return ""
    name = method.parts[0].name if method is not None else "llama.cpp's own KV cache"
    return (
        f"K in {type_k} is too coarse for the bias of this model's keys with {name}, answers may be random: "
        "use type_k='q8_0' (-ctk q8_0), or the method full"
    )


def _has_one_angle(method: Method) -> bool:
    base = method.parts[0]
    if isinstance(base, LongHeads):
        return base.position == "full"
    return base.role == "rule" or isinstance(base, Window) or (isinstance(base, Full) and (base.spans or 1) == 1)
