"""A Completer with access to its sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pylongctx.attention.recording import record
from pylongctx.attention.trace import Trace
from pylongctx.chat.completer import Completer
from pylongctx.chat.template import Templates
from pylongctx.engine.cache import BaseLlamaCache
from pylongctx.engine.counters import Counters
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.saved_state import LlamaState
from pylongctx.engine.session import Session
from pylongctx.engine.solo import Solo
from pylongctx.engine.source import NoTokens, TokenSource
from pylongctx.engine.states import States
from pylongctx.loading.opening import OpenedModel
from pylongctx.methods import Method

if TYPE_CHECKING:
    pass

NO_CONTEXT = "this Llama was loaded with vocab_only=True: it has no context"


class LocalCompleter(Completer):
    """A Completer on an engine with one slot, whose sequence can be evaluated, rewound, saved and traced.

    Parameters
    ----------
    opened : OpenedModel
        The model and its context.
    """

    def __init__(self, opened: OpenedModel) -> None:
        given, self._opened = opened.given, opened
        super().__init__(
            opened.model,
            _source(opened),
            opened.path,
            Templates(opened.model, given["chat_format"]),
            given["seed"],
            given["last_n_tokens_size"],
            given["chat_handler"],
        )

    # ---- the sequence ----

    @property
    def session(self) -> Session:
        """The sequence: its tokens and logits, evaluation, rewinding, and facts about the model.

        Raises
        ------
        RuntimeError
            When the object is closed, or was loaded with ``vocab_only``.
        """
        return self._solo.session

    @property
    def sessions(self) -> Sequence[Session]:
        """All sequences; ``session`` is the first one."""
        return [slot.session for slot in self._solo.engine.slots]

    @property
    def counters(self) -> Counters:
        """The work since the object was opened: tokens of prompts and answers, drafts and how many were right.

        Examples
        --------
        >>> before = llm.counters.generated_tokens
        >>> answer = llm("It was", max_tokens=3, temperature=0)
        >>> llm.counters.generated_tokens - before
        3
        """
        return self._solo.engine.counters

    @property
    def states(self) -> States:
        """The states that the sequence can continue from: the checkpoint and the cache, and their identity."""
        return self._solo.states

    @property
    def _solo(self) -> Solo:
        self._model.handle  # noqa: B018 - raises when closed
        if not isinstance(self._source, Solo):
            raise RuntimeError(NO_CONTEXT)
        return self._source

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        return self.session.method

    def n_ctx(self) -> int:
        """Return the context window in tokens.

        Examples
        --------
        >>> llm.n_ctx()
        2048
        """
        return self.session.context.n_ctx

    @property
    def n_tokens(self) -> int:
        """The number of evaluated tokens; setting a smaller number removes the tokens after it."""
        return self.session.n_tokens

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        if not 0 <= n <= self.session.n_tokens:
            raise ValueError(f"n_tokens can only be reduced: it must be from 0 to {self.session.n_tokens}, not {n}")
        self.session.n_tokens = n

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """int32 [n_ctx]; the first ``n_tokens`` are the evaluated tokens."""
        return self.session.input_ids

    @property
    def _input_ids(self) -> NDArray[np.int32]:  # llama_cpp's
        return self.session.tokens

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits, float32 [n_tokens, n_vocab] with logits_all, else only the last row, [1, n_vocab].

        The array is a view that later evaluations may overwrite; it has no rows before the first evaluation.
        """
        return self.session.scores

    _scores = scores

    @property
    def eval_tokens(self) -> deque[int]:
        """The evaluated tokens."""
        return deque(self._input_ids.tolist(), maxlen=self.session.n_ctx)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The rows of ``scores`` as lists."""
        return deque(self.scores.tolist(), maxlen=self.session.n_ctx if self.session.logits_all else 1)

    def reset(self) -> None:
        """Remove all tokens.

        Examples
        --------
        >>> llm.reset()
        >>> llm.n_tokens
        0
        """
        with self.session.lock:
            self.session.clear()

    def abort(self) -> None:
        """Stop an evaluation in another thread, which raises Aborted; the object stays usable.

        Examples
        --------
        >>> from threading import Timer
        >>> Timer(60, llm.abort).cancel()  # without cancel(): stops what runs after a minute
        """
        self.session.context.abort = True

    # ---- evaluation ----

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the current ones.

        Raises
        ------
        ValueError
            When a token is outside the vocabulary, or the tokens do not fit (ContextFull).
        Aborted
            When ``abort`` was called during the evaluation.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval([1, 7, 9])
        >>> llm.n_tokens, llm.scores.shape == (1, llm.n_vocab())
        (3, True)
        """
        ids = self._model.check_tokens(tokens)
        with self.session.lock:
            self.session.context.abort = False
            self.session.eval(ids)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Evaluate a prompt after its cached prefix, so that the sequence holds it and the logits after it.

        Raises
        ------
        ValueError
            When a token is outside the vocabulary, or the tokens do not fit (PromptTooLong).
        Aborted
            When ``abort`` was called during the evaluation.

        Examples
        --------
        >>> llm.prefill([1, 7, 9])
        >>> llm.prefill([1, 7, 8])  # evaluates one token
        >>> llm.n_tokens
        3
        """
        self._solo.prefill(tokens)

    def eval_rows(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Evaluate tokens and yield their logits, float32 [k, n_vocab] per step of at most n_ubatch tokens.

        Memory does not grow with the tokens. An array is valid until the next step.

        Examples
        --------
        >>> llm.reset()
        >>> sum(len(rows) for rows in llm.eval_rows([1, 7, 9]))
        3
        """
        ids = self._model.check_tokens(tokens)
        self.session.context.abort = False
        return self.session.eval_rows(ids)

    def trace(self, start: int | None = None, stop: int | None = None) -> AbstractContextManager[Trace]:
        """Record the chunks that each layer and head reads: ``with llm.trace() as trace: llm.eval(tokens)``.

        The results do not change. ``pylongctx.attention`` computes numbers and a map. A position that is evaluated
        again replaces its record.

        Parameters
        ----------
        start, stop : int or None
            Record the queries at positions ``start <= p < stop`` of the text. None: the current number of tokens,
            and n_ctx. A query takes 4 * n_layer * n_head * window / chunk_size bytes.

        Raises
        ------
        ValueError
            When the method does not read chunks, or the range is empty or outside the context.
        RuntimeError
            When a trace is already being recorded.
        MemoryError
            When the records of the range do not fit into memory.

        Examples
        --------
        >>> llm.reset()
        >>> with llm.trace(stop=64) as trace:
        ...     llm.eval(tokens[:64])
        >>> len(trace.positions)
        64
        """
        return record(self.session, start, stop)

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Return the length of the common prefix of two token sequences.

        Examples
        --------
        >>> llm.longest_token_prefix([1, 7, 9], [1, 7, 8, 9])
        2
        """
        return longest_prefix(a, b)

    @staticmethod
    def logits_to_logprobs(logits: NDArray[np.float32] | list[float], axis: int = -1) -> NDArray[np.float32]:
        """Return the log-softmax along ``axis``, float32 of the same shape; rows may hold -inf.

        Examples
        --------
        >>> round(float(llm.logits_to_logprobs([0.0, 0.0])[0]), 4)  # log(1/2)
        -0.6931
        """
        x = np.asarray(logits, np.float32)
        top = np.max(x, axis=axis, keepdims=True)
        shifted = x - np.where(np.isfinite(top), top, np.float32(0))
        with np.errstate(divide="ignore"):
            return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)), np.float32)

    # ---- states ----

    def save_state(self) -> LlamaState:
        """Return tokens, last logits and KV entries, without the sampler and the earlier ``scores``.

        Examples
        --------
        >>> llm.eval([1, 7, 9])
        >>> state = llm.save_state()
        >>> llm.reset()
        >>> llm.load_state(state)
        >>> llm.n_tokens
        3
        """
        return self.states.save()

    def load_state(self, state: LlamaState) -> None:
        """Continue from a saved state; with logits_all the earlier rows of ``scores`` are NaN.

        Raises
        ------
        InvalidInput
            When another model, method or setting saved it, or it is damaged. Then the object is empty and usable.
        """
        self.states.load(state)

    def checkpoint(self) -> LlamaState:
        """Keep and return a snapshot in memory: a prompt with its tokens as prefix continues from there.

        It is for methods that cannot rewind, such as corm, which evicts: take it where the next prompt may differ,
        such as after the prompt of a chat turn. It is as large as the KV cache; the next one replaces it.

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval([1, 7])
        >>> llm.checkpoint().n_tokens
        2
        >>> llm.eval([9])
        >>> llm.restore()
        >>> llm.n_tokens
        2
        """
        return self.states.take_checkpoint()

    def restore(self, state: LlamaState | None = None) -> None:
        """Rewind to ``state``, or to the last checkpoint.

        Raises
        ------
        RuntimeError
            When there is no checkpoint.
        InvalidInput
            When the state belongs to another model, method or setting, see ``load_state``.
        """
        state = state or self.states.checkpoint
        if state is None:
            raise RuntimeError("there is no checkpoint: call checkpoint() first")
        self.load_state(state)

    @property
    def cache(self) -> BaseLlamaCache | None:
        """The cache of states that completions start from, see ``set_cache``."""
        return self.states.cache

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Let completions start from the states of a cache, and add theirs to it; None: no cache.

        Examples
        --------
        >>> from pylongctx import LlamaRAMCache
        >>> llm.set_cache(LlamaRAMCache(capacity_bytes=2**28))
        >>> llm.set_cache(None)
        """
        self.states.cache = cache


def _source(opened: OpenedModel) -> TokenSource:
    """Return the source of a Llama's tokens."""
    if not opened.sessions:
        return NoTokens(opened.model, NO_CONTEXT)
    states = States(opened.sessions[0], lambda: opened.identity)
    return Solo(opened.sessions, states, opened.draft_model, opened.library)
