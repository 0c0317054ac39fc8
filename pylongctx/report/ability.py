"""What a model can do by itself: full attention inside the trained context. A method cannot be told by the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pylongctx.eval.task import Record
from pylongctx.methods import NONE, Full
from pylongctx.report.records import Evidence, grouped, has_score, kv_types, mean_score

ENOUGH = 50.0  # percent right, below which a task tells more about the model than about a method


@dataclass(frozen=True)
class Own:
    """What full attention has right at the longest length inside the trained context, in percent."""

    length: int
    percent: float

    @property
    def enough(self) -> bool:
        """Whether methods can be compared by the task."""
        return self.percent >= ENOUGH


def abilities(evidence: Evidence) -> dict[str, Own]:
    """Return what the model of the records does by itself, for each task of which that was measured."""
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
    """Return what stands beside a table of a task that the model cannot do, "" for another."""
    found = own.get(task)
    if found is None or found.enough:
        return ""
    return f"; the model cannot do this: full attention has {found.percent:.0f} % right at {found.length} tokens"
