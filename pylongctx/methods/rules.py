"""Rules that determine which keys are evicted."""

from dataclasses import dataclass

from pylongctx.methods.base import LIMIT, BudgetRule, Method, check_given, check_int, check_word

__all__ = ["H2O", "Corm", "Kvzip", "Scissorhands", "SnapKV", "Tova"]


@dataclass(frozen=True)
class Corm(Method):
    """Evict the keys that no recent query found important, separately in every layer and KV head, without a budget.

    CORM, Sequence can Secretly Tell You What to Discard, arXiv 2404.15949, section 4.2, algorithm 1. A key is important
    (definition 3.1) to a query whose segments span t tokens, including evicted ones, when its weight is at least 1/t;
    with grouped heads, when it is for any of the query heads that share it. Alone it reads like full attention;
    ``SelfExtend() + Corm()`` and ``LongHeads() + Corm()`` read like their base.

    Parameters
    ----------
    window : int
        Number of last queries to consider: a key is evicted when none of them found it important; nothing
        is evicted before that many were seen.
    recent : int
        Number of newest keys that are never evicted; 0 protects none.
    evict_every : int or None
        Tokens between two evictions, which happen at multiples of it, no matter how a prompt is split
        into batches. 1 is algorithm 1, token by token. None: ``window``, but at least 64, by measurement.

    Examples
    --------
    >>> str(Corm(window=128, recent=128))
    'corm,window=128,recent=128'
    """

    window: int = 256
    recent: int = 256
    evict_every: int | None = None

    name = "corm"
    role = "rule"

    def __post_init__(self) -> None:
        check_given("window", self.window)
        check_given("recent", self.recent)
        check_int("window", self.window, 1, LIMIT)
        check_int("recent", self.recent, 0, LIMIT)
        check_int("evict_every", self.evict_every, 1, LIMIT)


@dataclass(frozen=True)
class H2O(BudgetRule):
    """Keep a budget of keys per layer and KV head: the newest ones, and those with the most accumulated attention.

    H2O: Heavy-Hitter Oracle, arXiv 2306.14048, section 4.1, algorithm 1. The score of a key is the sum of its weights
    over all queries since it was added, and over the query heads that share it; on ties the newer key stays.

    Parameters
    ----------
    budget, recent, evict_every, heads
        See ``BudgetRule``. ``evict_every=1`` is the paper's setting.

    Examples
    --------
    >>> str(H2O(budget=1024, recent=256))
    'h2o,budget=1024,recent=256'
    """

    budget: int | None = None
    recent: int | None = None
    evict_every: int | None = None
    heads: str | None = None

    name = "h2o"


@dataclass(frozen=True)
class Scissorhands(BudgetRule):
    """Keep a budget of keys per layer and KV head: the newest ones, and those that were recently important most often.

    Scissorhands, arXiv 2305.17118, section 4.1, algorithms 1 and 2. The score of a key counts how often its weight was
    at least the mean one, among the last ``window`` queries before an eviction and the query heads that share it; the
    mean is 1/t for a query whose segments span t tokens, including evicted ones. Each eviction resets the scores to 0;
    on ties the newer key stays.

    Parameters
    ----------
    budget, recent, evict_every, heads
        See ``BudgetRule``.
    window : int or None
        Number of queries before an eviction that count, at most ``evict_every``. None: ``evict_every``, which is all
        since the last eviction.

    Examples
    --------
    >>> str(Scissorhands(budget=1024))
    'scissorhands,budget=1024'
    """

    budget: int | None = None
    window: int | None = None
    recent: int | None = None
    evict_every: int | None = None
    heads: str | None = None

    name = "scissorhands"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.evict_every is not None and self.window > self.evict_every:
            raise ValueError(f"window must be at most evict_every ({self.evict_every}), not {self.window}")


@dataclass(frozen=True)
class Tova(BudgetRule):
    """Keep a budget of keys per layer and KV head: those that the last query before an eviction attends to most.

    TOVA, Token Omission Via Attention, Transformers are Multi-State RNNs, arXiv 2401.06104, section 3. The score of a
    key is the sum of that query's weights over the query heads that share it; in the paper it is the mean over all
    heads of a layer, which evict the same tokens. No key is protected; on ties the newer key stays.

    Parameters
    ----------
    budget, evict_every, heads
        See ``BudgetRule``. ``evict_every=1`` is the paper's setting.

    Examples
    --------
    >>> str(Tova(budget=1024))
    'tova,budget=1024'
    """

    budget: int | None = None
    evict_every: int | None = None
    heads: str | None = None

    name = "tova"


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


@dataclass(frozen=True)
class SnapKV(Method):
    """Read a prompt with full attention, and compress it for its last tokens when ``Llama.compress`` is called.

    SnapKV, arXiv 2404.14469, section 4: the last tokens of the prompt, the observation window, stay, and of the keys
    before them those with the largest sum of attention weights from queries of the window, summed over neighboring
    keys. For one question at the end of a long text; nothing is replayed. In the paper all heads have the same budget;
    here all layers and KV heads share one, of which each head keeps at least a fifth of an equal part (AdaKV, arXiv
    2407.11550).

    Parameters
    ----------
    window : int or None
        Number of tokens at the end of the prompt that vote and stay. None: 64.
    pool : int or None
        Number of neighboring keys over which scores are summed; odd. None: 17; the authors' is 5.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=SnapKV(window=32), n_ctx=1024, verbose=False) as reader:
    ...     text = reader.tokenize(b"It was the best of times, it was the worst of times. " * 20 + b"What was it?")
    ...     reader.eval(text)
    ...     report = reader.compress(0.3)
    ...     answer = reader(text, max_tokens=4)
    >>> report.bytes_after < 0.5 * report.bytes_before
    True
    """

    window: int | None = None
    pool: int | None = None

    name = "snapkv"
    role = "rule"
    waits = True

    def __post_init__(self) -> None:
        check_int("window", self.window, 1, LIMIT)
        check_int("pool", self.pool, 1, LIMIT)
        if self.pool is not None and self.pool % 2 == 0:
            raise ValueError(f"pool must be odd, not {self.pool}")
