"""``pylongctx bench``: runs on the embedded model, refusals, turns with the peer."""

import json
import re
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from needs import lacks

from pylongctx.cli import main
from pylongctx.eval.bench import programs, record, runner
from pylongctx.eval.bench.record import Case
from pylongctx.eval.bench.worker import BenchRun

CORM = "corm,window=8,recent=8,evict_every=8"


# ---- runs ----


def bench(capsys, *args: str) -> tuple[int, str, str]:
    status = main(["bench", *args])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_run_measures_every_test_with_every_method(capsys, monkeypatch):
    monkeypatch.setenv("LCTX_METHOD", "nonsense")  # --method is meant
    options = (
        "-p",
        "24",
        "-n",
        "4",
        "-pg",
        "8,4",
        "-d",
        "0,32",
        "-r",
        "2",
        "-ub",
        "16",
        "-t",
        "1",
        "-o",
        "jsonl",
        "--progress",
    )
    status, out, err = bench(capsys, *options, "--method", "full", "--method", CORM)
    assert status == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    tests = [(24, 0, 0), (0, 4, 0), (8, 4, 0), (24, 0, 32), (0, 4, 32), (8, 4, 32)]
    assert [(one["n_prompt"], one["n_gen"], one["n_depth"]) for one in lines] == [t for t in tests for _ in range(2)]
    assert [one["method"].partition(",")[0] for one in lines] == ["full", "corm"] * 6
    for one in lines:
        assert one["error"] == ""
        assert (one["n_ubatch"], one["n_threads"], one["type_v"]) == (16, 1, "f16")
        assert len(one["samples_ns"]) == 2
        assert min(one["samples_ns"]) > 0
        assert one["ttft_ns"] > 0
        assert one["peak_rss"] > 2**24
        assert one["kv_bytes"] > 0
    assert "benchmark 1/6: pp24: run 2/2" in err


def test_a_refused_configuration_is_a_record_and_the_rest_runs(capsys):
    status, out, _ = bench(capsys, "-p", "8", "-n", "0", "-r", "1", "-ctk", "q9_9,f16", "-o", "json", "-oe", "md")
    refused, measured = json.loads(out)
    assert status == 1
    assert refused["error"] == "unknown type_k 'q9_9'; names are those of ggml, for instance f16, q8_0, q4_0"
    assert (refused["avg_ts"], refused["type_k"]) == (None, "q9_9")
    assert measured["error"] == ""


def test_a_process_that_dies_is_a_record(embedded_model):
    engine = runner.Ours(Case(str(embedded_model), 8, 0), "full", warmup=False)
    engine._process.kill()
    engine.run()
    engine.run()
    engine.close()
    assert engine.record()["error"] == "the process ended, status -9"


@pytest.mark.parametrize("method", ["full", "selfextend,group_size=2,neighbor_window=8", CORM])
def test_every_repetition_starts_from_the_depth(embedded_model, method):
    running = BenchRun(
        Case(str(embedded_model), 8, 3, n_depth=40, n_ubatch=16, n_threads=1, n_gpu_layers=0), method, warmup=True
    )
    rows = []
    for _ in range(3):
        running.run()
        assert running.llm.n_tokens == 51
        rows.append(running.llm.kv_usage().rows.sum())
        running._go_back()
        assert running.llm.n_tokens == 40
    assert (running.llm.states.checkpoint is not None) == (method == CORM)
    if method != CORM:
        assert len(set(rows)) == 1
    running.llm.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "nonsense"], "unknown method 'nonsense'; available: full"),
        (["-r", "0"], "-r must be at least 1, not 0"),
        (["--delay", "-1"], "--delay must be at least 0"),
        (["-p", "0", "-n", "0"], "there is no test to run"),
        (["-fa", "0"], "-fa 0: pylongctx's attention is always a flash attention"),
        (["-fa", "maybe"], "-fa takes 0, 1 or auto, not 'maybe'"),
        (["-m", "random:phi-2:1"], "are written by 'python bench/geometries.py phi-2:1' of the repository"),
        (
            ["--vs-stock", "--stock", "nowhere/llama-bench"],
            "nowhere/llama-bench does not exist: build it with 'make tools-stock'",
        ),
    ],
)
def test_refusals_name_the_reason(capsys, args, message):
    status, out, err = bench(capsys, *args)
    assert (status, out) == (1, "")
    assert message in err


