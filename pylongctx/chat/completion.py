"""Chat: the part of llama_cpp.Llama's interface that answers messages."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from pylongctx._arguments import check_count
from pylongctx.chat import formats
from pylongctx.chat.handlers import registered_handler
from pylongctx.chat.history import prompt_tokens
from pylongctx.chat.parser import AnswerParser
from pylongctx.chat.request import check_messages, choose_tools, wanted_schema
from pylongctx.chat.response import Answer, collect
from pylongctx.chat.template import ChatTemplate, Rendered
from pylongctx.completion import Request, StopFilter
from pylongctx.generation import Criteria, Generation, Processors
from pylongctx.grammar import constraint
from pylongctx.logprobs import Scorer
from pylongctx.sampling import Sampler

OWN = "chat_template."  # begins the names of a model's own templates: chat_template.default, chat_template.tool_use
OURS = ("stopping_criteria", "stream_options", "parallel_tool_calls", "enable_thinking", "chat_template_kwargs")


class Chat(Generation):
    """What Llama does with messages."""

    chat_format: str | None
    chat_handler: Any
    _template: ChatTemplate | None = None

    def create_chat_completion(
        self,
        messages: Any,
        functions: Any = None,
        function_call: Any = None,
        tools: Any = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006 - the default of llama_cpp, never changed
        seed: int | None = None,
        response_format: Any = None,
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
        grammar: Any = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        stopping_criteria: Criteria = None,
        stream_options: Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        enable_thinking: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer a conversation; returns OpenAI's response dict, or with ``stream`` an iterator of chunks.

        llama.cpp renders the model's chat template, and reads tool calls and reasoning. Of a conversation that goes on,
        only the new tokens are evaluated.

        Parameters
        ----------
        messages : list of dict
            The conversation: ``role`` and ``content``, ``tool_calls``, ``tool_call_id``.
        functions, function_call
            OpenAI's older form of ``tools`` and ``tool_choice``.
        tools : list of dict
            Functions that the model may call.
        tool_choice : str or dict
            ``auto`` (the default), ``none``, ``required``, or one function by name. A grammar holds the model to it.
        response_format : dict
            ``json_object``, with an optional ``schema``, or ``json_schema``: a grammar holds the answer to it.
        max_tokens : int or None
            Most tokens to generate; None or <= 0: until the context is full.
        logprobs, top_logprobs : bool and int
            Return the log-probability of each token, and of so many likeliest ones.
        stream_options : dict
            ``{"include_usage": True}``: the usage is in a chunk of its own, without choices, as OpenAI sends it.
            Else the chunk with the finish reason has it.
        parallel_tool_calls : bool
            Whether several calls may be made at once; None: when the template can render them.
        enable_thinking : bool
            Whether a model that can may think before it answers.
        chat_template_kwargs : dict
            More variables for the template.

        What the model thought is ``reasoning_content`` of the message. The other parameters are those of
        ``create_completion``.

        Raises
        ------
        ValueError
            When a message, a tool, a schema or a grammar is not usable, or the prompt does not fit the context.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        handler = self.chat_handler or registered_handler(self.chat_format)
        if handler is not None:
            return handler(llama=self, **{name: value for name, value in given.items() if name not in OURS})
        answer = self._answer(given)
        if stream:
            return self._locked_steps(answer.stream())
        return self._locked(partial(collect, answer.stream(), bool(logprobs)))

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a conversation with objects of the package ``openai``, which must be installed."""
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError as reason:
            raise ImportError("objects of openai need its package: pip install openai") from reason
        answer = self.create_chat_completion(*args, **kwargs)
        if isinstance(answer, Mapping):
            return ChatCompletion.model_validate(answer)
        return (ChatCompletionChunk.model_validate(chunk) for chunk in answer)

    def apply_template(self, messages: Any, **kwargs: Any) -> str:
        """Return the prompt of a conversation; other keywords as in ``create_chat_completion``."""
        names = ("functions", "function_call", "tools", "tool_choice", "response_format")
        asked = dict.fromkeys((*names, "parallel_tool_calls"), None)
        return self._render(asked | {"enable_thinking": True, "chat_template_kwargs": None} | kwargs, messages).prompt

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of ``chat_format``, or the model's own."""
        if self._template is None:
            self._template = self._find_template()
        return self._template

    def _find_template(self) -> ChatTemplate:
        name = self.chat_format
        if name is None:
            own = ChatTemplate(self._model)
            return own if own.info["own"] else ChatTemplate(self._model, *formats.find("chatml"))
        if not name.startswith(OWN):
            return ChatTemplate(self._model, *formats.find(name))
        key = "tokenizer." + name.removesuffix(".default")
        if key not in self.metadata:
            raise ValueError(f"chat_format={name!r}: the model has no template {key}")
        return ChatTemplate(self._model, self.metadata[key])

    def _render(self, given: Mapping[str, Any], messages: Any) -> Rendered:
        template = self.chat_template
        tools, choice = choose_tools(*(given[name] for name in ("functions", "function_call", "tools", "tool_choice")))
        request = {
            "messages": check_messages(messages, template.info["source"]),
            "enable_thinking": given["enable_thinking"],
            "kwargs": dict(given["chat_template_kwargs"] or {}),
            "parallel_tool_calls": given["parallel_tool_calls"],
            "add_generation_prompt": given.get("add_generation_prompt", True),
        }
        if tools:
            request |= {"tools": tools, "tool_choice": choice}
        schema = wanted_schema(given["response_format"])
        if schema is not None:
            request["json_schema"] = schema
        if given.get("grammar") is not None and (schema is not None or (tools and choice != "none")):
            raise ValueError("grammar cannot be combined with tools or a response_format, which make one of their own")
        rendered = template.render(request)
        if tools and choice == "required" and rendered.constraint is None:
            raise ValueError("the chat template knows no tool calls, so none can be required; try chat_format='chatml'")
        if tools and not template.info["caps"]["supports_tools"]:
            warnings.warn(
                "the chat template does not show tools to the model; try chat_format='chatml'",
                RuntimeWarning,
                stacklevel=4,
            )
        return rendered

    def _answer(self, given: Mapping[str, Any]) -> Answer:
        rendered = self._render(given, given["messages"])
        own_grammar = constraint(given["grammar"]) or rendered.constraint
        sampler = Sampler(self._model, self._sampling({**given, "temp": given["temperature"]}), own_grammar)
        tokens = self._conversation(rendered.prompt)
        piece = partial(self._piece, self._tokens_of(rendered.preserved))
        n_top = check_count("top_logprobs", given["top_logprobs"] or 0, 0)
        scorer = Scorer(self._model, n_top, piece) if given["logprobs"] else None
        stop = given["stop"]
        request = Request(
            model_name=self.model_path if given["model"] is None else given["model"],
            tokens=self._generate(tokens, sampler, True, given["logits_processor"], given["stopping_criteria"]),
            piece=piece,
            ends=self._model.ends_generation,
            n_prompt=len(tokens),
            max_tokens=self._room(len(tokens), given["max_tokens"]),
            filter=StopFilter([*([stop] if isinstance(stop, str) else stop or []), *rendered.stops]),
            score=partial(self._score, scorer) if scorer else None,
            begin=partial(self._recall, tokens),
            end=self._remember,
        )
        usage_chunk = bool((given["stream_options"] or {}).get("include_usage")) and given["stream"]
        parser = AnswerParser(rendered.syntax)
        return Answer(request, parser, bool(given["functions"]), usage_chunk, self._session.say)

    def _conversation(self, prompt: str) -> list[int]:
        return prompt_tokens(self._model, prompt, self._session.tokens.tolist())

    def _tokens_of(self, texts: list[str]) -> frozenset[int]:
        """Return the tokens that stand for a whole text each."""
        found = (self._model.tokenize(text.encode(), False, True) for text in texts)
        return frozenset(tokens[0] for tokens in found if len(tokens) == 1)

    def _piece(self, preserved: frozenset[int], token: int) -> bytes:
        return self._model.piece(token, token in preserved)
