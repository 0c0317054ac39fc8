"""Many prompts at once: their answers are generated concurrently, on all sequences of an engine."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pylongctx.completions.logprobs import TokenEntry
from pylongctx.completions.results import Completion, Generation, collect, stream
from pylongctx.engine.solo import Solo

QUEUED = 2  # prompts queued per sequence; a queued prompt may be a prefix of the next one

Parts = list[tuple[str, list[TokenEntry]]]


class Answered(NamedTuple):
    """A completion and its generation, which has the tokens."""

    completion: Completion
    generation: Generation


class RunningAnswer:
    """A running answer among others.

    Parameters
    ----------
    generation : Generation
        Its job must have been started.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.parts: Parts = []
        self._taken = generation.parts()

    def take(self) -> bool:
        """Collect the available tokens of the answer; returns whether it is complete."""
        job = self.generation.job
        while not job.results.empty() or job.limit == 0:
            part = next(self._taken, None)
            if part is None:
                return True
            self.parts.append(part)
        return False

    def answer(self, name: str) -> Answered:
        """Return the completion, with the model's name."""
        chunks = stream(self.generation, name, self.parts)
        return Answered(collect(chunks, self.generation.scorer is not None), self.generation)


def complete_together(
    solo: Solo, generations: Iterable[Generation], name: str, done: Callable[[int], None]
) -> list[Answered]:
    """Return the answers to prompts, in order.

    Parameters
    ----------
    solo : Solo
        Owner of the sequences that they run on; its lock is held.
    generations : iterable of Generation
        Each is created shortly before a sequence becomes free for it.
    name : str
        The model's name in answers.
    done : callable
        Called after each answer with the number of answered prompts.
    """
    waiting, n_taken = iter(generations), 0
    running: dict[int, RunningAnswer] = {}
    found: dict[int, Answered] = {}
    solo.release()
    solo.session.context.abort = False
    try:
        while True:
            for generation in _next(waiting, QUEUED * len(solo.engine.slots) - len(running)):
                solo.start(generation.job)
                running[n_taken] = RunningAnswer(generation)
                n_taken += 1
            if not running:
                return [found[i] for i in range(n_taken)]
            complete = [i for i, one in running.items() if one.take()]
            for i in complete:
                found[i] = running.pop(i).answer(name)
                done(len(found))
            if not complete:
                solo.step()
    finally:
        solo.release()


def _next(generations: Iterator[Generation], n: int) -> list[Generation]:
    """Return the next generations, at most ``n``."""
    return [generation for _, generation in zip(range(n), generations, strict=False)]
