"""Chat templates, rendered by llama.cpp: a prompt, the form of its answer, and places where schemas are enforced."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pylongctx._arguments import check_count
from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.chat import formats
from pylongctx.chat.answer import AnswerParser
from pylongctx.chat.budget import ReasoningBudget, Tags
from pylongctx.chat.formats import registered_handler
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.schema import SHARED, EnforcedSchema, hold, warn_of
from pylongctx.guarded.process import guarded

SCHEMA_MARK = "<schema>"
FIRST_PLACEHOLDER = 1 << 30  # the token of the first placeholder, see native/chat/grammar.h
PLACEHOLDER = re.compile(rf'"{{\\"{SCHEMA_MARK}\\":(\d+)}}"')  # a placeholder in the converter's output
# keywords without constraints
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
OWN_TEMPLATE = "chat_template."  # prefix of the names of a model's own templates, such as chat_template.default
HINTS = (
    "Unable to generate parser for this template. Automatic parser generation failed: ",
    "please consider disabling jinja via --no-jinja, or using another chat template",
    "try using --jinja",
)
NO_TEMPLATE = (
    "the model has no chat template, so ChatML is used; a model not trained on it may give empty answers: "
    "pass chat_format, or use completions instead of chat"
)


def place(number: int, like: Any = None) -> dict[str, Any]:
    """Return a schema that llama.cpp turns into a placeholder; a template sees the fields of ``like`` in it."""
    shown = like if isinstance(like, Mapping) else {}
    kept = {key: value for key, value in shown.items() if key not in ("$ref", "oneOf", "anyOf")}
    return {"type": "object", **kept, "const": {SCHEMA_MARK: number}}


def with_places(grammar: str) -> str:
    """Return llama.cpp's grammar with placeholders in the form of ``lctx_grammar_create``."""
    return PLACEHOLDER.sub(lambda found: f"<[{FIRST_PLACEHOLDER + int(found[1])}]>", grammar)


def has_places(answer: Mapping[str, Any]) -> bool:
    """Return True if the grammar of a rendered request has placeholders."""
    return bool(answer["constraint"]) and PLACEHOLDER.search(answer["constraint"]["grammar"]) is not None


class PlacedTools:
    """The tools of a request, with placeholders for their parameters; ``strict`` ones must be enforced."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.marked: list[dict[str, Any]] = []  # the tools with placeholders
        self.grammars: list[str] = []  # of the placeholders
        self.gaps: list[str] = []  # keywords that are not enforced
        self.refusal = ""  # why a strict tool cannot be enforced
        self._tools = [tool["function"] for tool in tools]

    def whole(self) -> "PlacedTools":
        """Give each tool one placeholder: its call has the arguments as one JSON value."""
        for function in self._tools:
            self._add(function, self._place(function, function["parameters"], ""))
        return self

    def by_parameter(self) -> "PlacedTools":
        """Give each parameter a placeholder: a call lists them separately, with strings as plain text."""
        for function in self._tools:
            schema = function["parameters"]
            shared = {key: schema[key] for key in SHARED if key in schema}
            self._note(function, "", schema, {"type", "properties", "required", "additionalProperties", *SHARED})
            parts = {}
            for name, part in schema.get("properties", {}).items():
                if may_be_text(part, schema):
                    parts[name] = {"type": "string"}
                    self._note(function, f"/properties/{name}", part, {"type"})
                else:
                    parts[name] = self._place(function, {**shared, **part}, f"/properties/{name}")
            required = [name for name in schema.get("required", ()) if name in parts]
            self._add(function, {"type": "object", "properties": parts, "required": required})
        return self

    def nowhere(self) -> "PlacedTools":
        """Record that this chat template does not constrain calls, including strict ones."""
        self.gaps = [f"{function['name']}: this chat template enforces no schema" for function in self._tools]
        return self

    def _place(self, function: Mapping[str, Any], schema: Any, path: str) -> dict[str, Any]:
        try:
            held: EnforcedSchema = hold(schema, strict=function.get("strict") is True)
        except ValueError as reason:
            raise ValueError(f"the parameters{path} of {function['name']}: {reason}") from None
        self.grammars.append(held.grammar)
        self.gaps += [f"{function['name']}{path}{gap}" for gap in held.gaps]
        return place(len(self.grammars) - 1, schema)

    def _add(self, function: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        self.marked.append({"type": "function", "function": {**function, "parameters": parameters}})

    def _note(self, function: Mapping[str, Any], path: str, schema: Any, held: set[str]) -> None:
        """Record keywords that cannot be enforced, since the template writes strings and parameters without JSON."""
        keys = [key for key in schema if key not in ANNOTATIONS | held] if isinstance(schema, Mapping) else []
        if keys and function.get("strict") is True and not self.refusal:
            self.refusal = (
                f"{function['name']}{path}/{keys[0]} cannot be enforced in the calls of this chat template; "
                "leave it out, or the tool's strict"
            )
        self.gaps += [f"{function['name']}{path}/{key}: this chat template does not enforce it" for key in keys]


def may_be_text(schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Return True if a schema allows a string, by llama.cpp's rule for parameters.

    Examples
    --------
    >>> may_be_text({"anyOf": [{"type": "null"}, {"enum": ["a"]}]}, {}), may_be_text({"type": "integer"}, {})
    (True, False)
    """
    if not isinstance(schema, Mapping) or depth > 32:
        return True
    if isinstance(schema.get("$ref"), str):
        return may_be_text(_found(schema["$ref"], root), root, depth + 1)
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return any(may_be_text(part, root, depth + 1) for part in schema[key])
    kind = schema.get("type")
    if isinstance(kind, list):
        return any(may_be_text({**schema, "type": one}, root, depth + 1) for one in kind)
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if values is not None:
            return any(isinstance(value, str) for value in values)
    if kind is not None:
        return bool(kind == "string")
    if any(key in schema for key in ("properties", "additionalProperties", "items", "prefixItems")):
        return False
    return all(may_be_text(part, root, depth + 1) for part in schema.get("allOf", ()))


