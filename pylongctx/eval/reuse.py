"""Ask one text many times: the beginning that prompts share is read once, and the cache goes back to its end.

A question on its own starts from an empty cache. Here a method has stored the text before it knows the question, which
is how a cached prefix is used; a method that evicts by what is read last may then answer differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.compress import PIECE
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.saved_state import LlamaState
from pylongctx.llama import Llama
from pylongctx.methods import Method

if TYPE_CHECKING:
    from pylongctx.eval.task import Sample

REPLAY = PIECE + 64  # tokens of room for a compression
Tokens = NDArray[np.int32]


def by_text(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return samples in groups of one text each, in the order of their first ones.

    Examples
    --------
    >>> from pylongctx.eval.task import Sample
    >>> samples = [Sample(str(i), text + "?", shared=1) for i, text in enumerate("abab")]
    >>> [[sample.id for sample in group] for group in by_text(samples)]
    [['0', '2'], ['1', '3']]
    """
    groups: dict[object, list[Sample]] = {}
    for sample in samples:
        beginning = sample.prompt[: sample.shared]
        key = beginning if isinstance(beginning, str) else beginning.tobytes()
        groups.setdefault(key or sample.id, []).append(sample)
    return list(groups.values())


class PrefixReader:
    """Lets a model hold the shared beginning of one prompt after the other.

    Parameters
    ----------
    compress : float
        Share of the rows that ``Llama.compress`` leaves, 1 for no compression: of a beginning, or with ``snapkv`` of
        each whole prompt.

    Examples
    --------
    >>> reader = PrefixReader(llm)
    >>> reader.hold(np.array(tokens[:100], np.int32))
    >>> reader.hold(np.array(tokens[:100], np.int32))  # evaluates nothing
    """

    def __init__(self, llm: Llama, compress: float = 1.0) -> None:
        self._llm, self._compress = llm, compress
        parts = llm.method.parts if llm.method is not None else ()
        self._keeps_state = any(part.role == "rule" for part in parts)
        self._for_one_question = is_for_one_question(llm)
        self._tokens: Tokens | None = None
        self._state: LlamaState | None = None

    @property
    def compresses_texts(self) -> bool:
        """Whether beginnings are compressed, before their questions are known."""
        return self._compress < 1 and not self._for_one_question

    def hold(self, beginning: Tokens) -> None:
        """Let the cache hold a beginning, as it is when nothing else was read."""
        if self._tokens is not None and np.array_equal(self._tokens, beginning):
            if self._state is not None:  # what a question let the rule evict comes back
                self._llm.load_state(self._state)
            return
        self._llm.reset()
        self._llm.prefill(beginning.tolist())
        if self.compresses_texts:
            self._llm.compress(self._compress)
        self._tokens, self._state = beginning, self._llm.save_state() if self._keeps_state else None

    def hold_prompt(self, beginning: Tokens, prompt: Tokens) -> None:
        """Let the cache hold a beginning, or what remains of a whole prompt that is compressed for its question."""
        self.hold(beginning)
        if self._compress < 1 and self._for_one_question:
            self._llm.eval(prompt[len(beginning) :].tolist())
            self._llm.compress(self._compress)


def why_no_compression(method: Method | None) -> str:
    """Return why a method cannot compress a text that was read and the way out, "" when it can."""
    if method is not None and any(part.waits for part in method.parts):
        return ""
    return "only the rules kvzip and snapkv compress a text that was read: use --method kvzip"


def is_for_one_question(llm: Llama) -> bool:
    """Return True if ``Llama.compress`` keeps what the end of a prompt attends to, as with ``snapkv``."""
    parts = llm.method.parts if llm.method is not None else ()
    return any(part.waits and not part.replays for part in parts)


def beginning_of(prompt: Tokens, shortened: Tokens) -> Tokens:
    """Return the tokens with which a prompt and its shared part alone begin.

    Examples
    --------
    >>> beginning_of(np.array([1, 5, 6, 7], np.int32), np.array([1, 5, 9], np.int32)).tolist()
    [1, 5]
    """
    return prompt[: min(longest_prefix(prompt, shortened), len(prompt) - 1)]
