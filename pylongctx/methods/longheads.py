"""LongHeads: every head reads the chunks of the text that matter to it."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_given, check_int, check_multiple, check_word

GRAIN = 16


@dataclass(frozen=True)
class LongHeads(Method):
    """Cut the text into chunks; per layer and head read the best ones, within a window the model was trained for.

    LongHeads, arXiv 2402.10685, sections 2.1 to 2.3. Up to ``window`` tokens everything is read and the result is that
    of full attention. An option that is None is chosen by the library: sizes from the trained context, the parts
    (group, minmax, packed) by measurement, see the page on LongHeads; ``paper()`` has the paper's.

    Parameters
    ----------
    chunk_size : int or None
        Tokens of a chunk, a multiple of 16. None: 256, or less so that 16 chunks fit into the window (8 with
        ``representation="attention"``).
    window : int or None
        Tokens that a query reads, its own chunk counted as complete: a multiple of ``chunk_size``. None: half of the
        trained context.
    n_recent : int
        Chunks right before the query's own one that are always read, as chunk 0 and the own chunk are.
    select : str or None
        Who chooses: every query head for itself ("head", the paper), or the query heads of one KV head together
        ("group").
    select_block : int or None
        Neighbouring queries that share one choice; 1 is the paper's, a choice per query. Divides ``chunk_size``.
    representation : str or None
        What stands for a chunk when a query scores it. "attention": the mean key weighted by the chunk's attention to
        itself (the paper, eq. 1-2). "minmax": the minimum and maximum of the keys per channel, which bound the score of
        the best key from above (Quest, arXiv 2406.10774).
    position : str or None
        Where the chosen chunks seem to stand. "packed": side by side in front of the query (the paper, figure 3).
        "grouped": at their distance divided by ``group_size``, as SelfExtend, arXiv 2401.01325, has it.
    group_size : int or None
        Divisor of the distances with ``position="grouped"``.
    n_neighbor : int or None
        Chunks of the window given to the neighbors of the best chunks: the remedy for what a chunk border cuts in two
        (the paper, table 7). None: one in eight chunks that are free to choose, none with
        ``representation="attention"``.

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
    n_recent: int = 1
    select: str | None = None
    select_block: int | None = None
    representation: str | None = None
    position: str | None = None
    group_size: int | None = None
    n_neighbor: int | None = None

    name = "longheads"
    role = "base"
    words = {
        "select": ("head", "group"),
        "representation": ("attention", "minmax"),
        "position": ("packed", "grouped"),
    }

    def __post_init__(self) -> None:
        check_given("n_recent", self.n_recent)
        minimums = {"n_recent": 0, "n_neighbor": 0, "select_block": 1, "group_size": 1}
        for name, minimum in (minimums | {"chunk_size": GRAIN, "window": GRAIN}).items():
            check_int(name, getattr(self, name), minimum)
        for name, words in self.words.items():
            check_word(name, getattr(self, name), words)
        check_multiple("chunk_size", self.chunk_size, str(GRAIN), GRAIN)
        check_multiple("window", self.window, "chunk_size", self.chunk_size)
        check_multiple("chunk_size", self.chunk_size, "select_block", self.select_block)

    @classmethod
    def paper(cls, chunk_size: int | None = None, window: int | None = None) -> "LongHeads":
        """Return the settings of the paper: each query and head chooses alone, by attention, read side by side.

        Examples
        --------
        >>> str(LongHeads.paper(chunk_size=256))
        'longheads,chunk_size=256,n_recent=1,select=head,select_block=1,representation=attention,position=packed,n_neighbor=0'
        """
        return cls(chunk_size, window, 1, "head", 1, "attention", "packed", n_neighbor=0)
