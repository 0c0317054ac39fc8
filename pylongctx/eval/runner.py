"""Run tasks: a cell of the table has one record for each sample, and a file of records says what is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from pylongctx import _arguments as arguments
from pylongctx.eval.peak import peak_memory, reset_peak_memory
from pylongctx.eval.task import (
    REPLAY,
    Chat,
    Evaluate,
    ModelVocabulary,
    OpenLlama,
    Question,
    Record,
    Sample,
    Task,
    by_text,
    chat_of,
    why_no_compression,
)
from pylongctx.llama import Llama
from pylongctx.methods import NONE, named
from pylongctx.methods.base import check_share
from pylongctx.planning import Plan


@dataclass(frozen=True)
class Cell:
    """One method of one model on the samples of one task and length; can be pickled.

    Attributes
    ----------
    model : str
        GGUF file.
    method : str
        Spec string, or ``none``; automatic choices are made for the context window of the cell.
    chat : bool or Chat
        Surround prompts by the model's chat template; True is ``Chat()``, without reasoning.
    options : dict
        Other arguments of Llama.
    rope : str
        Name of the RoPE scaling that is part of the options, "" for the model's own.
    reuse : bool
        Read the text that several questions share once, instead of each question from an empty cache.
    compress : float
        With ``reuse``: share of a text's rows that ``Llama.compress`` leaves before the questions, 1 for no
        compression; for a method with the rule kvzip. With snapkv it is the share of each whole prompt.

    Examples
    --------
    >>> from pylongctx.eval.passkey import Passkey
    >>> cell = Cell("model.gguf", "longheads", Passkey(tests=2), length=300)
    >>> len(make_samples(cell))
    2
    """

    model: str
    method: str
    task: Task
    length: int
    seed: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    chat: bool | Chat = False
    options: Mapping[str, Any] = field(default_factory=dict)
    rope: str = ""
    reuse: bool = False
    compress: float = 1.0

    def __post_init__(self) -> None:
        check_share("compress", self.compress)

    @property
    def facts(self) -> Record:
        """The fields that all records of the cell share."""
        return {
            "task": self.task.name,
            "model": Path(self.model).name,
            "asked": str(named(self.method) or NONE),
            "rope": self.rope,
            "options": {name: value for name, value in self.options.items() if name not in UNNAMED},
            "type_k": self.type_k,
            "type_v": self.type_v,
            **(chat.facts if (chat := chat_of(self.chat)) is not None else {"chat": False}),
            "length": self.length,
            "seed": self.seed,
            **({"reuse": True} if self.reuse else {}),
            **({"compress": self.compress} if self.compress < 1 else {}),
        }

    @property
    def place(self) -> Record:
        """Where K and V are, if not where the layers are; answers do not depend on it."""
        place = self.options.get("kv_offload")
        return {"kv_offload": place} if isinstance(place, str) else {}

    @property
    def reads_once(self) -> bool:
        """Whether the text that several samples share is evaluated once, when they run one after the other."""
        return self.reuse or self.task.reads_once

    def refusal(self) -> str:
        """Return why the cell cannot be measured and the way out, "" when it can."""
        method = named(self.method)
        if self.reuse and not isinstance(self.task, Question):
            return f"the task {self.task.name!r} asks no questions that could share a text: leave reuse out"
        if self.reuse and self.options.get("n_parallel", 1) > 1:
            return "samples that share a text are answered one by one: leave n_parallel or reuse out"
        if self.compress < 1 and not self.reuse:
            return "a text is compressed for the questions that share it: compress needs reuse"
        if self.compress < 1 and (refusal := why_no_compression(method)):
            return refusal
        return self.task.refusal(method)

    def open(self, n_ctx: int, method: str | None = None) -> Llama:
        """Open the model, with another method and f16 KV where one is named."""
        types = {"type_k": self.type_k, "type_v": self.type_v} if method is None else {"type_k": "f16", "type_v": "f16"}
        chosen = self.method if method is None else method
        return Llama(self.model, **{"verbose": False, **self.options, **types}, method=named(chosen), n_ctx=n_ctx)


# arguments of Llama that change how fast an answer comes, not which
UNNAMED = {
    *("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "n_gpu_layers", "verbose", "rpc_servers", "tensor_split"),
    *("split_mode", "main_gpu", "kv_offload", "kv_offload_mib", "use_mmap", "use_mlock", "progress_callback"),
    *("kv_offload_path", "preflight", "n_parallel"),
}


def digest(cell: Cell, sample: Sample) -> str:
    """Return a name of a sample in a cell that changes with everything an answer depends on, but the model's bytes."""
    parts = [cell.facts, cell.task.settings, sample.id, sample.prefix, sample.answers, sample.max_tokens, sample.stop]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    name.update(sample.prompt.encode() if isinstance(sample.prompt, str) else sample.prompt.tobytes())
    return name.hexdigest()[:16]