def test_gpu_layers_without_a_gpu(capsys):
    from pylongctx._arguments import has_gpu

    if has_gpu():
        pytest.skip("this build has a GPU backend")
    assert "this build of pylongctx has no GPU backend" in bench(capsys, "-ngl", "99")[2]


def test_wrong_lists_are_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "-p", "1-8*1"])
    assert stop.value.code == 2
    assert "never ends" in capsys.readouterr().err


# ---- against unpatched llama.cpp ----

# one object that llama-bench of llama.cpp 0c1e570 has printed
STOCK_RECORD = {
    "build_commit": "0c1e570", "build_number": 1, "cpu_info": "AMD EPYC", "gpu_info": "", "backends": "CPU",
    "model_filename": "model.gguf", "model_type": "llama ?B Q8_0", "model_size": 4744192, "model_n_params": 4458752,
    "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "cpu_mask": "0x0", "cpu_strict": False, "poll": 50,
    "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0,
    "no_kv_offload": False, "flash_attn": -1, "devices": "auto", "tensor_split": "0.00",
    "tensor_buft_overrides": "none", "load_mode": "auto", "lazy_mode": "auto", "embeddings": False,
    "no_op_offload": 0, "no_host": False, "repack": True, "fit_target": 0, "fit_min_ctx": 0, "n_prompt": 32,
    "n_gen": 0, "n_depth": 0, "test_time": "2026-11-21T16:58:48Z", "avg_ns": 4000000, "stddev_ns": 0,
    "avg_ts": 8000.0, "stddev_ts": 0.0, "samples_ns": [4000000], "samples_ts": [8000.0],
}  # fmt: skip
# Takes 4 ms, with flash attention 2 ms; refuses f16 with flash attention. What it was asked for is appended to a log.
FAKE = """#!{python}
import json, os, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(__file__).parent
with open(folder / "log", "a") as log:
    print(json.dumps([options, os.environ["LD_LIBRARY_PATH"], os.environ.get("LCTX_METHOD")]), file=log)
if options["-fa"] == "0" and options["-ctk"] == "q4_0":
    sys.exit("some warning\\nmain: error: q4_0 needs flash attention")
record = json.loads((folder / "record.json").read_text())
ns = 2000000 if options["-fa"] == "1" else 4000000
n_prompt, n_gen = options["-pg"].split(",") if "-pg" in options else (options["-p"], options["-n"])
record |= {{"n_prompt": int(n_prompt), "n_gen": int(n_gen), "flash_attn": int(options["-fa"]), "samples_ns": [ns]}}
print(json.dumps([record]))
"""


@pytest.fixture
def stock(tmp_path) -> Path:
    """Return a program that answers as llama-bench does."""
    path = tmp_path / "llama-bench"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "record.json").write_text(json.dumps(STOCK_RECORD))
    return path


def asked(stock: Path) -> list:
    return [json.loads(line) for line in (stock.parent / "log").read_text().splitlines()]


