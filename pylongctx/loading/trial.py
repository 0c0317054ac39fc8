"""A trial load of a model file in another process, in case it crashes llama.cpp."""

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

from pylongctx._cache_folder import cache_folder
from pylongctx._lib import ffi, lib, library_path
from pylongctx.engine.model import with_fields
from pylongctx.errors import InvalidInput, ModelRefused
from pylongctx.guarded.process import guarded
from pylongctx.model_files.gguf import check_gguf, file_id
from pylongctx.model_files.overrides import as_json

TRIAL_N_CTX = 512  # tokens: the graph does not depend on the length of the context
SECONDS = 60
SLOW_TRIAL = 0.1  # seconds: the result of a slower trial is saved, see ``_note``
ELSEWHERE = (
    *("tensor_split", "n_tensor_split", "rpc_servers", "n_gpu_layers", "split_mode", "main_gpu"),
    *("kv_overrides", "override_tensor"),
)

_good: set[str] = set()


def try_model(
    path: str, model_settings: dict[str, Any], settings: dict[str, Any] | None = None, method: str = ""
) -> None:
    """Open a model without weights and a context without memory in another process.

    A regular error of the library is ignored here, since it is raised again when the model is opened; but not
    one about memory, of which this process may have more.

    Raises
    ------
    ModelRefused
        When that process crashed, or exceeded a minute or ``guarded.process.MEMORY``.
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
        few = {"n_ctx": n_ctx, "n_seq_max": min(settings.get("n_seq_max", 1), 2)}
        context = _hex(with_fields("lctx_context_params", lib.lctx_context_params_default, settings | few))
    call = (os.path.abspath(path), _hex(model), context, method, as_json(overrides))
    name = hashlib.sha256(
        repr((file_id(os.stat(path)), file_id(os.stat(library_path())), call)).encode("utf-8", "replace")
    ).hexdigest()
    if name in _good or _note(name).is_file():
        return
    start = time.monotonic()
    try:
        reason = guarded(f"{path} cannot be used: it", "try_model", *call, seconds=SECONDS)
    except InvalidInput as stopped:
        raise ModelRefused(str(stopped), stopped.status) from None
    if "alloc" in reason:
        raise ModelRefused(
            f"{path} cannot be used: even without weights it takes too much memory ({reason})", lib.LCTX_INVALID
        )
    _good.add(name)
    if time.monotonic() - start > SLOW_TRIAL:
        with contextlib.suppress(OSError):  # without a cache folder, the next process tries again
            _note(name).parent.mkdir(parents=True, exist_ok=True)
            _note(name).touch()


def _hex(struct: Any) -> str:
    return bytes(ffi.buffer(struct)).hex()


def _note(name: str) -> Path:
    """Return the file that records a successful trial."""
    return cache_folder() / "tried" / name
