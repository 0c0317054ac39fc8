"""The matrix: what a TOML file asks for, RoPE scalings with the published formulas, a folder that is continued."""

import json
import math
from pathlib import Path

import pytest
from llamas import new
from needs import need

from pylongctx.cli import main
from pylongctx.eval.matrix import LINEAR, YARN, Positions, all_methods, make, positions_of, read, scaling, split_method
from pylongctx.eval.needle import Needle
from pylongctx.eval.passkey import Passkey
from pylongctx.eval.report.records import label
from pylongctx.eval.ruler import NAMES
from pylongctx.eval.runner import make_samples, run
from pylongctx.methods import METHODS, parse

TRAINED = Positions(512, 64, 10000.0)
PASSKEY = {"kind": "passkey", "tests": 1}
REPORT = Path(__file__).resolve().parents[2] / "bench" / "matrix.toml"


def lines(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


# ---- rope scalings ----


def test_ntk_slows_the_slowest_channel_by_the_factor_and_keeps_the_fastest():
    base = scaling("ntk", TRAINED, 700, 4096)["rope_freq_base"]
    slowest = 62 / 64  # the exponent of the last pair of channels
    assert math.isclose(base**slowest, 8 * 10000.0**slowest)


def test_dynamic_ntk_follows_the_length_of_the_text():
    assert scaling("dynamic", TRAINED, 512, 4096) == {}
    assert scaling("dynamic", TRAINED, 4096, 4096) == scaling("ntk", TRAINED, 700, 4096)
    assert scaling("dynamic", TRAINED, 1024, 4096)["rope_freq_base"] == pytest.approx(10000 * 2 ** (64 / 62))


def test_linear_and_yarn_are_fixed_for_the_longest_text():
    assert scaling("linear", TRAINED, 512, 2048) == {"rope_scaling_type": LINEAR, "rope_freq_scale": 0.25}
    yarn = {"rope_scaling_type": YARN, "rope_freq_scale": 0.25, "yarn_orig_ctx": 512}
    assert scaling("yarn", TRAINED, 512, 2048) == yarn


def test_a_scaling_is_not_put_on_top_of_another():
    with pytest.raises(ValueError, match="made with rope scaling 'yarn'"):
        scaling("ntk", Positions(512, 64, scaled="yarn"), 700, 700)


def test_the_model_tells_its_positions(llm, model_path):
    assert positions_of(llm) == TRAINED
    with new(model_path("llama-yarn"), vocab_only=True) as scaled:
        assert positions_of(scaled).scaled == "yarn"


# ---- jobs ----


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ntk", ("full", "ntk")),
        ("window,window=64", (str(parse("window,window=64")), "")),
        ("longheads+corm@dynamic", (str(parse("longheads+corm")), "dynamic")),
    ],
)
def test_a_method_and_its_scaling(text, found):
    assert split_method(text) == found


def test_all_is_every_method_that_there_is():
    named = all_methods()
    assert set(METHODS) <= set(named)
    assert {"ntk", "dynamic", "linear", "yarn", "longheads@dynamic", "longheads+corm"} <= set(named)
    assert {"selfextend+corm", "dca+corm"} <= set(named)
    assert len({split_method(name) for name in named}) == len(named)


def test_jobs_are_the_product():
    table = {"methods": ["full", "linear"], "kv": ["f16", "q8_0/f16"], "lengths": [100, 1024], "tasks": [PASSKEY]}
    jobs = make(table | {"seed": 3, "llama": {"n_ubatch": 64}}).cells()
    found = [(job.length, job.type_k, job.type_v, job.rope, job.seed) for job in jobs]
    types = (("f16", "f16"), ("q8_0", "f16"))
    assert found == [(n, k, v, rope, 3) for n in (100, 1024) for k, v in types for rope in ("", "linear")]
    assert [job.options.get("rope_freq_scale") for job in jobs] == [None, 0.5] * 4
    assert all(job.options["n_ubatch"] == 64 for job in jobs)


