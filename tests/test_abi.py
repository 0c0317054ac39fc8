"""The header, the cffi module and the library say the same."""

import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from needs import lacks

HEADER = Path(__file__).resolve().parents[1] / "native" / "lctx.h"
STT_FUNC, SHT_DYNSYM = 2, 11


def cdef() -> str:
    return re.search(r"// \[cdef begin\]\n(.*)// \[cdef end\]", HEADER.read_text(), re.DOTALL).group(1)


def functions() -> set[str]:
    """Return the names of the functions that the header declares."""
    code = re.sub(r"//.*", "", cdef())
    return set(re.findall(r"\b(lctx_\w+)\s*\(", code))


def exported_symbols(path: Path) -> set[str]:
    """Return the defined dynamic symbols of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    offset, entry_size, count = (struct.unpack_from(f, data, at)[0] for f, at in (("<Q", 40), ("<H", 58), ("<H", 60)))
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry_size) for i in range(count)]
    names = set()
    for _, kind, _, _, start, size, link, *_ in sections:
        if kind != SHT_DYNSYM:
            continue
        strings = sections[link][4]
        for at in range(start, start + size, 24):
            name, info, other, section = struct.unpack_from("<IBBH", data, at)
            # defined, not local, default or protected visibility
            if section and info >> 4 and other & 3 in (0, 3):
                names.add(data[strings + name : data.index(b"\0", strings + name)].decode())
    return names


@pytest.fixture(scope="module")
def library() -> Path:
    from pylongctx._lib import library_path

    return library_path()


def test_the_header_declares_functions():
    assert {"lctx_abi_version", "lctx_decode", "lctx_op_run"} <= functions()


def test_the_cdef_is_what_a_compiler_reads(tmp_path):
    """In API mode cffi writes C code that fails to compile where the cdef and the header disagree."""
    from cffi import FFI

    compiler = next((cc for cc in ("cc", "gcc", "clang") if shutil.which(cc)), None)
    include = Path(sysconfig.get_path("include"))
    if compiler is None or not (include / "Python.h").is_file():
        lacks("build", "no C compiler or no Python.h to check the cdef with")
    ffi, source = FFI(), tmp_path / "abi.c"
    ffi.cdef(cdef())
    ffi.set_source("_lctx_abi", '#include "lctx.h"')
    ffi.emit_c_code(str(source))
    command = [compiler, "-fsyntax-only", "-Werror", f"-I{HEADER.parent}", f"-I{include}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_library_has_the_version_of_the_header(ffi, lib):
    in_header = int(re.search(r"LCTX_ABI_VERSION = (\d+)", cdef()).group(1))
    assert lib.lctx_abi_version() == in_header == lib.LCTX_ABI_VERSION


def test_every_declared_function_is_exported(library):
    assert functions() <= exported_symbols(library)


def test_every_declared_function_is_in_the_cffi_module(lib):
    assert {name for name in functions() if not callable(getattr(lib, name))} == set()


def test_only_our_symbols_and_those_of_llama_are_exported(library):
    names = exported_symbols(library)
    assert {name for name in names if not name.startswith(("llama_", "lctx_"))} == set()
    assert any(name.startswith("llama_") for name in names)


def test_no_lctx_function_is_exported_that_the_header_does_not_declare(library):
    ours = {name for name in exported_symbols(library) if name.startswith("lctx_")}
    assert ours <= functions()
