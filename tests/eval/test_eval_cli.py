"""The commands that evaluate: what is printed, what is written, what is not run again."""

import json
import math
import re

import pytest
from needs import need
from tiny_gguf import make_model

from pylongctx.cli import main
from pylongctx.cli.arguments import pair
from pylongctx.cli.eval import SHOWN
from pylongctx.cli.eval_cells import make_tasks
from pylongctx.cli.options import method_list
from pylongctx.eval.registry import TASKS, task_class
from pylongctx.eval.retrieval import KeyValue


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"It was the best of times, it was chapter {i}." for i in range(40)))
    return str(file)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_a_task_they_are_listed(capsys):
    assert main(["eval"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {entry.help}" in listed for name, entry in SHOWN.items())


def test_every_task_loads():
    assert {name: task_class(name).__name__.lower() for name in TASKS} == {
        name: entry.task.rpartition(":")[2].lower() for name, entry in TASKS.items()
    }


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("full,longheads", ["full", "longheads"]),
        ("window,n_sink=4,window=64,full", ["window,n_sink=4,window=64", "full"]),
        ("longheads,chunk_size=16+corm,window=64,none", ["longheads,chunk_size=16+corm,window=64", "none"]),
    ],
)
def test_several_methods_at_once(text, methods):
    assert method_list(text) == methods


def test_a_standard_task_has_its_fields_from_options():
    given = {"tests": 2, "place": 3}
    assert make_tasks("keyvalue", ["a.jsonl", "b.jsonl"], given) == [
        KeyValue("a.jsonl", tests=2, place=3),
        KeyValue("b.jsonl", tests=2, place=3),
    ]
    assert [pair(text) for text in ("place=3", "haystack=a=b.txt", "e=true")] == [
        ("place", 3),
        ("haystack", "a=b.txt"),
        ("e", True),
    ]