def _found(ref: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in ref.split("/")[1:]:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation."""

    prompt: str  # without the BOS token if the vocabulary adds one
    constraint: str | None  # the grammar of the answer, for a Sampler
    preserved: list[str]  # texts of special tokens that are part of the answer's text
    stops: list[str]  # strings that end the answer, in addition to the model's end tokens
    syntax: str  # how to parse the answer, for an AnswerParser
    plain: Sequence[tuple[int, int]] = ()  # positions where texts of special tokens are plain text


class ChatTemplate:
    """A chat template, parsed and rendered in a worker process that can be stopped, since it is untrusted code.

    ``source`` is Jinja text, or with ``is_name`` a name in llama.cpp; ``with_tools`` is separate text for requests with
    tools, if there is any. InvalidInput when the template cannot be used.
    """

    def __init__(
        self, model: Model, source: str, stops: tuple[str, ...] = (), with_tools: str = "", is_name: bool = False
    ) -> None:
        self._stops = stops
        spec = _tokens(model) | {"source": source, "with_tools": with_tools, "is_name": is_name}
        self._spec = json.dumps(spec)
        found = json.loads(guarded("the chat template", "template_info", self._spec))
        self.info: dict[str, Any] = {"source": source, **found}  # and caps: what the template supports
        self.reasoning_format: str | None = None  # llama.cpp's name; "none" leaves reasoning in the text

    @cached_property
    def reasoning_tags(self) -> Tags | None:
        """The texts that begin and end reasoning; None: there are none. llama.cpp names them beside a grammar only."""
        asked = {"messages": [{"role": "user", "content": "a"}], "json_schema": {"type": "object"}}
        found = self._apply(asked)["constraint"] or {}
        ends = found.get("thinking_ends")
        return (found["thinking_start"].strip(), ends[0]) if ends and found["thinking_start"].strip() else None

    def render(self, request: Mapping[str, Any], strict: bool = True) -> Rendered:
        """Render a request, see ``lctx_template_apply``; InvalidInput when the template refuses it.

        Unless ``strict``, a ``json_schema`` need not be fully enforced: a RuntimeWarning names the gaps.
        """
        wanted, grammars = dict(request), []
        if "json_schema" in wanted:
            held = hold(wanted["json_schema"], strict)
            warn_of(held.gaps)
            wanted["json_schema"], grammars = place(0), [held.grammar]
        elif wanted.get("tools") and wanted.get("tool_choice") != "none":
            return self._with_tools(wanted)
        answer = self._apply(wanted)
        if grammars and not answer["constraint"]:
            if not _begins_with_content(json.dumps(answer["syntax"])):
                raise error(lib.LCTX_INVALID, "the chat template begins with reasoning and cannot enforce a schema")
            answer["constraint"] = {}  # the schema is the whole answer
        return self._rendered(answer, answer["prompt"], grammars)

    def _with_tools(self, request: Mapping[str, Any]) -> Rendered:
        """Render a request with the original tools in the prompt and placeholders in the grammar."""
        prompt = self._apply({**request, "tool_choice": "none"})["prompt"]
        tools = PlacedTools(request["tools"]).whole()
        answer = self._apply({**request, "tools": tools.marked})
        if not has_places(answer):
            tools = PlacedTools(request["tools"]).by_parameter()
            answer = self._apply({**request, "tools": tools.marked})
        if not has_places(answer):
            tools, answer = PlacedTools(request["tools"]).nowhere(), self._apply(request)
        if tools.refusal:
            raise ValueError(tools.refusal)
        warn_of(tools.gaps)
        return self._rendered(answer, prompt, tools.grammars)

    def _apply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.reasoning_format is not None:
            request = {**request, "reasoning_format": self.reasoning_format}
        try:
            wanted = json.dumps(request)
            found: dict[str, Any] = json.loads(guarded("the chat template", "template_apply", self._spec, wanted))
        except (ValueError, RecursionError) as reason:
            why = f"the chat template cannot render the messages: {_without_hints(str(reason))}"
            raise error(lib.LCTX_INVALID, why) from None
        return found

    def _rendered(self, answer: Mapping[str, Any], prompt: str, grammars: list[str]) -> Rendered:
        constraint = answer["constraint"]
        if has_places(answer):
            constraint = {**constraint, "grammar": with_places(constraint["grammar"]), "schemas": grammars}
        elif constraint == {}:
            constraint = {"schemas": grammars}
        return Rendered(
            prompt=prompt,
            constraint=json.dumps(constraint) if constraint else None,
            preserved=answer["preserved_tokens"],
            stops=[*answer["stops"], *self._stops],
            syntax=json.dumps(answer["syntax"]),
        )


def _without_hints(reason: str) -> str:
    """Return llama.cpp's reason without hints about its own programs."""
    for one in HINTS:
        reason = reason.replace(one, "")
    return reason.strip(" ,;")


def _begins_with_content(syntax: str) -> bool:
    """Return True if an answer that is only JSON is parsed as content."""
    parser = AnswerParser(syntax)
    return all("content" in delta for delta in [*parser.feed("[0]"), *parser.end(True)]) and not parser.failure


def _tokens(model: Model) -> dict[str, Any]:
    """Return the texts of the tokens that templates use, and whether the vocabulary adds them."""
    info = model.info
    ids = {"bos": info.token_bos, "eos": info.token_eos}
    texts = {name: model.piece(token, True).decode("utf-8", "replace") for name, token in ids.items() if token >= 0}
    return texts | {"add_bos": bool(info.add_bos), "add_eos": bool(info.add_eos)}


class Templates:
    """The chat template of a model, loaded on first use; ValueError or InvalidInput for an unknown name.

    The name is that of a format or a handler, Jinja text, or ``chat_template.NAME`` of the model. None: the model's own
    template, else ChatML, with a warning.
    """

    def __init__(self, model: Model, name: str | None) -> None:
        self.name = name
        self.reasoning_format: str | None = None  # of the template
        self.stops_reasoning = False  # whether stop strings act on all text that the model generates, as in llama.cpp
        self.reasoning_budget: int | None = None  # most tokens of an answer's reasoning
        self._model = model
        if name is not None and registered_handler(name) is None:
            self._named(name)

    @cached_property
    def template(self) -> ChatTemplate:
        """The template; InvalidInput when it cannot be used."""
        found = ChatTemplate(self._model, *(self._own() if self.name is None else self._named(self.name)))
        found.reasoning_format = self.reasoning_format
        return found

    def budget(self, rendered: Rendered, asked: int | None = None) -> ReasoningBudget | None:
        """Return what limits the reasoning of an answer; None: nothing does, or the template has no reasoning.

        ``asked`` is the limit of the request, -1 for none; the smaller limit applies.
        """
        wanted = -1 if asked is None else check_count("reasoning_budget", asked, -1)
        limits = [n for n in (self.reasoning_budget, wanted) if n is not None and n >= 0]
        tags = self.template.reasoning_tags if limits else None
        if tags is None:
            return None
        begun = json.loads(rendered.syntax)["generation_prompt"]
        return ReasoningBudget(self._model, min(limits), tags, begun)

    def _named(self, name: str) -> formats.Format:
        if not name.startswith(OWN_TEMPLATE):
            return formats.find(name)
        key, metadata = "tokenizer." + name.removesuffix(".default"), self._model.metadata()
        if key not in metadata:
            raise ValueError(f"chat_format={name!r}: the model has no template {key}")
        return formats.Format(metadata[key])

    def _own(self) -> formats.Format:
        metadata = self._model.metadata()
        plain, tools = (metadata.get(f"tokenizer.{key}", "") for key in ("chat_template", "chat_template.tool_use"))
        if plain or tools:
            return formats.Format(plain or tools, with_tools=tools)
        LOG.warning(NO_TEMPLATE)
        return formats.find("chatml")
