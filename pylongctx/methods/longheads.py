"""LongHeads: every head reads the chunks of the text that are relevant to it."""

from dataclasses import dataclass

from pylongctx.methods.base import Method, check_int, check_multiple, check_word
from pylongctx.methods.positions import DualChunk, Full, SelfExtend, ShiftedRotary

CHUNK_MULTIPLE = 16
TILES = (1, 64)


@dataclass(frozen=True)
class LongHeads(Method):
    """Split the text into chunks; each layer and head reads the first, the recent and the best ones.

    LongHeads, arXiv 2402.10685, sections 2.1 to 2.3. Selection is a filter on a base method, which determines the
    distances at which a query sees keys. Up to ``select_from`` tokens everything is read and the result is bitwise
    identical to that of the base. An option that is None is chosen by the library, by measurements on real models
    (see the page on LongHeads); ``paper()`` has the paper's settings.

    Parameters
    ----------
    chunk_size : int or None
        Tokens per chunk, a multiple of 16. None: 16.
    window : int or None
        Tokens that a query reads, counting its own chunk as complete: a multiple of ``chunk_size``. The neighbor
        window of SelfExtend is added. None: an eighth of the trained context, from 2048 to 4096, half as
        much more if heads select together; at most half of the trained context.
    n_recent : int or None
        Chunks right before the query's own chunk that are always read, in addition to chunk 0 and the own chunk.
        None: the number that holds 128 tokens.
    select : str or None
        What selects chunks: every query head separately ("head", the paper), or the query heads of one KV head
        together, by the sum of their weights ("group"). None: "head"; "group" for models with at least 4 query
        heads per KV head, if ``window`` is None.
    representation : str or None
        What queries are compared with. "keys2", "keys1": every key of a chunk in two bits or one bit a channel; the
        score is the log of the attention that the chunk would get. "outlier": the key farthest from the mean of the
        chunk, and mean and variance of the others. "minmax": the minimum and maximum of the keys per channel, which
        bound the score of the best key from above (Quest, arXiv 2406.10774). "attention": the mean key weighted by the
        chunk's attention to itself (the paper, eq. 1-2). None: "keys2"; "attention" with ``position="packed"``.
    position : str or None
        The base: "full", "string" (up to the trained context), "dca" or "selfextend", with its automatic settings.
        "packed": the selected chunks side by side before the query (the paper, figure 3), only with "attention".
        None: "full" up to the trained context, including RoPE scaling, and "dca" beyond it.
    select_from : int or None
        The first position whose query selects chunks; before it everything is read, which is cheaper there. At least
        ``window``. None: ``window`` if that is given; else 5/4 of ``tile_window``, or without tiles three times the
        automatic window.
    tile : int or None
        Tokens of a prompt that share what they select, with the query heads of a KV head: 64, from a multiple of 64
        on. Other tokens, such as those that are generated, select for themselves. 1: every token does (the
        paper). None: 64 where keys are compared and ``n_ubatch`` is at least 64, unless ``deterministic``, else 1.
    tile_window : int or None
        Tokens that the queries of a tile read, counted as in ``window``: a multiple of ``chunk_size``. None: 2048 more
        than ``window``, at most twice as many.
    tile_cutoff : int or None
        A tile leaves out chunks in which no compared query has a key with 1/2**``tile_cutoff`` of the weight of what it
        reads anyway, so it often reads less than ``tile_window``. None: 8.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=LongHeads(), n_ctx=4096, verbose=False) as chosen:
    ...     chosen.method.chunk_size, chosen.method.window, chosen.method.position
    (16, 256, 'dca')
    """

    chunk_size: int | None = None
    window: int | None = None
    n_recent: int | None = None
    select: str | None = None
    representation: str | None = None
    position: str | None = None
    select_from: int | None = None
    tile: int | None = None
    tile_window: int | None = None
    tile_cutoff: int | None = None

    name = "longheads"
    role = "base"
    words = {
        "select": ("head", "group"),
        "representation": ("attention", "minmax", "outlier", "keys1", "keys2"),
        "position": (*(base.name for base in (Full, ShiftedRotary, DualChunk, SelfExtend)), "packed"),
    }

    def __post_init__(self) -> None:
        minimums = {"n_recent": 0, "select_from": 0, "chunk_size": CHUNK_MULTIPLE, "window": CHUNK_MULTIPLE, "tile": 1,
                    "tile_window": CHUNK_MULTIPLE, "tile_cutoff": 0}  # fmt: skip
        for name, minimum in minimums.items():
            check_int(name, getattr(self, name), minimum)
        for name, words in self.words.items():
            check_word(name, getattr(self, name), words)
        check_multiple("chunk_size", self.chunk_size, str(CHUNK_MULTIPLE), CHUNK_MULTIPLE)
        check_multiple("window", self.window, "chunk_size", self.chunk_size)
        check_multiple("tile_window", self.tile_window, "chunk_size", self.chunk_size)
        if self.tile not in (None, *TILES):
            raise ValueError(f"tile must be 64, or 1: every token of a prompt selects for itself; not {self.tile}")

    @classmethod
    def paper(cls, chunk_size: int | None = None, window: int | None = None) -> "LongHeads":
        """Return the settings of the paper: each query head selects separately, by attention, with packed positions.

        Examples
        --------
        >>> str(LongHeads.paper(chunk_size=256))
        'longheads,chunk_size=256,n_recent=1,select=head,representation=attention,position=packed'
        """
        return cls(chunk_size, window, 1, "head", "attention", "packed")

    @classmethod
    def quest(cls, window: int | None = None) -> "LongHeads":
        """Return the settings of Quest, arXiv 2406.10774: pages of 16 tokens, selected by each query head by the bound.

        Quest uses full attention in its first two layers; here every layer selects.

        Examples
        --------
        >>> str(LongHeads.quest(1024))
        'longheads,chunk_size=16,window=1024,n_recent=0,select=head,representation=minmax,position=full'
        """
        return cls(16, window, 0, "head", "minmax", "full")
