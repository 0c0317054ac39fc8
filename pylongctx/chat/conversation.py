"""A conversation becomes a prompt that fits into the context, and its tokens."""

from __future__ import annotations

import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np

from pylongctx._log import LOG
from pylongctx.chat.answer import Message
from pylongctx.chat.template import ChatTemplate, Rendered
from pylongctx.chat.tools import check_call, choose_tools
from pylongctx.engine.documents import with_texts
from pylongctx.engine.model import Model
from pylongctx.engine.overflow import Eviction
from pylongctx.engine.prefix import longest_prefix
from pylongctx.errors import LctxError, PromptTooLong

if TYPE_CHECKING:
    from pylongctx.engine.documents import Document
    from pylongctx.engine.source import TokenSource

SYSTEM = ("system", "developer")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# markers of reasoning, for templates that open it in a way that llama.cpp does not detect
THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<thought>": "</thought>", "<seed:think>": "</seed:think>"}
FILLER = "x"  # in the place of a text with reasoning of its own
INDEXED = 3  # characters that are indexed to find marks
GUESTS = ("user", "tool", "function")  # roles whose text is plain
Span = tuple[int, int]
ANSWER_SHARE = 8  # 1 / ANSWER_SHARE of the context is reserved for an answer, or its own limit if that is less


def check_messages(messages: Any, source: str) -> list[Message]:
    """Return the messages with OpenAI's functions as tools and with tool calls in OpenAI's form.

    ValueError when a message is invalid; a role must be one of OpenAI's, or one named in the template.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a list of at least one message")
    checked = [_check_message(i, message, source) for i, message in enumerate(messages)]
    ids: list[str] = []  # ids of calls without a result
    for i, message in enumerate(checked):
        if message["role"] == "assistant":
            calls = [check_call(i, j, call) for j, call in enumerate(_calls(i, message))]
            ids = [call["id"] for call in calls]
            message.pop("tool_calls", None)
            if calls:
                message["tool_calls"] = calls
        elif message["role"] == "tool":
            expected = ids.pop(0) if ids else ""
            message["tool_call_id"] = message.get("tool_call_id") or expected
    return checked


def _calls(i: int, message: Message) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"messages[{i}].tool_calls must be a list, not {type(calls).__name__}")
    return calls


def texts_of(message: Any) -> Iterator[str]:
    """Yield the texts of a message; none of other values."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [{"text": content}] if isinstance(content, str) else content if isinstance(content, list | tuple) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    yield from (text for text in texts if isinstance(text, str))


def text_size(messages: Any) -> int:
    """Return a lower bound of the bytes in the texts of messages, ignoring other values.

    Examples
    --------
    >>> text_size([{"role": "user", "content": "Why?"}, {"role": "user", "content": [{"type": "text", "text": "So"}]}])
    6
    """
    found = messages if isinstance(messages, list | tuple) else ()
    return sum(len(text.encode()) for message in found for text in texts_of(message))


def text_of_content(content: Any) -> str:
    """Return the text of a message's content, joining its text parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _check_message(i: int, message: Any, source: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}] must be a dict, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or (role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source):
        raise ValueError(f"messages[{i}]: unknown role {role!r}; roles are {', '.join(sorted(ROLES))}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        _check_parts(i, content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"messages[{i}]: content must be text or a list of text parts, not {type(content).__name__}")
    return _without_functions({"content": None, **message})


def _check_parts(i: int, parts: Sequence[Any]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ValueError(
                f"messages[{i}]: a content part of type {kind!r} cannot be read, only text; "
                "for images pass a chat_handler that supports them"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{i}]: the text of a content part must be a string, not {part.get('text')!r}")


def _without_functions(message: dict[str, Any]) -> Message:
    """Return a message with OpenAI's older function calls as tool calls; the function's name is the call's id."""
    if message["role"] == "function":
        return message | {"role": "tool", "tool_call_id": message.get("name", "")}
    call = message.pop("function_call", None)
    if call is not None:
        message["tool_calls"] = [{"type": "function", "id": call["name"], "function": dict(call)}]
    return message


