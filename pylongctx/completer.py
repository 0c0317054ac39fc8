"""Completions of prompts and answers to conversations, from any source of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from pylongctx._arguments import check_count
from pylongctx.chat.answer import AnswerParser, ChatAnswer, ChatChunk, ChatCompletion
from pylongctx.chat.answer import collect as collect_chat
from pylongctx.chat.conversation import Conversation, tokens_of
from pylongctx.chat.formats import LlamaChatCompletionHandler, registered_handler
from pylongctx.chat.template import ChatTemplate, Templates
from pylongctx.chat.tools import custom_names
from pylongctx.completions import results
from pylongctx.completions.grammar import constraint
from pylongctx.completions.request import (
    AnswerOptions,
    Grammar,
    Messages,
    Prompt,
    ToolChoice,
    are_prompts,
    flattened,
    job_of,
    joined,
    prompt_tokens,
    sampling_params,
    stop_words,
)
from pylongctx.completions.results import Completion, Generation, Scorer, StopFilter
from pylongctx.engine.overflow import halves
from pylongctx.engine.sampling.sampler import Sampler, SeedSequence
from pylongctx.engine.source import TokenSource

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion as OpenAICompletion
    from openai.types.chat import ChatCompletionChunk as OpenAIChunk
    from typing_extensions import Unpack

    from pylongctx.completions.request import ChatOptions, CompletionOptions
    from pylongctx.engine.model import Model
    from pylongctx.engine.sampling.sampler import Processors, StoppingCriteria

Chunk = TypeVar("Chunk", bound=Mapping[str, Any])

INFILL = "infill prompts differ between models: write the prompt yourself, and pass it without suffix"
# keywords that llama_cpp's chat handlers do not accept
OURS = (
    "stopping_criteria",
    "stream_options",
    "parallel_tool_calls",
    "enable_thinking",
    "reasoning_budget",
    "chat_template_kwargs",
    "parse_special",
)
TEMPLATE = {
    **dict.fromkeys(("functions", "function_call", "tools", "tool_choice", "response_format", "parallel_tool_calls")),
    "enable_thinking": True,
    "chat_template_kwargs": None,
    "parse_special": False,
}


class Completer:
    """Completes prompts and answers conversations with OpenAI's response dicts, independent of slots and HTTP.

    The source generates the tokens, ``name`` is the model's in answers, and penalties consider the last
    ``last_n_tokens_size`` tokens. With ``prefills`` an answer continues a last message of the assistant, as in
    llama-server; else it is a new message. With ``penalizes_prompt``, penalties also count the tokens of the prompt.
    """

    def __init__(
        self,
        model: Model,
        source: TokenSource,
        name: str,
        templates: Templates,
        seed: int | None = None,
        last_n_tokens_size: int = 64,
        chat_handler: LlamaChatCompletionHandler | None = None,
        prefills: bool = False,
        penalizes_prompt: bool = False,
    ) -> None:
        self.last_n_tokens_size = check_count("last_n_tokens_size", last_n_tokens_size, 0)
        self.prefills = prefills
        self.penalizes_prompt = penalizes_prompt
        self.chat_handler = chat_handler
        self._model = model
        self._source = source
        self._name = name
        self._templates = templates
        self.set_seed(seed)

    def set_seed(self, seed: int | None) -> None:
        """Seed the sampler of the next run; -1 and None are random.

        Examples
        --------
        >>> llm.set_seed(7)
        """
        self._seeds = SeedSequence(seed)

    # ---- prompts ----

    @overload
    def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> Completion: ...
    @overload
    def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> Iterator[Completion]: ...
    @overload
    def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: bool, **options: Unpack[CompletionOptions]
    ) -> Completion | Iterator[Completion]: ...

    def create_completion(
        self,
        prompt: Prompt | Sequence[Prompt],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006 - the default of llama_cpp, never changed
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        logits_processor: Processors = None,
        grammar: Grammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
        **more: Unpack[AnswerOptions],
    ) -> Completion | Iterator[Completion]:
        """Complete a prompt; returns OpenAI's response dict, or with ``stream`` an iterator of chunks.

        Parameters
        ----------
        prompt : str or list of int, or a list of them
            Text, or tokens that are used unchanged. A list of prompts: one completion with a choice for each, see
            ``complete_many``.
        suffix : str or None
            Not supported: raises NotImplementedError.
        max_tokens : int or None
            Maximum tokens to generate; None or <= 0: until the context is full. Only ``overflow="evict_middle"`` can
            generate more than fit: it evicts the older half of the text, except its first tokens.
        temperature, top_p, min_p, typical_p, top_k
            Sampling; ``temperature=0`` is greedy, ``top_k=0`` considers all tokens.
        logprobs : int or None
            Return the log-probability of each token and of the ``logprobs`` most likely ones, before sampling
            changes them. With ``echo`` also those of the prompt, for which the whole prompt is evaluated again;
            the first token has one only if a BOS token precedes it.
        echo : bool
            Prepend the prompt to the text.
        stop : str or list of str or None
            Strings that end the completion; they are not returned, not even in part.
        frequency_penalty, presence_penalty, repeat_penalty
            Penalties for the last ``last_n_tokens_size`` generated tokens.
        stream : bool
            Yield chunks as they are generated; the last one has ``usage``.
        seed : int or None
            Seed of this call; None: derived from the object's seed, which is random unless given.
        tfs_z
            No effect: llama.cpp removed it.
        mirostat_mode, mirostat_tau, mirostat_eta
            Mirostat sampling: version (0: off), target entropy, learning rate.
        model : str or None
            The model's name in the response.
        stopping_criteria : callable or None
            Ends the completion when ``criteria(input_ids, logits)`` is true.
        logits_processor : callable or list of callable or None
            Changes the logits before each token, ``processor(input_ids, logits)``.
        grammar : LlamaGrammar or str or None
            Constrains the completion, see ``LlamaGrammar``.
        logit_bias : dict or None
            Values to add to the logits of tokens.
        **more
            llama.cpp's other samplers (XTC, DRY, top-n-sigma, dynamic temperature, adaptive-p) and their order, see
            ``SamplerOptions`` and ``SamplingParams``. All are off by default.
            ``min_tokens``: minimum tokens of the answer. ``stop_token_ids``: tokens that end
            the answer and are not part of it.

        Raises
        ------
        ValueError
            When the prompt is empty or does not fit the context (PromptTooLong).
        NotImplementedError
            For ``suffix``.

        Examples
        --------
        >>> done = llm.create_completion("It was the best of", max_tokens=2, temperature=0)
        >>> done["usage"]["completion_tokens"]
        2
        >>> chunks = llm.create_completion("It was", max_tokens=2, stream=True)
        >>> list(chunks)[-1]["choices"][0]["finish_reason"]
        'length'
        """
        given = flattened(locals(), "stream", "model", more_of=AnswerOptions)
        if are_prompts(prompt):
            if stream:
                raise ValueError("stream=True takes one prompt, not a list: use complete_many or AsyncLlama")
            return results.choices_of(self.complete_many(given.pop("prompt"), model=model, **given))
        chunks = results.stream(self.generation(**given), self._name if model is None else model)
        if stream:
            return self._steps(chunks)
        with self._source.lock():
            return results.collect(chunks, logprobs is not None)

    __call__ = create_completion

    def complete_many(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the completion of each prompt, in order; see ``Llama.complete_many``."""
        found: list[Completion] = []
        for prompt in prompts:
            found.append(self.create_completion(prompt, model=model, **options))
            if progress is not None:
                progress(len(found), len(prompts))
        return found

    def generation(
        self,
        prompt: Prompt,
        post_sampling_probs: bool = False,
        n_keep: int | None = None,
        **options: Any,
    ) -> Generation:
        """Start a completion and return its generation; takes the options of ``create_completion``.

        With ``post_sampling_probs``, ``logprobs`` are those after all samplers, from which tokens were drawn. Where
        tokens may be evicted, the first ``n_keep`` tokens of the prompt stay, -1: all; BOS always stays. None:
        four.

        Examples
        --------
        >>> generation = llm.generation("It was the best of", max_tokens=2, temperature=0)
        >>> text = "".join(part for part, _ in generation.parts())
        >>> len(generation.tokens)
        2
        """
        given = completion_defaults() | options
        if given["suffix"] is not None:
            raise NotImplementedError(f"suffix: {INFILL}")
        model, source, n_top = self._model, self._source, given["logprobs"]
        params = sampling_params(given, self._seeds, self.last_n_tokens_size)
        held, tokens = constraint(given["grammar"]), prompt_tokens(source, prompt)
        sampler = Sampler(model, params, held, tokens, self.penalizes_prompt)
        scorer = None if n_top is None else Scorer(model, check_count("logprobs", n_top, 0))
        evictions = halves(model, tokens, n_keep, source.n_ctx) if source.evicts else None
        text = prompt if isinstance(prompt, str) else ""
        fields = {"after_samplers": post_sampling_probs, "evictions": evictions, "text": text}
        return Generation(
            source,
            job_of(source, tokens, sampler, given, scorer is not None, **fields),
            StopFilter(stop_words(given["stop"]), strip_space=len(prompt) == 0),
            model.piece,
            scorer,
            prompt if isinstance(prompt, str) else model.detokenize(prompt).decode("utf-8", "ignore"),
            given["echo"],
            isinstance(prompt, str),
            params,
        )

    # ---- conversations ----

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
        function_call: ToolChoice | None = None,
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
        reasoning_budget: int | None = None,
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
            Functions that the model may call, and OpenAI's custom tools, whose input is a text.
        tool_choice : str or dict
            ``auto`` (the default), ``none``, ``required`` (or ``any``), one tool by name, or ``allowed_tools``;
            enforced by a grammar.
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
        reasoning_budget : int or None
            Maximum tokens of reasoning; then the template's end tag follows. None or -1: no limit. No effect if the
            template does not mark reasoning.
        chat_template_kwargs : dict
            Additional variables for the template.
        parse_special : bool
            Whether the texts of special tokens in user and tool messages become special tokens, as in llama.cpp.
            By default they are plain text, so that a message cannot end its own turn.
        temperature, top_p, top_k, min_p, typical_p, stream, stop, seed, presence_penalty, frequency_penalty, \
