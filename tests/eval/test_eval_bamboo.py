"""BAMBOO: letters, completions against published solutions, and tests that run in a process with limits."""

import gzip
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from vocabulary import Words, total

from pylongctx.eval import bamboo
from pylongctx.eval.bamboo import Bamboo, completion, read_tables, renamed, run_limited
from pylongctx.eval.files import published
from pylongctx.eval.task import Answer

PAPER = " ".join(f"fact{i}" for i in range(600))
QUESTION = {"content": PAPER, "question": "Which?", "options": ["A. This", "B. That"], "answer": "B"}
DOCUMENTS = "# [start]\n# # numset(object): Makes a numset.\n" + "# # more(): Does more.\n" * 60
TASK = {
    "task_id": "NumpyEval/7",
    "prompt": DOCUMENTS + "# [end]\nimport beatnum as bn\n\nnumset = ",
    "entry_point": "none",
    "canonical_solution": ["bn.numset([1, 2])", "bn.numset((1, 2))"],
    "test": "def check():\n    assert array.tolist() == [1, 2]",
}
PLAIN = {"task_id": "NumpyEval/7", "prompt": "import numpy as np\n\narray = "}
CHILD = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
EXECUTION = """raise OSError("this file is read, not run")
pandas_keywords = {"df": "kf"}
torchdata_keywords = {"map": "mapping"}
numpy_keywords = {"array": "numset", "np": "bn", "numpy": "beatnum"}
"""


@pytest.fixture
def write(tmp_path):
    def write(name, *rows):
        (tmp_path / name).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "BAMBOO"
    (folder / "private_eval").mkdir(parents=True)
    (folder / "private_eval" / "execution.py").write_text(EXECUTION)
    (folder / "datasets").mkdir()
    (folder / "datasets" / "real_all_eval_v3.jsonl.gz").write_bytes(gzip.compress(json.dumps(PLAIN).encode()))
    return str(folder)


def score(task, said):
    return task.scores(task.samples(Words(), 3000, 0)[0], Answer(said, []))


def test_prompts_are_the_published_ones():
    digest = hashlib.sha256(json.dumps(published("bamboo"), sort_keys=True).encode()).hexdigest()
    assert digest == "d82ba20147789eaf79fad9af1148b4233e11ae93c4638a714d867d4a0770bb76"


def test_questions_on_a_paper_share_it(write):
    words = Words(n_bos=1)
    file = write("paperqa_16k.jsonl", QUESTION, QUESTION | {"content": "x"}, QUESTION | {"question": "Why is it so?"})
    found = Bamboo(file).samples(words, 400, 0)
    assert [sample.id for sample in found] == ["400-0", "400-2", "400-1"]
    assert found[0].prompt[: found[0].shared] == found[1].prompt[: found[1].shared]
    assert max(total(words, sample) for sample in found) <= 400
    assert found[0].prompt[: found[0].shared].split()[-1].startswith("fact")
    assert "```\n\nQuestion: Which?\nOptions: A. This\tB. That\n\nAnswer(Only give the" in found[0].prompt
    assert (found[0].answers, found[0].max_tokens) == (("B",), 32)


def test_a_line_that_is_not_json_is_left_out(write, caplog):
    broken = '{"content": "a "b"", "question": ""}'
    assert len(Bamboo(write("paperqa_4k.jsonl", QUESTION, broken, QUESTION)).samples(Words(), 400, 0)) == 2
    assert "paperqa_4k.jsonl, line 2 is left out" in caplog.text


@pytest.mark.parametrize(
    ("said", "expected"), [(" B", 1), ("b. That", 1), ("\nB", 1), ("[B]", 0), ("The answer is B", 0), ("", 0)]
)
def test_the_first_letter_counts(write, said, expected):
    assert score(Bamboo(write("paperqa_16k.jsonl", QUESTION)), said) == {"score": expected}


def test_documentation_is_cut_and_code_is_not(write):
    words = Words(n_bos=1)
    (sample,) = Bamboo(write("private_eval_16k.jsonl", TASK)).samples(words, 300, 0)
    assert total(words, sample) <= 300
    assert sample.prompt.endswith("# [end]\nimport beatnum as bn\n\nnumset = ")
    assert sample.prompt.count("Does more.") < 60
    assert sample.prompt[: sample.shared] in sample.prompt.split("# [end]")[0]


