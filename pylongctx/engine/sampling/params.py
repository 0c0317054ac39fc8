"""The table of sampling parameters: of a sampler, of completions, of requests and of the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from typing import Any

# names and letters of llama.cpp's samplers, in its order
SAMPLERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "adaptive_p": "a",
}
OTHER_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typicalp": "typ_p"}
MAX_FLOAT = (2 - 2**-23) * 2.0**127  # of float32
MAX_BREAKERS, MAX_BREAKER_BYTES = 64, 40


def sampler_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return samplers by the names of ``SAMPLERS``, from llama.cpp's letters or its names and their other spellings.

    Examples
    --------
    >>> sampler_names(["top-k", "temp"])
    ('top_k', 'temperature')
    """
    letters = {letter: name for name, letter in SAMPLERS.items()}
    found: list[str] = []
    for one in given:
        name = letters.get(one) if isinstance(given, str) else sampler_name(one)
        if name is None:
            choices = ", ".join(f"{name} ({letter})" for name, letter in SAMPLERS.items())
            raise ValueError(f"samplers: there is no {str(one)[:40]!r}; there are {choices}")
        if name in found:
            raise ValueError(f"samplers: {name} is given twice")
        found.append(name)
    return tuple(found)


def sampler_name(given: Any) -> str | None:
    """Return the name in ``SAMPLERS`` for llama.cpp's name or another spelling; None: there is none."""
    word = str(given).lower().replace("_", "").replace("-", "")
    return ({name.replace("_", ""): name for name in SAMPLERS} | OTHER_NAMES).get(word)


@dataclass(frozen=True)
class Number:
    """A number that the sampler reads, and where it can be set."""

    low: float = -MAX_FLOAT
    high: float = MAX_FLOAT
    options: tuple[str, ...] = ()  # of the command line
    env: str | None = None  # the environment variable of the option, without its prefix ``LLAMA_ARG_``
    help: str = ""  # of the option
    request: Mapping[str, float] = field(default_factory=dict)  # its limits there, as arguments of pydantic's ``Field``
    aliases: tuple[str, ...] = ()  # other programs' names in requests
    keyword: str = ""  # of requests and of ``create_completion``; by default the field's name
    name: str = ""  # the field of ``SamplingParams``
    kind: type = float  # or int


