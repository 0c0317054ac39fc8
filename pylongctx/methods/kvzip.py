"""KVzip: keep the keys that a replay of the text attends to."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_word


@dataclass(frozen=True)
class Kvzip(Method):
    """Read a text with full attention, and compress it when ``Llama.compress`` is called.

    KVzip, arXiv 2505.23416, section 3: the text is replayed ("repeat the previous context"), and among the keys of all
    layers and KV heads those with the largest weights from queries of the replay are kept. The choice does not depend
    on a question, so one compressed text answers any number of questions. Weights are normalized over everything
    that the query reads; in the paper only over the query's own piece, the replay and the first tokens, which are all
    that it reads with ``replay="piece"``.

    Parameters
    ----------
    replay : {"text", "piece"} or None
        What queries of the replay read: the whole text, or the piece of 2000 tokens that they repeat and the first
        tokens, which takes a time that grows with the length of the text and not with its square. None: "piece" where
        the rule is alone or with ``full,spans=N``, "text" for ``longheads+kvzip`` and other compositions.

    Raises
    ------
    ValueError
        When ``replay`` is another word.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=Kvzip(), n_ctx=1024, verbose=False) as reader:
    ...     reader.eval(reader.tokenize(b"It was the best of times, it was the worst of times. " * 20))
    ...     report = reader.compress(0.3)
    ...     rows = reader.kv_usage().rows
    ...     float(round(rows.sum() / (rows.size * reader.n_tokens), 2))
    0.3
    """

    name = "kvzip"
    role = "rule"
    waits = replays = True
    words = {"replay": ("text", "piece")}

    replay: str | None = None

    def __post_init__(self) -> None:
        check_word("replay", self.replay, self.words["replay"])
