"""What a program that tries many damaged inputs, one per seed, does for each of them.

It gets the seeds as FIRST LAST STEP, and prints for each how the input ended, 0 it was used and 3 it was refused, and
the most memory in MiB.
"""

import signal
from collections.abc import Iterator

from pylongctx.eval.peak import peak_memory, reset_peak_memory

LIMIT = 20  # seconds of the processor that one input may take
HANGS = (-signal.SIGPROF, -signal.SIGALRM)

Line = list[int | str]


def tries(first: str, last: str, step: str) -> Iterator[int]:
    """Yield seeds, each with its own limit of time and its own peak of memory."""
    for seed in range(int(first), int(last), int(step)):
        reset_peak_memory()
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        signal.alarm(10 * LIMIT)
        yield seed


def tell(used: bool) -> None:
    """Print the line of the seed that was tried."""
    print(0 if used else 3, peak_memory() >> 20, flush=True)
