"""The tables of a short run in a page: a section per card between two markers, which a later run replaces."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cuda_build import ROOT
from report import table

PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- short runs -->", "<!-- short runs: end -->"
PHASES = {"decode": "one token", "prefill": "prefill of 512 tokens"}
SPECIAL = {"layers recorded": " of a text", "layers wgmma": " by wgmma"}  # steps whose layers have lines of their own
RESULTS = {"results": "Cases of sub-ops as on the CPU", "results wgmma": "By wgmma"}
COUNTERS = ("us", "registers", "warps %", "f16 products %", "int8 products %", "shared memory %", "memory %")

Line = Mapping[str, Any]


def merged(page: str, lines: Sequence[Line]) -> str:
    """Return a page with the section of a run.

    Raises
    ------
    ValueError
        When the page has no markers, or the run no card.
    """
    before, begin, rest = page.partition(BEGIN)
    sections, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    if not lines or lines[0]["step"] != "card":
        raise ValueError("the first line of a run is that of the card")
    title = f"#### {lines[0]['card']}"
    others = [part for part in re.split(r"^(?=#### )", sections, flags=re.MULTILINE) if part.strip()]
    kept = [part.strip() for part in others if part.split("\n")[0] != title]
    new = "\n\n".join([title, *section(lines)])
    return before + begin + "\n\n" + "\n\n".join([*kept, new]) + "\n\n" + end + after


def section(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the parts of a section: the card, what is right, tables, and the steps without a result."""
    card = lines[0]
    of = [card["card"], f"driver {card['driver']}" if card["driver"] else "", f"CUDA {card['cuda']}", card["date"]]
    yield f"{', '.join(filter(None, of))}; `python tests/gpu/short_run.py`."
    results = {line["step"]: line["result"] for line in lines[1:] if "result" in line}
    for name, words in RESULTS.items():
        if name in results:
            yield f"{words}: {right(results[name]['checks'])}."
    layers = [(name, part) for name, one in results.items() if name.startswith("layers") for part in one["layers"]]
    for phase, words in PHASES.items():
        if rows := list(layer_rows([(name, one) for name, one in layers if one["phase"] == phase])):
            yield table((f"{words}, us", "K and V", "llama.cpp", *methods(layers)), rows)
    if ends := [end for name, one in results.items() if name.startswith("model") for end in one["end_to_end"]]:
        yield table(("whole model, tokens/s", "K and V", "prompt", "then", "GPU MiB"), list(map(end_row, ends)))
    for name, launches in results.items():
        if name.startswith("counters") and launches:
            rows = [[f"`{one['kernel']}`", *(number(one.get(what)) for what in COUNTERS)] for one in launches]
            yield table((name, *COUNTERS), rows)
    if missing := [f"{line['step']} ({line['error']})" for line in lines[1:] if "error" in line]:
        yield f"Without a result: {', '.join(missing)}."


def right(checks: Sequence[Line]) -> str:
    """Return how many cases the card computes as the CPU does."""
    n, refused, wrong = (sum(check[name] for check in checks) for name in ("n", "refused", "wrong"))
    return f"{n - refused - wrong} right, {wrong} wrong, {refused} not served"


def methods(layers: Sequence[tuple[str, Line]]) -> list[str]:
    return list(dict.fromkeys(one["method"] for _, one in layers))


def layer_rows(layers: Sequence[tuple[str, Line]]) -> Iterator[list[str]]:
    """Yield a row per depth and type: microseconds of stock and of every method."""
    keys = dict.fromkeys((SPECIAL.get(name, ""), one["depth"], one["kv"]) for name, one in layers)
    for key in keys:
        here = [one for name, one in layers if (SPECIAL.get(name, ""), one["depth"], one["kv"]) == key]
        steps = {one["method"]: one["step"] for one in here}
        stock = min(one["stock"] for one in here)
        depth = f"{key[1]} rows{key[0]}"
        yield [depth, key[2], number(stock), *(number(steps.get(method)) for method in methods(layers))]


def end_row(end: Line) -> list[str]:
    name = f"{end['method']}, {end['depth']} tokens"
    return [name, end["kv"], number(end["prompt"]), number(end["decode"]), str(end["gpu_mib"] or "")]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