def _checked(schema: Any) -> Any:
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"the schema of response_format must be an object, not {schema!r}")
    return schema


def wanted_schema(response_format: Any) -> Any:
    """Return the JSON schema of an answer; None for plain text; json_object allows any object."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        return {"type": "object"} if schema is None or schema == {} else _checked(schema)
    if kind == "json_schema":
        wrapper = response_format.get("json_schema", response_format)  # llama-server's form has no wrapper
        if isinstance(wrapper, Mapping) and "schema" in wrapper:
            return _checked(wrapper["schema"])
        raise ValueError("response_format json_schema needs {'json_schema': {'schema': ...}} or {'schema': ...}")
    raise ValueError(f"response_format must have type text, json_object or json_schema, not {response_format!r}")


def is_strict(response_format: Any) -> bool:
    """Return True if a schema that cannot be fully enforced is refused: unless ``strict`` is false in the request."""
    wrapper = (response_format or {}).get("json_schema")
    return all(one.get("strict") is not False for one in (response_format, wrapper) if isinstance(one, Mapping))


def render(template: ChatTemplate, given: Mapping[str, Any], prefills: bool = False) -> Rendered:
    """Render a conversation; ``given``: the keywords of ``create_chat_completion``.

    With ``prefills``, a last message of the assistant stays open: its reasoning and its text begin the answer.
    ValueError when a message, a tool or a schema is invalid, or the template does not support the request.
    """
    tools, choice = choose_tools(*(given[name] for name in ("functions", "function_call", "tools", "tool_choice")))
    messages = check_messages(given["messages"], template.info["source"])
    request = {
        "messages": messages,
        "enable_thinking": given["enable_thinking"],
        "kwargs": dict(given["chat_template_kwargs"] or {}),
        "parallel_tool_calls": given["parallel_tool_calls"],
        "add_generation_prompt": given.get("add_generation_prompt", True),
    }
    begun = _begun(messages) if prefills and request["add_generation_prompt"] else None
    said, mark = "", ""
    if begun is not None:
        said, mark = _own_thoughts(begun, template.info["source"])
        begun["content"] = FILLER if mark else begun["content"]
        request |= {"add_generation_prompt": False, "continue_final_message": True}
    if tools:
        request |= {"tools": tools, "tool_choice": choice}
    schema = wanted_schema(given["response_format"])
    if schema is not None:
        request["json_schema"] = schema
    if given.get("grammar") is not None and (schema is not None or (tools and choice != "none")):
        raise ValueError("grammar cannot be combined with tools or a response_format, which create their own grammar")
    if tools and choice == "required" and schema is not None:
        raise ValueError("a required tool call cannot be combined with a response_format: an answer is one of them")
    rendered = _with_systems(template, request, is_strict(given["response_format"]))
    if begun is not None:
        rendered = _with_own_thoughts(rendered, said, mark) if mark else _after_thoughts(rendered, begun)
    if tools and choice == "required" and rendered.constraint is None:
        raise ValueError(
            "the chat template does not support tool calls, so none can be required; try chat_format='chatml'"
        )
    if tools and not template.info["caps"]["supports_tools"]:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        warnings.warn(
            f"the chat template does not show tools to the model, which cannot call {names}; try chat_format='chatml'",
            RuntimeWarning,
            stacklevel=5,
        )
    return rendered


def _begun(messages: Sequence[Message]) -> Message | None:
    """Return the last message if the answer continues it."""
    last = messages[-1]
    has_text = text_of_content(last["content"]) or last.get("reasoning_content")
    if last["role"] != "assistant" or last.get("tool_calls") or not has_text:
        return None
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise ValueError("messages: the last two are from the assistant, so there is nothing to answer")
    return last


def _with_systems(template: ChatTemplate, request: dict[str, Any], strict: bool) -> Rendered:
    """Render a request; system messages are merged if the template drops or refuses additional ones."""
    messages: list[Message] = request["messages"]
    at = [i for i, message in enumerate(messages) if message["role"] in SYSTEM]
    if at in ([], [0]):
        return template.render(request, strict)
    try:
        rendered = template.render(request, strict)
        if all(text_of_content(messages[i]["content"]).strip() in rendered.prompt for i in at):
            return rendered
    except LctxError as reason:
        rendered, refusal = None, reason
    said = "\n\n".join(text for i in at if (text := text_of_content(messages[i]["content"])))
    others = [message for message in messages if message["role"] not in SYSTEM]
    try:
        return template.render({**request, "messages": [{"role": "system", "content": said}, *others]}, strict)
    except LctxError:
        if rendered is None:
            raise refusal from None
        return rendered


def _after_thoughts(rendered: Rendered, begun: Message) -> Rendered:
    """Return a rendering whose prompt ends with the open message, after reasoning opened by the template.

    To detect how a template writes reasoning, llama.cpp has closed it.
    """
    text = "\n\n".join(texts_of(begun))
    head = rendered.prompt.removesuffix(text)
    opened = open_mark(head)
    if not opened or not text:
        return rendered
    own = begun.get("reasoning_content") or ""
    return _prefilled(rendered, f"{own}\n{THOUGHTS[opened]}\n\n{text}", len(text))


def open_mark(prompt: str) -> str:
    """Return the mark of reasoning that a prompt ends with; empty if it ends with none.

    Examples
    --------
    >>> open_mark("<|im_start|>assistant\\n<think>\\n"), open_mark("<think></think>")
    ('<think>', '')
    """
    return next((mark for mark in THOUGHTS if prompt.rstrip().endswith(mark)), "")


def _own_thoughts(begun: Message, source: str) -> tuple[str, str]:
    """Return the text of an open message that begins with reasoning, and its mark; empty if it does not."""
    text = "\n\n".join(texts_of(begun))
    found = (mark for mark in THOUGHTS if text.lstrip().startswith(mark) and mark in source)
    mark = "" if begun.get("reasoning_content") else next(found, "")
    return text if mark else "", mark


def _with_own_thoughts(rendered: Rendered, text: str, mark: str) -> Rendered:
    """Return a rendering that ends with a text and its reasoning, instead of the filler and reasoning before it.

    The template has opened that reasoning, or llama.cpp has put an empty one there.
    """
    tail = re.search(rf"{re.escape(mark)}\s*(?:{re.escape(THOUGHTS[mark])}\s*)?{FILLER}\Z", rendered.prompt)
    return _prefilled(rendered, text, len(tail[0] if tail else FILLER))


def _prefilled(rendered: Rendered, more: str, n: int) -> Rendered:
    """Return a rendering in which another text replaces the last ``n`` characters of the answer's beginning."""

    def longer(text: str) -> str:
        return text[: len(text) - n] + more

    syntax = json.loads(rendered.syntax)
    syntax["generation_prompt"] = longer(syntax["generation_prompt"])
    constraint = json.loads(rendered.constraint) if rendered.constraint else None
    if constraint is not None:
        constraint["prefill"] = longer(constraint["prefill"])
    return replace(
        rendered,
        prompt=longer(rendered.prompt),
        syntax=json.dumps(syntax),
        constraint=None if constraint is None else json.dumps(constraint),
    )


