"""Scores of full attention inside the trained context; tasks with low scores cannot compare methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pylongctx.eval.report.records import Evidence, grouped, has_score, kv_types, mean_score
from pylongctx.eval.task import Record
from pylongctx.methods import NONE, Full

MIN_ABILITY = 50.0  # percent right, below which a task measures the model rather than a method


@dataclass(frozen=True)
class Own:
    """The score of full attention at the longest length inside the trained context, in percent."""

    length: int
    percent: float

    @property
    def enough(self) -> bool:
        """True if the task can compare methods."""
        return self.percent >= MIN_ABILITY


def abilities(evidence: Evidence) -> dict[str, Own]:
    """Return the scores of full attention for each task that has them."""
    trained = evidence.trained(evidence.models[0]) or 0
    answered = [record for record in evidence.records if has_score(record)]
    inside = [record for record in answered if record["length"] <= trained and _is_plain(record)]
    return {task: _own(found) for task, found in grouped(inside, "task").items()}


def _is_plain(record: Record) -> bool:
    return record["asked"] in (Full.name, NONE) and not record.get("rope") and kv_types(record) == "f16"


def _own(records: Sequence[Record]) -> Own:
    by_length = grouped(records, "length")
    longest = max(by_length)
    return Own(longest, mean_score(by_length[longest]))


def remark(own: Mapping[str, Own], task: str) -> str:
    """Return a note for the table of a task that the model cannot do; "" for other tasks."""
    found = own.get(task)
    if found is None or found.enough:
        return ""
    return f"; the model cannot do this: full attention has {found.percent:.0f} % right at {found.length} tokens"