def test_settings_are_rows_of_every_task_without_methods_of_its_own():
    settings = [
        {"methods": "full", "kv": ["f16", "q4_0"]},
        {"methods": "longheads", "kv": "q8_0", "llama": {"n_ubatch": 32}},
        {"methods": "kvzip", "compress": 0.35},
    ]
    tasks = [
        {"kind": "passkey", "tests": 1, "reuse": True},
        {"kind": "recall", "methods": "window"},
        {"kind": "ruler", "name": "vt", "settings": settings[:1]},
    ]
    matrix = make({"lengths": [300], "llama": {"n_batch": 64}, "settings": settings, "tasks": tasks})
    rows = [(job.task.name, job.method.partition(",")[0], job.type_k, job.compress) for job in matrix.cells()]
    full, others = [("full", "f16", 1), ("full", "q4_0", 1)], [("longheads", "q8_0", 1), ("kvzip", "f16", 0.35)]
    assert rows == [
        *(("passkey", *row) for row in full + others),
        ("recall", "window", "f16", 1),
        *(("vt", *row) for row in full),
    ]
    options = [{"verbose": False, "n_batch": 64} | ({"n_ubatch": 32} if row[1] == "longheads" else {}) for row in rows]
    assert [job.options for job in matrix.cells()] == options
    with pytest.raises(ValueError, match="a setting has no 'chat'; available: methods, kv, compress, llama"):
        make({"lengths": [300], "settings": [{"chat": True}], "tasks": [PASSKEY]})


def test_files_are_named_from_the_folder_of_the_toml(tmp_path):
    (tmp_path / "m.toml").write_text(
        'model = "a.gguf"\nlengths = [128]\n[[tasks]]\nkind = "perplexity"\nfile = "a.txt"\n'
        '[[tasks]]\nkind = "needle"\npasskey = true\nlengths = [300]\ndepth_percents = [0, 50]\nhaystack = "b.txt"\n'
        '[[tasks]]\nkind = "passkey"\nhaystack = "sentences"\n'
    )
    matrix = make(read(str(tmp_path / "m.toml")))
    text, needle, passkey = matrix.tasks
    assert matrix.models == (str(tmp_path / "a.gguf"),)
    assert (text.task.file, text.lengths) == (str(tmp_path / "a.txt"), (128,))
    assert isinstance(needle.task, Needle)
    assert (needle.task.haystack, passkey.task.haystack) == (str(tmp_path / "b.txt"), "sentences")
    assert (needle.task.scorer, needle.task.depth_percents, needle.lengths) == ("match", (0, 50), (300,))


def test_a_task_may_have_several_files(tmp_path):
    (tmp_path / "m.toml").write_text('lengths = [128]\n[[tasks]]\nkind = "perplexity"\nfile = ["a.txt", "b/c.txt"]\n')
    (wanted,) = make(read(str(tmp_path / "m.toml"))).tasks
    assert wanted.task.file == (str(tmp_path / "a.txt"), str(tmp_path / "b" / "c.txt"))


def test_texts_of_the_command_line_replace_those_of_the_file(tmp_path):
    from pylongctx.eval.matrix import with_texts

    tasks = [
        {"kind": "perplexity", "file": "a.txt"},
        {"kind": "recall", "haystack": "a.txt"},
        {"kind": "needle", "haystack": "synthetic"},
        {"kind": "passkey"},
    ]
    found = make({"lengths": 300, "tasks": with_texts(tasks, ["b.txt", "c.txt"])}).tasks
    assert found[0].task.file == ("b.txt", "c.txt")
    assert [wanted.task.haystack for wanted in found[1:]] == ["b.txt", "synthetic", "sentences"]


def test_the_plan_for_real_models_can_be_made(tmp_path):
    need("eval", "wonderwords")
    cells = make(read(str(REPORT.with_name("real.toml"))) | {"lengths": [4096]}).cells()
    found = {cell.task.name for cell in cells}
    assert found >= {"recall", "recall-3-decoys", "recall-names", "recall-paraphrased", "kld", "vt", "cwe"}
    for cell in cells:
        if cell.method == "full" and cell.type_k == "f16" and cell.task.name not in NAMES:
            assert make_samples(cell)


