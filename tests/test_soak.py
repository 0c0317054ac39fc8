"""``bench/soak.py``, shortened: nothing is wrong, and what is wrong is noticed."""

import pytest

for package in ("fastapi", "httpx", "psutil"):
    pytest.importorskip(package, reason=f"the package {package} is not installed")
soak = pytest.importorskip("soak")


def test_mixed_requests_leave_nothing_behind(capsys):
    assert soak.main(["--requests", "96"]) == 0
    said = capsys.readouterr().out
    assert "KV 0 bytes, exit status 0" in said
    assert "cancelled stream" in said


def test_a_wrong_status_is_a_failure(capsys, monkeypatch):
    monkeypatch.setitem(soak.KINDS, "tokenize", (404, soak.KINDS["tokenize"][1]))
    assert soak.main(["--requests", "32"]) == 1
