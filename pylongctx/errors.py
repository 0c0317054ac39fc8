"""What pylongctx raises when the native library reports a failure."""


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
    """The library refused a model, a setting or an argument, and nothing changed."""


class ModelRefused(InvalidInput):
    """A model file cannot be opened, whatever its context would be."""


class ContextFull(LctxError, ValueError):  # noqa: N818 - reads as what happened
    """There is no room for more tokens; the cache is unchanged and usable."""


class PromptTooLong(ContextFull):
    """A text does not fit the context.

    Attributes
    ----------
    n_tokens, n_ctx : int
        The tokens of the text, and those that the context holds.
    """

    def __init__(self, message: str, status: int, n_tokens: int, n_ctx: int) -> None:
        super().__init__(message, status)
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class DeviceLost(LctxError):  # noqa: N818 - reads as what happened
    """An RPC server ended, or the connection to it broke: the model must be closed, and opened again."""


class Aborted(LctxError):  # noqa: N818 - reads as what happened
    """An evaluation was stopped by ``Llama.abort``; what was evaluated before is kept."""
