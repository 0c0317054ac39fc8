"""Methods that determine which positions a query sees."""

from dataclasses import dataclass

from pylongctx.methods.base import Method, check_given, check_int

__all__ = ["DualChunk", "Full", "SelfExtend", "ShiftedRotary", "Window"]


@dataclass(frozen=True)
class Full(Method):
    """Every query reads all earlier tokens at their true positions, as the model was trained.

    Parameters
    ----------
    spans : int or None
        Maximum number of pieces of a text that were prefilled separately (``Llama.read``) or remained after an eviction
        (``overflow="evict_middle"``). Each is seen at its true distance. None: one.

    Examples
    --------
    >>> str(Full()), str(Full(spans=5))
    ('full', 'full,spans=5')
    """

    spans: int | None = None

    name = "full"
    role = "base"
    reads_all = True

    def __post_init__(self) -> None:
        check_int("spans", self.spans, 1)


@dataclass(frozen=True)
class Window(Method):
    """Read the first tokens (sinks) and the last ones, evict the middle.

    StreamingLLM, arXiv 2309.17453, and LM-Infinite, arXiv 2308.16137. Fluent at any length, but blind to tokens
    outside the window: the baseline for long-context methods.

    Parameters
    ----------
    n_sink : int
        Number of first tokens that are kept.
    window : int or None
        Number of last tokens that are kept, including the query's own key. None: chosen from the trained context.

    Examples
    --------
    >>> str(Window(n_sink=4, window=400))
    'window,n_sink=4,window=400'
    """

    n_sink: int = 4
    window: int | None = None

    name = "window"

    def __post_init__(self) -> None:
        check_given("n_sink", self.n_sink)
        check_int("n_sink", self.n_sink, 0)
        check_int("window", self.window, 1)


@dataclass(frozen=True)
class SelfExtend(Method):
    """Read every token; beyond the neighbor window, distances are divided by the group size.

    LLM Maybe LongLM: SelfExtend, arXiv 2401.01325, algorithm 1. With automatic options, nothing is remapped up to
    the trained context, and the result is that of full attention.

    Parameters
    ----------
    group_size : int or None
        Far positions are floor-divided by it. None: the smallest that fits n_ctx by the paper's rule (eq. 5).
    neighbor_window : int or None
        Distances below it stay exact. None: chosen from the trained context.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=SelfExtend(), n_ctx=4096, verbose=False) as chosen:
    ...     chosen.method
    SelfExtend(group_size=32, neighbor_window=128)
    """

    group_size: int | None = None
    neighbor_window: int | None = None

    name = "selfextend"
    role = "base"
    reads_all = True

    def __post_init__(self) -> None:
        check_int("group_size", self.group_size, 1)
        check_int("neighbor_window", self.neighbor_window, 1)


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


@dataclass(frozen=True)
class ShiftedRotary(Method):
    """Read every token; distances from ``shift_offset`` on are reduced by ``shift_offset - local_window``.

    STRING (ShifTed Rotary position embeddING), arXiv 2410.18745, section 4.1, equation 4. Large distances are rare in
    training, so inside the trained context they are replaced by smaller ones. The first ``shift_offset`` tokens are
    read as in full attention. The maximum length is twice the trained context minus the local window.

    Parameters
    ----------
    shift_offset : int or None
        Distances below it stay exact; at most the trained context. None: a third of the trained context, the paper's
        setting, or more if ``n_ctx`` requires it.
    local_window : int or None
        The distance that replaces ``shift_offset``, so that the nearest tokens stay the nearest. At most
        ``shift_offset``, with which all distances are exact. None: 128, the paper's setting, or a sixteenth of the
        trained context if that is less.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=ShiftedRotary(), n_ctx=768, verbose=False) as chosen:
    ...     chosen.method
    ShiftedRotary(shift_offset=288, local_window=32)
    """

    shift_offset: int | None = None
    local_window: int | None = None

    name = "string"
    role = "base"
    reads_all = True

    def __post_init__(self) -> None:
        check_int("shift_offset", self.shift_offset, 1)
        check_int("local_window", self.local_window, 1, self.shift_offset)
