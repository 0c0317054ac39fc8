"""The most memory of this process, from a moment on."""

import pytest

from pylongctx._peak import peak_memory, reset_peak_memory

MIB = 2**20


def test_the_peak_begins_anew():
    block = b"x" * (64 * MIB)
    assert reset_peak_memory()
    with_block = peak_memory()
    del block
    assert reset_peak_memory()
    assert peak_memory() < with_block - 32 * MIB


def test_a_system_that_cannot_begin_anew(tmp_path):
    assert not reset_peak_memory(tmp_path / "gone")


def test_a_system_without_peaks(tmp_path):
    (tmp_path / "status").write_text("VmRSS: 12 kB\n")
    with pytest.raises(RuntimeError, match="no VmHWM"):
        peak_memory(tmp_path)
