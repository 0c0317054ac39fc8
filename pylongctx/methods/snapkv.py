"""SnapKV: keep the keys that the end of a prompt attends to."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, check_int


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

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer, too small or larger than 2**30, or ``pool`` is even.

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
