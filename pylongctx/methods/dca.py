"""Dual chunk attention: exact positions nearby, one bounded distance for all that is far."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_int


@dataclass(frozen=True)
class DualChunk(Method):
    """Read every token; beyond the chunk before the query's own, distances are cut to the trained context.

    ChunkLlama, arXiv 2402.17463. Positions start again at every chunk, so no length is too long. The first
    ``chunk_size + local_window`` tokens, with automatic options the trained context, are read as by full attention.

    Parameters
    ----------
    chunk_size : int or None
        Tokens after which positions start again, below the trained context. None: three quarters of that, less when
        a larger local window is given.
    local_window : int or None
        Distances up to it stay exact across the border of two chunks. At most ``chunk_size``, and the trained context
        less ``chunk_size``. None: as large as that.

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