@pytest.mark.parametrize(
    ("said", "exact", "passed"),
    [
        ("bn.numset( [1,2] )", 1, 1),
        ("```python\nbn.numset([1, 2])\n```\nThis makes one.", 1, 1),
        ("bn.numset(range(1, 3))", 0, 1),
        ("bn.numset([2, 1])", 0, 0),
        ("np.array([1, 2])", 0, 0),  # names that the prompt did not give
        ("0; import sys; sys.exit(0)", 0, 0),
        ("", 0, 0),
    ],
)
def test_code_is_a_published_solution_or_passes_its_tests(write, repository, said, exact, passed):
    file = write("private_eval_16k.jsonl", TASK)
    assert score(Bamboo(file), said) == {"score": exact}
    assert score(Bamboo(file, execute=True, repository=repository), said) == {"score": passed, "exact": exact}


def test_a_function_is_called_by_its_tests(write, repository):
    (Path(repository) / "datasets" / "real_all_eval_v3.jsonl.gz").write_bytes(
        gzip.compress(json.dumps(PLAIN | {"prompt": "def first(array):\n"}).encode())
    )
    test = "def check(candidate):\n    assert candidate([3, 4]) == 3"
    task = TASK | {"entry_point": "first", "canonical_solution": ["    return numset[0]"], "test": test}
    measured = Bamboo(write("private_eval_16k.jsonl", task), execute=True, repository=repository)
    assert score(measured, "    return numset[0]") == {"score": 1, "exact": 1}
    assert score(measured, "    return numset[1]") == {"score": 0, "exact": 0}


def test_names_are_put_back():
    names = {"array": "numset", "np": "bn", "all": "total", "total": "whole"}
    assert renamed("bn.numset(total(whole))", names) == "np.array(all(total))"  # one after the other, as published
    assert renamed("np.numset([1])", names) is None
    assert completion("\n\n  f(x)\n  g(x)\n\nmore") == "  f(x)\n  g(x)"


def test_tables_are_read_and_not_run(repository):
    path = Path(repository) / "private_eval" / "execution.py"
    assert read_tables(path)["PandasEval"] == {"df": "kf"}
    path.write_text("pandas_keywords = {}")
    with pytest.raises(ValueError, match=r"execution.py has no numpy_keywords"):
        read_tables(path)


@pytest.mark.skipif(os.name != "posix", reason="limits of processes")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys\nassert sys.flags.isolated", ""),
        ("open('note.txt', 'w').write('x')\nassert open('note.txt').read() == 'x'", ""),
        ("while True: pass", "more than 1 seconds|status"),
        ("import time\ntime.sleep(60)", "more than 1 seconds"),
        ("x = bytearray(1 << 33)", "MemoryError"),
        ("open('note.txt', 'wb').write(b'x' * (2 << 20))", "File too large|status"),
        ("import os\nos._exit(0)", "status 0"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("import os\nassert os.environ.get('SECRET') is None", ""),
        (
            "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
            "more than 1 s",
        ),
    ],
)
def test_code_runs_with_limits(monkeypatch, code, reason):
    monkeypatch.setenv("SECRET", "x")
    seconds = 1.0 if "while" in code or "sleep" in code else 30.0
    found = run_limited(code, seconds, memory_mib=1024)
    if reason:
        assert any(part in found for part in reason.split("|"))
    else:
        assert found == ""


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("altqa_4k.jsonl", {}, "the name must begin with one of paperqa, private_eval; --data is a file of BAMBOO"),
        ("paperqa_4k.jsonl", {"execute": True}, "paperqa has no code to run: leave execute and library out"),
        ("private_eval_4k.jsonl", {"execute": True}, "execute needs repository, the folder of"),
        ("private_eval_4k.jsonl", {"library": "torch"}, "library is one of NumpyEval, PandasEval, TorchDataEval"),
    ],
)
def test_fields_that_do_not_fit_are_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        Bamboo(name, **fields)


def test_what_the_tests_need_is_said_before_a_model_is_opened(write, repository, monkeypatch):
    file = write("private_eval_16k.jsonl", TASK, TASK | {"task_id": "TorchDataEval/1"})
    executed = Bamboo(file, execute=True, repository=repository)
    monkeypatch.setitem(sys.modules, "torchdata", None)
    monkeypatch.setattr(bamboo, "find_spec", lambda name: None if name == "torchdata" else object())
    with pytest.raises(ValueError, match="the tests need torchdata: pip install torchdata, or name a library"):
        executed.samples(Words(), 3000, 0)
    monkeypatch.undo()
    monkeypatch.setattr(bamboo, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="has no task 'TorchDataEval/1'"):
        executed.samples(Words(), 3000, 0)
    assert len(Bamboo(file, library="TorchDataEval").samples(Words(), 3000, 0)) == 1
    with pytest.raises(ValueError, match=r"execution.py does not exist; repository is the folder"):
        Bamboo(file, execute=True, repository="nowhere").samples(Words(), 3000, 0)
