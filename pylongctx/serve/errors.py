"""Errors in OpenAI's form."""

from typing import Any

from pylongctx.engine.job import Cancelled
from pylongctx.errors import ContextFull, DeviceLost, PromptTooLong

RETRY_AFTER = {"Retry-After": "1"}


class ApiError(Exception):
    """A request that fails with an error response of OpenAI's or llama-server's kinds, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        param: str | None = None,
        code: str | None = None,
        more: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.error = {"message": message, "type": kind, "param": param, "code": code, **(more or {})}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error of an invalid request."""
    return ApiError(400, "invalid_request_error", message, param)


def unavailable(message: str) -> ApiError:
    """Return the error of a temporarily unavailable server."""
    return ApiError(503, "unavailable_error", message, headers=RETRY_AFTER)


def as_api_error(reason: BaseException) -> ApiError:
    """Return the error for an exception of a request."""
    if isinstance(reason, ApiError):
        return reason
    if isinstance(reason, PromptTooLong):
        sizes = {"n_prompt_tokens": reason.n_tokens, "n_ctx": reason.n_ctx}
        code = "context_length_exceeded"
        message = f"{reason}; the request exceeds the available context size ({reason.n_ctx} tokens)"
        return ApiError(400, "exceed_context_size_error", message, "prompt", code, sizes)
    if isinstance(reason, NotImplementedError):
        return ApiError(501, "not_supported_error", str(reason))
    if isinstance(reason, ContextFull | MemoryError):
        return ApiError(503, "unavailable_error", f"no memory for more tokens now: {reason}", headers=RETRY_AFTER)
    if isinstance(reason, Cancelled | DeviceLost):
        return unavailable(str(reason))
    if isinstance(reason, ValueError | TypeError | OverflowError):
        return invalid(str(reason))
    return ApiError(500, "server_error", f"{type(reason).__name__}: {reason}")
