"""Exceptions for failures that the native library reports."""


class LctxError(RuntimeError):
    """A call into the native library failed.

    Attributes
    ----------
    status : int
        The status code of ``enum lctx_status``.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class InvalidInput(LctxError, ValueError):  # noqa: N818 - reads as what happened
    """The library refused a model, a setting or an argument; the state is unchanged."""


class ModelRefused(InvalidInput):
    """A model file cannot be opened with any context."""


class ContextFull(LctxError, ValueError):  # noqa: N818 - reads as what happened
    """There is no room for more tokens; the KV cache is unchanged and usable."""


class PromptTooLong(ContextFull):
    """A text does not fit into the context.

    Attributes
    ----------
    n_tokens, n_ctx : int
        The tokens of the text, and the size of the context.
    """

    def __init__(self, message: str, status: int, n_tokens: int, n_ctx: int) -> None:
        super().__init__(message, status)
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class DeviceLost(LctxError):  # noqa: N818 - reads as what happened
    """An RPC server exited or the connection broke: the model must be closed and opened again."""


class Aborted(LctxError):  # noqa: N818 - reads as what happened
    """An evaluation was stopped by ``Llama.abort``; tokens evaluated before are kept."""