class Marks:
    """Replaces texts of special tokens in messages before a template is rendered, and restores them afterwards.

    It does so in texts for which ``is_plain(role, text)`` is true. Values that are not messages stay unchanged.

    Examples
    --------
    >>> marks = Marks([{"role": "user", "content": "a<s>b"}], frozenset({"<s>"}), lambda role, text: True)
    >>> marks.messages[0]["content"]
    'azq0mark0qb'
    >>> marks.restored("<s>azq0mark0qb</s>")
    ('<s>a<s>b</s>', [(4, 7)])
    """

    def __init__(self, messages: Any, texts: frozenset[str], is_plain: Callable[[Any, str], bool]) -> None:
        self._found: list[str] = []
        self._is_plain = is_plain
        self._texts = texts
        self.messages = messages
        if isinstance(messages, list | tuple):
            said = "\n".join(text for message in messages for text in texts_of(message)).lower()
            self._word = next(word for i in count() if (word := f"zq{i}mark") not in said)
            self.messages = [self._without(message) for message in messages]

    def _without(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._hide(role, content)}
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [self._part(role, part) for part in content]}

    def _part(self, role: Any, part: Any) -> Any:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            return part
        return {**part, "text": self._hide(role, part["text"])}

    def _hide(self, role: Any, text: str) -> str:
        if not self._is_plain(role, text):
            return text
        parts, done = [], 0
        for first, end in find_marks(text, self._texts):
            parts += [text[done:first], f"{self._word}{len(self._found)}q"]
            self._found.append(text[first:end])
            done = end
        return "".join(parts) + text[done:] if parts else text

    def restored(self, prompt: str) -> tuple[str, list[Span]] | None:
        """Return a rendered text with these texts restored, and their positions; None: the template changed them."""
        if not self._found:
            return prompt, []
        words = list(re.finditer(rf"{self._word}(\d+)q", prompt))
        if len(words) != prompt.lower().count(self._word):
            return None
        parts: list[str] = []
        spans, done, n = [], 0, 0
        for word in words:
            before, mark = prompt[done : word.start()], self._found[int(word[1])]
            parts += [before, mark]
            spans.append((n + len(before), n + len(before) + len(mark)))
            n, done = n + len(before) + len(mark), word.end()
        return "".join([*parts, prompt[done:]]), spans


