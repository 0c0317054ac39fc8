"""BAMBOO (arXiv 2309.13345): questions on papers and code that needs a library's documentation, from the user's files.

Prompts and scores are those of https://github.com/RUCAIBox/BAMBOO. What is too long loses its end: of an article, or of
the documentation before the code.
"""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pylongctx.eval.files import Kind, published, read_rows, stem
from pylongctx.eval.fitting import Make, fitted
from pylongctx.eval.scorers import first_letter, same_code
from pylongctx.eval.task import Answer, FileQuestion, Record, Sample, Vocabulary

MIB = 1 << 20
# reads the code and its limits, applies them, and tells at the end that nothing was raised
RUNNER = """
import json, resource, sys
given = json.load(sys.stdin)
for name, value in given["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
exec(compile(given["code"], "answer", "exec"), {"__name__": "answer"})
sys.__stdout__.write(given["end"])
"""


def run_limited(code: str, seconds: float = 10.0, memory_mib: int = 4096) -> str:
    """Run code to its end; return "" when it came there, otherwise what stopped it.

    The process is isolated from the environment and from user packages (``python -I``), works in an empty folder that
    is removed, and has limits of time, memory and file sizes (1 MiB). One that it started and that still runs counts as
    too long, and is ended. The network is not closed, and files that the user may read can be read: run it where that
    does no harm.

    Raises
    ------
    OSError
        When the system has no limits for processes, as Windows.

    Examples
    --------
    >>> run_limited("x = 1")
    ''
    >>> run_limited("assert 1 == 2")
    'AssertionError'
    """
    if os.name != "posix":
        raise OSError("code of models runs with the limits of a Unix system only: leave execute out")
    limits = {"RLIMIT_CPU": int(seconds) + 1, "RLIMIT_AS": memory_mib * MIB, "RLIMIT_FSIZE": MIB, "RLIMIT_CORE": 0}
    end = secrets.token_hex(16)
    given = json.dumps({"code": code, "limits": limits, "end": end}).encode()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HOME": folder, "PATH": os.defpath}
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it took more than {seconds:g} seconds"
        finally:
            _end(process)
    if out.endswith(end.encode()):
        return ""
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"it ended early with status {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# ---- the task ----

HINT = "--data is a file of BAMBOO, such as paperqa_16k.jsonl or private_eval_16k.jsonl"
REPOSITORY = "repository is the folder of https://github.com/RUCAIBox/BAMBOO"
END = "# [end]"  # of the documentation
FIELDS: dict[str, dict[str, Kind]] = {
    "paperqa": {"content": str, "question": str, "options": list, "answer": str},
    "private_eval": {"task_id": str, "prompt": str, "entry_point": str, "canonical_solution": list, "test": str},
}
TABLES = {"NumpyEval": "numpy_keywords", "PandasEval": "pandas_keywords", "TorchDataEval": "torchdata_keywords"}
PACKAGES = {"NumpyEval": "numpy", "PandasEval": "pandas", "TorchDataEval": "torchdata"}
FENCE = re.compile(r"^```\w*$", re.MULTILINE)


@dataclass(frozen=True)
class Bamboo(FileQuestion):
    """Answer questions about papers with a letter, or complete code.

    Attributes
    ----------
    data : str
        A file of BAMBOO; its name begins with paperqa or private_eval.
    library : str
        Of private_eval: only the tasks of NumpyEval, PandasEval or TorchDataEval, "" for all.
    execute : bool
        Of private_eval: run each answer with the tests of the file, which needs ``repository`` and the libraries. It is
        the code of a model, see ``run_limited``. Otherwise an answer counts when it is a published solution, spaces
        aside, which right answers in other words are not.
    repository : str
        Folder of BAMBOO's repository, whose private_eval/execution.py says what the renamed names stand for.

    Examples
    --------
    >>> Bamboo("paperqa_16k.jsonl").kind
    'paperqa'
    """

    library: str = ""
    execute: bool = False
    repository: str = ""

    def __post_init__(self) -> None:
        if self.library not in ("", *TABLES):
            raise ValueError(f"library is one of {', '.join(TABLES)}, not {self.library!r}")
        if self.kind not in published("bamboo"):
            raise ValueError(f"{self.data}: the name must begin with one of {', '.join(published('bamboo'))}; {HINT}")
        if (self.execute or self.library) and self.kind != "private_eval":
            raise ValueError(f"{self.kind} has no code to run: leave execute and library out")
        if self.execute and not self.repository:
            raise ValueError("execute needs repository, the folder of https://github.com/RUCAIBox/BAMBOO")

    @property
    def name(self) -> str:
        """The name of the file, and what is run of it."""
        return stem(self.data) + f"-{self.library}" * bool(self.library) + "-executed" * self.execute

    @property
    def kind(self) -> str:
        """The kind of questions: paperqa or private_eval."""
        return re.sub(r"_\d+k$", "", stem(self.data))

    @property
    def settings(self) -> Record:
        """Whether answers are run."""
        return {"execute": True} if self.execute else {}

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per question; what is too long loses its end. The seed changes nothing."""
        # line 26 of the published paperqa_16k.jsonl is not JSON
        rows = read_rows(self.data, FIELDS[self.kind], HINT, skip_broken=self.kind == "paperqa")
        rows = [row for row in rows if row.get("task_id", "").startswith(self.library)]
        if self.execute:
            check_packages([row["task_id"] for row in rows])
            programs(self.data, self.repository)  # what is missing there is an error before a model is opened
        make = self._question if self.kind == "paperqa" else self._code
        asked = [make(row, f"{length}-{i}") for i, row in enumerate(rows)]
        return fitted(vocabulary, asked, length, f"{self.name}, length {length}", self.tests)

    def _question(self, row: dict[str, Any], name: str) -> tuple[str, Make]:
        fields = {"question": row["question"], "options": "\t".join(row["options"])}
        return row["content"], partial(self._sample, name, fields, (row["answer"],), {})

    def _code(self, row: dict[str, Any], name: str) -> tuple[str, Make]:
        documents, end, code = row["prompt"].partition(END)
        answers, facts = tuple(row["canonical_solution"]), {"task_id": row["task_id"]}
        return documents, partial(self._sample, name, {"question": end + code}, answers, facts)

    def _sample(
        self, name: str, fields: dict[str, str], answers: tuple[str, ...], facts: dict[str, Any], document: str
    ) -> Sample:
        task = published("bamboo")[self.kind]
        before, after = task["prompt"].split("{content}")
        prompt, n = before + document + after.format(**fields), self.max_tokens or task["max_tokens"]
        return Sample(name, prompt, "", answers, n, facts=facts, shared=len(before + document))

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return whether the first letter is right; of code whether it is a published solution or passes its tests."""
        if self.kind == "paperqa":
            return {"score": first_letter(answer.text, sample.answers)}
        code = completion(answer.text)
        exact = same_code(code, sample.answers)
        if not self.execute:
            return {"score": exact}
        program = programs(self.data, self.repository)[sample.facts["task_id"]]
        original = renamed(code, program.names)
        passed = original is not None and not run_limited(program.before + original + program.after)
        return {"score": float(passed), "exact": exact}


