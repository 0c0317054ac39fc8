"""Opening a model: its context, adapters and store, from the arguments of ``Llama``."""

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pylongctx import _arguments as arguments
from pylongctx._cache_folder import cache_folder
from pylongctx._enums import AUTO_LAYERS, DISK
from pylongctx._guess import guess
from pylongctx._lib import error, ffi, lib, library_path, text
from pylongctx._log import LOG
from pylongctx.catalog import CATALOG, resolve
from pylongctx.drafts.model import MTP_NAME as MTP
from pylongctx.drafts.model import MtpDraft
from pylongctx.drafts.speculative import DraftChain, SelfDraft
from pylongctx.engine.context import Context
from pylongctx.engine.drafting import DraftModel, check_draft, check_model
from pylongctx.engine.identity import WEIGHTS, row_identity
from pylongctx.engine.model import Model, with_fields
from pylongctx.engine.overflow import with_spans
from pylongctx.engine.session import Session
from pylongctx.errors import InvalidInput, LctxError, ModelRefused
from pylongctx.guarded.process import guarded
from pylongctx.methods import DualChunk, Full, LongHeads, Method, Window, parse
from pylongctx.model_files.digests import ModelFiles, check_unchanged, digest_of, stats
from pylongctx.model_files.gguf import check_adapter, check_gguf, file_id
from pylongctx.model_files.overrides import as_json
from pylongctx.planning import fit, place, serves
from pylongctx.store.library import StoredTexts
from pylongctx.store.store import DEFAULT_LIMIT, KVStore

# their keys have a bias that is many times as large as the rest (Qwen2.5-Coder-1.5B: up to 912)
LARGE_BIAS = ("qwen2", "qwen2moe", "qwen2vl")
FEW_BITS = ("q4_0", "q4_1", "iq4_nl")
TRIAL_N_CTX = 512  # tokens: the graph does not depend on the length of the context
TRIAL_SECONDS = 60  # maximum time of a trial
SLOW_TRIAL = 0.1  # seconds: the result of a slower trial is saved, see ``_note``
ELSEWHERE = (
    *("tensor_split", "n_tensor_split", "rpc_servers", "n_gpu_layers", "split_mode", "main_gpu"),
    *("kv_overrides", "override_tensor"),
)
_tried: set[str] = set()
AUTO = "auto"  # full attention on pylongctx's KV cache, or on llama.cpp's own if the model is not supported
NO_SPANS = "needs full attention in all layers, so leave it out"
OWN_CACHE = ""  # the spec of llama.cpp's own KV cache


class Adapter:
    """Owner of one ``lctx_adapter``; must be closed before its model.

    Its file is as llama.cpp's convert_lora_to_gguf.py writes it. Raises ValueError when that is missing, damaged or for
    another model.
    """

    def __init__(self, model: Model, path: str) -> None:
        if not os.path.exists(path):
            raise ValueError(f"LoRA path does not exist: {path}")
        check_adapter(path)
        found = stats([path])
        self.handle = lib.lctx_adapter_load(model.handle, os.fsencode(path))
        if failure := text(lib.lctx_adapter_error(self.handle)):
            self.close()
            raise error(lib.LCTX_INVALID, f"{path} cannot be used as a LoRA adapter: {failure}")
        self.scale = 1.0
        self._place, self._found = os.path.realpath(path), found[0]
        try:
            self.digest = digest_of([path])
            check_unchanged([path], found)
        except InvalidInput:
            self.close()
            raise

    def is_at(self, path: str) -> bool:
        """Return True if a path leads to the adapter's file."""
        with suppress(OSError):
            return os.path.realpath(path) == self._place or os.path.samestat(os.stat(path), self._found)
        return False

    def close(self) -> None:
        """Free the adapter."""
        handle, self.handle = self.handle, ffi.NULL
        lib.lctx_adapter_free(handle)