def number(default: float, *options: str, **where: Any) -> Any:
    """Return the field of a number in ``SamplingParams``; ``where`` are the attributes of ``Number``."""
    return field(default=default, metadata={"number": Number(options=options, **where)})


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one sampler chain; ``temp`` 0 is greedy. Penalties only consider generated tokens.

    Mirostat, and a ``temp`` that is not above 0, replace all samplers except penalties and DRY. With XTC, dynamic
    temperature or ``samplers`` the chain also runs with ``temp`` 0, and takes the most likely remaining token.

    Attributes
    ----------
    top_n_sigma : float
        Keep only tokens whose logit is at most this many standard deviations below the best one (arXiv:2411.07641);
        0 and below: all.
    xtc_probability, xtc_threshold : float
        With this probability remove all tokens above the threshold except the least likely one of them (XTC). A
        threshold above 0.5 has no effect.
    dynatemp_range, dynatemp_exponent : float
        The temperature varies from ``temp`` - range to ``temp`` + range with the entropy to the power of the exponent
        (arXiv:2309.02772).
    adaptive_target, adaptive_decay : float
        Prefer tokens near this probability, which adapts to the chosen ones (adaptive-p); below 0: off.
    min_keep : int
        Minimum number of tokens that ``top_p``, ``min_p``, ``typical_p`` and XTC keep.
    dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers
        DRY: a token that would extend a repetition of n tokens loses multiplier * base ** (n - allowed_length).
        Repetitions are searched in the last tokens of prompt and answer, not across breakers.
    samplers : str or sequence of str or None
        The samplers to run, in order: names of ``SAMPLERS``, or llama.cpp's letters for them. None: all.
    repeatable : bool
        Whether the seed must lead to the same tokens with and without drafts. If not, drafts may be accepted by
        rejection sampling: more of them are used, and the tokens have the same distribution.

    Examples
    --------
    >>> SamplingParams(seed=1, temp=0.0).settings()["temp"]
    0.0
    >>> SamplingParams(seed=1, samplers="kt").samplers
    ('top_k', 'temperature')
    """

    seed: int
    top_k: int = number(
        40, "--top-k", env="TOP_K", help="sample from the N most likely tokens (0: all)", request={"ge": -1}
    )
    top_p: float = number(
        0.95,
        "--top-p",
        env="TOP_P",
        help="sample from the most likely tokens up to this total probability (1: all)",
        request={"ge": 0, "le": 1},
    )
    min_p: float = number(
        0.05,
        "--min-p",
        env="MIN_P",
        help="minimum probability, relative to the best token (0: all)",
        request={"ge": 0, "le": 1},
    )
    typical_p: float = number(
        1.0,
        "--typical",
        "--typical-p",
        help="locally typical sampling (1: off)",
        request={"ge": 0, "le": 1},
        aliases=("typ_p", "typical"),
    )
    top_n_sigma: float = number(
        -1.0,
        "--top-nsigma",
        "--top-n-sigma",
        help="top-n-sigma: keep logits within N standard deviations of the best (-1: all)",
        aliases=("nsigma",),
    )
    xtc_probability: float = number(
        0.0, "--xtc-probability", low=0, high=1, help="XTC: probability of removing the most likely tokens (0: off)"
    )
    xtc_threshold: float = number(
        0.1, "--xtc-threshold", low=0, high=1, help="XTC: tokens above this probability are removed, except one"
    )
    temp: float = number(
        0.8,
        "--temp",
        "--temperature",
        env="TEMPERATURE",
        help="temperature; 0 is greedy",
        request={"ge": 0},
        keyword="temperature",
    )
    dynatemp_range: float = number(0.0, "--dynatemp-range", low=0, high=1000, help="dynamic temperature range (0: off)")
    dynatemp_exponent: float = number(1.0, "--dynatemp-exp", low=0, high=1000, help="dynamic temperature exponent")
    adaptive_target: float = number(
        -1.0, "--adaptive-target", high=1, help="adaptive-p: prefer tokens near this probability (-1: off)"
    )
    adaptive_decay: float = number(
        0.9, "--adaptive-decay", low=0, high=0.99, help="adaptive-p: how slowly it adapts, up to 0.99"
    )
    min_keep: int = number(0, low=0)
    penalty_last_n: int = number(
        64,
        "--repeat-last-n",
        help="number of last tokens that penalties consider (0: off)",
        request={"ge": -1},
        keyword="repeat_last_n",
        aliases=("repetition_penalty_range", "rep_pen_range"),
    )
    repeat_penalty: float = number(
        1.0,
        "--repeat-penalty",
        env="REPEAT_PENALTY",
        help="penalty for repeated tokens, a factor (1: off)",
        request={"gt": 0},
        aliases=("repetition_penalty", "rep_pen"),
    )
    frequency_penalty: float = number(
        0.0,
        "--frequency-penalty",
        env="FREQUENCY_PENALTY",
        help="penalty per use (0: off)",
        request={"ge": -2, "le": 2},
    )
    presence_penalty: float = number(
        0.0,
        "--presence-penalty",
        env="PRESENCE_PENALTY",
        help="penalty for used tokens (0: off)",
        request={"ge": -2, "le": 2},
    )
    dry_multiplier: float = number(
        0.0, "--dry-multiplier", low=0, help="DRY: penalty for continuing a repetition (0: off)"
    )
    dry_base: float = number(1.75, "--dry-base", low=1, help="DRY: factor per token of the repetition")
    dry_allowed_length: int = number(
        2, "--dry-allowed-length", low=0, help="DRY: longest repetition without a penalty, in tokens"
    )
    dry_penalty_last_n: int = number(
        64,
        "--dry-penalty-last-n",
        low=0,
        help="DRY: number of last tokens to consider, including the prompt (0: off)",
    )
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat_mode: int = number(
        0, "--mirostat", help="Mirostat 1 or 2 (0: off)", request={"ge": 0, "le": 2}, aliases=("mirostat",)
    )
    mirostat_tau: float = number(5.0, "--mirostat-ent", help="Mirostat: target entropy tau", request={"ge": 0})
    mirostat_eta: float = number(0.1, "--mirostat-lr", help="Mirostat: learning rate eta", request={"ge": 0})
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: str | Sequence[str] | None = None
    repeatable: bool = True

    def __post_init__(self) -> None:
        for key, value in self.settings().items():
            if not isinstance(value, Real):
                raise TypeError(f"{key} must be a number, not {value!r}")
            if not -MAX_FLOAT <= getattr(self, key) <= MAX_FLOAT:
                raise ValueError(f"{key} must be a finite number, not {value}")
        for one in NUMBERS:
            value = getattr(self, one.name)
            if not one.low <= value <= one.high:
                limit = f"at least {one.low}" if one.high == MAX_FLOAT else f"from {one.low} to {one.high}"
                raise ValueError(f"{one.name} must be {limit}, not {value}")
        if self.repeat_penalty <= 0:
            raise ValueError(f"repeat_penalty must be above 0 (1 is none), not {self.repeat_penalty}")
        if self.mirostat_mode not in (0, 1, 2):
            raise ValueError(f"mirostat_mode must be 0, 1 or 2, not {self.mirostat_mode}")
        check_breakers(self.dry_sequence_breakers)
        if self.samplers is not None:
            object.__setattr__(self, "samplers", sampler_names(self.samplers))

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``lctx_sampler_params`` that are plain numbers."""
        others = ("logit_bias", "dry_sequence_breakers", "samplers", "repeatable")
        return {key: value for key, value in asdict(self).items() if key not in others}

    @property
    def has_fixed_odds(self) -> bool:
        """Whether a token is drawn from probabilities that a draw does not change: neither greedy nor adaptive."""
        return self.temp > 0 and not self.mirostat_mode and self.adaptive_target < 0

    @property
    def letters(self) -> str | None:
        """The samplers that run as llama.cpp's letters; None: all."""
        return None if self.samplers is None else "".join(SAMPLERS[name] for name in self.samplers)


