"""Limits the prompt tokens of a step, so that concurrent answers continue at reading speed."""

MIN_PROMPT_TOKENS = 16  # minimum prompt tokens in a step
NEW = 0.5  # weight of the last step in the moving average


class Pace:
    """Bounds the time of steps with both answers and prompts.

    Parameters
    ----------
    seconds : float or None
        Time limit of such a step, or twice the time of a step without prompts if that is more. None: no limit.

    Examples
    --------
    >>> pace = Pace(0.15)
    >>> pace.add(n_prompt=0, seconds=0.05)
    >>> pace.add(n_prompt=100, seconds=0.25)
    >>> pace.most(512)
    48
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._alone = 0.0  # seconds of a step without prompts
        self._each = 0.0  # additional seconds per prompt token

    def most(self, n_step: int) -> int:
        """Return how many prompt tokens the next step may evaluate, at most ``n_step``."""
        if self._seconds is None:
            return n_step
        room = max(self._seconds - self._alone, self._alone)
        n = int(room / self._each) if self._each else 4 * MIN_PROMPT_TOKENS
        return min(n_step, max(MIN_PROMPT_TOKENS, n - n % MIN_PROMPT_TOKENS))

    def add(self, n_prompt: int, seconds: float) -> None:
        """Record a step with ``n_prompt`` prompt tokens."""
        if n_prompt == 0:
            self._alone = _mean(self._alone, seconds)
        elif n_prompt >= MIN_PROMPT_TOKENS:
            self._each = _mean(self._each, max(seconds - self._alone, 0.1 * seconds) / n_prompt)


def _mean(before: float, now: float) -> float:
    return now if before == 0 else (1 - NEW) * before + NEW * now
