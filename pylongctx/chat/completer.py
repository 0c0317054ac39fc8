"""Completions and chats from any source of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from pylongctx._arguments import check_count
from pylongctx.chat import response
from pylongctx.chat.handlers import Handler, registered_handler
from pylongctx.chat.overflow import FittedConversation
from pylongctx.chat.parser import AnswerParser
from pylongctx.chat.render import render
from pylongctx.chat.request import text_size
from pylongctx.chat.template import ChatTemplate, Rendered, Templates
from pylongctx.chat.tokens import tokens_of
from pylongctx.chat.types import ChatChunk, ChatCompletion
from pylongctx.completions.grammar import constraint
from pylongctx.completions.logprobs import Scorer
from pylongctx.completions.options import AnswerOptions, FunctionChoice, Grammar, Messages, ToolChoice, flattened
from pylongctx.completions.request import job_of, sampling_params, stop_words
from pylongctx.completions.results import Generation, StopFilter
from pylongctx.completions.text_completer import TextCompleter
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.engine.source import TokenSource

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion as OpenAICompletion
    from openai.types.chat import ChatCompletionChunk as OpenAIChunk
    from typing_extensions import Unpack

    from pylongctx.completions.options import ChatOptions
    from pylongctx.engine.model import Model
    from pylongctx.engine.sampling.sampler import Processors, StoppingCriteria

# keywords that llama_cpp's chat handlers do not accept
OURS = (
    "stopping_criteria",
    "stream_options",
    "parallel_tool_calls",
    "enable_thinking",
    "chat_template_kwargs",
    "parse_special",
)
TEMPLATE = {
    **dict.fromkeys(("functions", "function_call", "tools", "tool_choice", "response_format", "parallel_tool_calls")),
    "enable_thinking": True,
    "chat_template_kwargs": None,
    "parse_special": False,
}


class Completer(TextCompleter):
    """A TextCompleter that also answers conversations.

    Parameters
    ----------
    model : Model
        The model, for its vocabulary.
    source : TokenSource
        Generates the tokens.
    name : str
        The model's name in answers.
    templates : Templates
        The chat template.
    seed : int or None
        Seed of the samplers; -1 or None: random.
    last_n_tokens_size : int
        Number of last tokens that penalties consider.
    chat_handler : callable or None
        Handles ``create_chat_completion`` instead, called like llama_cpp's handlers.
    prefills : bool
        Whether an answer continues a last message of the assistant, as in llama-server; else it is a new message.
    """

    def __init__(
        self,
        model: Model,
        source: TokenSource,
        name: str,
        templates: Templates,
        seed: int | None = None,
        last_n_tokens_size: int = 64,
        chat_handler: Handler | None = None,
        prefills: bool = False,
    ) -> None:
        super().__init__(model, source, name, seed, last_n_tokens_size)
        self.prefills = prefills
        self.chat_handler = chat_handler
        self._templates = templates

    @overload
    def create_chat_completion(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion: ...
    @overload
    def create_chat_completion(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Iterator[ChatChunk]: ...
    @overload
    def create_chat_completion(
        self, messages: Messages, *, stream: bool, **options: Unpack[ChatOptions]
    ) -> ChatCompletion | Iterator[ChatChunk]: ...

    def create_chat_completion(
        self,
        messages: Messages,
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: FunctionChoice | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006 - the default of llama_cpp, never changed
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Processors = None,
        grammar: Grammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        stream_options: Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        enable_thinking: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        **more: Unpack[AnswerOptions],
    ) -> ChatCompletion | Iterator[ChatChunk]:
        """Answer a conversation; returns OpenAI's response dict, or with ``stream`` an iterator of chunks.

        llama.cpp renders the model's chat template and parses tool calls and reasoning. When a conversation continues,
        only the new tokens are evaluated. Reasoning is in ``reasoning_content`` of the message.

        Parameters
        ----------
        messages : list of dict
            The conversation: ``role`` and ``content``, ``tool_calls``, ``tool_call_id``.
        functions, function_call
            OpenAI's older form of ``tools`` and ``tool_choice``.
        tools : list of dict
            Functions that the model may call.
        tool_choice : str or dict
            ``auto`` (the default), ``none``, ``required``, or one function by name; enforced by a grammar.
        response_format : dict
            ``json_object``, with an optional ``schema``, or ``json_schema``; enforced by a grammar.
        max_tokens : int or None
            Maximum tokens to generate; None or <= 0: until the context is full.
        logprobs, top_logprobs : bool and int
            Return the log-probability of each token, and of the ``top_logprobs`` most likely ones.
        stream_options : dict
            ``{"include_usage": True}``: the usage is in a separate chunk without choices, as in OpenAI's API.
            By default it is in the chunk with the finish reason.
        parallel_tool_calls : bool
            Whether several calls may be made at once; None: if the template supports them. With False the answer
            ends after one call.
        enable_thinking : bool
            Whether a reasoning model reasons before it answers.
        chat_template_kwargs : dict
            Additional variables for the template.
        parse_special : bool
            Whether the texts of special tokens in user and tool messages become special tokens, as in llama.cpp.
            By default they are plain text, so that a message cannot end its own turn.
        temperature, top_p, top_k, min_p, typical_p, stream, stop, seed, presence_penalty, frequency_penalty, \
