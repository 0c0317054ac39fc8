"""Reading the JSON of a request: its size in entries, and fields that are not served."""

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from pylongctx.sampling import MOST_BREAKERS, SAMPLERS
from pylongctx.serve.access import is_json
from pylongctx.serve.errors import ApiError, invalid

# most entries of lists and objects, by field
MOST = {
    "messages": 8192,
    "tools": 1024,
    "functions": 1024,
    "stop": 256,
    "stop_sequences": 256,
    "logit_bias": 65536,
    "dry_sequence_breakers": MOST_BREAKERS,
    "samplers": len(SAMPLERS),
    "input_extra": 1024,
    "response_fields": 64,
    "chat_template_kwargs": 1024,
    "tokens": 1 << 20,
    "prompt": 1 << 20,
    "input": 1 << 20,
    "documents": 1 << 20,
    "texts": 1 << 20,
}
MOST_PARTS = 65536  # content parts and tool calls of all messages
MOST_STOP = 16384  # characters of all stop strings
SHOWN = 60  # characters of a value in a message

# fields that ask for nothing: clients send them for their own records
LABELS = frozenset(
    {"model", "user", "metadata", "safety_identifier", "prompt_cache_key", "client_metadata", "prompt_cache_retention"}
)
# fields whose feature is not here and would change an answer, with the values that ask for what is done anyway
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "conversation": (),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "n_keep": (0,),
    "post_sampling_probs": (False,),
    "previous_response_id": (),
    "lora": ([],),
    "image_data": ([],),
}
# the same for fields without which an answer is as good; others have no effect, and are named
HINTS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default", "standard_only"),
    "truncation": ("disabled",),
    "include": ([],),
    "context_management": ([],),
    "verbosity": ("medium",),
    "tfs_z": (1,),
    "n_discard": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "penalize_nl": (False, True),  # llama.cpp removed it
    "reasoning_format": ("auto", "deepseek"),
    "parse_tool_calls": (True,),
    "speculative.n_max": (0,),
    "backend_sampling": (False,),
}
MOST_NAMED = 32  # of them in a response
# fields that say how one of those above works: without effect, for that is off
DETAILS = frozenset({"speculative.n_min", "speculative.p_min"})

Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, body: type[Body]) -> Body:
    """Return the body of a request; ApiError when it is not what it should be."""
    unserved: dict[str, str] = {}
    found = load(body, await json_of(request), unserved)
    note(request, unserved)
    return found


async def json_of(request: Request) -> Any:
    """Return the JSON of a request; ApiError when it is none, or is not said to be."""
    if not is_json(request.headers):
        kind = request.headers.get("content-type", "")
        # a page of another site can send other types without asking this server first
        raise ApiError(415, "invalid_request_error", f"send the header Content-Type: application/json, not {kind!r}")
    try:
        return from_json(await request.body())
    except ValueError as reason:
        raise invalid(f"the body is no JSON: {reason}") from None


def note(request: Request, unserved: dict[str, str]) -> None:
    """Take note of fields without effect, each with a message; ApiError when the server was told to refuse them."""
    if unserved and request.scope["unknown_fields"] == "refuse":
        name = next(iter(unserved))
        raise invalid(unserved[name], name)
    request.scope["unserved"] |= unserved


def load(body: type[Body], fields: Any, unserved: dict[str, str] | None = None) -> Body:
    """Return a body from its fields; ApiError names the first one that cannot be served.

    ``unserved`` gets the fields that have no effect, each with a message; None: these are errors, too.
    """
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    known = _names(body)
    for name, value in fields.items():
        if name in known:
            _check_length(name, value)
        elif value is not None and name not in LABELS and name not in DETAILS and (reason := _unserved(name, value)):
            if unserved is None or name in NEUTRAL:
                raise invalid(reason, name[:SHOWN])
            unserved[name[:SHOWN]] = reason
    try:
        return body.model_validate({name: value for name, value in fields.items() if name in known})
    except ValidationError as reason:
        first = reason.errors(include_url=False, include_input=False)[0]
        # a union names the alternative that did not fit behind the field
        field = str(first["loc"][0]) if first["loc"] else None
        raise invalid(f"{field}: {first['msg']}" if field else first["msg"], field) from None


def _names(body: type[BaseModel]) -> set[str]:
    """Return the names of the fields of a body, and their other names."""
    found = set(body.model_fields)
    for field in body.model_fields.values():
        found |= set(getattr(field.validation_alias, "choices", ()))
    return found


def _unserved(name: str, value: Any) -> str:
    """Return why a field has no effect; empty when its value asks for what is done anyway."""
    usual = NEUTRAL.get(name, HINTS.get(name))
    if usual is None:
        return f"the field {name[:SHOWN]!r} is not served here"
    if value in usual:
        return ""
    only = f": only {_shown(usual[0])} is" if usual else ""
    return f"{name}={_shown(value)} is not served{only}"


def _check_length(name: str, value: Any) -> None:
    most = MOST.get(name)
    if most is not None and isinstance(value, list | dict) and len(value) > most:
        raise invalid(f"{name} has {len(value)} entries, more than {most}", name)
    if name in ("stop", "stop_sequences") and isinstance(value, list):
        n = sum(len(one) for one in value if isinstance(one, str))
        if n > MOST_STOP:
            raise invalid(f"{name} has {n} characters, more than {MOST_STOP}", name)
    if name in ("messages", "input") and isinstance(value, list):
        n = sum(_n_parts(message) for message in value)
        if n > MOST_PARTS:
            raise invalid(f"{name}: {n} parts and calls, more than {MOST_PARTS}", name)


def _n_parts(message: Any) -> int:
    """Return how many parts a message has, those of its parts included."""
    lists = [value for value in message.values() if isinstance(value, list)] if isinstance(message, Mapping) else []
    return sum(len(value) + sum(map(_n_parts, value)) for value in lists)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