class Adapters:
    """The LoRA adapters in use. A change removes all tokens, which were evaluated with other weights."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._used: dict[str, Adapter] = {}

    @property
    def scales(self) -> dict[str, float]:
        """The adapters in use: path and scale."""
        return {path: adapter.scale for path, adapter in self._used.items()}

    @property
    def identity(self) -> list[str]:
        """The adapters' part of the identity of saved states."""
        return sorted(f"{adapter.digest} * {adapter.scale}" for adapter in self._used.values())

    def add(self, session: Session, path: str, scale: float) -> None:
        """Use an adapter, or change the scale of one in use; nothing changes when it is refused."""
        with session.lock:
            path = self._spelled(path)
            new = path not in self._used
            adapter = Adapter(self._model, path) if new else self._used[path]
            before, adapter.scale = adapter.scale, float(scale)
            try:
                self._use(session, self._used | {path: adapter})
            except BaseException:
                adapter.scale = before
                if new:
                    adapter.close()
                raise
            self._used[path] = adapter

    def remove(self, session: Session, path: str) -> None:
        """Stop using an adapter; KeyError when it is not in use."""
        with session.lock:
            adapter = self._used.pop(self._spelled(path))
            self._use(session, self._used)
            adapter.close()

    def close(self) -> None:
        """Free all adapters; must be called before the model is freed."""
        while self._used:
            self._used.popitem()[1].close()

    def _spelled(self, path: str) -> str:
        """Return the path under which a file is in use; for an unused file the path itself."""
        return next((used for used, adapter in self._used.items() if adapter.is_at(path)), path)

    def _use(self, session: Session, adapters: dict[str, Adapter]) -> None:
        session.context.set_adapters([(adapter.handle, adapter.scale) for adapter in adapters.values()])
        session.clear()


def few_bits_for_a_bias(architecture: str, type_k: str, method: Method | None) -> str:
    """Return a warning if K has too few bits for the bias of its keys, or the empty string.

    The mean of the bias is not stored where every query sees all keys from one position.
    """
    if architecture not in LARGE_BIAS or type_k not in FEW_BITS or (method is not None and _has_one_angle(method)):
        return ""
    name = method.parts[0].name if method is not None else "llama.cpp's own KV cache"
    return (
        f"K in {type_k} is too coarse for the bias of this model's keys with {name}, answers may be random: "
        "use type_k='q8_0' (-ctk q8_0), or the method full"
    )


def _has_one_angle(method: Method) -> bool:
    base = method.parts[0]
    if isinstance(base, LongHeads):
        return base.position == "full"
    return base.role == "rule" or isinstance(base, Window) or (isinstance(base, Full) and (base.spans or 1) == 1)


def try_model(
    path: str, model_settings: dict[str, Any], settings: dict[str, Any] | None = None, method: str = ""
) -> None:
    """Open a model without weights and a context without memory in another process.

    A regular error of the library is ignored here, since it is raised again when the model is opened; but not
    one about memory, of which this process may have more.

    Raises ModelRefused when that process crashed, or exceeded a minute or ``guarded.process.MEMORY``.
    """
    if not os.path.isfile(path):
        return  # the error is raised when it is opened
    overrides = model_settings.get("kv_overrides")
    check_gguf(path, overrides)
    here = {name: value for name, value in model_settings.items() if name not in ELSEWHERE}
    model = with_fields("lctx_model_params", lib.lctx_model_params_default, here | {"n_gpu_layers": 0, "dry": 1})
    context = ""
    if settings is not None:
        n_ctx = min(settings["n_ctx"] or TRIAL_N_CTX, TRIAL_N_CTX)
        few = {"n_ctx": n_ctx, "n_seq_max": min(settings.get("n_seq_max", 1), 2), "kv_offload_folder": ffi.NULL}
        context = _hex(with_fields("lctx_context_params", lib.lctx_context_params_default, settings | few))
    call = (os.path.abspath(path), _hex(model), context, method, as_json(overrides))
    name = hashlib.sha256(
        repr((file_id(os.stat(path)), file_id(os.stat(library_path())), call)).encode("utf-8", "replace")
    ).hexdigest()
    if name in _tried or _note(name).is_file():
        return
    start = time.monotonic()
    try:
        reason = guarded(f"{path} cannot be used: it", "try_model", *call, seconds=TRIAL_SECONDS)
    except InvalidInput as stopped:
        raise ModelRefused(str(stopped), stopped.status) from None
    if "alloc" in reason:
        raise ModelRefused(
            f"{path} cannot be used: even without weights it takes too much memory ({reason})", lib.LCTX_INVALID
        )
    _tried.add(name)
    if time.monotonic() - start > SLOW_TRIAL:
        with contextlib.suppress(OSError):  # without a cache folder, the next process tries again
            _note(name).parent.mkdir(parents=True, exist_ok=True)
            _note(name).touch()


def _hex(struct: Any) -> str:
    return bytes(ffi.buffer(struct)).hex()


def _note(name: str) -> Path:
    """Return the file that records a successful trial."""
    return cache_folder() / "tried" / name


