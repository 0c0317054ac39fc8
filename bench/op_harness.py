"""The native runs of single ops: ``native/harness/harness.h``, in a library built with LCTX_HARNESS=ON."""

from pathlib import Path
from typing import Any

from cffi import FFI

from pylongctx._lib import library_path

HEADER = Path(__file__).resolve().parents[1] / "native/harness/harness.h"


def cdef() -> str:
    """Return the declarations of the header."""
    return HEADER.read_text().split("// [cdef begin]")[1].split("// [cdef end]")[0]


ffi = FFI()
ffi.cdef(cdef())
lib = ffi.dlopen(str(library_path()))
if not hasattr(lib, "lctx_op_run"):
    raise ImportError(f"{library_path()} runs no single ops: build it with LCTX_HARNESS=ON, as 'make test' does")


def call(function: Any, args: Any) -> None:
    """Call a run; ValueError with the reason that the native code gave."""
    err = ffi.new("char[]", 512)
    if function(args, err, len(err)):
        raise ValueError(ffi.string(err).decode())