repeat_penalty, tfs_z, mirostat_mode, mirostat_tau, mirostat_eta, model, logits_processor, grammar, logit_bias, \
stopping_criteria, **more
            As in ``create_completion``, except that ``stop`` ends the text of the answer, not its reasoning or calls.

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
        with self._source.lock():
            return collect_chat(chunks, bool(logprobs))

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

    def _conversation(self, given: Mapping[str, Any]) -> Conversation:
        return Conversation(self._templates.template, self._source, given, self.prefills)

    def _answer(self, given: Mapping[str, Any]) -> ChatAnswer:
        model, source, conversation = self._model, self._source, self._conversation(given)
        prompt = conversation.fit(given["max_tokens"]) if source.evicts else conversation.prompt()
        rendered, tokens = prompt.rendered, prompt.tokens
        own_grammar = constraint(given["grammar"]) or rendered.constraint
        if (budget := self._templates.budget(rendered, given["reasoning_budget"])) is not None:
            given = {**given, "logits_processor": joined(given["logits_processor"], budget)}
        params = sampling_params(given, self._seeds, self.last_n_tokens_size)
        sampler = Sampler(model, params, own_grammar, tokens, self.penalizes_prompt)
        piece = partial(self._piece, tokens_of(model, rendered.preserved))
        n_top = check_count("top_logprobs", given["top_logprobs"] or 0, 0)
        scorer = Scorer(model, n_top, piece) if given["logprobs"] else None
        job = job_of(
            source,
            tokens,
            sampler,
            given,
            scorer is not None,
            text=rendered.prompt,
            evictions=prompt.evictions,
            dropped_turns=prompt.dropped_turns,
            dropped_tokens=prompt.dropped_tokens,
        )
        stops = stop_words(given["stop"])
        everywhere = [*rendered.stops, *(stops if self._templates.stops_reasoning else ())]
        return ChatAnswer(
            Generation(source, job, StopFilter(everywhere), piece, scorer),
            AnswerParser(rendered.syntax),
            self._name if given["model"] is None else given["model"],
            stops,
            legacy=bool(given["functions"]),
            one_call=bool(given["functions"]) or given["parallel_tool_calls"] is False,
            custom=custom_names(given["tools"]),
            usage_chunk=bool((given["stream_options"] or {}).get("include_usage")) and given["stream"],
        )

    def _piece(self, preserved: Iterable[int], token: int) -> bytes:
        return self._model.piece(token, token in preserved)

    def _steps(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        while True:
            with self._source.lock():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk


@cache
def completion_defaults() -> dict[str, Any]:
    """Return the defaults of ``create_completion``."""
    found = {name: one.default for name, one in signature(Completer.create_completion).parameters.items()}
    others = ("self", "prompt", "stream", "model", "more")
    return {name: value for name, value in found.items() if name not in others}