def test_a_task_may_have_no_chat_template_in_a_plan_of_chats():
    table = {"chat": True, "methods": "full", "lengths": [64], "tasks": [PASSKEY, {"kind": "recall", "chat": False}]}
    assert [cell.chat for cell in make(table).cells()] == [True, False]
    with pytest.raises(ValueError, match="two tasks are 'passkey' at the same length"):
        make(table | {"tasks": [PASSKEY, PASSKEY | {"chat": False, "methods": "corm"}]})


def test_names_may_have_files_of_their_own(tmp_path):
    (tmp_path / "m.toml").write_text(
        'lengths = [512]\nmethods = "full"\n[[tasks]]\nkind = "ruler"\nname = ["vt", "qa_1", "qa_2"]\n'
        'data = {qa_1 = "squad.json", qa_2 = "hotpot.json"}\n'
    )
    tasks = [wanted.task for wanted in make(read(str(tmp_path / "m.toml"))).tasks]
    files = {"vt": None, "qa_1": str(tmp_path / "squad.json"), "qa_2": str(tmp_path / "hotpot.json")}
    assert {task.name: task.data for task in tasks} == files


def test_several_names_are_several_tasks():
    tasks = make({"lengths": [512], "tasks": [{"kind": "ruler", "name": ["vt", "niah_single_1"], "tests": 2}]}).tasks
    assert [(wanted.task.name, wanted.task.tests) for wanted in tasks] == [("vt", 2), ("niah_single_1", 2)]


def test_a_task_has_its_own_methods():
    own = {"kind": "perplexity", "file": "a.txt", "methods": ["window", "longheads@ntk", "window"]}
    jobs = make({"methods": ["full"], "lengths": 700, "tasks": [own, PASSKEY]}).cells()
    assert [(job.task.name, job.method.split(",")[0], job.rope) for job in jobs] == [
        ("perplexity", "window", ""),
        ("perplexity", "longheads", "ntk"),
        ("passkey", "full", ""),
    ]


def test_a_task_has_its_own_kv_types():
    table = {
        "methods": "full",
        "kv": ["f16", "q4_0"],
        "lengths": 64,
        "tasks": [PASSKEY, {"kind": "kld", "file": "a.txt", "kv": "q8_0/f16"}],
    }
    jobs = make(table).cells()
    types = [(job.task.name, job.type_k, job.type_v) for job in jobs]
    assert types == [("passkey", "f16", "f16"), ("passkey", "q4_0", "q4_0"), ("kld", "q8_0", "f16")]
    with pytest.raises(ValueError, match="'passkey' has no KV types"):
        make({"lengths": 64, "tasks": [PASSKEY | {"kv": []}]})


def test_the_report_s_matrix_has_every_method_and_texts_of_every_length():
    need("eval", "wonderwords")
    jobs = make(read(str(REPORT))).cells()
    assert {(job.method, job.rope) for job in jobs} >= {split_method(name) for name in all_methods()}
    shortest = {}
    for job in sorted(jobs, key=lambda job: -job.length):
        shortest[job.task] = job
    for job in shortest.values():
        assert make_samples(job)


def test_a_task_may_have_all_methods():
    (wanted,) = make({"methods": "full", "lengths": 64, "tasks": [PASSKEY | {"methods": "all"}]}).tasks
    assert list(wanted.methods) == all_methods()


