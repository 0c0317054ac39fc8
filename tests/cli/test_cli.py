"""The command line, through a subprocess as users run it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need

import pylongctx
from pylongctx.cli import COMMANDS, main
from pylongctx.cli.doctor import KV_TYPES

EXTENDED = "selfextend,group_size=8,neighbor_window=128"


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "LCTX_METHOD"}
    return subprocess.run(
        [sys.executable, "-m", "pylongctx", *args],
        capture_output=True,
        text=True,
        env=clean | env,
        timeout=300,
        check=False,
    )


def test_doctor_json():
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["version"] == pylongctx.__version__
    assert facts["problems"] == []
    assert Path(facts["library"]).is_file()
    assert Path(facts["embedded_model"]).is_file()
    assert {"version", "upstream", "series", "compiler", "build_type", "backends", "native"} <= set(facts["build"])
    assert facts["ram_bytes"] > 2**28
    (cpu,) = [device for device in facts["devices"] if device["type"] == "CPU"]
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]
    assert (len(facts["devices"]) == 1) == facts["gpu"].startswith("none: ")
    widths = facts["attention"]["CPU"]
    assert {kv: 80 in widths[kv] for kv in widths} == {kv: kv in ("f32", "f16", "bf16") for kv in KV_TYPES}
    assert all({64, 96, 128, 256} <= set(dims) for dims in widths.values())


def test_doctor_table():
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    words = ("version", "library", "backends", "GiB free", "cpu features", "cffi", "numpy", "embedded model", "ram")
    for word in words:
        assert word in done.stdout
    paths = [
        line.split("  ")[-1].strip()
        for line in done.stdout.splitlines()
        if line.startswith(("library ", "embedded model "))
    ]
    assert all(map(os.path.exists, paths)), paths  # whole, whatever the width of the terminal


def test_doctor_without_a_library_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pylongctx._lib", None)
    assert main(["doctor", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert "pylongctx._lib" in facts["problems"][0]
    assert facts["version"] == pylongctx.__version__


@pytest.fixture(scope="module")
def passkey(tmp_path_factory):
    """Two methods, two lengths, two trials: the process and its JSON lines."""
    out = tmp_path_factory.mktemp("passkey") / "out.jsonl"
    options = ("--tests", "2", "--lengths", "300,400", "--method", "full", "--method", EXTENDED, "--json", str(out))
    done = run("eval", "passkey", *options)
    assert done.returncode == 0, done.stderr
    return done, [json.loads(line) for line in out.read_text().splitlines()]


def test_passkey_writes_one_line_per_trial(passkey):
    _, lines = passkey
    asked = [(line["method"], line["length"], line["trial"]) for line in lines]
    assert asked == [(m, n, i) for m in ("full", EXTENDED) for n in (300, 400) for i in (0, 1)]
    for line in lines:
        assert 0 <= line["depth"] <= 1
        assert line["length"] - 3 <= line["n_tokens"] <= line["length"]
        assert line["seconds"] > 0
        assert line["strict"] == (line["answer"] == f" {line['key']}")


def test_passkey_asks_every_method_the_same(passkey):
    _, lines = passkey
    questions = [(line["length"], line["trial"], line["key"], line["depth"], line["n_tokens"]) for line in lines]
    assert questions[:4] == questions[4:]


def test_passkey_prints_the_shares(passkey):
    done, lines = passkey
    header = next(line for line in done.stdout.splitlines() if "method" in line)
    assert "300" in header
    assert "400" in header
    row = next(line for line in done.stdout.splitlines() if "full" in line)
    strict = [line["strict"] for line in lines if line["method"] == "full" and line["length"] == 300]
    assert f"{50 * sum(strict)} %" in row


def test_passkey_shows_what_was_chosen(passkey):
    done = run("eval", "passkey", "--tests", "1", "--lengths", "600,700", "--method", "selfextend")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^selfextend at 600(, 700)?: group_size=\d+, neighbor_window=\d+$", done.stdout, re.MULTILINE)
    assert "group_size=" not in passkey[0].stdout.replace(EXTENDED, "")


def test_passkey_takes_the_method_from_the_environment(tmp_path):
    out = tmp_path / "out.jsonl"
    done = run(
        "eval", "passkey", "--tests", "1", "--lengths", "200", "--json", str(out), LCTX_METHOD="window,window=64"
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["window,n_sink=4,window=64"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "nonsense"], "unknown method 'nonsense'; available: full, window, selfextend"),
        (["--method", "window+corm"], "window does not compose with other methods"),
        (["--lengths", "10"], "length 10 is too short"),
        (["--tests", "0"], "--limit must be at least 1"),
        (["missing.gguf"], "Model path does not exist: missing.gguf"),
        (["a.gguf", "-m", "b.gguf"], "the model is given twice"),
        (["--haystack", "missing.txt"], "neither 'sentences' nor a file"),
        (["-ctk", "q9_9"], "unknown type_k 'q9_9'"),
    ],
)
def test_passkey_errors_are_one_line(args, message):
    done = run("eval", "passkey", "--tests", "1", "--lengths", "200", *args)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


CHUNKED = "longheads,chunk_size=16,window=128"


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    """One question: the process, its numbers, the folder of its maps."""
    folder = tmp_path_factory.mktemp("inspect")
    numbers = folder / "numbers.json"
    options = ("--method", CHUNKED, "--length", "400", "--trial", "1", "--out", str(folder), "--json", str(numbers))
    done = run("inspect", *options)
    assert done.returncode == 0, done.stderr
    return done, json.loads(numbers.read_text()), folder


def test_inspect_writes_the_numbers(inspected):
    _, facts, _ = inspected
    assert (facts["length"], facts["trial"], facts["chunk_size"]) == (400, 1, 16)
    assert facts["method"].startswith(CHUNKED)
    start = facts["positions"][0]
    assert facts["positions"] == list(range(start, start + len(facts["positions"])))
    assert facts["n_chunks"] == facts["positions"][-1] // 16 + 1
    assert facts["strict"] == (facts["answer"] == f" {facts['key']}")
    answer = facts["answer_chunks"]
    assert answer == list(range(answer[0], answer[-1] + 1))
    assert 0 <= answer[0] <= answer[-1] < facts["n_chunks"]
    for part in ("first", "all"):
        numbers = facts[part]
        assert list(numbers) == ["cover_rate", "gini", "hit_rate_top1", "hit_rate_top5"]
        assert 128 / 400 <= numbers["cover_rate"] <= 1
        assert 0 <= numbers["gini"] <= 1
        assert 0 <= numbers["hit_rate_top1"] <= numbers["hit_rate_top5"] <= 1


def test_inspect_prints_the_numbers(inspected):
    done, facts, folder = inspected
    for word in ("cover rate", "Gini", "top 1", "top 5", "right" if facts["strict"] else "wrong", facts["method"]):
        assert word in done.stdout
    assert f"{facts['first']['gini']:.2f}" in done.stdout
    maps = sorted(path.name for path in folder.iterdir() if path.suffix != ".json")
    need("plot", "matplotlib")
    assert [Path(name).suffix for name in maps] == [".png", ".svg"]
    assert all(str(folder / name) in done.stdout for name in maps)
    assert all((folder / name).stat().st_size > 1000 for name in maps)


def test_inspect_says_that_a_short_text_is_read_whole(inspected, capsys, tmp_path):
    assert "tokens are read, as in any text" not in inspected[0].stdout
    assert main(["inspect", "--method", "longheads", "--length", "300", "--out", str(tmp_path)]) == 0
    assert "tokens are read, as in any text of up to 640: try --length 1280" in capsys.readouterr().out


def test_inspect_without_matplotlib_prints_the_numbers(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["inspect", "--method", CHUNKED, "--length", "300", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "cover rate" in shown.out
    assert "no map: drawing needs matplotlib: pip install 'pylongctx[plot]'" in shown.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--method", "full"],
            "method 'full' does not read chunks, so there is nothing to trace; use method='longheads'",
        ),
        (["--trial", "-1"], "--trial must be at least 0"),
        (["--length", "10"], "length 10 is too short"),
        (["--haystack", "missing.txt"], "neither 'sentences' nor a file"),
    ],
)
def test_inspect_errors_are_one_line(args, message):
    done = run("inspect", "--length", "200", *args)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_usage_is_status_2():
    assert run("eval", "passkey", "--lengths", "many").returncode == 2
    assert run().returncode == 2
    assert run("--version").stdout.split() == ["pylongctx", pylongctx.__version__]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chta"], "there is no command 'chta'; did you mean 'chat'?"),
        (["chat", "--mehtod", "full"], "there is no option --mehtod; did you mean '--method'?"),
        (["serve", "a.gguf", "b.gguf"], "unexpected argument 'b.gguf'"),
        (["chat", "smolm2-135m"], "Model path does not exist: smolm2-135m; did you mean 'smollm2-135m'?"),
        (["chat", "--method", "longhead"], "unknown method 'longhead'; did you mean 'longheads'?"),
        (["complete", "-f", "missing.txt"], "argument -f/--file: missing.txt: No such file or directory"),
        (
            ["complete", "-p", "x", "--kv-store", "/dev/null"],
            "--kv-store /dev/null: File exists; give a writable folder",
        ),
        (["complete", "-p", "x", "-m", "missing.gguf"], "missing.gguf; pylongctx get lists models to download"),
        (["serve", "--port", "99999"], "--port must be from 0 to 65535, not 99999"),
    ],
)
def test_a_mistake_gets_a_line_and_a_guess(words, message):
    done = run(*words)
    assert done.returncode in (1, 2)
    assert message in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr


AWAY = """
import sys
from pathlib import Path

