"""The methods, one frozen dataclass each, and the parser of their spec strings."""

from dataclasses import fields
from typing import Any

from pylongctx.methods.base import Method
from pylongctx.methods.full import Full
from pylongctx.methods.longheads import LongHeads
from pylongctx.methods.selfextend import SelfExtend
from pylongctx.methods.window import Window

__all__ = ["METHODS", "Full", "LongHeads", "Method", "SelfExtend", "Window", "parse"]

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Full, Window, SelfExtend, LongHeads)}
PLANNED = ("corm",)


def parse(spec: str) -> Method:
    """Return the method that a spec string such as ``"selfextend,group_size=8"`` describes.

    Raises
    ------
    ValueError
        When the method, an option or a value is unknown; the message lists what exists.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a method is a string or a method object, not {spec!r}")
    name, *options = (part.strip() for part in spec.split(","))
    cls = METHODS.get(name)
    if cls is None:
        raise ValueError(_unknown_method(name))
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


def _unknown_method(name: str) -> str:
    available = f"available: {', '.join(METHODS)}"
    parts = name.split("+")
    if any(part in PLANNED for part in parts) or (len(parts) > 1 and all(part in METHODS for part in parts)):
        return f"method {name!r} is planned for a later release and not in this version; {available}"
    return f"unknown method {name!r}; {available}"
