"""Dual chunk attention: exact distances nearby, a bounded distance for everything far away."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_int


@dataclass(frozen=True)
class DualChunk(Method):
    """Read every token; beyond the chunk before the query's own, distances are limited to the trained context.

    ChunkLlama, arXiv 2402.17463. Positions restart at every chunk, so the length is unlimited. The first
    ``chunk_size + local_window`` tokens (with automatic options the trained context) are read as in full attention.

    Parameters
    ----------
    chunk_size : int or None
        Tokens after which positions restart, less than the trained context. None: three quarters of it, less if
        a larger local window is given.
    local_window : int or None
        Distances up to it stay exact across the border of two chunks. At most ``chunk_size`` and the trained context
        minus ``chunk_size``. None: that maximum.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer or is too small, or the window is larger than the chunk.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=DualChunk(), n_ctx=4096, verbose=False) as chosen:
    ...     chosen.method
    DualChunk(chunk_size=384, local_window=128)
    """

    chunk_size: int | None = None
    local_window: int | None = None

    name = "dca"
    role = "base"
    reads_all = True

    def __post_init__(self) -> None:
        check_int("chunk_size", self.chunk_size, 1)
        check_int("local_window", self.local_window, 1, self.chunk_size)
