"""What every method shares: its name, its options, its spec string."""

from dataclasses import dataclass, fields
from numbers import Integral
from typing import ClassVar


@dataclass(frozen=True)
class Method:
    """A way to read a long context; ``str(method)`` is the spec string that the native library parses.

    An option that is None is left out of the spec: the library then chooses it.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        options = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ",".join([self.name, *(f"{key}={value}" for key, value in options if value is not None)])


def check_int(name: str, value: int | None, minimum: int) -> None:
    """Raise TypeError or ValueError unless ``value`` is None or an integer >= ``minimum``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer or None, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
