"""The fuzzers see what they look for: processes that die, hang, or answer wrongly."""

from pathlib import Path

import drivers
import fuzz
import httpx
import pytest
import requests_driver

DYING = """
import os, sys
sys.path.insert(0, {tests!r})
import tries
tries.LIMIT = 1
for seed in tries.tries(*sys.argv[3:]):
    if seed == 3:
        os.abort()
    while seed == 9:
        pass
    assert seed != 15, "wrong"
    tries.tell(seed % 2 == 0)
"""


def test_a_driver_that_dies_is_a_line_of_its_own(tmp_path):
    """If a process is killed, hangs or fails, the seeds after that are tried in another one."""
    (tmp_path / "dying_driver.py").write_text(DYING.format(tests=str(Path(drivers.__file__).parent)))
    lines = list(drivers.run(str(tmp_path / "dying"), tmp_path / "model.gguf", "case", "", range(0, 20, 3)))
    assert [line[:3] for line in lines] == [
        [seed, "case", end] for seed, end in zip(range(0, 20, 3), (0, -6, 0, "hang", 0, 1, 0), strict=True)
    ]
    assert lines[5][4].endswith("AssertionError: wrong\n")
    assert all(0 < line[3] < 1000 for line in lines if line[2] == 0)
    assert list(map(fuzz.is_bad, lines)) == [False, True, False, True, False, True, False]
    summary = fuzz.summary("states", lines)
    assert summary.startswith("states: 7 mutations, 4 ran, 0 refused, 1 signals, 1 hangs, 1 wrong answers, at most ")


def test_a_line_that_took_too_much_memory_is_bad():
    assert fuzz.is_bad([1, "case", 0, fuzz.MEMORY + 1])
    assert not fuzz.is_bad([1, "case", 3, fuzz.MEMORY])


class Broken(requests_driver.Target):
    """A server that is not there: what it answers is given."""

    known = "yes"

    def __init__(self, answers, folder):
        self.answers = iter(answers)
        self.errors = folder / "server.err"
        self.errors.write_text("Traceback")
        transport = httpx.MockTransport(lambda request: next(self.answers)(request))
        self.http = httpx.Client(base_url="http://a", transport=transport)
        self.process = type("Ended", (), {"poll": lambda self: -11})()

    def memory(self):
        return 7


def status(code, text="no"):
    return lambda request: httpx.Response(code, json={"choices": [{"text": text}]}, request=request)


def fails(kind):
    def answer(request):
        raise kind("gone", request=request)

    return answer


@pytest.mark.parametrize(
    ("seed", "answers", "end"),
    [
        (1, [status(200)], [0, 7]),
        (1, [status(422)], [3, 7]),
        (1, [status(501)], [3, 7]),
        (1, [status(500)], [1, 7, "status 500 Traceback"]),
        (1, [fails(httpx.ReadTimeout)], ["hang", 0]),
        (1, [fails(httpx.ReadError)], [-11, 0, "ReadError('gone') Traceback"]),
        (0, [status(200), status(200, "yes")], [0, 7]),
        (0, [status(200), status(200, "no")], [1, 7, "another answer to the fixed prompt"]),
    ],
)
def test_how_a_request_ends(tmp_path, seed, answers, end):
    assert requests_driver.outcome(Broken(answers, tmp_path), seed, "/v1/completions", {"prompt": "a"}) == end
