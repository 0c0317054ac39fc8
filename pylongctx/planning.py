"""Memory of a model before it is opened: what it takes on each device, what fits, and what to change if it does not."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pylongctx._arguments import check_count, has_gpu, kv_offload, thread_counts
from pylongctx._enums import DISK
from pylongctx._free import address_room, disk_free, free_bytes
from pylongctx._lib import InvalidInput, check, error, ffi, lib, text
from pylongctx._log import LOG
from pylongctx._units import bytes_text
from pylongctx.engine.model import Model, with_fields
from pylongctx.methods import METHODS
from pylongctx.model_files.overrides import EXPERTS, first_layers

MAX_DEVICES = 64
N_CTX_STEP = 256  # tokens: llama.cpp pads n_ctx to it
ROWS = {
    "weights": "weights",
    "k": "K",
    "v": "V",
    "chunks": "chunk summaries",
    "near": "near keys",
    "other": "block tables and lists",
    "foreign": "windows and states",
    "compute": "compute",
}
MAX_SHOWN = 5
BASES = [cls.name for cls in METHODS.values() if cls.role == "base"]
SMALL_TYPE, SMALL_BATCH = "q8_0", 128  # the smallest with almost no loss
Suggestion = tuple[bool, str]  # whether it suffices, and what to do
PROBE_BYTES = 32 * 2**20  # address space of a model and context without memory; llama.cpp aborts without it
MIN_N_CTX = 512  # tokens: lower bound for n_ctx=0
LEAST_N_CTX = 4096  # tokens for which devices have room if the context may have any length
MARGIN = 2**30  # bytes of a device for other programs, and for what its backend allocates later
SMALL = 8  # small devices leave this part of their free memory instead


@dataclass(frozen=True)
class Device:
    """A device that the library can compute on."""

    name: str  # such as "CUDA0"
    description: str  # the product's name
    type: str  # such as "GPU"
    # bytes, 0 where the device does not report them
    memory_free: int
    memory_total: int

    @property
    def memory(self) -> str:
        """The memory as text."""
        if not self.memory_total:
            return "memory unknown"
        return f"{bytes_text(self.memory_free)} of {bytes_text(self.memory_total)} free"


def devices() -> list[Device]:
    """Return the devices that the build can use."""
    found = []
    info = ffi.new("lctx_device_info *")
    for i in range(lib.lctx_device_count()):
        lib.lctx_device_get(i, info)
        names = text(info.name), text(info.description), text(info.type)
        # ggml reports all host memory as free
        free = min(free_bytes(), info.memory_total) if names[2] == "CPU" else info.memory_free
        found.append(Device(*names, free, info.memory_total))
    return found


def serve_devices(host: str, port: int, names: str = "", n_threads: int | None = None) -> NoReturn:
    """Serve devices over RPC until the process ends: the named ones, else all GPUs, else the CPU.

    Raises InvalidInput when the address or a device cannot be used.
    """
    n_threads, _ = thread_counts(n_threads, 1)
    reason = ffi.new("char[]", 1024)
    endpoint = f"{host}:{check_count('port', port)}"
    status = lib.lctx_rpc_serve(endpoint.encode(), names.encode(), n_threads, reason, len(reason))
    raise error(status, text(reason))


@dataclass(frozen=True)
class Sizes:
    """Memory of a context on one device, in bytes; see ``lctx_sizes``."""

    device: str
    weights: int
    k: int
    v: int
    chunks: int
    near: int
    other: int
    disk: int
    foreign: int
    compute: int
    free: int | None
    disk_free: int | None = None  # for ``disk``; None without a file

    @property
    def kv(self) -> int:
        """The bytes that grow with the text."""
        return self.k + self.v + self.chunks + self.near + self.other

    @property
    def total(self) -> int:
        """The bytes of everything."""
        return self.weights + self.kv + self.foreign + self.compute

    @property
    def fits(self) -> bool:
        """True if the free memory of the device suffices, or is not known, and the disk does."""
        return self.fits_memory and (self.disk_free is None or self.disk <= self.disk_free)

    @property
    def fits_memory(self) -> bool:
        """True if the free memory of the device suffices, or is not known."""
        return self.free is None or self.total <= self.free


class Plan:
    """A model without weights, and the memory that its contexts would take.

    Raises InvalidInput when the library refuses the model.
    """

    def __init__(self, path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> None:
        self.path, self.model_settings, self.settings, self.method = path, model_settings, settings, method
        self._model = Model(path, model_settings | {"dry": 1})
        self.info = self._model.info

    def moved(self, **where: Any) -> "Plan":
        """Return the plan of the same context of a model that other settings place elsewhere."""
        return type(self)(self.path, self.model_settings | where, self.settings, self.method)

    def close(self) -> None:
        """Free the model."""
        self._model.close()

    def __enter__(self) -> "Plan":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sizes(self, **changes: Any) -> list[Sizes]:
        """Return the sizes on each device, the host first; InvalidInput when the library refuses the settings."""
        return self._estimate(**changes)[1]

    def n_ctx(self) -> int:
        """Return the actual ``n_ctx``, with 0 resolved."""
        return self._estimate()[0]

    def fits(self, **changes: Any) -> bool:
        """Return True if changed settings are valid and fit on all devices."""
        try:
            return all(size.fits for size in self.sizes(**changes))
        except InvalidInput:
            return False

    def longest(self, **changes: Any) -> int:
        """Return the largest ``n_ctx`` that fits with changed settings, a multiple of 256; 0 for none."""
        return N_CTX_STEP * most(self.n_ctx() // N_CTX_STEP, lambda n: self.fits(**changes, n_ctx=n * N_CTX_STEP))

    def _estimate(self, **changes: Any) -> tuple[int, list[Sizes]]:
        method = changes.pop("method", self.method)
        settings = self.settings | changes
        params = with_fields("lctx_context_params", lib.lctx_context_params_default, settings)
        out, reason = ffi.new("lctx_sizes[]", MAX_DEVICES), ffi.new("char[]", 4096)
        n = lib.lctx_estimate(self._model.handle, params, method.encode(), out, MAX_DEVICES, reason, len(reason))
        check(min(n, lib.LCTX_OK), reason)
        host, disk = free_bytes(), file_room(settings)
        return params.n_ctx, [
            Sizes(device=text(s.device), free=host if i == 0 else device_free(s), disk_free=disk, **_numbers(s))
            for i, s in enumerate(out[0:n])
        ]


def _numbers(sizes: Any) -> dict[str, int]:
    return {name: getattr(sizes, name) for name in (*ROWS, "disk")}


def device_free(sizes: Any) -> int | None:
    """Return the free bytes of the device of an ``lctx_sizes``; None when it does not report them."""
    return sizes.free or None


def file_room(settings: dict[str, Any]) -> int | None:
    """Return the free bytes of the disk for K and V; None without a file, and where a file system does not say."""
    folder = settings.get("kv_offload_folder", ffi.NULL)
    return None if folder == ffi.NULL else disk_free(Path(os.fsdecode(ffi.string(folder))))


def most(n: int, works: Callable[[int], bool]) -> int:
    """Return the largest number up to ``n`` for which the monotonic ``works`` is true; 0 for none."""
    low = 0
    while low < n:
        middle = (low + n + 1) // 2
        low, n = (middle, n) if works(middle) else (low, middle - 1)
    return low


def suggestions(plan: Plan, longest: int) -> list[str]:
    """Return changes of the arguments, sufficient ones first; ``longest`` is the largest n_ctx that fits."""
    sizes = plan.sizes()
    if any(size.free is not None and size.weights > size.free for size in sizes):
        ways = [*_elsewhere(plan), (False, _smaller_model(sizes))]
    else:
        ways = [
            *_smaller_types(plan),
            *_fewer_tokens(plan, longest),
            *_larger_disk(sizes),
            *_elsewhere(plan),
            *_on_disk(plan),
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


def _on_disk(plan: Plan) -> Iterator[Suggestion]:
    """Yield K and V in a file, for layers on the CPU."""
    if plan.sizes()[0].fits or plan.model_settings["n_gpu_layers"]:
        return
    file = kv_offload(DISK, None, None)
    if plan.fits(method="longheads", **file):
        (host, *_) = plan.sizes(method="longheads", **file)
        sizes = f"{bytes_text(host.kv)} in memory, {bytes_text(host.disk)} in a file"
        yield True, f'method="longheads", kv_offload="disk" (--kv-offload disk): {sizes}'


def _larger_disk(sizes: list[Sizes]) -> Iterator[Suggestion]:
    """Yield another folder for K and V."""
    needed = sum(size.disk for size in sizes)
    if all(size.fits_memory for size in sizes):
        yield True, f"kv_offload_path (--kv-offload-path) on a disk with {bytes_text(needed)} free"


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


def fit(path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the settings of the context; ``n_ctx=0`` becomes the size that fits, with a log message if it is reduced.

    Raises MemoryError, with the size of each part and suggestions, when an explicit ``n_ctx`` or even 512 tokens do not
    fit, and InvalidInput when the library refuses the model or the settings.
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
            plan.sizes(n_ctx=N_CTX_STEP)
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
    where = "memory" if file_room(plan.settings) is None else "memory and the disk"
    return f"n_ctx is {longest}{each}, the largest that fits into {where}, not {asked}, {wanted}; for more: {ways}"


def explain(plan: Plan, longest: int) -> str:
    """Return the message of the MemoryError."""
    note = ""
    if "corm" in plan.method:
        note = "\nHow much corm keeps depends on the text; the table counts the minimum."
    anyway = "preflight=False (--no-preflight): opens it anyway"
    if plan.method:
        anyway += ", for shorter texts: the KV cache is allocated as the text grows"
    ways = "\n".join(f"- {way}" for way in [*suggestions(plan, longest), anyway])
    where = "memory" if not all(size.fits_memory for size in plan.sizes()) else "the free space of the disk"
    return f"n_ctx {plan.n_ctx()} does not fit into {where}:\n{table(plan.sizes())}{note}\nSuggestions:\n{ways}"


def _known(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else bytes_text(n_bytes)


def table(sizes: list[Sizes]) -> str:
    """Return the sizes as lines of text with a column per device."""
    rows = [["", *(size.device for size in sizes)]]
    for name, label in ROWS.items():
        if any(getattr(size, name) for size in sizes):
            rows.append([label, *(bytes_text(getattr(size, name)) for size in sizes)])
    rows.append(["sum", *(bytes_text(size.total) for size in sizes)])
    rows.append(["free", *(_known(size.free) for size in sizes)])
    if any(size.disk for size in sizes):
        rows.append(["K and V on disk", *(bytes_text(size.disk) for size in sizes)])
        rows.append(["free on disk", *(_known(size.disk_free) for size in sizes)])
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"{row[0]:{first}}" + "".join(f" {cell:>{n}}" for cell, n in zip(row[1:], widths, strict=True)) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def place(
    path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str
) -> tuple[dict[str, Any], str]:
    """Return the settings of a model of which devices hold as much as fits, and a line that says how much.

    All layers, if they fit; else all layers without the experts of as many of them as necessary; else fewer layers.
    The order, the smallest context and the margin are those of llama.cpp's ``--fit``. If devices cannot compute what is
    asked for, they hold nothing.

    Raises InvalidInput when the library refuses the model or the settings.
    """

    nothing = {"n_gpu_layers": 0}
    if not has_gpu() and not model_settings.get("rpc_servers"):
        return model_settings | nothing, ""
    with quiet(), Plan(path, model_settings, settings, method) as plan:
        try:
            devices = _on_devices(plan)
        except InvalidInput as reason:
            with plan.moved(**nothing) as other:
                other.sizes()  # raises if the CPU cannot compute it either
            return model_settings | nothing, f"no layers are on devices: {reason}"
        where, held, others = _chosen(plan, devices)
    free = (f"{size.device}" + (f" ({bytes_text(size.free)} free)" if size.free else "") for size in devices)
    return model_settings | where, f"{held} are on {', '.join(free)}{others}"


def _chosen(plan: Plan, devices: list[Sizes]) -> tuple[dict[str, Any], str, str]:
    """Return where the model goes, the layers that devices hold, and what they do not hold; ``devices``: with all."""
    n_layer, given = plan.info.n_layer, plan.model_settings["override_tensor"]

    def without_experts(n: int) -> dict[str, Any]:
        return {"override_tensor": {**given, first_layers(n, EXPERTS): "CPU"}}

    def works(where: Mapping[str, Any]) -> bool:
        with plan.moved(**where) as other:
            return _have_room(_on_devices(other))

    if _have_room(devices):
        return {}, f"all {n_layer + 1} layers", ""
    if works(without_experts(n_layer)):
        n = n_layer - most(n_layer - 1, lambda n: works(without_experts(n_layer - n)))
        return without_experts(n), f"all {n_layer + 1} layers", f"; the experts of {n} of them are on the CPU"
    n = most(n_layer, lambda n: works({"n_gpu_layers": n}))
    return {"n_gpu_layers": n}, f"{n} of {n_layer + 1} layers", "; the others are on the CPU"


def _on_devices(plan: Plan) -> list[Sizes]:
    """Return the sizes on the devices; a context that may have any length has the least one."""
    changes = {} if plan.settings["n_ctx"] else {"n_ctx": min(plan.n_ctx(), LEAST_N_CTX)}
    return plan.sizes(**changes)[1:]


def _have_room(devices: list[Sizes]) -> bool:
    return all(size.free is None or size.total <= size.free - min(MARGIN, size.free // SMALL) for size in devices)