def _numbers() -> Iterator[Number]:
    for one in fields(SamplingParams):
        if (found := one.metadata.get("number")) is not None:
            yield replace(found, name=one.name, keyword=found.keyword or one.name, kind=type(one.default))


NUMBERS = tuple(_numbers())


# keywords of create_completion; how far penalties look back is a setting of the object, as in llama_cpp
KEYWORDS = tuple(one.keyword for one in NUMBERS if one.name != "penalty_last_n")


def check_breakers(breakers: Sequence[str]) -> None:
    """Raise ValueError for invalid sequence breakers of DRY."""
    if isinstance(breakers, str) or not all(isinstance(one, str) for one in breakers):
        raise TypeError("dry_sequence_breakers must be a list of strings")
    if len(breakers) > MAX_BREAKERS:
        raise ValueError(f"dry_sequence_breakers: {len(breakers)} are more than the maximum of {MAX_BREAKERS}")
    for one in breakers:
        data = one.encode("utf-8", "replace")
        if not 1 <= len(data) <= MAX_BREAKER_BYTES or b"\0" in data or data.decode() != one:
            raise ValueError(
                f"dry_sequence_breakers: {one[:MAX_BREAKER_BYTES]!r} must have 1 to {MAX_BREAKER_BYTES} bytes"
            )