def find_marks(text: str, marks: frozenset[str]) -> Iterator[Span]:
    """Yield the positions of marks in a text from left to right, the longest one at each position."""
    if not marks:
        return
    begins, sizes = _search(marks)
    found = begins.search(text)
    while found:
        start = found.start()
        end = start + next((len(mark) for n in sizes if (mark := text[start : start + n]) in marks), 0)
        if end > start:
            yield start, end
        found = begins.search(text, max(end, start + 1))


@lru_cache(maxsize=8)
def _search(marks: frozenset[str]) -> tuple[re.Pattern[str], list[int]]:
    """Return an index of the beginnings of marks with their lengths, descending; vocabularies have up to 6000."""
    begins = sorted({mark[:INDEXED] for mark in marks})
    return re.compile("|".join(map(re.escape, begins))), sorted({len(mark) for mark in marks}, reverse=True)


def split(prompt: str, plain: Sequence[Span], marks: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Yield a prompt in parts, and whether special tokens are parsed in them.

    A part without them extends from one special token to the next, so that its words are tokenized like a whole text.
    """
    if not plain:
        yield prompt, True
        return
    starts = [first for first, _ in plain]
    read = [span for span in find_marks(prompt, marks) if not _overlaps(span, plain, starts)]
    done = start = 0
    for first, end in [*read, (len(prompt), len(prompt))]:
        i = bisect_left(starts, start)
        if i < len(starts) and starts[i] < first:
            yield prompt[done:start], True
            yield prompt[start:first], False
            done = first
        start = end
    yield prompt[done:], True


def _overlaps(span: Span, plain: Sequence[Span], starts: Sequence[int]) -> bool:
    i = bisect_left(starts, span[1]) - 1
    return i >= 0 and plain[i][1] > span[0]


def prompt_tokens(model: Model, prompt: str, plain: Sequence[Span] = ()) -> list[int]:
    """Return the tokens of a rendered conversation; ``plain`` positions are ascending, see ``Rendered``."""
    parts = split(prompt, plain, model.special_texts if plain else frozenset())
    tokens = (model.tokenize(text.encode(), False, special) for text, special in parts)
    return [*model.start, *chain.from_iterable(tokens)]


def left_out(model: Model, tokens: Sequence[int], shorter: Sequence[int]) -> tuple[int, int] | None:
    """Return the run of tokens to remove from a prompt to get a shorter prompt; None if no single run is enough.

    Among several such runs, the one that begins with a special token is a whole turn.
    """
    long, short = np.asarray(tokens), np.asarray(shorter)
    n, most = len(long) - len(short), longest_prefix(long, short)
    least = len(short) - longest_prefix(long[::-1], short[::-1])
    if n <= 0 or least > most:
        return None
    special = (i for i in range(most, least - 1, -1) if model.is_special(int(long[i])))
    first = next(special, most)
    return first, first + n


def tokens_of(model: Model, texts: Iterable[str]) -> frozenset[int]:
    """Return the tokens of those texts that are a single token."""
    found = (model.tokenize(text.encode(), False, True) for text in texts)
    return frozenset(tokens[0] for tokens in found if len(tokens) == 1)


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
    """A rendered conversation and its tokens."""

    rendered: Rendered
    tokens: list[int]
    dropped_turns: int = 0  # oldest turns that are left out, with the tokens below
    dropped_tokens: int = 0
    evictions: Turns | None = None  # the turns that may be left out later, if there are any


class Conversation:
    """A conversation to answer, with all turns or without its oldest ones.

    ``given`` has the arguments of ``create_chat_completion``. With ``parse_special``, texts of special tokens become
    these tokens in user and tool messages too; never in documents.
    """

    def __init__(
        self, template: ChatTemplate, source: TokenSource, given: Mapping[str, Any], prefills: bool = False
    ) -> None:
        self.model = source.model
        self._template, self._source, self._given, self._prefills = template, source, given, prefills
        self._documents: list[Document] = []
        self._messages = with_texts(given["messages"], self._document)
        self._guests = () if given["parse_special"] else GUESTS

    def _render(self, messages: Sequence[Any]) -> Rendered:
        self._source.check_size(text_size(messages))
        return render(self._template, {**self._given, "messages": messages}, self._prefills)

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

    def fit(self, max_tokens: int | None) -> ChatPrompt:
        """Return the prompt without as many turns as needed to leave room for an answer; the last turn always stays.

        PromptTooLong when the last turn alone is too long.
        """
        n_ctx = self._source.n_ctx
        room = n_ctx // ANSWER_SHARE
        most = n_ctx - (min(room, max_tokens) if max_tokens and max_tokens > 0 else room)
        n_whole, found = self._size(0)
        last = len(turns(self._messages)) - 1
        if found is None or (n_whole > most and last > 0):
            n = 1 + bisect_left(range(1, last), True, key=lambda n: self._size(n)[0] <= most) if last > 0 else 0
            found = self.prompt(n)
        dropped = max(0, n_whole - len(found.tokens))
        return replace(found, dropped_tokens=dropped, evictions=Turns(self, found, last, n_ctx))

    def _size(self, n: int) -> tuple[int, ChatPrompt | None]:
        """Return the number of tokens of a prompt, and the prompt; for a text that is too long a lower bound."""
        try:
            found = self.prompt(n)
        except PromptTooLong as reason:
            return reason.n_tokens, None
        return len(found.tokens), found


class Turns:
    """The turns to evict while an answer is generated, the oldest first; the ``last`` one stays.

    ``most`` is the maximum tokens of an answer without a given limit.
    """

    def __init__(self, conversation: Conversation, prompt: ChatPrompt, last: int, most: int) -> None:
        self.most: int | None = most
        self._conversation, self._last = conversation, last
        self._n, self._tokens = prompt.dropped_turns, prompt.tokens

    def next(self, n: int) -> Eviction | None:
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
        return Eviction(*run, n_turn=1)
