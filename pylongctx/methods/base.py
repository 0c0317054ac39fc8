"""The base class of methods: name, options and their checks, spec string; and the composition of a base and a rule."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar

LIMIT = 2**30  # the largest size that a rule accepts
UNIFORM_OR_ADAPTIVE = ("uniform", "adaptive")  # how heads share their budgets
READS_ALL = "full"  # the base of a rule without an explicit base
MINIMUM = {"budget": 1, "recent": 0, "window": 1, "evict_every": 1}  # of the options of rules with a budget
METHODS: dict[str, type["Method"]] = {}  # by name; the classes add themselves


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


@dataclass(frozen=True)
class Method:
    """A method for long contexts; ``str(method)`` is the spec string that the native library parses.

    An option that is None is left out of the spec, and the library chooses it. ``base + rule`` composes two methods.

    Attributes
    ----------
    name : str
        The first word of the spec string.
    words : mapping
        The options with string values, and their allowed values.
        All other options are integers.
    role : str or None
        Role in a composition: a "base" determines what is read, a "rule" what is evicted. None: it composes with
        nothing.
    reads_all : bool
        Whether every query reads all earlier tokens.
    waits : bool
        Whether it is a rule that evicts only on request.
    replays : bool
        Whether a replay of the text decides what it evicts then, independently of later questions.

    Raises
    ------
    TypeError, ValueError
        When an option of a method has the wrong type or is out of range, or a size of a rule is above 2**30.

    Examples
    --------
    >>> from pylongctx import Corm, LongHeads
    >>> str(LongHeads(chunk_size=64) + Corm(window=128))
    'longheads,chunk_size=64+corm,window=128,recent=256'
    """

    name: ClassVar[str]
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    role: ClassVar[str | None] = None
    reads_all: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    replays: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(name := vars(cls).get("name"), str):
            METHODS[name] = cls

    @property
    def parts(self) -> tuple["Method", ...]:
        """The methods that it consists of: base and rule of a composition, else itself."""
        return (self,)

    @property
    def eviction(self) -> "Method | None":
        """The part that evicts keys per head; None without one.

        Examples
        --------
        >>> from pylongctx import Corm, LongHeads
        >>> (LongHeads() + Corm()).eviction == Corm(), LongHeads().eviction
        (True, None)
        """
        return next((part for part in self.parts if part.role == "rule"), None)

    def __add__(self, other: "Method") -> "Method":
        if not isinstance(other, Method):
            return NotImplemented
        return compose(*self.parts, *other.parts)

    def __str__(self) -> str:
        options = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ",".join([self.name, *(f"{key}={value}" for key, value in options if value is not None)])


@dataclass(frozen=True)
class BudgetRule(Method):
    """The base of rules that keep a budget of keys per layer and KV head; a rule declares the options that it has.

    Attributes
    ----------
    budget : int or None
        Keys left by an eviction; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
    recent : int or None
        Number of newest keys that are never evicted, less than ``budget``. None: a quarter of the budget.
    evict_every : int or None
        Tokens between two evictions, which happen at multiples of it. None: a quarter of the budget, but at most 256.
    heads : str or None
        "adaptive": the KV heads of a layer pool their budgets for their best keys, and each head keeps at least a fifth
        of its budget (AdaKV, arXiv 2407.11550, with the safeguard of its section 4). None, "uniform": every head has
        its own budget.

    Examples
    --------
    >>> from pylongctx import H2O
    >>> isinstance(H2O(budget=1024), BudgetRule)
    True
    """

    role = "rule"
    words = {"heads": UNIFORM_OR_ADAPTIVE}

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in given.items():
            if name in self.words:
                check_word(name, value, self.words[name])
            else:
                check_int(name, value, MINIMUM[name], LIMIT)
        check_below("recent", given.get("recent"), "budget", given["budget"])


@dataclass(frozen=True)
class Composition(Method):
    """A base with an eviction rule, such as ``LongHeads() + Corm()``; its spec string joins both by ``+``.

    Parameters
    ----------
    base : Method
        Determines what is read: a method whose role is "base". It is full attention by default: ``Full() + Corm()`` is
        ``Corm()``.
    rule : Method
        Determines what is evicted: a method whose role is "rule".

    Raises
    ------
    TypeError, ValueError
        When a part is not a method object, or the two do not compose; the message lists valid compositions.

    Examples
    --------
    >>> from pylongctx import Corm, LongHeads
    >>> both = LongHeads() + Corm()
    >>> both.base == LongHeads(), both.rule == Corm()
    (True, True)
    """

    base: Method
    rule: Method

    def __post_init__(self) -> None:
        for name, part in (("base", self.base), ("rule", self.rule)):
            if not isinstance(part, Method):
                raise TypeError(f"{name} must be a method object, not {part!r}")
        _check(self.base.parts + self.rule.parts)
        if str(self.base) == READS_ALL:
            raise ValueError(f"'full+{self.rule.name}' is the same as {self.rule.name!r}: use the rule itself")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The names of both parts, joined by ``+``."""
        return "+".join(part.name for part in self.parts)

    @property
    def parts(self) -> tuple[Method, ...]:
        """The base and the rule."""
        return self.base, self.rule

    @property
    def replays(self) -> bool:  # type: ignore[override]
        """Whether one of the parts does."""
        return any(part.replays for part in self.parts)

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def compose(*parts: Method) -> Method:
    """Return the method of ``parts``: a single one, or a base and a rule.

    Raises
    ------
    ValueError
        When they do not compose.

    Examples
    --------
    >>> from pylongctx import H2O, SelfExtend
    >>> str(compose(SelfExtend(), H2O(budget=512)))
    'selfextend+h2o,budget=512'
    """
    if len(parts) == 1:
        return parts[0]
    _check(parts)
    base, rule = parts
    return rule if str(base) == READS_ALL else Composition(base, rule)


def _check(parts: tuple[Method, ...]) -> None:
    if len(parts) == 2 and parts[0].name == READS_ALL and str(parts[0]) != READS_ALL and not parts[1].replays:
        raise ValueError(
            f"'{parts[0]}+{parts[1].name}' does not compose: KV entries of spans can only be evicted with kvzip"
        )
    if [part.role for part in parts] != ["base", "rule"]:
        raise ValueError(
            f"{'+'.join(part.name for part in parts)!r} does not compose: {_reason(parts)}; "
            f"a composition is one base ({names('base')}) + one rule ({names('rule')})"
        )


def _reason(parts: tuple[Method, ...]) -> str:
    """Return why parts are not a base and a rule."""
    if len(parts) != 2:
        return f"it has {len(parts)} parts"
    for part in parts:
        if part.role is None:
            return f"{part.name} does not compose with other methods"
    first, second = parts
    if first.role == second.role:
        return f"both are {first.role}s"
    return f"the base comes first, '{second.name}+{first.name}'"


def names(role: str, reads_all: bool = False) -> str:
    """Return the methods of a role, or only those that read every token, as ``"a, b or c"``.

    Examples
    --------
    >>> "longheads" in names("base"), "longheads" in names("base", reads_all=True)
    (True, False)
    """
    *most, last = sorted(cls.name for cls in METHODS.values() if cls.role == role and cls.reads_all >= reads_all)
    return f"{', '.join(most)} or {last}"
