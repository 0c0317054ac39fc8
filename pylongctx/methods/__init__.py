"""The methods, frozen dataclasses, and the parser of their spec strings."""

from dataclasses import fields
from typing import Any

from pylongctx._guess import guess
from pylongctx.methods.base import METHODS, BudgetRule, Composition, Method, compose
from pylongctx.methods.longheads import LongHeads
from pylongctx.methods.positions import *  # noqa: F403 - what its __all__ names
from pylongctx.methods.rules import *  # noqa: F403

# isort: split
# After the imports above, whose order is that of METHODS.
from pylongctx.methods import positions, rules

__all__ = ["METHODS", "NONE", "BudgetRule", "Composition", "LongHeads", "Method", "named", "parse"]
__all__ += positions.__all__
__all__ += rules.__all__
NONE = "none"  # llama.cpp's own KV cache


def parse(spec: str) -> Method:
    """Return the method of a spec string such as ``"longheads,chunk_size=64+corm,window=128"``.

    Options belong to the part that they follow.

    Raises
    ------
    ValueError
        When a method, an option or a value is unknown, or the parts do not compose; the message lists the valid ones.

    Examples
    --------
    >>> parse("longheads,chunk_size=64+corm,window=128").rule
    Corm(window=128, recent=256, evict_every=None)
    >>> parse("selfextend,group=8")
    Traceback (most recent call last):
        ...
    ValueError: unknown option 'group=8' of method 'selfextend'; options: group_size=N, neighbor_window=N
    """
    if not isinstance(spec, str):
        raise TypeError(f"a method must be a string or a method object, not {spec!r}")
    return compose(*map(_parse_part, spec.split("+")))


def named(spec: str) -> Method | None:
    """Return the method of a spec string; None, as ``Llama`` takes it, for llama.cpp's own KV cache.

    Examples
    --------
    >>> named("none") is None, named("window")
    (True, Window(n_sink=4, window=None))
    """
    return None if spec == NONE else parse(spec)


def _parse_part(spec: str) -> Method:
    name, *options = (part.strip() for part in spec.split(","))
    cls = METHODS.get(name)
    if cls is None:
        raise ValueError(f"unknown method {name!r}{guess(name, METHODS)}; available: {', '.join(METHODS)}")
    values: dict[str, Any] = {}
    for option in options:
        key, value = _parse_option(cls, option)
        if key in values:
            raise ValueError(f"option {key!r} of method {name!r} is given twice")
        values[key] = value
    return cls(**values)


def _parse_option(cls: type[Method], option: str) -> tuple[str, int | str]:
    key, equals, value = (part.strip() for part in option.partition("="))
    known = [field.name for field in fields(cls)]
    if not equals or key not in known:
        listed = ", ".join(f"{name}={'|'.join(cls.words.get(name, 'N'))}" for name in known) or "none"
        raise ValueError(f"unknown option {option!r} of method {cls.name!r}; options: {listed}")
    if key in cls.words:
        return key, value
    try:
        return key, int(value)
    except ValueError:
        raise ValueError(f"option {key!r} of method {cls.name!r} must be an integer, not {value!r}") from None