has = Path.is_file
Path.is_file = lambda path: path.name != "libllama.so" and has(path)
from pylongctx.cli import COMMANDS, main
"""
HELP = """
for words in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["eval", "ruler", "-h"]):
    try:
        main(words)
    except SystemExit as reason:
        assert reason.code == 0, words
assert not sys.modules.keys() & {"numpy", "pylongctx.llama", "pylongctx._lib"}
"""


def run_without_library(*args: str, program: str = "sys.exit(main(sys.argv[1:]))") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", AWAY + program, *args]
    return subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def test_help_does_not_need_the_library():
    done = run_without_library(program=HELP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: pylongctx") == 2 + len(COMMANDS)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["doctor"], 1, "problems        the native library"),
        (["get"], 0, "smollm2-135m"),
        (["eval"], 0, "passkey     hide a number"),
        (["completion", "bash"], 0, "complete -o bashdefault -F _shtab_pylongctx pylongctx"),
    ],
)
def test_what_does_not_compute_does_not_need_the_library(words, status, said):
    done = run_without_library(*words)
    assert (done.returncode, done.stderr) == (status, "")
    assert said in done.stdout


@pytest.mark.parametrize(
    "words",
    [["eval", "passkey"], ["chat", "-p", "x"], ["serve"], ["bench"], ["inspect"], ["kv", "ls", "."], ["rpc-server"]],
    ids=" ".join,
)
def test_a_library_that_is_missing_is_said_in_a_line(words):
    done = run_without_library(*words)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"pylongctx: error: the native library .*libllama\.so is missing: build it with 'pip .*", line)
