"""Write the cffi module (ABI mode, out of line) from the marked blocks of the C API's headers.

The build runs ``python native/build_ffi.py HEADER... OUTPUT``. An output that ends in .def lists the functions instead,
as linkers for Windows want it.
"""

import re
import sys
from pathlib import Path

from cffi import FFI

BEGIN, END = "// [cdef begin]", "// [cdef end]"
USAGE = "usage: build_ffi.py HEADER... OUTPUT"


def read_cdef(header: Path) -> str:
    """Return the text between the two markers of the header."""
    _, begin, rest = header.read_text(encoding="utf-8").partition(BEGIN)
    cdef, end, _ = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{header}: the lines '{BEGIN}' and '{END}' are missing")
    return cdef


def emit(headers: list[Path], output: Path) -> None:
    """Parse the cdef of the headers, in order, and write the Python module ``output``."""
    ffi = FFI()
    for header in headers:
        ffi.cdef(read_cdef(header))
    ffi.set_source("pylongctx._ffi_generated", None)
    output.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_python_code(str(output))


def emit_exports(headers: list[Path], output: Path) -> None:
    """Write the names of the functions of the headers as a module definition."""
    names = [
        name for header in headers for name in re.findall(r"^[^/\n]*?\b(lctx_\w+)\(", read_cdef(header), re.MULTILINE)
    ]
    output.write_text("\n".join(["EXPORTS", *names, ""]), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(USAGE)
    *headers, output = map(Path, sys.argv[1:])
    (emit_exports if output.suffix == ".def" else emit)(headers, output)
