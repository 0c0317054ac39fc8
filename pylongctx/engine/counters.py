"""Counters of an engine."""

from dataclasses import dataclass

from pylongctx.engine.drafting import Drafting


@dataclass
class Counters:
    """The work of an engine since its start."""

    prompt_tokens: int = 0  # evaluated
    cached_tokens: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0  # of texts that did not fit
    steps: int = 0
    sequences: int = 0  # of all steps together
    longest: int = 0  # tokens of a sequence
    prompt_seconds: float = 0.0  # of finished completions, like the next field
    answer_seconds: float = 0.0
    busy_seconds: float = 0.0
    drafts: int = 0  # of finished completions, like the next two fields
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0

    def count_drafts(self, draft: Drafting | None) -> None:
        """Add the drafts of a job."""
        if draft is not None:
            self.drafts += draft.n_drafts
            self.drafted_tokens += draft.n_drafted
            self.accepted_tokens += draft.n_accepted
