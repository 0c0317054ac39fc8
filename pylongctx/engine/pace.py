"""How much of the prompts a step takes beside answers, so that these go on at a reading pace."""

LEAST = 16  # tokens of prompts in a step
NEW = 0.5  # weight of the last step in a mean


class Pace:
    """Bounds the time of a step in which answers are written and prompts are evaluated.

    Parameters
    ----------
    seconds : float or None
        The time of such a step, or twice the time of a step without prompts where that is more. None: no bound.

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
        self._each = 0.0  # seconds more for a token of a prompt

    def most(self, n_step: int) -> int:
        """Return how many tokens of prompts the next step may take, of at most ``n_step``."""
        if self._seconds is None:
            return n_step
        room = max(self._seconds - self._alone, self._alone)
        n = int(room / self._each) if self._each else 4 * LEAST
        return min(n_step, max(LEAST, n - n % LEAST))

    def add(self, n_prompt: int, seconds: float) -> None:
        """Take note of a step that has evaluated so many tokens of prompts."""
        if n_prompt == 0:
            self._alone = _mean(self._alone, seconds)
        elif n_prompt >= LEAST:
            self._each = _mean(self._each, max(seconds - self._alone, 0.1 * seconds) / n_prompt)


def _mean(before: float, now: float) -> float:
    return now if before == 0 else (1 - NEW) * before + NEW * now
