"""The headers, the cffi modules and the library say the same; nothing that ships needs the harness."""

import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from needs import lacks

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("base/counts.h", "lctx.h", "lctx-sampling.h", "harness/harness.h")
COUNTS, HEADER, SAMPLING, HARNESS = (ROOT / "native" / name for name in NAMES)
STT_FUNC, SHT_DYNSYM = 2, 11


def cdef(header: Path = HEADER) -> str:
    """Return the block of a header; for lctx.h those of all headers of the API."""
    block = re.search(r"// \[cdef begin\]\n(.*)// \[cdef end\]", header.read_text(), re.DOTALL).group(1)
    return cdef(COUNTS) + block + cdef(SAMPLING) if header == HEADER else block


def functions(header: Path = HEADER) -> set[str]:
    """Return the names of the functions that a header declares."""
    code = re.sub(r"//.*", "", cdef(header))
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


def test_the_headers_declare_functions():
    assert {"lctx_abi_version", "lctx_decode"} <= functions()
    assert {"lctx_op_run", "lctx_step_run"} <= functions(HARNESS)
    assert functions() & functions(HARNESS) == set()


@pytest.mark.parametrize("header", [HEADER, HARNESS], ids=lambda header: header.stem)
def test_the_cdef_is_what_a_compiler_reads(tmp_path, header):
    """In API mode cffi writes C code that fails to compile where the cdef and the header disagree."""
    from cffi import FFI

    compiler = next((cc for cc in ("cc", "gcc", "clang") if shutil.which(cc)), None)
    include = Path(sysconfig.get_path("include"))
    if compiler is None or not (include / "Python.h").is_file():
        lacks("build", "no C compiler or no Python.h to check the cdef with")
    ffi, source = FFI(), tmp_path / "abi.c"
    ffi.cdef(cdef(header))
    last = SAMPLING if header == HEADER else header
    ffi.set_source("_lctx_abi", f'#include "{last.name}"')
    ffi.emit_c_code(str(source))
    command = [compiler, "-fsyntax-only", "-Werror", f"-I{header.parent}", f"-I{include}", str(source)]
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


def test_no_lctx_function_is_exported_that_no_header_declares(library):
    ours = {name for name in exported_symbols(library) if name.startswith("lctx_")}
    assert ours - functions() in (set(), functions(HARNESS))


def test_the_harness_is_all_there_or_not_at_all(library):
    try:
        import op_harness
    except ImportError:
        assert functions(HARNESS).isdisjoint(exported_symbols(library))
    else:
        assert {name for name in functions(HARNESS) if not callable(getattr(op_harness.lib, name))} == set()


def test_nothing_that_ships_needs_the_harness():
    sources = [path for path in (*ROOT.glob("native/**/*.*"), *ROOT.glob("pylongctx/**/*.py"))
               if path.suffix in {".h", ".cpp", ".cu", ".py"} and HARNESS.parent not in path.parents]  # fmt: skip
    needed = {*functions(HARNESS), "harness/", "op_harness"}
    assert len(sources) > 100
    assert [path.name for path in sources if any(name in path.read_text(encoding="utf-8") for name in needed)] == []
