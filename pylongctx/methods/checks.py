"""Checks of the options of methods."""

from numbers import Integral, Real

LIMIT = 2**30  # the largest size that a rule accepts
UNIFORM_OR_ADAPTIVE = ("uniform", "adaptive")  # how heads share their budgets


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
    """Raise ValueError unless ``value`` or ``limit`` is None or ``value`` is below ``limit``."""
    if value is not None and limit is not None and value >= limit:
        raise ValueError(f"{name} must be below {limit_name} ({limit}), not {value}")


def check_multiple(name: str, value: int | None, unit_name: str, unit: int | None) -> None:
    """Raise ValueError unless ``value`` or ``unit`` is None or ``value`` is a multiple of ``unit``."""
    if value is not None and unit is not None and value % unit:
        low = value - value % unit
        nearest = f"{low} or {low + unit}" if low else str(unit)
        wanted = unit_name if unit_name == str(unit) else f"{unit_name} ({unit})"
        raise ValueError(f"{name} must be a multiple of {wanted}, not {value}; the nearest: {nearest}")


def check_share(name: str, value: float | None) -> None:
    """Raise TypeError or ValueError unless ``value`` is None or a number above 0 and at most 1."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or None, not {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, not {value}")


def check_word(name: str, value: str | None, words: tuple[str, ...]) -> None:
    """Raise TypeError or ValueError unless ``value`` is None or one of ``words``."""
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string or None, not {value!r}")
    if value not in words:
        raise ValueError(f"{name} must be {' or '.join(words)}, not {value!r}")