def test_passkey_continues_where_it_stopped(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["eval", "passkey", "--lengths", "160", "--method", "full", "--json", str(out)]
    assert main([*options, "--limit", "1"]) == 0
    first = out.read_text()
    assert main([*options, "--limit", "2"]) == 0
    assert out.read_text().startswith(first)
    assert [line["trial"] for line in lines(out)] == [0, 1]
    again = out.read_text()
    assert main([*options, "--limit", "2"]) == 0
    assert out.read_text() == again
    assert "pass key found" in capsys.readouterr().out


def test_a_pipe_gets_a_line_for_each_cell(capsys):
    options = ["--lengths", "160,300", "--method", "full", "--method", "selfextend", "--limit", "1"]
    assert main(["eval", "passkey", *options]) == 0
    said = [re.sub(r", \d+ s\]", "]", line) for line in capsys.readouterr().err.splitlines() if line]
    cells = [(method, n) for method in ("full", "selfextend") for n in (160, 300)]
    assert said == [f"[{i}/4] passkey: {method} at {n}: 100 %" for i, (method, n) in enumerate(cells, 1)]


def test_passkey_styles(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["--limit", "2", "--lengths", "274", "--method", "full", "--digits", "5,8", "--json", str(out)]
    assert main(["eval", "passkey", "--style", "landmark", *options]) == 0
    assert [(line["style"], len(line["answers"][0])) for line in lines(out)] == [("landmark", n) for n in (5, 5, 8, 8)]
    assert "passkey-8-digits" in capsys.readouterr().out


def test_needle_prints_depths_by_lengths(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["--context-lengths", "150,200", "--document-depth-percents", "0,100", "--passkey", "--predict", "6"]
    options += ["--final-context-length-buffer", "70", "--method", "full", "--json", str(out)]
    assert main(["eval", "needle", *options]) == 0
    found = lines(out)
    assert [(line["length"], line["depth_percent"]) for line in found] == [(150, 0), (150, 100), (200, 0), (200, 100)]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    share = {(line["length"], line["depth_percent"]): f"{100 * line['score']:.0f}" for line in found}
    assert ["\u2502", "100", "%", "\u2502", share[150, 100], "\u2502", share[200, 100], "\u2502"] in rows


def test_recall_prints_scores_and_how_many_answers_a_fresh_prefill_repeats(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["--lengths", "400", "--limit", "1", "--questions", "2", "--fresh", "1", "--json", str(out)]
    asked = ["--asked", "number", "--asked", "literal", "--decoys", "1"]
    assert main(["eval", "recall", *options, *asked, "--method", "full"]) == 0
    found = lines(out)
    assert [(line["task"], len(line["turns"]), line["n_fresh"]) for line in found] == [
        ("recall-1-decoys", 2, 1),
        ("recall-names-1-decoys", 2, 1),
    ]
    printed = capsys.readouterr().out
    assert "facts recalled" in printed
    assert printed.count("at 400: 100 % as with a fresh prefill") == 2


def test_recall_tells_the_perplexity_of_the_same_reading(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["--lengths", "400", "--limit", "1", "--questions", "1", "--json", str(out), "--method", "full"]
    assert main(["eval", "recall", *options, "--scored", "20"]) == 0
    (found,) = lines(out)
    printed = capsys.readouterr().out.split("perplexity, ")[1]
    assert "the last 20 tokens of each text" in " ".join(printed.split())
    assert f"{math.exp(found['nll'] / 20):.2f}" in printed


def test_ruler_prints_tasks_and_their_mean(capsys, tmp_path):
    need("eval", "wonderwords")
    out = tmp_path / "out.jsonl"
    options = ["--tasks", "niah_single_2,vt", "--limit", "1", "--lengths", "1024", "--method", "window,window=64"]
    assert main(["eval", "ruler", *options, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "mean" in printed
    assert "RULER-compatible, with other data: niah_single_2" in " ".join(printed.split())
    found = lines(out)
    assert [line["label"] for line in found] == ["RULER-compatible", "RULER"]
    assert [line["seed"] for line in found] == [42, 42]
    assert all(line["n_tokens"] <= 1024 for line in found)


def test_longbench_e_has_a_table_per_range(tmp_path, capsys):
    line = {
        "input": "Q",
        "context": "It was the cat. " * 200,
        "answers": ["cat"],
        "length": 4500,
        "all_classes": ["cat"],
    }
    (tmp_path / "trec_e.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["eval", "longbench", "--data", str(tmp_path), "-E", "--lengths", "200", "--method", "full"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("LongBench-E") == 4
    assert main(["eval", "longbench", "--data", str(tmp_path), "--method", "full"]) == 1
    assert "contains no file of LongBench, such as trec.jsonl" in capsys.readouterr().err


def test_leval_asks_all_files(tmp_path, capsys):
    line = {"input": "It was the cat.", "instructions": ["Who? (A) cat (B) dog"], "outputs": ["(A) cat"]}
    for name in ("quality", "tpo"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    data = [part for name in ("quality", "tpo") for part in ("--data", str(tmp_path / f"{name}.jsonl"))]
    assert main(["eval", "leval", *data, "--lengths", "200", "--predict", "3", "--method", "full"]) == 0
    printed = capsys.readouterr().out
    assert "quality" in printed
    assert "tpo" in printed


def test_questions_share_the_reading_of_a_text(tmp_path, capsys):
    asked = [f"Who was number {i}? (A) cat (B) dog" for i in range(3)]
    line = {"input": "It was the cat. " * 30, "instructions": asked, "outputs": ["(A) cat"] * 3}
    (tmp_path / "quality.jsonl").write_text(json.dumps(line) + "\n")
    out = tmp_path / "out.jsonl"
    options = ["--data", str(tmp_path / "quality.jsonl"), "--lengths", "500", "--predict", "3", "--json", str(out)]
    assert main(["eval", "leval", *options, "--method", "full"]) == 0
    assert main(["eval", "leval", *options, "--method", "full", "--reuse"]) == 0
    alone, shared = lines(out)[:3], lines(out)[3:]
    assert [line["answer"] for line in alone] == [line["answer"] for line in shared]
    assert sum(line["tokens_read"] for line in shared) < 0.6 * sum(line["tokens_read"] for line in alone)
    assert main(["eval", "leval", *options, "--method", "kvzip", "--compress", "0.5"]) == 1
    assert "compress needs reuse" in capsys.readouterr().err


def test_perplexity_prints_the_final_estimate(text, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["-c", "64-96+32", "--method", "full", "--chunks", "2", "--json", str(out)]
    assert main(["eval", "perplexity", "-f", text, *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Final estimate: PPL = ") == 2
    assert [line["n_scored"] for line in lines(out)] == [31, 31, 47, 47]


def test_perplexity_takes_several_texts(text, tmp_path, capsys):
    other, out = tmp_path / "other.txt", tmp_path / "out.jsonl"
    other.write_text(" ".join(f"The bell rang {i} times." for i in range(60)))
    texts = ["-f", text, "-f", str(other)]
    options = ["-c", "64", "--method", "full", "--chunks", "1"]
    assert main(["eval", "perplexity", *texts, *options, "--json", str(out)]) == 0
    assert [line["text"] for line in lines(out)] == ["text.txt", "other.txt"]
    assert main(["eval", "perplexity", *texts, *options, "--kl-divergence"]) == 0
    assert "KL divergence from full, text.txt, other.txt" in " ".join(capsys.readouterr().out.split())


def test_perplexity_of_llama_cpp_s_own_cache(text, tmp_path, capsys):
    """In f32, since quantized products round activations to 8 bits."""
    out, model = tmp_path / "out.jsonl", str(make_model(tmp_path / "model.gguf"))
    options = ["-ctk", "f32", "-ctv", "f32", "-c", "64", "--chunks", "2", "--json", str(out)]
    assert main(["eval", "perplexity", model, "-f", text, *options, "--method", "none", "--method", "full"]) == 0
    own, full = lines(out)[:2], lines(out)[2:]
    assert [(line["asked"], line["method"]) for line in own] == [("none", "none")] * 2
    assert [line["nll"] for line in own] == pytest.approx([line["nll"] for line in full], rel=1e-5)
    assert not any("kv_bytes" in line for line in own)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("none at 64: ")]
    assert [line.startswith("none at 64: Final estimate: PPL = ") for line in said] == [True]


def test_perplexity_prints_a_curve(text, capsys):
    options = ["--mode", "incremental", "--ppl-stride", "50", "-c", "200", "--method", "full", "--method", "window"]
    assert main(["eval", "perplexity", "-f", text, *options]) == 0
    printed = capsys.readouterr().out.split("perplexity by position")[1]
    assert [n for n in ("25", "75", "125", "175") if f" {n} " in printed] == ["25", "75", "125", "175"]


def test_a_stride_alone_means_sliding_windows(text, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["-c", "64", "--ppl-stride", "16", "--chunks", "2", "--method", "full", "--json", str(out)]
    assert main(["eval", "perplexity", "-f", text, *options]) == 0
    assert [(line["mode"], line["n_scored"]) for line in lines(out)] == [("sliding", 63), ("sliding", 16)]


def test_the_divergence_of_full_from_itself_is_zero(text, capsys):
    options = ["--kl-divergence", "-c", "64", "--chunks", "2", "--method", "full", "--method", "window,window=8"]
    assert main(["eval", "perplexity", "-f", text, *options]) == 0
    own, other = capsys.readouterr().out.split("======")[2::2]
    assert "Maximum KLD                   :     0.000000" in own
    assert "Same top p                    :   100.000000" in own
    assert "Maximum KLD                   :     0.000000" not in other


@pytest.mark.parametrize(
    "args",
    [
        ["eval", "perplexity", "-c", "64", "--chunks", "1", "--method", "full", "-f"],
        ["eval", "passkey", "--lengths", "160", "--limit", "1", "--method", "full", "--haystack"],
        ["inspect", "--method", "corm", "--length", "64", "--json", "numbers.json", "--text"],
        ["complete", "-n", "2", "-f"],
    ],
    ids=" ".join,
)
def test_every_command_reads_a_file_that_is_not_utf_8(args, tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.txt").write_bytes("Gr\u00fc\u00dfe aus M\u00fcnchen. ".encode("latin-1") * 20)
    assert main([*args, "old.txt"]) == 0
    assert "old.txt: read as Windows-1252, as it is not UTF-8" in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["eval", "perplexity", "-f", "missing.txt"], "no text file 'missing.txt'"),
        (["eval", "perplexity", "-f", "x", "--kl-divergence", "--mode", "last"], "leave --mode and --ppl-stride out"),
        (["eval", "needle", "--context-lengths", "120"], "make --final-context-length-buffer smaller"),
        (["eval", "needle", "--limit", "0"], "--limit must be at least 1"),
        (["eval", "ruler", "--tasks", "poem"], "RULER has no task 'poem'"),
        (["eval", "ruler", "--tasks", "qa_2"], "qa_2 needs the questions of HotpotQA"),
        (["eval", "leval", "--data", "missing.jsonl"], "missing.jsonl does not exist"),
        (["eval", "leval", "--data", "missing.jsonl", "--limit", "0"], "--limit must be at least 1"),
        (
            ["eval", "keyvalue", "--data", "a.jsonl", "--set", "plce=1"],
            "has no field plce; did you mean 'place'?",
        ),
        (
            ["eval", "keyvalue", "--data", "a.jsonl", "--set", "data=b.jsonl"],
            "has no field data; it has tests, max_tokens",
        ),
        (["eval", "passkey", "--style", "landmark", "--depths", "0.5"], "landmark draws its depths itself"),
    ],
)
def test_errors_are_one_line(args, message, capsys):
    assert main([*args, "--method", "full"]) == 1
    assert message in capsys.readouterr().err


def test_lengths_that_are_not_numbers_are_refused_with_the_reason(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "passkey", "--lengths", "512-64"])
    assert "the range '512-64' is empty" in capsys.readouterr().err
