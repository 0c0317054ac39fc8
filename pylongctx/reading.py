"""A Completer with documents, and with the usage and the compression of its KV cache."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.compress import CompressionReport
from pylongctx.engine.documents import Document
from pylongctx.engine.usage import KVUsage, OffloadUsage
from pylongctx.generating import GeneratingCompleter
from pylongctx.store import StoreUsage


class ReadingCompleter(GeneratingCompleter):
    """A GeneratingCompleter that prefills documents independently of a prompt, reports KV memory, and compresses it.

    Parameters
    ----------
    opened : Opened
        The model and its context.
    """

    # ---- documents ----

    @property
    def documents(self) -> Sequence[Document]:
        """The documents, the least recently used first."""
        return list(self._solo.engine.documents)

    def read(self, text: str, name: str | None = None, ratio: float | None = None) -> Document:
        """Prefill a text independently, so that later prompts can contain it anywhere without another prefill.

        It is recognized wherever a prompt contains its text: among others in any order, or after a changed system
        prompt. Its first tokens are evaluated there; the others were computed without the tokens before them (EPIC,
        arXiv 2410.15332), so answers differ slightly from those of a full prefill. Keys are not rotated again; queries
        see them at their distance in the prompt. The tokens of the sequence are removed. With ``kv_store``, a text that
        an earlier process prefilled is loaded from the store.

        Parameters
        ----------
        text : str
            The text, at least 128 tokens long.
        name : str or None
            Name for parts of messages: ``{"type": "document", "name": ...}``. None: the text itself.
        ratio : float or None
            Fraction of its KV entries to keep, see ``compress``; ``kv_store`` stores these. None: all.

        Returns
        -------
        document : Document
            ``str(document)`` is the text, so that it can be put into a prompt.

        Raises
        ------
        ValueError
            When the method is not ``full,spans=N``, or with a ratio ``full,spans=N+kvzip``, ``ratio`` is invalid, the
            text is too short or too long, or the context has no room for the replay (ContextFull).

        Examples
        --------
        >>> from pylongctx import Llama
        >>> with Llama("model.gguf", n_ctx=1024, method="full,spans=3", verbose=False) as reader:
        ...     book = reader.read("It was the best of times, it was the worst of times. " * 20, name="book")
        ...     parts = [{"type": "document", "name": "book"}, {"type": "text", "text": "Which times?"}]
        ...     answer = reader.create_chat_completion([{"role": "user", "content": parts}], max_tokens=1)
        ...     [place.document.name for place in reader.session.placed]
        ['book']
        """
        solo = self._solo
        document = solo.engine.documents.add(text, name, ratio=ratio)
        if document.rows is None:
            solo.prefill(document.prompt.tolist(), reads=document)
        return document

    def forget(self, document: Document | str) -> None:
        """Free a document, so that prompts with its text are prefilled normally; ValueError for an unknown name."""
        self._solo.engine.documents.forget(document.name if isinstance(document, Document) else document)

    # ---- the KV cache ----

    def kv_usage(self) -> KVUsage:
        """Return the KV memory: ``bytes``, ``peak_bytes``, ``full_bytes``, ``rows`` int32 [n_layer, n_head_kv].

        Examples
        --------
        >>> llm.reset()
        >>> llm.eval(tokens[:64])
        >>> usage = llm.kv_usage()
        >>> usage.bytes <= usage.peak_bytes, int(usage.rows.min())
        (True, 64)
        """
        return self.session.context.kv_usage()

    def offload_usage(self) -> OffloadUsage:
        """Return how KV entries of ``kv_offload="host"`` were read since the model was loaded."""
        return self.session.context.offload_usage()

    def kv_store_usage(self) -> StoreUsage:
        """Return a copy of the counters of ``kv_store`` since the model was loaded.

        Raises
        ------
        ValueError
            When there is no store.

        Examples
        --------
        >>> from pylongctx import Llama
        >>> with Llama("model.gguf", n_ctx=1024, kv_store="kv", verbose=False) as reader:
        ...     answer = reader("a long text " * 150, max_tokens=1)
        ...     reader.kv_store_usage().hits
        0
        """
        if self._opened.store is None:
            raise ValueError("this Llama has no kv_store: open it with kv_store=FOLDER")
        return replace(self._opened.store.usage)

    def held_rows(self, layer: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the tokens that a KV head still holds, and their scores.

        Returns
        -------
        rows : numpy.ndarray
            int32 [n], positions, ascending.
        scores : numpy.ndarray
            int32 [n]: with corm the last query to which the token was important, -1 for none (CORM, definition 3.1; one
            of the last ``window`` ones if ``evict_every`` is at least ``window``, since one is enough to stay);
            with scissorhands a count; with weight-based rules a float (``scores.view(numpy.float32)``): the sum of
            all weights, with kvzip the largest.

        Raises
        ------
        IndexError
            When the model has no such layer or head.
        """
        shape = self.kv_usage().rows.shape
        if not (0 <= layer < shape[0] and 0 <= head < shape[1]):
            raise IndexError(f"the model has {shape[0]} layers of at most {shape[1]} KV heads, not ({layer}, {head})")
        return self.session.context.held_rows(layer, head)

    def compress(self, ratio: float) -> CompressionReport:
        """Evict most KV entries of a text, independently of later questions: for ``method="kvzip"``, alone or composed.

        The text is replayed after itself in pieces of up to 2000 tokens, for which ``n_ctx`` must have room; this takes
        one to two times as long as the prefill, composed up to three times. Then the pages of evicted entries are
        freed. The text and prompts that begin with it continue from there; rewinding before its end evaluates it again.

        Parameters
        ----------
        ratio : float
            Fraction of the entries of a full cache to keep, above 0 and at most 1. A text that is already compressed
            keeps at most its current entries.

        Returns
        -------
        CompressionReport
            Bytes before and after, seconds, and how much the model's predictions changed where it repeats the text.

        Raises
        ------
        ValueError
            When the method's rule does not support it, there is no text, ``ratio`` is invalid, or the context has no
            room for the replay (ContextFull). The text is unchanged.
        Aborted
            When ``abort`` was called. The text is unchanged.

        Examples
        --------
        >>> from pylongctx import Llama
        >>> with Llama("model.gguf", method="kvzip", n_ctx=1024, verbose=False) as reader:
        ...     text = reader.tokenize(b"The code of the mill is 4127. " + b"It was the best of times. " * 60)
        ...     reader.eval(text)
        ...     report = reader.compress(0.5)
        ...     for question in (b"What is the code?", b"What was it?"):
        ...         answer = reader(text + reader.tokenize(question, add_bos=False), max_tokens=1)
        >>> report.bytes_after < 0.7 * report.bytes_before
        True
        """
        return self._solo.compress(ratio)