def test_vs_stock_takes_turns_and_prints_ratios(capsys, stock, monkeypatch, embedded_model):
    monkeypatch.setenv("LCTX_METHOD", "window")
    options = (
        "-p",
        "32",
        "-n",
        "0",
        "-d",
        "16",
        "-r",
        "2",
        "-t",
        "1",
        "-o",
        "json",
        "--vs-stock",
        "--stock",
        str(stock),
    )
    status, out, err = bench(capsys, *options, "--method", "full")
    assert status == 0, err
    ours, plain, flash = json.loads(out)
    assert [one["method"] for one in (ours, plain, flash)] == ["full", "llama.cpp, fa 0", "llama.cpp, fa 1"]
    assert [list(one) for one in (ours, plain, flash)] == [[*record.FIELDS, "samples_ns", "samples_ts"]] * 3
    assert (plain["samples_ns"], plain["avg_ts"], plain["build_commit"]) == ([4000000] * 2, 8000.0, "0c1e570")
    assert (flash["samples_ns"], flash["avg_ts"], flash["flash_attn"]) == ([2000000] * 2, 16000.0, 1)
    assert (flash["kv_bytes"], flash["peak_rss"], flash["ttft_ns"]) == (None,) * 3
    head, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in err.strip().splitlines())
    assert head[5:] == ["t/s", "llama.cpp t/s", "ratio to llama.cpp"]
    assert row[:5] == [embedded_model.stem, "1", "f16", "pp32 @ d16", "full"]
    assert row[6] == "16000.00, fa 1"
    ratios = sorted(rate / 16000 for rate in ours["samples_ts"])
    assert [float(cell) for cell in re.findall(r"[\d.]+", row[7])] == pytest.approx(
        [np.mean(ratios), *ratios], abs=0.006
    )
    wanted = {"-m": str(embedded_model), "-p": "32", "-n": "0", "-d": "16", "-b": "2048", "-ub": "512", "-t": "1",
              "-ctk": "f16", "-ctv": "f16", "-r": "1", "-o": "json"}  # fmt: skip
    assert [options["-fa"] for options, _, _ in asked(stock)] == ["0", "1", "0", "1"]
    for options, path, method in asked(stock):
        assert options.items() >= wanted.items()
        assert path.split(":")[0] == str(stock.parent)
        assert method is None


def test_vs_stock_runs_a_quantized_v_with_flash_attention_only(capsys, stock):
    options = (
        "-p",
        "0",
        "-n",
        "0",
        "-pg",
        "8,2",
        "-r",
        "1",
        "-t",
        "1",
        "-ctv",
        "q8_0",
        "--vs-stock",
        "--stock",
        str(stock),
    )
    status, out, err = bench(capsys, *options)
    assert status == 0, err
    assert [(options["-fa"], options["-p"], options["-n"], options["-pg"]) for options, _, _ in asked(stock)] == [
        ("1", "0", "0", "8,2")
    ]
    assert "| llama.cpp, fa 1  " in out
    assert "| ratio to llama.cpp " in out


def test_vs_stock_runs_with_its_options(capsys, stock):
    options = ("-p", "8", "-n", "0", "-r", "1", "-t", "1", "-ctv", "q8_0", "--vs-stock", "--stock", str(stock))
    status, _, err = bench(capsys, *options, "-fa", "0,auto")
    assert status == 0, err
    assert [options["-fa"] for options, _, _ in asked(stock)] == ["0", "-1"]


def test_vs_stock_without_one_of_the_peers(capsys, stock):
    options = (
        "-p",
        "8",
        "-n",
        "0",
        "-r",
        "2",
        "-t",
        "1",
        "-ctk",
        "q4_0",
        "-o",
        "json",
        "--vs-stock",
        "--stock",
        str(stock),
    )
    status, out, err = bench(capsys, *options)
    assert status == 1
    assert [one["error"] for one in json.loads(out)] == ["", "main: error: q4_0 needs flash attention", ""]
    assert len(asked(stock)) == 3
    assert re.search(r"\d, fa 1 +\|", err)


def test_vs_stock_with_the_real_one(capsys):
    try:
        programs.find_stock(None)
    except FileNotFoundError as reason:
        lacks("tools", str(reason))
    options = ("-p", "8", "-n", "2", "-pg", "8,2", "-d", "4", "-r", "1", "-t", "1", "-o", "json", "--vs-stock")
    status, out, err = bench(capsys, *options)
    assert status == 0, err
    lines = [
        {name: one[name] for name in ("n_prompt", "n_gen", "n_depth", "n_batch", "type_k")} for one in json.loads(out)
    ]
    assert lines[::3] == lines[1::3] == lines[2::3]


def test_no_ratio_without_a_peer(embedded_model):
    refused = runner.Peer(Case("a", 8, 0), programs.stock_program(Path("nowhere"), 0), True)
    refused.run()
    assert refused.error == "nowhere cannot be run: No such file or directory"
    assert runner.ratios([refused]) == []
