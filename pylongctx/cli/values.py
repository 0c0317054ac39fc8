"""Parsing the values of options that only some commands have."""

from pylongctx._enums import AUTO_LAYERS, ROPE_SCALINGS, SPLIT_MODES
from pylongctx.cli.arguments import integer, number, on_off_auto, one_of

ON = -1  # an option that takes a number was given without one


def shares(text: str) -> list[float]:
    """Return the numbers of ``"3/1"`` or ``"3,1"``."""
    return [number(share) for share in text.replace("/", ",").split(",")]


def staged_mib(text: str) -> int:
    """Return a number of MiB; 0 means auto, ON that no number was given."""
    return 0 if text == "auto" else integer(text) if text else ON


def mib(text: str) -> int:
    """Return a number of MiB in bytes."""
    return integer(text) << 20


def layers(text: str) -> int | str:
    """Return a number of layers, -1 for all, or "auto"."""
    if text == AUTO_LAYERS:
        return text
    return -1 if text == "all" else integer(text)


def split_mode(text: str) -> int:
    """Return the number of a split mode."""
    return SPLIT_MODES[one_of(tuple(SPLIT_MODES))(text)]


def rope_scaling(text: str) -> int:
    """Return the number of a RoPE scaling."""
    return ROPE_SCALINGS[one_of(tuple(ROPE_SCALINGS))(text)]


def flash_attention(text: str) -> None:
    """Refuse to turn off what cannot be turned off."""
    if on_off_auto(text) is False:
        raise ValueError("pylongctx's attention is always a flash attention and cannot be turned off")
