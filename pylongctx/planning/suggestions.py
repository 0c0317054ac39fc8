"""Suggestions, with numbers, for a context that does not fit into memory."""

from collections.abc import Iterator
from typing import Any

from pylongctx._lib import InvalidInput, lib
from pylongctx._units import bytes_text
from pylongctx.methods.table import CLASSES
from pylongctx.planning.plan import Plan, Sizes, most

MAX_SHOWN = 4
BASES = [cls.name for cls in CLASSES if cls.role == "base"]
SMALL_TYPE, SMALL_BATCH = "q8_0", 128  # the smallest with almost no loss

Suggestion = tuple[bool, str]  # whether it suffices, and what to do


def suggestions(plan: Plan, longest: int) -> list[str]:
    """Return changes of the arguments, sufficient ones first; ``longest`` is the largest n_ctx that fits."""
    sizes = plan.sizes()
    if any(size.free is not None and size.weights > size.free for size in sizes):
        ways = [*_elsewhere(plan), (False, _smaller_model(sizes))]
    else:
        ways = [
            *_smaller_types(plan),
            *_fewer_tokens(plan, longest),
            *_elsewhere(plan),
            *_limited(plan),
            *_fewer_rows(plan),
            *_smaller_batch(plan),
        ]
    return [way for _, way in sorted(ways, key=lambda way: not way[0])][:MAX_SHOWN]


def for_longer_context(plan: Plan, longest: int) -> Iterator[str]:
    """Yield short suggestions for a context longer than ``longest``, which fits without changes."""
    small = lib.lctx_type_from_name(SMALL_TYPE.encode())
    n = plan.longest(type_k=small, type_v=small)
    if n > longest:
        yield f'type_k="{SMALL_TYPE}" and type_v="{SMALL_TYPE}" (n_ctx {n})'
    if method := _with_corm(plan):
        yield f'method="{method}"'
    if plan.method and not plan.settings["kv_limit"]:
        yield "kv_limit (a long n_ctx that is usable as far as memory allows)"
    yield "preflight=False"


def _sum(sizes: list[Sizes]) -> int:
    return sum(size.total for size in sizes)


def _changed(plan: Plan, what: str, sum_is: str = "in all", **changes: Any) -> Iterator[Suggestion]:
    """Yield the total after a change, if it becomes smaller."""
    try:
        after = plan.sizes(**changes)
    except InvalidInput:
        return  # the model or the method does not support it
    before = plan.sizes()
    if _sum(after) < _sum(before):
        enough = all(size.fits for size in after)
        numbers = f"{bytes_text(_sum(after))} {sum_is} instead of {bytes_text(_sum(before))}"
        yield enough, f"{what}: {numbers}" + ("" if enough else ", which alone is not enough")


def _smaller_types(plan: Plan) -> Iterator[Suggestion]:
    small = lib.lctx_type_from_name(SMALL_TYPE.encode())
    what = f'type_k="{SMALL_TYPE}", type_v="{SMALL_TYPE}" (-ctk {SMALL_TYPE} -ctv {SMALL_TYPE})'
    yield from _changed(plan, what, type_k=small, type_v=small)


def _smaller_batch(plan: Plan) -> Iterator[Suggestion]:
    what = f"n_ubatch={SMALL_BATCH} (-ub {SMALL_BATCH})"
    if plan.settings["n_ubatch"] > SMALL_BATCH:
        yield from _changed(plan, what, n_ubatch=SMALL_BATCH)


def _fewer_tokens(plan: Plan, longest: int) -> Iterator[Suggestion]:
    if longest > 0:
        yield True, f"n_ctx={longest} (-c {longest}): fits"


def _elsewhere(plan: Plan) -> Iterator[Suggestion]:
    """Yield ways to free device memory: the KV cache or layers in host memory."""
    if all(size.fits for size in plan.sizes()[1:]):
        return
    far = {"method": "longheads", "kv_offload": lib.LCTX_OFFLOAD_AUTO}
    if plan.fits(**far):
        rows = bytes_text(sum(size.kv for size in plan.sizes(**far)[1:]))
        yield True, f'method="longheads", kv_offload="host" (--kv-offload auto): {rows} on devices'
    n_layer = _most_layers(plan)
    if n_layer > 0:
        yield True, f"n_gpu_layers={n_layer} (-ngl {n_layer}): fits"


def _most_layers(plan: Plan) -> int:
    def works(n_layer: int) -> bool:
        with plan.moved(n_gpu_layers=n_layer) as other:
            return other.fits()

    return most(min(plan.model_settings["n_gpu_layers"], plan.info.n_layer), works)


def _limited(plan: Plan) -> Iterator[Suggestion]:
    """Yield the largest KV limit that fits into host memory."""
    host = plan.sizes()[0]
    if not plan.method or plan.settings["kv_limit"] or host.fits or host.free is None:
        return
    limit, text = host.free - host.weights - host.compute - host.other - host.foreign, host.kv - host.other
    mib = limit >> 20  # the command line's unit
    limit = mib << 20
    if limit > 0 and plan.fits(kv_limit=limit):
        n = plan.n_ctx() * limit // text
        yield True, f"kv_limit={limit} (--kv-limit {mib}): same n_ctx, of which about {n} tokens are usable"


def _fewer_rows(plan: Plan) -> Iterator[Suggestion]:
    """Yield an eviction rule."""
    if method := _with_corm(plan):
        yield from _changed(plan, f'method="{method}"', "at least", method=method)


def _with_corm(plan: Plan) -> str:
    """Return the method with an eviction rule; empty if it has one or cannot have one."""
    name = plan.method.partition(",")[0]
    if name not in BASES or "+" in plan.method:
        return ""
    return "corm" if name == "full" else f"{plan.method}+corm"


def _smaller_model(sizes: list[Sizes]) -> str:
    weights = bytes_text(sum(size.weights for size in sizes))
    return f"a smaller model or quantization: the weights alone take {weights}"