def test_a_method_that_is_named_twice_is_run_once():
    jobs = make({"methods": ["ntk", "full@ntk", "full"], "lengths": 700, "tasks": [PASSKEY]}).cells()
    assert [job.rope for job in jobs] == ["ntk", ""]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "there is no task"),
        ({"method": "full"}, "a matrix has no 'method'; available: model, methods"),
        ({"methods": ["fuII"]}, "unknown method 'fuII'"),
        ({"methods": ["full@ntq"]}, "unknown rope scaling 'ntq'"),
        ({"lengths": 64, "tasks": [PASSKEY | {"methods": ["fuII"]}]}, "unknown method 'fuII'"),
        ({"lengths": 64, "tasks": [PASSKEY | {"methods": []}]}, "'passkey' has no methods"),
        ({"methods": ["fuII"], "tasks": [PASSKEY | {"methods": "full"}]}, "unknown method 'fuII'"),
        ({"tasks": [{"kind": "poem"}]}, "a task has no kind 'poem'"),
        (
            {"lengths": 64, "tasks": [{"kind": "ruler", "name": "vt", "data": {"qa_1": "a.json"}}]},
            "a task of kind 'ruler' has data for 'qa_1', which is not one of its names",
        ),
        ({"lengths": 64, "tasks": [{"kind": "ruler", "name": []}]}, "there is no task"),
        ({"tasks": [PASSKEY]}, "'passkey' has no lengths"),
        ({"lengths": 64, "tasks": [PASSKEY | {"haystack": ["a", "b"]}]}, "'passkey' has one haystack, not a list"),
        ({"lengths": 64, "tasks": [PASSKEY, PASSKEY | {"tests": 2}]}, "two tasks are 'passkey' at the same length"),
        (
            {"lengths": 64, "tasks": [PASSKEY | {"methods": m} for m in ("full", "corm", ["tova", "corm"])]},
            "two tasks are 'passkey' at the same length",
        ),
        ({"lengths": 64, "tasks": [PASSKEY | {"test": 1}]}, "a task of kind 'passkey' has no 'test'; available: style"),
    ],
)
def test_errors_name_what_there_is(table, message):
    with pytest.raises(ValueError, match=message):
        make(table)


# ---- the command ----

OPTIONS = ["--method", "full", "--method", "longheads@dynamic", "--lengths", "256,700", "-t", "1"]


