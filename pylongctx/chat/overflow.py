"""A conversation that does not fit: its oldest turns are left out, behind the system prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pylongctx._log import LOG
from pylongctx.chat.marks import GUESTS, Marks
from pylongctx.chat.tokens import left_out, prompt_tokens
from pylongctx.engine.documents import with_texts
from pylongctx.engine.overflow import Cut
from pylongctx.errors import LctxError, PromptTooLong

if TYPE_CHECKING:
    from pylongctx.chat.template import Rendered
    from pylongctx.engine.documents import Document
    from pylongctx.engine.model import Model
    from pylongctx.engine.source import TokenSource

SHARE = 8  # an answer has this part of the context, or its own limit where that is less

Render = Callable[[Any], "Rendered"]  # of messages


def turns(messages: Any) -> list[int]:
    """Return where the turns of a conversation begin: behind the system prompt, and with every user message.

    Examples
    --------
    >>> turns([{"role": role} for role in ("system", "user", "assistant", "tool", "assistant", "user")])
    [1, 5]
    """
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    return [i for i, role in enumerate(roles) if i == first or (i > first and role == "user")]


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it.

    Attributes
    ----------
    rendered : Rendered
        Its text, and what the answer must look like.
    tokens : list of int
        The tokens of the text.
    n_left_out : int
        Turns that it lacks.
    """

    rendered: Rendered
    tokens: list[int]
    n_left_out: int


class Conversation:
    """A conversation, whole and without its oldest turns.

    Parameters
    ----------
    model : Model
        Has the vocabulary.
    source : TokenSource
        What a prompt must fit into, and where its documents are.
    messages : list of dict
        The messages.
    render : callable
        Renders messages.
    parse_special : bool
        Whether texts of special tokens are these tokens in what users and tools say, too; never in documents.
    """

    def __init__(
        self, model: Model, source: TokenSource, messages: Sequence[Any], render: Render, parse_special: bool = False
    ) -> None:
        self.model = model
        self._source, self._render = source, render
        self._documents: list[Document] = []
        self._messages = with_texts(messages, self._document)
        self._guests = () if parse_special else GUESTS

    def _is_plain(self, role: Any, text: str) -> bool:
        return role in self._guests or any(text == document.text for document in self._documents)

    def _document(self, text: str | None, name: str | None) -> Document:
        found = self._source.document(text, name)
        self._documents.append(found)
        return found

    def rendered(self, n: int) -> Rendered:
        """Return the rendering without the ``n`` oldest turns."""
        starts = turns(self._messages) if n else []
        messages = [*self._messages[: starts[0]], *self._messages[starts[n] :]] if n else self._messages
        marks = Marks(messages, self.model.special_texts, self._is_plain)
        rendered = self._render(marks.messages)
        if (found := marks.restored(rendered.prompt)) is not None:
            return replace(rendered, prompt=found[0], plain=found[1])
        LOG.warning("the chat template changes the texts of special tokens, which are read as these tokens")
        return self._render(messages)

    def prompt(self, n: int = 0) -> Prompt:
        """Return the prompt without the ``n`` oldest turns; PromptTooLong for a text that is too long anyway."""
        rendered = self.rendered(n)
        self._source.check_size(len(rendered.prompt.encode()))
        for document in self._documents if not n else ():
            if document.text.strip() not in rendered.prompt:
                document.miss("the chat template does not write its text as it is")
        return Prompt(rendered, prompt_tokens(self.model, rendered.prompt, rendered.plain), n)

    def fitting(self, max_tokens: int | None) -> tuple[Prompt, dict[str, Any]]:
        """Return the prompt without as few turns as leave room for an answer, and fields of its job.

        The last turn stays, whether it leaves this room or not.

        Raises
        ------
        PromptTooLong
            When the text of the last turn alone is too long.
        """
        room = self._source.n_ctx // SHARE
        most = self._source.n_ctx - (min(room, max_tokens) if max_tokens and max_tokens > 0 else room)
        n_whole, whole = self._size(0)
        last = len(turns(self._messages)) - 1
        if whole is not None and (n_whole <= most or last < 1):
            return whole, {"cuts": Turns(self, whole, last, self._source.n_ctx)}
        n = 1 + bisect_left(range(1, last), True, key=lambda n: self._size(n)[0] <= most) if last > 0 else 0
        found = self.prompt(n)
        cuts = Turns(self, found, last, self._source.n_ctx)
        return found, {"cuts": cuts, "dropped_turns": n, "dropped_tokens": max(0, n_whole - len(found.tokens))}

    def _size(self, n: int) -> tuple[int, Prompt | None]:
        """Return the tokens of a prompt, and the prompt; of a text that is too long the fewest that it can have."""
        try:
            found = self.prompt(n)
        except PromptTooLong as reason:
            return reason.n_tokens, None
        return len(found.tokens), found


class Turns:
    """The turns that leave while an answer is written, the oldest first; the last one stays.

    Parameters
    ----------
    conversation : Conversation
        What is answered.
    prompt : Prompt
        The prompt of the answer.
    last : int
        How many turns the conversation has before its last one.
    most : int
        Most tokens of an answer for which nobody gives a number.
    """

    def __init__(self, conversation: Conversation, prompt: Prompt, last: int, most: int) -> None:
        self.most: int | None = most
        self._conversation, self._last = conversation, last
        self._n, self._tokens = prompt.n_left_out, prompt.tokens

    def next(self, n: int) -> Cut | None:
        """Return the oldest turn that is left; None for the last one, or where a template writes no such run."""
        if self._n >= self._last:
            return None
        try:
            shorter = self._conversation.prompt(self._n + 1).tokens
        except (LctxError, ValueError):  # a template may refuse what is left
            return None
        run = left_out(self._conversation.model, self._tokens, shorter)
        if run is None:
            return None
        self._n, self._tokens = self._n + 1, shorter
        return Cut(*run, n_turn=1)
