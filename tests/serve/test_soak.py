"""``bench/soak.py``, shortened: nothing is wrong, and what is wrong is noticed."""

from needs import need

need("server", "fastapi", "httpx", "psutil")
import soak  # noqa: E402


def test_mixed_requests_leave_nothing(capsys):
    assert soak.main(["--requests", "96"]) == 0
    said = capsys.readouterr().out
    assert "KV 0 bytes, exit status 0" in said
    assert "cancelled stream" in said


def test_a_wrong_status_is_a_failure(capsys, monkeypatch):
    monkeypatch.setitem(soak.KINDS, "tokenize", (404, soak.KINDS["tokenize"][1]))
    assert soak.main(["--requests", "32"]) == 1