class OpenedModel:
    """A model, the ``n_seq`` sequences of its context, and its adapters; with ``vocab_only`` only the model.

    ``given`` are all arguments of ``Llama``. ``draft_model`` is the given one, then the model itself. Raises what
    ``Llama`` raises; then everything is closed.
    """

    def __init__(self, given: Mapping[str, Any], n_seq: int = 1) -> None:
        self.path = resolve(given["model_path"])
        if not Path(self.path).exists():
            way_out = guess(self.path, CATALOG) or "; pylongctx get lists models to download"
            raise ValueError(f"Model path does not exist: {self.path}{way_out}")
        self.verbose = bool(given["verbose"])
        self.given = given = _with_drafts(given)
        arguments.check_later(given)
        arguments.warn_without_device(given["n_gpu_layers"], given["rpc_servers"], self.verbose)
        self.threads = arguments.thread_counts(given["n_threads"], given["n_threads_batch"])
        settings = arguments.context_settings(given, self.threads)
        if n_seq > 1:
            if given["embedding"]:
                raise ValueError(f"embedding=True batches texts automatically: leave out n_parallel={n_seq}")
            n_step = min(settings["n_batch"], settings["n_ubatch"])
            if n_step < n_seq:
                raise ValueError(f"{n_seq} sequences need batches of that many tokens, not {n_step}: raise -ub")
            settings |= {"n_seq_max": n_seq}
        spec = _spec(given["method"], bool(given["embedding"]))
        self.evicts, self.cache_reuse = arguments.evicts(given), arguments.cache_reuse(given)
        self._needs_spans = ""  # the argument that does
        if self.evicts or self.cache_reuse:
            self._needs_spans = "overflow='evict_middle'" if self.evicts else f"cache_reuse={self.cache_reuse}"
            spec = with_spans(spec, self._needs_spans)
        if self._mtp is not None:
            settings |= {"mtp": 1}
        elif given["draft"] is not None:
            spec = drafting_spec(spec, given["draft"], settings["n_ctx"])
        drafts = self._mtp if given["draft_model"] is None else given["draft_model"]
        check_draft(drafts, parse(spec) if spec else None)
        kept = arguments.store_settings(given, DEFAULT_LIMIT)
        self.store: KVStore | None = None
        self.library: StoredTexts | None = None
        self.context: Context | None = None
        self.n_gpu_layers = 0
        if given["vocab_only"]:
            self._set_log_level()
            if given["preflight"]:
                try_model(self.path, self._where())
            self.model = Model(self.path, self._where())
        elif given["method"] == AUTO and spec and (given["draft"] is None or self._mtp is not None):
            self._open_auto(settings, spec)
        else:
            self._open(settings, spec)
        self.adapters = Adapters(self.model)
        try:
            self.draft_model = self._draft_model()
            check_model(self.draft_model, self.model)
            self.sessions = self._sessions(n_seq)
            if kept is not None and self.context is not None:
                self._open_store(self.context, *kept)
        except BaseException:  # no memory, or drafts are not supported
            self.close()
            raise

    def close(self) -> None:
        """Free everything; waits for a running evaluation and for pending writes of the store."""
        if self.store is not None:
            self.store.close()
        if self.context is not None:
            self.context.close()
        self.adapters.close()
        self.model.close()

    @property
    def row_identity(self) -> Mapping[str, Any]:
        """The part of the identity that is known at once: metadata, method, settings and adapters."""
        used = self.adapters.identity
        return self._rows | ({"lora": used} if used else {})

    @property
    def identity(self) -> Mapping[str, Any]:
        """The full identity of KV entries; waits until the files of the model are hashed."""
        return {**self.row_identity, WEIGHTS: self.files.weights()}

    @property
    def _mtp(self) -> MtpDraft | None:
        """The drafts of the model's MTP block, if they are wanted."""
        own = self.given["draft"]
        return own if isinstance(own, MtpDraft) else None

    def _where(self) -> dict[str, Any]:
        """Return the settings of the model."""
        return arguments.model_settings(self.given) | {"mtp": int(self._mtp is not None)}

    def _draft_model(self) -> DraftModel | None:
        """Return the source of drafts: the given model, then the model itself."""
        given: DraftModel | None = self.given["draft_model"]
        if self.given["draft"] is None or self.context is None:
            return given
        own = self._mtp or _self_draft(self.context)
        return own if given is None else DraftChain([given, own])

    def _open_store(self, context: Context, folder: str, limit: int, words: bool) -> None:
        self.store = KVStore(folder, limit, lambda: self.row_identity, self.files.weights, words)
        self.files.prepare()
        self.library = StoredTexts(self.store, context)
        for session in self.sessions:
            session.watchers.append(self.library.keeper(session))

    def _open_auto(self, settings: dict[str, Any], spec: str) -> None:
        """Open with pylongctx's KV cache if it supports the model, else with llama.cpp's own."""
        try:
            self._open(settings, spec)
        except ModelRefused:
            raise
        except InvalidInput as reason:
            if serves(self.path, self._where(), settings, spec):
                raise  # a setting was refused, not the model
            if self._needs_spans:
                raise error(reason.status, f"{self._needs_spans} {NO_SPANS}: {reason}") from None
            try:
                self._open(settings, OWN_CACHE)
            except InvalidInput:
                raise reason from None
            LOG.warning("llama.cpp's own KV cache is used, without a method: %s", reason)

    def _open(self, settings: dict[str, Any], spec: str) -> None:
        where = self._where()
        if self.given["preflight"]:
            try_model(self.path, where, settings, spec)
        if self.given["n_gpu_layers"] == AUTO_LAYERS:
            where, placed = place(self.path, where, settings, spec)
            if placed:
                LOG.info(placed)
        if self.given["preflight"]:
            settings = fit(self.path, where, settings, spec)
        self.n_gpu_layers = where["n_gpu_layers"]
        self._set_log_level()
        self.model, self.files = _load(self.path, where)
        try:
            if self.given["kv_offload"] == DISK and self.given["kv_offload_path"] is None:
                cache_folder().mkdir(parents=True, exist_ok=True)
            self.context = Context(self.model, settings, spec)
        except BaseException:
            self.model.close()
            raise
        if self.context.n_ctx < settings["n_ctx"]:
            LOG.warning(
                "n_ctx is %d, the learned positions of the model, not %d", self.context.n_ctx, settings["n_ctx"]
            )
        self._rows = row_identity(self.model, self.files, self.context, self.given)
        if self._needs_spans and self.context.keeps_checkpoints:
            self.context.close()
            self.model.close()
            raise ValueError(f"{self._needs_spans} {NO_SPANS}: this model has sliding windows or recurrent states")
        method = parse(self.context.method) if self.context.method else None
        architecture = self.model.metadata().get("general.architecture", "")
        if warning := few_bits_for_a_bias(architecture, self.context.types["type_k"], method):
            LOG.warning(warning)
        if self.verbose and self.context.why:
            LOG.info(self.context.why)

    def _set_log_level(self) -> None:
        lib.lctx_log_set_level(2 if self.verbose else 1)

    def _sessions(self, n_seq: int) -> list[Session]:
        if self.context is None:
            return []
        every = bool(self.given["logits_all"])
        found = [Session(self.model, self.context, every, self.verbose, seq) for seq in range(n_seq)]
        for session in found:
            session.progress = self.given["progress_callback"]
            session.evicts, session.cache_reuse = self.evicts, self.cache_reuse
        return found


