"""What every method shares: its name, its options, its spec string."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import ClassVar

LIMIT = 2**30  # the largest size that a rule takes


@dataclass(frozen=True)
class Method:
    """A way to read a long context; ``str(method)`` is the spec string that the native library parses.

    An option that is None is left out of the spec: the library then chooses it. ``base + rule`` composes two methods.

    Attributes
    ----------
    name : str
        First word of the spec string.
    words : mapping
        The options that are words, with the words they may be; all others are integers.
    role : str or None
        What it is in a composition: a "base" says what is read, a "rule" what is forgotten. None: it composes with
        nothing.

    Examples
    --------
    >>> from pylongctx import Corm, LongHeads
    >>> str(LongHeads(chunk_size=64) + Corm(window=128))
    'longheads,chunk_size=64,n_recent=1+corm,window=128,recent=256'
    """

    name: ClassVar[str]
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    role: ClassVar[str | None] = None

    @property
    def parts(self) -> tuple["Method", ...]:
        """The methods that it is made of: base and rule of a composition, else itself."""
        return (self,)

    def __add__(self, other: "Method") -> "Method":
        if not isinstance(other, Method):
            return NotImplemented
        from pylongctx.methods.compose import compose  # which builds on this module

        return compose(*self.parts, *other.parts)

    def __str__(self) -> str:
        options = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ",".join([self.name, *(f"{key}={value}" for key, value in options if value is not None)])


def check_given(name: str, value: int | None) -> None:
    """Raise TypeError when ``value`` is None."""
    if value is None:
        raise TypeError(f"{name} must be an integer, not None")


def check_int(name: str, value: int | None, minimum: int, maximum: int | None = None) -> None:
    """Raise TypeError or ValueError unless ``value`` is None or an integer from ``minimum`` to ``maximum``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer or None, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, not {value}")


def check_below(name: str, value: int | None, limit_name: str, limit: int | None) -> None:
    """Raise ValueError unless one of both is None or ``value`` is below ``limit``."""
    if value is not None and limit is not None and value >= limit:
        raise ValueError(f"{name} must be below {limit_name} ({limit}), not {value}")


def check_multiple(name: str, value: int | None, unit_name: str, unit: int | None) -> None:
    """Raise ValueError unless one of both is None or ``value`` is a multiple of ``unit``."""
    if value is not None and unit is not None and value % unit:
        low = value - value % unit
        nearest = f"{low} or {low + unit}" if low else str(unit)
        wanted = unit_name if unit_name == str(unit) else f"{unit_name} ({unit})"
        raise ValueError(f"{name} must be a multiple of {wanted}, not {value}; the nearest: {nearest}")


def check_word(name: str, value: str | None, words: tuple[str, ...]) -> None:
    """Raise TypeError or ValueError unless ``value`` is None or one of ``words``."""
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string or None, not {value!r}")
    if value not in words:
        raise ValueError(f"{name} must be {' or '.join(words)}, not {value!r}")
