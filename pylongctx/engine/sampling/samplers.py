"""The samplers of llama.cpp by name."""

from collections.abc import Sequence
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
