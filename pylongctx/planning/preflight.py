"""The check that a model and its context fit into memory, before anything is allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pylongctx._free import address_room
from pylongctx._lib import InvalidInput, lib
from pylongctx._log import LOG
from pylongctx._units import bytes_text
from pylongctx.planning.plan import ROWS, STEP, Plan, Sizes
from pylongctx.planning.suggestions import for_longer_context, suggestions

PROBE_BYTES = 32 * 2**20  # address space of a model and context without memory; llama.cpp aborts without it
MIN_N_CTX = 512  # tokens: lower bound for n_ctx=0


def fit(path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the settings of the context; ``n_ctx=0`` becomes the size that fits, with a log message if it is reduced.

    Raises
    ------
    MemoryError
        When an explicit ``n_ctx`` does not fit, or not even 512 tokens do, with the size of each part and suggestions.
    InvalidInput
        When the library refuses the model or the settings.
    """
    if min(address_room(), default=PROBE_BYTES) < PROBE_BYTES:
        raise MemoryError(f"a check of the model needs {bytes_text(PROBE_BYTES)}, and ulimit -v leaves less; raise it")
    with quiet(), Plan(path, model_settings, settings, method) as plan:
        if all(size.fits for size in plan.sizes()):
            return settings
        longest = plan.longest()
        if settings["n_ctx"] > 0 or longest < MIN_N_CTX:
            raise MemoryError(explain(plan, longest))
        LOG.warning(shortened(plan, longest))
        return settings | {"n_ctx": longest}


def serves(path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> bool:
    """Return True if a method supports a model, whatever the size of its context."""
    try:
        with quiet(), Plan(path, model_settings, settings, method) as plan:
            plan.sizes(n_ctx=STEP)
    except InvalidInput:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress llama.cpp's messages, which are repeated on load or become the reason of an exception."""
    lib.lctx_log_set_level(0)
    try:
        yield
    finally:
        lib.lctx_log_set_level(1)


def shortened(plan: Plan, longest: int) -> str:
    """Return the log message for a reduced ``n_ctx=0``."""
    asked, trained, n_seq = plan.n_ctx(), plan.info.n_ctx_train, plan.settings.get("n_seq_max", 1)
    each = f" for each of {n_seq} sequences" if n_seq > 1 else ""
    wanted = "the trained context" if asked == trained else f"{asked / trained:.2g} times the trained context"
    ways = ", ".join(for_longer_context(plan, longest))
    return f"n_ctx is {longest}{each}, the largest that fits into memory, not {asked}, {wanted}; for more: {ways}"


def explain(plan: Plan, longest: int) -> str:
    """Return the message of the MemoryError."""
    note = ""
    if "corm" in plan.method:
        note = "\nHow much corm keeps depends on the text; the table counts the minimum."
    anyway = "preflight=False (--no-preflight): opens it anyway"
    if plan.method:
        anyway += ", for shorter texts: the KV cache is allocated as the text grows"
    ways = "\n".join(f"- {way}" for way in [*suggestions(plan, longest), anyway])
    return f"n_ctx {plan.n_ctx()} does not fit into memory:\n{table(plan.sizes())}{note}\nSuggestions:\n{ways}"


def table(sizes: list[Sizes]) -> str:
    """Return the sizes as lines of text with a column per device."""
    rows = [["", *(size.device for size in sizes)]]
    for name, label in ROWS.items():
        if any(getattr(size, name) for size in sizes):
            rows.append([label, *(bytes_text(getattr(size, name)) for size in sizes)])
    rows.append(["sum", *(bytes_text(size.total) for size in sizes)])
    rows.append(["free", *("unknown" if size.free is None else bytes_text(size.free) for size in sizes)])
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"{row[0]:{first}}" + "".join(f" {cell:>{n}}" for cell, n in zip(row[1:], widths, strict=True)) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
