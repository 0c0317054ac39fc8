"""What ran where, how much of it is right and how fast: lines to paste into an issue."""

import platform
from collections.abc import Iterator, Mapping, Sequence

from gpu.checks import METHODS, Check, serves
from gpu.speed import EndToEnd
from pylongctx._lib import build_info
from pylongctx.planning import devices


def summary(device: str, every: int, found: Mapping[str, Sequence[Check]], ends: Sequence[EndToEnd]) -> Iterator[str]:
    """Yield the lines; ``found``: checks by section."""
    here = next(one for one in devices() if one.name.upper() == device.upper())
    yield f"device: {here.name}, {here.description}, {here.memory}"
    build = build_info()
    upstream = build["upstream"].split()[0]
    yield f"build: pylongctx {build['version']} on {upstream}, {build['compiler']}, {platform.platform()}"
    share = "all cases" if every == 1 else f"one case in {every}"
    yield f"ops: {cases(found['ops'])}, {share}" if "ops" in found else "ops: not run"
    for section in ("models", "features"):
        yield f"{section}: {parts(found[section])}" if section in found else f"{section}: not run"
    if missing := [method for method in METHODS if not serves(device, method)]:
        yield f"not served there: {'; '.join(missing)}"
    yield from speeds(ends)


def cases(checks: Sequence[Check]) -> str:
    """Return how many cases ended how."""
    n, refused, wrong = (sum(getattr(check, field) for check in checks) for field in ("n", "refused", "wrong"))
    return f"{n - refused - wrong} right, {wrong} wrong, {refused} not served"


def parts(checks: Sequence[Check]) -> str:
    """Return how many checks ended how, and which failed."""
    wrong = [check.name for check in checks if check.failures]
    return f"{len(checks) - len(wrong)} right, {len(wrong)} wrong" + "".join(f"; {name}" for name in wrong)


def speeds(ends: Sequence[EndToEnd]) -> Iterator[str]:
    """Yield tokens per second, and how many times those of the first run with the same cache, which is stock."""
    if not ends:
        yield "tokens/s: not run"
    stock: dict[tuple[str, int], EndToEnd] = {}
    for end in ends:
        first = stock.setdefault((end.kv, end.depth), end)
        rates = (
            f"{what} {rate:.1f} ({rate / of:.2f} x)"
            for what, rate, of in (("prompt", end.prompt, first.prompt), ("decode", end.decode, first.decode))
        )
        yield f"tokens/s, {end.depth} tokens, {end.kv}, {end.method}: {', '.join(rates)}"