def _load(path: str, settings: dict[str, Any]) -> tuple[Model, ModelFiles]:
    """Load a model from files that do not change while it is loaded."""
    files: ModelFiles | LctxError
    try:
        files = ModelFiles(path)
    except LctxError as reason:
        files = reason  # llama.cpp gives a better reason
    model = Model(path, settings)
    try:
        if isinstance(files, LctxError):
            raise files
        files.check()
    except LctxError as reason:
        model.close()
        raise ModelRefused(str(reason), reason.status) from None
    return model, files


def _with_drafts(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with ``draft="mtp"`` as an object."""
    return {**given, "draft": MtpDraft()} if given["draft"] == MTP else given


def _self_draft(context: Context) -> SelfDraft:
    """Return the drafts of a context whose queries can choose."""
    chosen = parse(context.method)
    assert isinstance(chosen, LongHeads) and chosen.window is not None
    return SelfDraft(chosen.window)


def drafting_spec(spec: str, draft: Method | str, n_ctx: int) -> str:
    """Return the method of a context that reads like ``spec``, and drafts by selecting chunks.

    It is ``longheads`` that selects from the end of the context on; drafts lower that.

    Raises ValueError when the draft is not ``longheads``, or the method reads in another way than its base can.
    """
    chosen = draft if isinstance(draft, Method) else parse(draft)
    if not isinstance(chosen, LongHeads) or chosen.select_from is not None:
        raise ValueError(f'draft must be "mtp", or "longheads" with a window if wanted, not {str(draft)!r}')
    base = parse(spec) if spec else None
    if not isinstance(base, (Full, DualChunk)) or base not in (Full(), DualChunk()):
        raise ValueError(f"draft={str(draft)!r} needs the method full or dca, not {spec or None!r}")
    if n_ctx <= 0:
        raise ValueError(f"draft={str(draft)!r} needs a context of a given size: set n_ctx (-c)")
    return str(replace(chosen, position=base.name, select_from=n_ctx))


def _spec(method: Method | str | None, embedding: bool) -> str:
    """Return the spec string of an argument; empty for llama.cpp's own KV cache."""
    if embedding and method not in (None, AUTO, "full") and not isinstance(method, Full):
        raise ValueError(f"embedding=True runs on llama.cpp's own KV cache: leave out method={method}")
    if method is None or embedding:
        return OWN_CACHE
    return "full" if method == AUTO else str(method if isinstance(method, Method) else parse(method))