repeat_penalty, tfs_z, mirostat_mode, mirostat_tau, mirostat_eta, model, logits_processor, grammar, logit_bias, \
stopping_criteria, **more
            As in ``create_completion``.

        Raises
        ------
        ValueError
            When a message, a tool, a schema or a grammar is invalid, or the prompt does not fit into the context.

        Examples
        --------
        >>> messages = [{"role": "user", "content": "Name a color."}]
        >>> answer = llm.create_chat_completion(messages, max_tokens=4, temperature=0)
        >>> answer["choices"][0]["message"]["role"]
        'assistant'
        """
        given = flattened(locals(), more_of=AnswerOptions)
        handler = self.chat_handler or registered_handler(self._templates.name)
        if handler is not None:
            answered: ChatCompletion | Iterator[ChatChunk] = handler(
                llama=self, **{name: value for name, value in given.items() if name not in OURS}
            )
            return answered
        chunks = self._answer(given).stream()
        if stream:
            return self._steps(chunks)
        with self._source.turn():
            return response.collect(chunks, bool(logprobs))

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> OpenAICompletion | Iterator[OpenAIChunk]:
        """Answer a conversation with objects of the package ``openai``, which must be installed.

        Examples
        --------
        >>> messages = [{"role": "user", "content": "Name a color."}]
        >>> answer = llm.create_chat_completion_openai_v1(messages, max_tokens=2)  # doctest: +SKIP
        """
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError as reason:
            raise ImportError("objects of openai need its package: pip install openai") from reason
        answer = self.create_chat_completion(*args, **kwargs)
        if isinstance(answer, Mapping):
            return ChatCompletion.model_validate(answer)
        return (ChatCompletionChunk.model_validate(chunk) for chunk in answer)

    def apply_template(self, messages: Messages, **kwargs: Any) -> str:
        """Return the prompt of a conversation; other keywords as in ``create_chat_completion``.

        Examples
        --------
        >>> "Name a color." in llm.apply_template([{"role": "user", "content": "Name a color."}])
        True
        """
        return self._conversation({**TEMPLATE, **kwargs, "messages": messages}).rendered(0).prompt

    def chat_tokens(self, messages: Messages, **kwargs: Any) -> list[int]:
        """Return the tokens of that prompt, as counted in ``usage`` if no turn is left out.

        Examples
        --------
        >>> messages = [{"role": "user", "content": "Name a color."}]
        >>> usage = llm.create_chat_completion(messages, max_tokens=1)["usage"]
        >>> len(llm.chat_tokens(messages)) == usage["prompt_tokens"]
        True
        """
        return self._conversation({**TEMPLATE, **kwargs, "messages": messages}).prompt().tokens

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of ``chat_format``, or the model's own."""
        return self._templates.template

    # ---- parts ----

    def _render(self, given: Mapping[str, Any]) -> Rendered:
        self._source.check_size(text_size(given["messages"]))
        return render(self._templates.template, given, self.prefills)

    def _conversation(self, given: Mapping[str, Any]) -> FittedConversation:
        def render(messages: Any) -> Rendered:
            return self._render({**given, "messages": messages})

        return FittedConversation(self._model, self._source, given["messages"], render, bool(given["parse_special"]))

    def _answer(self, given: Mapping[str, Any]) -> response.ChatAnswer:
        model, source, conversation = self._model, self._source, self._conversation(given)
        prompt, fields = conversation.fit(given["max_tokens"]) if source.evicts else (conversation.prompt(), {})
        rendered, tokens = prompt.rendered, prompt.tokens
        own_grammar = constraint(given["grammar"]) or rendered.constraint
        params = sampling_params(given, self._seeds, self.last_n_tokens_size)
        sampler = Sampler(model, params, own_grammar, tokens)
        piece = partial(self._piece, tokens_of(model, rendered.preserved))
        n_top = check_count("top_logprobs", given["top_logprobs"] or 0, 0)
        scorer = Scorer(model, n_top, piece) if given["logprobs"] else None
        job = job_of(source, tokens, sampler, given, scorer is not None, text=rendered.prompt, **fields)
        stops = StopFilter([*stop_words(given["stop"]), *rendered.stops])
        return response.ChatAnswer(
            Generation(source, job, stops, piece, scorer),
            AnswerParser(rendered.syntax),
            self._name if given["model"] is None else given["model"],
            legacy=bool(given["functions"]),
            one_call=bool(given["functions"]) or given["parallel_tool_calls"] is False,
            usage_chunk=bool((given["stream_options"] or {}).get("include_usage")) and given["stream"],
        )

    def _piece(self, preserved: Iterable[int], token: int) -> bytes:
        return self._model.piece(token, token in preserved)
