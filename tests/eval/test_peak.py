"""The most memory of this process, from a moment on."""

from mmap import PAGESIZE, mmap

import pytest

from pylongctx.eval.peak import peak_memory, reset_peak_memory

MIB = 2**20


def test_the_peak_can_be_reset():
    with mmap(-1, 64 * MIB) as block:  # malloc may hold what is freed
        for page in range(0, len(block), PAGESIZE):
            block[page] = 1
        assert reset_peak_memory()
        with_block = peak_memory()
    assert reset_peak_memory()
    assert peak_memory() < with_block - 32 * MIB


def test_a_system_that_cannot_reset_it(tmp_path):
    assert not reset_peak_memory(tmp_path / "gone")


def test_a_system_without_peaks(tmp_path):
    (tmp_path / "status").write_text("VmRSS: 12 kB\n")
    with pytest.raises(RuntimeError, match="no VmHWM"):
        peak_memory(tmp_path)
