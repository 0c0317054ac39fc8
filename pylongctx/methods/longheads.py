"""LongHeads: every head reads the chunks of the text that matter to it."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_int, check_multiple, check_share, check_word

GRAIN = 16


@dataclass(frozen=True)
class LongHeads(Method):
    """Cut the text into chunks; per layer and head read the best ones, within a window the model was trained for.

    LongHeads, arXiv 2402.10685, sections 2.1 to 2.3. Up to ``window`` tokens everything is read and the result is that
    of full attention. An option that is None is chosen by the library: the window from the context, the parts (head,
    exact, a representation) by measurements on real models, see the page on LongHeads; ``paper()`` has the paper's.

    Parameters
    ----------
    chunk_size : int or None
        Tokens of a chunk, a multiple of 16. None: 16.
    window : int or None
        Tokens that a query reads, its own chunk counted as complete: a multiple of ``chunk_size``. None: an eighth of
        the context, at least 2048 and at most half of the trained context; with ``mass`` that half.
    n_recent : int or None
        Chunks right before the query's own one that are always read, as chunk 0 and the own chunk are. None: as many
        as hold 128 tokens.
    select : str or None
        Who chooses: every query head for itself ("head", the paper), or the query heads of one KV head together
        ("group").
    representation : str or None
        What stands for a chunk when a query scores it. "attention": the mean key weighted by the chunk's attention to
        itself (the paper, eq. 1-2). The others know where the keys stand. "minmax": the minimum and maximum of the keys
        per channel, which bound the score of the best key from above (Quest, arXiv 2406.10774). "moments": mean and
        variance per channel; the score is the log of the attention to expect if keys were normally distributed.
        "outlier": the key farthest from the mean by itself, and the moments of the others. None: "outlier";
        "minmax" for heads of up to 64 channels in a context beyond the trained one, without ``mass``.
    position : str or None
        Where the chosen chunks seem to stand. "exact": where they are, for queries inside the trained context.
        "packed": side by side in front of the query (the paper, figure 3). "grouped": distances beyond the recent
        chunks divided by ``group_size``, as SelfExtend, arXiv 2401.01325, has it, chunk by chunk.
    group_size : int or None
        Divisor of the distances with ``position="grouped"``.
    n_neighbor : int
        Chunks of the window given to the neighbors of the best chunks: the remedy for what a chunk border cuts in two
        (the paper, table 7).
    mass : float or None
        Share of the attention that a query is to read, above 0 and at most 1. It reads the best chunks until the
        estimate reaches it, and at most ``window`` tokens. Needs ``representation`` "outlier" or "moments". None:
        always ``window`` tokens.

    Raises
    ------
    TypeError, ValueError
        When an option is of the wrong type, too small, no multiple of what it is made of, or an unknown word.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=LongHeads(), n_ctx=4096, verbose=False) as chosen:
    ...     chosen.method.chunk_size, chosen.method.window
    (16, 256)
    """

    chunk_size: int | None = None
    window: int | None = None
    n_recent: int | None = None
    select: str | None = None
    representation: str | None = None
    position: str | None = None
    group_size: int | None = None
    n_neighbor: int | None = None
    mass: float | None = None

    name = "longheads"
    role = "base"
    words = {
        "select": ("head", "group"),
        "representation": ("attention", "minmax", "moments", "outlier"),
        "position": ("packed", "grouped", "exact"),
    }
    shares = ("mass",)

    def __post_init__(self) -> None:
        minimums = {"n_recent": 0, "n_neighbor": 0, "group_size": 1}
        for name, minimum in (minimums | {"chunk_size": GRAIN, "window": GRAIN}).items():
            check_int(name, getattr(self, name), minimum)
        for name, words in self.words.items():
            check_word(name, getattr(self, name), words)
        check_multiple("chunk_size", self.chunk_size, str(GRAIN), GRAIN)
        check_multiple("window", self.window, "chunk_size", self.chunk_size)
        check_share("mass", self.mass)
        if self.mass is not None and self.representation not in (None, "moments", "outlier"):
            raise ValueError(f"mass needs representation outlier or moments, not {self.representation}")
        if self.mass is not None and self.n_neighbor:
            raise ValueError("n_neighbor gives a part of a fixed budget away; with mass there is none")

    @classmethod
    def paper(cls, chunk_size: int | None = None, window: int | None = None) -> "LongHeads":
        """Return the settings of the paper: each query and head chooses alone, by attention, read side by side.

        Examples
        --------
        >>> str(LongHeads.paper(chunk_size=256))
        'longheads,chunk_size=256,n_recent=1,select=head,representation=attention,position=packed,n_neighbor=0'
        """
        return cls(chunk_size, window, 1, "head", "attention", "packed", n_neighbor=0)

    @classmethod
    def quest(cls, window: int | None = None) -> "LongHeads":
        """Return the settings of Quest, arXiv 2406.10774: pages of 16 tokens, each query head chooses by the bound.

        Quest reads its first two layers whole; here every layer chooses.

        Examples
        --------
        >>> str(LongHeads.quest(1024))
        'longheads,chunk_size=16,window=1024,n_recent=0,select=head,representation=minmax,position=exact,n_neighbor=0'
        """
        return cls(16, window, 0, "head", "minmax", "exact", n_neighbor=0)
