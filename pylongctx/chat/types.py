"""The dicts of chat completions in the form of OpenAI and llama_cpp."""

from typing import Any, Literal, TypedDict

from pylongctx.completions.results import CompletionUsage

Message = dict[str, Any]  # a message of a request: role, content, tool_calls, ...
FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class TopLogprob(TypedDict):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """The tokens of an answer, including markers of tool calls."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class FunctionCall(TypedDict):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class _Answer(TypedDict):
    role: Literal["assistant"]
    content: str | None


class AnswerMessage(_Answer, total=False):
    """The message of an answer."""

    reasoning_content: str
    tool_calls: list[ToolCall]
    function_call: FunctionCall


class ChatChoice(TypedDict):
    """One choice of an answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(TypedDict):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class _FunctionCallDelta(TypedDict):
    arguments: str


class FunctionCallDelta(_FunctionCallDelta, total=False):
    """A part of a function call: only the first one has the name."""

    name: str


class _ToolCallDelta(TypedDict):
    index: int
    function: FunctionCallDelta


class ToolCallDelta(_ToolCallDelta, total=False):
    """A part of a tool call; only the first one has the id and the type."""

    id: str
    type: Literal["function"]


class Delta(TypedDict, total=False):
    """The additions of a chunk to the message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    tool_calls: list[ToolCallDelta]
    function_call: FunctionCallDelta


class ChunkChoice(TypedDict):
    """A part of a choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class _Chunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]


class ChatChunk(_Chunk, total=False):
    """A chunk of a stream; only the last one has ``usage``."""

    usage: CompletionUsage
