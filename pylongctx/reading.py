"""A Completer that does more with a text than read it from its beginning: documents, and compression."""

from collections.abc import Sequence

from pylongctx._lib import error, lib
from pylongctx.engine.compress import compress
from pylongctx.engine.documents import Document
from pylongctx.local import LocalCompleter


class ReadingCompleter(LocalCompleter):
    """A LocalCompleter that reads documents by themselves, and compresses what was read.

    Parameters
    ----------
    opened : Opened
        The model and its context.
    """

    @property
    def documents(self) -> Sequence[Document]:
        """The documents, the least recently used first."""
        return list(self._solo.engine.documents)

    def read(self, text: str, name: str | None = None, ratio: float | None = None) -> Document:
        """Read a text by itself, so that it can stand anywhere in later prompts without being read again.

        It is recognized where a prompt has its text: between others in any order, behind a changed system prompt. Its
        first tokens are evaluated there, the others are as if nothing stood before them (EPIC, arXiv 2410.15332), so
        answers differ a little from those to a prompt that is read as a whole. Keys stay as they were rotated, and
        queries look from where the prompt has the text. What the sequence held is forgotten; with ``kv_store`` a text
        that an earlier process has read comes from there.

        Parameters
        ----------
        text : str
            The text, at least 128 tokens.
        name : str or None
            By which a part of a message names it: ``{"type": "document", "name": ...}``. None: the text itself.
        ratio : float or None
            Share of its rows that stay, as of ``compress``; ``kv_store`` keeps these for later processes. None: all.

        Returns
        -------
        document : Document
            ``str(document)`` is the text, so that it can be put into a prompt.

        Raises
        ------
        ValueError
            When the method is not ``full,spans=N``, or with a ratio ``full,spans=N+kvzip``, the ratio is no share, the
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
        """Free a document; prompts with its text are read as others; ValueError when there is none of this name."""
        self._solo.engine.documents.forget(document.name if isinstance(document, Document) else document)

    def compress(self, ratio: float) -> None:
        """Forget most of a text, whatever will be asked about it: for ``method="kvzip"``, alone or composed.

        The text is replayed behind itself in pieces of up to 2000 tokens, for which ``n_ctx`` must have room; it takes
        two to three times as long as reading it. Then the pages behind the rows that are forgotten are free. The text
        goes on from there, and prompts that begin with it do so too; going back before its end evaluates it anew.

        Parameters
        ----------
        ratio : float
            Share of the rows of a full cache that stay, above 0 and at most 1. A text that was compressed before keeps
            at most what it has.

        Raises
        ------
        ValueError
            When the method's rule does not wait for it, there is no text, ``ratio`` is no share, or the context has no
            room for the replay (ContextFull). The text is as before.
        Aborted
            When ``abort`` was called meanwhile. The text is as before.

        Examples
        --------
        >>> from pylongctx import Llama
        >>> with Llama("model.gguf", method="kvzip", n_ctx=1024, verbose=False) as reader:
        ...     text = reader.tokenize(b"The code of the mill is 4127. " + b"It was the best of times. " * 60)
        ...     reader.eval(text)
        ...     before = reader.kv_usage().bytes
        ...     reader.compress(0.5)
        ...     smaller = reader.kv_usage().bytes < 0.7 * before
        ...     for question in (b"What is the code?", b"What was it?"):
        ...         answer = reader(text + reader.tokenize(question, add_bos=False), max_tokens=1)
        >>> smaller
        True
        """
        if self._solo.engine.library is not None:
            reason = "kv_store keeps texts as they were read: open without it, or read(text, ratio=...) a document"
            raise error(lib.LCTX_INVALID, reason)
        compress(self.session, ratio)
