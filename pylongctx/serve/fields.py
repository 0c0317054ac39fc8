"""Parsing the JSON of a request: limits of its entries, and unsupported fields."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from pylongctx.engine.sampling.params import MAX_BREAKERS
from pylongctx.serve import foreign
from pylongctx.serve.access import is_json
from pylongctx.serve.errors import ApiError, invalid

# maximum entries of lists and objects, by field
MAX_ENTRIES = {
    "messages": 8192,
    "tools": 1024,
    "functions": 1024,
    "stop": 256,
    "stop_sequences": 256,
    "logit_bias": 65536,
    "dry_sequence_breakers": MAX_BREAKERS,
    "samplers": 64,
    "input_extra": 1024,
    "response_fields": 64,
    "chat_template_kwargs": 1024,
    "tokens": 1 << 20,
    "prompt": 1 << 20,
    "input": 1 << 20,
    "documents": 1 << 20,
    "texts": 1 << 20,
}
MAX_PARTS = 65536  # total content parts and tool calls of all messages
MAX_STOP = 16384  # total characters of all stop strings
SHOWN = 60  # characters of a value in error messages

MAX_NAMED = 32  # maximum fields without effect named in a response


class Unserved:
    """Unsupported fields of a request: they cause an error, a response header and a log message, or nothing.

    Parameters
    ----------
    policy : str
        ``warn``, ``ignore`` or ``refuse``.

    Attributes
    ----------
    found : dict
        The fields, each with the reason.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.found: dict[str, str] = {}

    def note(self, name: str, reason: str) -> None:
        """Record a field without effect; ApiError if such fields are refused."""
        name = name[:SHOWN]
        if self.policy == "refuse":
            raise invalid(reason, name)
        self.found.setdefault(name, reason)


class Fields(BaseModel):
    """The body of a request."""

    def settle(self, unserved: Unserved) -> None:
        """Record and drop values without effect."""


class Open(BaseModel):
    """An object inside a body, whose unknown fields have no effect."""

    model_config = ConfigDict(extra="allow")


Body = TypeVar("Body", bound=Fields)


async def read(request: Request, body: type[Body]) -> Body:
    """Return the body of a request; ApiError when it is invalid."""
    return load(body, await json_of(request), request.scope["unserved"])


async def json_of(request: Request) -> Any:
    """Return the JSON of a request; ApiError when it is not JSON, or not declared as JSON."""
    if not is_json(request.headers, request.url.path):
        kind = request.headers.get("content-type", "")
        # pages of other sites can send other types without a CORS preflight
        raise ApiError(415, "invalid_request_error", f"send the header Content-Type: application/json, not {kind!r}")
    try:
        return from_json(await request.body())
    except ValueError as reason:
        raise invalid(f"the body is not JSON: {reason}") from None


def load(body: type[Body], fields: Any, unserved: Unserved) -> Body:
    """Return a body from its fields; ApiError names the first unsupported one."""
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    names = _names(body)
    known = {name: field for field, all_names in names.items() for name in all_names}
    given: dict[str, str] = {}  # the names in use, by field
    for name, value in fields.items():
        if name not in known:
            _note_unknown(name, value, unserved)
        elif value is not None:
            _check_length(name, value)
            field = known[name]
            given[field] = min(given.get(field, name), name, key=names[field].index)
    for name, value in fields.items():
        first = given.get(known.get(name, ""), name)
        if name in known and value is not None and value != fields[first]:
            unserved.note(name, f"{name}={_shown(value)} has no effect together with {first}={_shown(fields[first])}")
    try:
        found = body.model_validate({name: fields[name] for name in given.values()})
    except ValidationError as reason:
        first_error = reason.errors(include_url=False, include_input=False)[0]
        # for a union, the alternative that did not match follows the field
        wrong = str(first_error["loc"][0]) if first_error["loc"] else None
        raise invalid(f"{wrong}: {first_error['msg']}" if wrong else first_error["msg"], wrong) from None
    for path in _unknown(found):
        unserved.note(path, f"{path} is not supported here")
    found.settle(unserved)
    return found


def _names(body: type[BaseModel]) -> dict[str, list[str]]:
    """Return the names of each field of a body in order of precedence."""
    found = {}
    for name, field in body.model_fields.items():
        choices = getattr(field.validation_alias, "choices", ())
        found[name] = [*map(str, choices), name]
    return found


def _unknown(found: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the paths of unknown fields in the objects of a body."""
    for name, value in found.model_extra.items() if found.model_extra else ():
        if value is not None:
            yield path + name
    for name in type(found).model_fields:
        value = getattr(found, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                yield from _unknown(one, f"{path}{name}.")


def _note_unknown(name: str, value: Any, unserved: Unserved) -> None:
    """Record an unknown field, unless its value requests the existing behavior."""
    if value is None or name in foreign.LABELS:
        return
    if name in foreign.REFUSED:
        usual, reason = foreign.REFUSED[name]
        if not _is_one_of(value, usual):
            raise invalid(f"{name}={_shown(value)} is not supported: {reason}", name)
        return
    usual, reason = foreign.WITHOUT_EFFECT.get(name, ((), ""))
    if not _is_one_of(value, usual):
        shown = f"{name}={_shown(value)}" if name in foreign.WITHOUT_EFFECT else f"the field {name[:SHOWN]!r}"
        unserved.note(name, f"{shown} is not supported" + (f": {reason}" if reason else " here"))


def _is_one_of(value: Any, usual: tuple[Any, ...]) -> bool:
    """Return True if a value is among others; false is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in usual)


def _check_length(name: str, value: Any) -> None:
    most = MAX_ENTRIES.get(name)
    if most is not None and isinstance(value, list | dict) and len(value) > most:
        raise invalid(f"{name} has {len(value)} entries, more than {most}", name)
    if name in ("stop", "stop_sequences") and isinstance(value, list):
        n = sum(len(one) for one in value if isinstance(one, str))
        if n > MAX_STOP:
            raise invalid(f"{name} has {n} characters, more than {MAX_STOP}", name)
    if name in ("messages", "input") and isinstance(value, list):
        n = sum(_n_parts(message) for message in value)
        if n > MAX_PARTS:
            raise invalid(f"{name}: {n} parts and calls, more than {MAX_PARTS}", name)


def _n_parts(message: Any) -> int:
    """Return how many parts a message has, including nested ones."""
    lists = [value for value in message.values() if isinstance(value, list)] if isinstance(message, Mapping) else []
    return sum(len(value) + sum(map(_n_parts, value)) for value in lists)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