def test_a_run_is_continued_and_shown(tmp_path, capsys):
    command = ["matrix", *OPTIONS, "--out", str(tmp_path)]
    assert main([*command, "--task", "passkey,tests=1"]) == 0
    first = lines(tmp_path)
    assert main([*command, "--task", "passkey,tests=2"]) == 0
    found = lines(tmp_path)
    assert found[: len(first)] == first
    assert len(found) == len({record["digest"] for record in found}) == 8
    assert {(record["asked"].split(",")[0], record["rope"], record["length"]) for record in found} == {
        *(("full", "", n) for n in (256, 700)),
        *(("longheads", "dynamic", n) for n in (256, 700)),
    }
    for record in found:
        assert record["kv_bytes"] <= record["kv_peak_bytes"] < record["peak_rss"]
        assert min(record["prompt_per_second"], record["token_seconds"]) > 0
    assert [bool(record["options"].get("rope_freq_base")) for record in found] == [
        record["rope"] == "dynamic" and record["length"] > 512 for record in found
    ]
    before = (tmp_path / "records.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*command, "--task", "passkey,tests=2"]) == 0
    assert (tmp_path / "records.jsonl").read_bytes() == before
    assert "longheads@dynamic" in capsys.readouterr().out
    assert json.loads((tmp_path / "about.json").read_text())["models"] == {found[0]["model"]: 512}


def test_what_is_refused_is_said_and_the_rest_is_run(tmp_path, capsys):
    options = ["--method", "longheads,window=1024", "--method", "full", "--lengths", "700", "--task", "passkey,tests=1"]
    assert main(["matrix", *options, "--out", str(tmp_path)]) == 1
    assert [record["asked"] for record in lines(tmp_path)] == ["full"]
    (failed,) = json.loads((tmp_path / "failed.json").read_text())
    assert failed["method"] == "longheads,window=1024"
    said = capsys.readouterr()
    assert failed["reason"] in " ".join(said.out.split())
    assert "passkey: longheads,window=1024 at 700: failed\n" in said.err
    assert "passkey: full at 700: " in said.err


def test_a_length_that_is_too_short_fails_alone(tmp_path, capsys):
    options = ["--method", "full", "--method", "window", "--lengths", "10,300", "--task", "passkey,tests=1"]
    assert main(["matrix", *options, "--out", str(tmp_path)]) == 1
    assert [(record["asked"], record["length"]) for record in lines(tmp_path)] == [
        ("full", 300),
        ("window,n_sink=4", 300),
    ]
    failed = json.loads((tmp_path / "failed.json").read_text())
    assert [(cell["length"], cell["method"]) for cell in failed] == [(10, "full"), (10, "window")]
    assert all("length 10 is too short" in cell["reason"] for cell in failed)
    assert "failed: passkey at 10: length 10 is too short" in capsys.readouterr().err


def test_methods_without_chunks_are_refused_and_the_others_are_shown(tmp_path, capsys):
    options = ["--method", "full", "--method", "longheads,window=64", "--lengths", "300", "-t", "1"]
    assert main(["matrix", *options, "--task", "chunks", "--out", str(tmp_path)]) == 1
    assert [record["asked"].split(",")[0] for record in lines(tmp_path)] == ["longheads"]
    (failed,) = json.loads((tmp_path / "failed.json").read_text())
    assert (failed["method"], failed["task"]) == ("full", "chunks")
    assert "give the task its own methods" in failed["reason"]
    assert "Chunks that are read, 300 tokens" in " ".join(capsys.readouterr().out.split())


def test_a_task_of_options_is_like_one_of_a_file():
    from pylongctx.cli.matrix import _task

    entry = _task("passkey,style=llama.cpp,tests=3,methods=ntk")
    (wanted,) = make({"lengths": [400], "tasks": [entry]}).tasks
    assert wanted.task == Passkey(style="llama.cpp", tests=3)
    assert wanted.methods == ("ntk",)


def test_one_task_has_rows_of_several_entries():
    shared = {**PASSKEY, "reuse": True}
    table = {
        "lengths": 64,
        "tasks": [
            shared | {"methods": ["full", "longheads"]},
            shared | {"methods": "full", "kv": "q8_0"},
            shared | {"methods": "kvzip", "compress": 0.3},
        ],
    }
    cells = make(table).cells()
    assert [label(cell.facts) for cell in cells] == ["full", "longheads", "full q8_0", "kvzip 30%"]
    assert [cell.compress for cell in cells] == [1, 1, 1, 0.3]
    assert all(cell.reuse for cell in cells)


def test_an_estimate_counts_what_is_left(tmp_path, capsys):
    (tmp_path / "plan.toml").write_text(
        'methods = ["full", "window"]\nlengths = [128]\n[[tasks]]\nkind = "passkey"\ntests = 3\n'
        '[[tasks]]\nkind = "longeval"\ndata = "lines.jsonl"\nlengths = [300]\nmethods = ["full"]\n'
        '[[tasks]]\nkind = "passkey"\nstyle = "llama.cpp"\ntests = 1\n'
        'lengths = [200]\nmethods = ["kvzip"]\nreuse = true\ncompress = 0.5\n'
    )
    (tmp_path / "data").mkdir()
    prompt = "Remember.\\nline a-b: REGISTER_CONTENT is <5>\\nWhat is in line a-b?"
    case = f'{{"prompt": "{prompt}", "correct_line": "line a-b: REGISTER_CONTENT is <5>\\n", "expected_number": 5}}\n'
    (tmp_path / "data" / "lines.jsonl").write_text(case)
    command = ["matrix", str(tmp_path / "plan.toml"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert main([*command, "--estimate"]) == 0
    assert "8 of 8 samples are left, with at most 1568 tokens to prefill: about 0.0 hours" in capsys.readouterr().out
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--estimate"]) == 0
    assert capsys.readouterr().out.strip().endswith("0 of 8 samples are left")


def test_llama_cpps_own_cache_is_a_row():
    (cell,) = make({"methods": ["none"], "lengths": [128], "tasks": [PASSKEY]}).cells()
    assert cell.facts["asked"] == "none"
    assert [record["method"] for record in run(cell, make_samples(cell)[:1])] == ["none"]