@dataclass(frozen=True)
class ProgramParts:
    """Code that runs before and after a completion, and the names that BAMBOO replaced: old by new."""

    before: str
    after: str
    names: dict[str, str]


@cache
def programs(data: str, repository: str) -> dict[str, ProgramParts]:
    """Return the programs of a file's tasks, with the prompts that BAMBOO had before it replaced names.

    Raises
    ------
    ValueError
        When the repository lacks a file, or a task of the data.
    """
    folder = Path(repository)
    tables = read_tables(folder / "private_eval" / "execution.py")
    file = folder / "datasets" / "real_all_eval_v3.jsonl.gz"
    plain = {row["task_id"]: row["prompt"] for row in read_rows(file, {"task_id": str, "prompt": str}, REPOSITORY)}
    found = {}
    for row in read_rows(data, FIELDS["private_eval"], HINT):
        task, asked = row["task_id"], "" if row["entry_point"] == "none" else row["entry_point"]
        if task not in plain:
            raise ValueError(f"{file} has no task {task!r}, {data} has")
        found[task] = ProgramParts(plain[task], f"\n{row['test']}\ncheck({asked})\n", tables[family(task)])
    return found


def family(task: str) -> str:
    """Return the family of a task: NumpyEval of NumpyEval/1."""
    return task.split("/")[0]


def check_packages(tasks: Sequence[str]) -> None:
    """Raise ValueError when the tests of tasks import a package that is not installed."""
    wanted = sorted({PACKAGES[family(task)] for task in tasks})
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise ValueError(f"the tests need {' and '.join(missing)}: pip install {' '.join(missing)}, or name a library")


def completion(text: str) -> str:
    """Return the code of an answer: without Markdown fences, and up to the first empty line.

    Examples
    --------
    >>> completion("```python\\nbn.zeros(3)\\n```")
    'bn.zeros(3)'
    """
    return FENCE.sub("", text).strip("\n").split("\n\n")[0].rstrip()


def renamed(code: str, names: dict[str, str]) -> str | None:
    """Return code with a library's own names in place of BAMBOO's; None where it has them already, as published.

    Examples
    --------
    >>> renamed("bn.numset([1])", {"np": "bn", "array": "numset"})
    'np.array([1])'
    >>> renamed("np.numset([1])", {"np": "bn", "array": "numset"})
    """
    if set(re.findall(r"\b[a-zA-Z_]\w*\b", code)) & (names.keys() - set(names.values())):
        return None
    for old, new in names.items():
        code = code.replace(new, old)
    return code


def read_tables(path: Path) -> dict[str, dict[str, str]]:
    """Return the names that BAMBOO replaced, by the family of tasks, from its execution.py, which is not run.

    Raises
    ------
    ValueError
        When there is no such file, or it has no such tables.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; {REPOSITORY}")
    assigned = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    values = {t.id: node.value for node in assigned for t in node.targets if isinstance(t, ast.Name)}
    if missing := [name for name in TABLES.values() if name not in values]:
        raise ValueError(f"{path} has no {missing[0]}")
    return {family: ast.literal_eval(values[name]) for family, name in TABLES.items()}
