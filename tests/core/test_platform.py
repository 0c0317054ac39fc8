"""What differs between systems: modules that one of them has, locks, pipes, and numbers of memory."""

import os
import subprocess
import sys
import textwrap

import pytest

from pylongctx._platform import free_pages, has_data, locked_folder, peak_bytes, ram_bytes, take_lock, thread_seconds

# Windows has none of them
ABSENT = "import sys; sys.modules |= dict.fromkeys(('fcntl', 'resource', 'termios', 'tty', 'pty', 'grp', 'pwd'))\n"
# of vm_stat, with the fields that matter and some that do not
VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                3.
Pages active:                            100.
Pages inactive:                           20.
Pages speculative:                         5.
Pages throttled:                           0.
Pages wired down:                       1000.
Pages purgeable:                           7.
Pages stored in compressor:           100000.
"""


@pytest.mark.parametrize(
    "program", ["import pylongctx; pylongctx.Llama", "import runpy; runpy.run_module('pylongctx', None, '__main__')"]
)
def test_modules_of_unix_are_not_needed(program):
    words = [sys.executable, "-c", ABSENT + program, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("usage: pylongctx" in done.stdout) == ("runpy" in program)


def locks_folder(folder) -> bool:
    """Return whether another process can lock a folder now."""
    program = """
        import os, sys
        from pylongctx._platform import take_lock
        take_lock(os.open(sys.argv[1], os.O_RDONLY), wait=False)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
    return subprocess.run(words, capture_output=True, timeout=120).returncode == 0


def test_a_locked_folder_is_locked_until_the_end(tmp_path):
    with locked_folder(tmp_path):
        assert not locks_folder(tmp_path)
    assert locks_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_file(tmp_path):
    path = tmp_path / "one"
    with path.open("wb") as file:
        take_lock(file)
        with path.open("rb") as other, pytest.raises(OSError, match="unavailable"):
            take_lock(other, wait=False)
    with path.open("rb") as other:
        take_lock(other, wait=False)


def test_a_pipe_has_data_or_ends_or_the_time_is_over():
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as pipe:
        assert not has_data(pipe, 0.01)
        os.write(write, b"x")
        assert has_data(pipe, 60)
        pipe.read(1)
        assert not has_data(pipe, 0)
        os.close(write)
        assert has_data(pipe, 60)
        assert pipe.read(1) == b""


def test_free_pages_of_macos():
    assert free_pages(VM_STAT) == 3 + 20 + 5 + 7


def test_numbers_of_this_system():
    import threading

    assert 2**26 < ram_bytes() < 2**50
    before = thread_seconds(threading.get_ident())
    sum(range(10**6))
    assert thread_seconds(threading.get_ident()) > before
    assert peak_bytes() > 0
