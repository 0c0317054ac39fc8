"""The native library: loading, status codes, checked numpy buffers."""

import json
import os
from importlib import resources, util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._cpu import cpu_features, cpu_kind
from pylongctx._platform import LIBRARY
from pylongctx.errors import Aborted, ContextFull, DeviceLost, InvalidInput, LctxError

__all__ = [
    "Aborted",
    "ContextFull",
    "InvalidInput",
    "LctxError",
    "build_info",
    "check",
    "check_process",
    "error",
    "ffi",
    "in_buffer",
    "lib",
    "library_path",
    "out_buffer",
    "take_text",
    "text",
]

HOW_TO_BUILD = "build it with 'pip install .' in the source tree of pylongctx"
CUDA_LIBRARIES = "it is built for GPUs; install its dependencies with 'pip install nvidia-cublas nvidia-cuda-runtime'"
CTYPES: dict[Any, str] = {np.int32: "int32_t[]", np.float32: "float[]", np.uint8: "uint8_t[]", np.int8: "int8_t[]"}


def library_path() -> Path:
    """Return the path of the library, which is always inside the package. A wheel has one for each kind of CPU."""
    # Joined before str(): an editable install spreads the package over two folders.
    library = Path(str(resources.files("pylongctx") / "lib" / LIBRARY)).resolve()
    return library.parent / cpu_kind(library.parent, cpu_features()) / library.name


def _load() -> tuple[Any, Any]:
    path = library_path()
    if not path.is_file():
        raise ImportError(f"the native library {path} is missing: {HOW_TO_BUILD}")
    try:
        from pylongctx._ffi_generated import ffi
    except ModuleNotFoundError as reason:
        raise ImportError(f"pylongctx/_ffi_generated.py is missing: {HOW_TO_BUILD}") from reason
    try:
        lib = ffi.dlopen(str(path))
        version = lib.lctx_abi_version()
    except (OSError, AttributeError) as reason:
        way_out = CUDA_LIBRARIES if "libcu" in str(reason) else HOW_TO_BUILD
        raise ImportError(f"the native library {path} cannot be loaded ({reason}): {way_out}") from reason
    if version != lib.LCTX_ABI_VERSION:
        raise ImportError(
            f"the native library {path} has ABI version {version}, this package needs {lib.LCTX_ABI_VERSION}: "
            + HOW_TO_BUILD
        )
    return ffi, lib


def cuda_library() -> Path | None:
    """Return the CUDA backend of the package pylongctx-cuda; None if that is not installed."""
    package = util.find_spec("pylongctx_cuda")
    if package is None or not package.submodule_search_locations:
        return None
    paths = [Path(folder) / "lib" / "libpylongctx-cuda.so" for folder in package.submodule_search_locations]
    return next((path for path in paths if path.is_file()), paths[0])


def _load_cuda(ffi: Any, lib: Any) -> None:
    path = cuda_library()
    if path is None:
        return
    reason = ffi.new("char[]", 1024)
    if lib.lctx_cuda_load(str(path).encode(), reason, len(reason)) != lib.LCTX_OK:
        why = ffi.string(reason).decode("utf-8", "replace")
        way_out = CUDA_LIBRARIES if "libcu" in why else "install the pylongctx-cuda of this version, or uninstall it"
        raise ImportError(f"the CUDA backend {path} cannot be loaded ({why}): {way_out}")


ffi, lib = _load()
_load_cuda(ffi, lib)

_CLASSES = {
    lib.LCTX_NO_SLOT: ContextFull,
    lib.LCTX_ABORTED: Aborted,
    lib.LCTX_INVALID: InvalidInput,
    lib.LCTX_LOST: DeviceLost,
}


def text(pointer: Any) -> str:
    """Decode a C string; NULL is the empty string."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def take_text(result: Any) -> str:
    """Return the string of an ``lctx_text`` and free it; InvalidInput with its reason for an error."""
    result = ffi.gc(result, lib.lctx_text_free)
    if failure := text(lib.lctx_text_error(result)):
        raise error(lib.LCTX_INVALID, failure)
    return text(lib.lctx_text_get(result))


def error(status: int, message: str) -> LctxError:
    """Return the exception for a status code."""
    return _CLASSES.get(status, LctxError)(message or f"the native library returned status {status}", status)


def check(status: int, message: Any) -> None:
    """Raise unless ``status`` is LCTX_OK; ``message`` is a C string."""
    if status != lib.LCTX_OK:
        raise error(status, text(message))


def _checked(name: str, array: NDArray[Any], dtype: type, writable: bool) -> Any:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} must be a numpy array of {np.dtype(dtype)}, not {found}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} must be writable")
    return ffi.from_buffer(CTYPES[dtype], array, require_writable=writable)


def in_buffer(name: str, array: NDArray[Any], dtype: type) -> Any:
    """Return a C view of an array that the library reads; ValueError names the argument."""
    return _checked(name, array, dtype, writable=False)


def out_buffer(name: str, array: NDArray[Any], dtype: type) -> Any:
    """Return a C view of an array that the library writes; ValueError names the argument."""
    return _checked(name, array, dtype, writable=True)


def check_process(pid: int) -> None:
    """Raise in a forked child: the library's threads and their locks do not survive a fork."""
    if os.getpid() != pid:
        raise RuntimeError("this Llama belongs to the process that opened it; open another one in the forked process")


def build_info() -> dict[str, Any]:
    """Return build information and the available devices; see ``lctx_build_info`` for the fields."""
    info: dict[str, Any] = json.loads(text(lib.lctx_build_info()))
    return info
