"""A Completer whose prompts may contain documents, which are read once."""

from collections.abc import Sequence

from pylongctx.engine.documents import Document
from pylongctx.local import LocalCompleter
from pylongctx.sampling import Sampler, SamplingParams


class ReadingCompleter(LocalCompleter):
    """A LocalCompleter that reads documents by themselves, see ``read``.

    Parameters
    ----------
    opened : Opened
        The model and its context.
    """

    @property
    def documents(self) -> Sequence[Document]:
        """The documents, the least recently used first."""
        return list(self._solo.engine.documents)

    def read(self, text: str, name: str | None = None) -> Document:
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

        Returns
        -------
        document : Document
            ``str(document)`` is the text, so that it can be put into a prompt.

        Raises
        ------
        ValueError
            When the method is not ``full,spans=N``, or the text is too short or too long.

        Examples
        --------
        >>> with Llama("model.gguf", n_ctx=1024, method="full,spans=3", verbose=False) as reader:
        ...     book = reader.read("It was the best of times, it was the worst of times. " * 20, name="book")
        ...     parts = [{"type": "document", "name": "book"}, {"type": "text", "text": "Which times?"}]
        ...     answer = reader.create_chat_completion([{"role": "user", "content": parts}], max_tokens=1)
        ...     answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 128
        True
        """
        solo = self._solo
        document = solo.engine.documents.add(text, name)
        if document.rows is None:
            sampler = Sampler(self._model, SamplingParams(seed=0), None, ())
            for _ in solo.drawn(solo.endless(document.prompt.tolist(), sampler, limit=0, reads=document)):
                pass
        return document

    def forget(self, document: Document | str) -> None:
        """Free a document; prompts with its text are read as others; ValueError when there is none of this name."""
        self._solo.engine.documents.forget(document.name if isinstance(document, Document) else document)