def make_samples(cell: Cell) -> list[Sample]:
    """Return the samples of a cell; they are the same for every method.

    Examples
    --------
    >>> from pylongctx.eval.passkey import Passkey
    >>> [sample.id for sample in make_samples(Cell("model.gguf", "full", Passkey(tests=2), length=300))]
    ['fill-300-0-0', 'fill-300-0-1']
    """
    with Llama(cell.model, vocab_only=True, verbose=False) as llm:
        return cell.task.samples(ModelVocabulary(llm, cell.chat), cell.length, cell.seed)


def run(cell: Cell, samples: Sequence[Sample] | None = None, done: Container[str] = ()) -> Iterator[Record]:
    """Run the samples of a cell and yield their records.

    They hold the peak memory of this process since the cell began, where the system can tell that.

    Parameters
    ----------
    samples : sequence of Sample or None
        What ``make_samples(cell)`` returned, all of them: the context window follows from it. None: make them.
    done : container of str
        Digests of samples to leave out; nothing is loaded when all are done.

    Raises
    ------
    ValueError
        When the task cannot measure the method, before a model is opened, or the method does not fit the model.

    Examples
    --------
    >>> from pylongctx.eval.passkey import Passkey
    >>> records = list(run(Cell("model.gguf", "longheads", Passkey(tests=1), length=1024)))
    >>> records[0]["strict"]
    True
    """
    samples = make_samples(cell) if samples is None else samples
    names = {sample.id: digest(cell, sample) for sample in samples}
    todo = [sample for sample in samples if names[sample.id] not in done]
    if not todo:
        return
    if refusal := cell.refusal():
        raise ValueError(refusal)
    if cell.reads_once:
        todo = [sample for group in by_text(todo) for sample in group]
    is_reset = reset_peak_memory()
    with _opened(cell, partial(_open, cell, samples)) as evaluate:
        for sample, measured in zip(todo, evaluate(todo), strict=True):
            facts = {"digest": names[sample.id], "id": sample.id, **cell.facts, **cell.place}
            yield facts | measured | ({"peak_rss": peak_memory()} if is_reset else {})


def context_window(cell: Cell, samples: Sequence[Sample]) -> int:
    """Return the context window that a cell needs, for all its samples."""
    with Llama(cell.model, vocab_only=True, verbose=False) as llm:
        n_ctx = cell.task.n_ctx(ModelVocabulary(llm, cell.chat), samples, cell.length)
    return n_ctx + (REPLAY if cell.compress < 1 else 0)


def _opened(cell: Cell, open_llama: OpenLlama) -> AbstractContextManager[Evaluate]:
    if cell.reuse and isinstance(cell.task, Question):
        return cell.task.opened_shared(open_llama, cell.chat, cell.compress)
    return cell.task.opened(open_llama, cell.chat)


def _open(cell: Cell, samples: Sequence[Sample], method: str | None) -> Llama:
    return cell.open(context_window(cell, samples), method)


class Results:
    """Records in a file of JSON lines, or in memory only.

    Parameters
    ----------
    path : str or None
        A file that is continued; a last line that was cut off by a crash is dropped.

    Examples
    --------
    >>> from pylongctx.eval.passkey import Passkey
    >>> cell, results = Cell("model.gguf", "full", Passkey(tests=1), length=300), Results("records.jsonl")
    >>> for record in run(cell, done=results.records):
    ...     results.add(record)
    >>> len(Results("records.jsonl").records)
    1
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self.records: dict[str, Record] = {}
        if self._path is not None and self._path.exists():
            self._load(self._path)

    def _load(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].decode().splitlines(), 1):
            try:
                record = json.loads(line)
                self.records[record["digest"]] = record
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number}, is not a record of an evaluation; name another file"
                ) from None
        if whole < len(data):
            with path.open("r+b") as file:
                file.truncate(whole)

    def add(self, record: Record) -> None:
        """Keep a record, and append it to the file at once."""
        self.records[record["digest"]] = record
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def of(self, cell: Cell, samples: Iterable[Sample]) -> list[Record]:
        """Return the records of a cell's samples that are there, in the order of the samples."""
        names = (digest(cell, sample) for sample in samples)
        return [self.records[name] for name in names if name in self.records]


# ---- the plan of a model that is not opened ----


def plan_of(path: str, method: str, threads: tuple[int, int], given: Mapping[str, Any]) -> Plan:
    """Return the plan of a model with a method and some arguments of Llama; the others have their defaults.

    Raises
    ------
    InvalidInput
        When the library refuses the model.
    """
    every = {name: part.default for name, part in signature(Llama).parameters.items()} | {"model_path": path, **given}
    settings = arguments.context_settings(every, threads)
    return Plan(path, arguments.model_settings(every), settings, method)
