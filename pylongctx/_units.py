"""Bytes and times as text."""

UNITS = ("KiB", "MiB", "GiB", "TiB")


def bytes_text(n: float) -> str:
    """Return bytes in the largest unit that they fill, for instance ``"1.07 MiB"``."""
    if n < 1024:
        return f"{n:.0f} B"
    power = next((i for i in range(1, len(UNITS)) if n < 1024 ** (i + 1)), len(UNITS))
    return f"{n / 1024**power:.2f} {UNITS[power - 1]}"


def age_text(seconds: float) -> str:
    """Return a time in the largest unit that it fills, for instance ``"3 h"``; one in the future is ``"0 s"``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
