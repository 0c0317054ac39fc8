"""The tasks that have a name in ``pylongctx eval`` and in the plans of ``pylongctx matrix``.

The classes are loaded when one is asked for: the table alone imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pylongctx.eval.task import Task


class TaskEntry(NamedTuple):
    """A task that has a name.

    ``OWN_OPTIONS`` of ``pylongctx.cli.eval`` has its ``options``. Without them the class has the standard ones, which
    are ``data`` if it reads a file, ``tests`` for ``--limit``, and ``max_tokens`` for ``--predict``.
    """

    task: str  # its class as module:Class, a module of pylongctx.eval
    help: str
    data: str = ""  # what --data names; empty when the samples are made
    lengths: str = "4096"  # default of --lengths
    options: bool = False
    plans_only: bool = False  # only pylongctx matrix knows it


TASKS = {
    "passkey": TaskEntry("passkey:Passkey", "hide a number in a long text and ask for it", options=True),
    "needle": TaskEntry("needle:Needle", "find a sentence in a long text, by length and depth", options=True),
    "recall": TaskEntry("recall:Recall", "several questions on one text that is read once", options=True),
    "ruler": TaskEntry("ruler:Ruler", "RULER's 13 tasks", options=True),
    "longbench": TaskEntry("longbench:LongBench", "LongBench's 21 tasks, from its files", options=True),
    "leval": TaskEntry("leval:LEval", "L-Eval's closed-ended tasks", "a file of L-Eval, such as quality.jsonl"),
    "keyvalue": TaskEntry(
        "retrieval:KeyValue", "key-value retrieval of Lost in the Middle", "a file with keys and values"
    ),
    "longeval": TaskEntry(
        "retrieval:LongEval", "LongEval's line retrieval", "a file of LongEval, such as 200_lines.jsonl"
    ),
    "babilong": TaskEntry("babilong:BabiLong", "BABILong, facts in a novel", "a test file of bAbI: qa1, qa2 or qa5"),
    "bamboo": TaskEntry(
        "bamboo:Bamboo", "BAMBOO: papers, and code from documentation", "paperqa_16k or private_eval_16k"
    ),
    "locomo": TaskEntry("locomo:LoCoMo", "LoCoMo: questions on a chat over months", "locomo10.zip or a file of it"),
    "ask": TaskEntry("ask:Ask", "questions about whole files, as ask puts them", "questions.json", lengths="32768"),
    "toolcalls": TaskEntry("toolcalls:ToolCalls", "tool calls after a long text", lengths="2048,16384"),
    "perplexity": TaskEntry("perplexity:Perplexity", "how well a text is predicted", options=True),
    "kld": TaskEntry("perplexity:Divergence", "how far from full attention", plans_only=True),
    "chunks": TaskEntry("chunks:Chunks", "what every head reads", plans_only=True),
}


def task_class(name: str) -> type[Task]:
    """Return the class of a task."""
    module, _, cls = TASKS[name].task.partition(":")
    found: type[Task] = getattr(import_module(f"pylongctx.eval.{module}"), cls)
    return found
