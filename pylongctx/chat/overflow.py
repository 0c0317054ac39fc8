"""Dropping the oldest turns after the system prompt when a conversation does not fit."""

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

SHARE = 8  # 1 / SHARE of the context is reserved for an answer, or its own limit if that is less

Render = Callable[[Any], "Rendered"]  # of messages


def turns(messages: Any) -> list[int]:
    """Return where the turns of a conversation begin: after the system prompt, and at every user message.

    Examples
    --------
    >>> turns([{"role": role} for role in ("system", "user", "assistant", "tool", "assistant", "user")])
    [1, 5]
    """
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    return [i for i, role in enumerate(roles) if i == first or (i > first and role == "user")]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation and its tokens.

    Attributes
    ----------
    rendered : Rendered
        The text, and the form of the answer.
    tokens : list of int
        The tokens of the text.
    n_left_out : int
        Number of turns that are left out.
    """

    rendered: Rendered
    tokens: list[int]
    n_left_out: int


class FittedConversation:
    """A conversation with all turns or without its oldest ones.

    Parameters
    ----------
    model : Model
        Its vocabulary is used.
    source : TokenSource
        Has the context that a prompt must fit into, and the documents.
    messages : list of dict
        The messages.
    render : callable
        Renders messages.
    parse_special : bool
        Whether texts of special tokens become these tokens in user and tool messages too; never in documents.
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
        LOG.warning("the chat template changes texts of special tokens in messages, so they become special tokens")
        return self._render(messages)

    def prompt(self, n: int = 0) -> ChatPrompt:
        """Return the prompt without the ``n`` oldest turns; PromptTooLong if any tokenization is too long."""
        rendered = self.rendered(n)
        self._source.check_size(len(rendered.prompt.encode()))
        for document in self._documents if not n else ():
            if document.text.strip() not in rendered.prompt:
                document.miss("the chat template changes its text")
        return ChatPrompt(rendered, prompt_tokens(self.model, rendered.prompt, rendered.plain), n)

    def fit(self, max_tokens: int | None) -> tuple[ChatPrompt, dict[str, Any]]:
        """Return the prompt without as many turns as needed to leave room for an answer, and fields of its job.

        The last turn always stays.

        Raises
        ------
        PromptTooLong
            When the last turn alone is too long.
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

    def _size(self, n: int) -> tuple[int, ChatPrompt | None]:
        """Return the number of tokens of a prompt, and the prompt; for a text that is too long a lower bound."""
        try:
            found = self.prompt(n)
        except PromptTooLong as reason:
            return reason.n_tokens, None
        return len(found.tokens), found


class Turns:
    """The turns to evict while an answer is generated, the oldest first; the last one stays.

    Parameters
    ----------
    conversation : FittedConversation
        The conversation to answer.
    prompt : ChatPrompt
        The prompt of the answer.
    last : int
        Number of turns before the last one.
    most : int
        Maximum tokens of an answer without a given limit.
    """

    def __init__(self, conversation: FittedConversation, prompt: ChatPrompt, last: int, most: int) -> None:
        self.most: int | None = most
        self._conversation, self._last = conversation, last
        self._n, self._tokens = prompt.n_left_out, prompt.tokens

    def next(self, n: int) -> Cut | None:
        """Return the oldest remaining turn; None for the last one, or if it is not a run of tokens in the template."""
        if self._n >= self._last:
            return None
        try:
            shorter = self._conversation.prompt(self._n + 1).tokens
        except (LctxError, ValueError):  # a template may refuse the remaining turns
            return None
        run = left_out(self._conversation.model, self._tokens, shorter)
        if run is None:
            return None
        self._n, self._tokens = self._n + 1, shorter
        return Cut(*run, n_turn=1)
