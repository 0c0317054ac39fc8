"""``pip install`` that says what is being done: a line for each step, and for each tenth of a compilation.

    python native/install.py --editable .[plot] -C cmake.define.GGML_CUDA=ON

The words go to pip. Where it fails, all that it said is printed.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterable

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--verbose", "--no-build-isolation")
# what a line begins with that starts a step, and what the step is called; make has said the first one
STEPS = (
    ("Collecting ", "Python packages"),
    ("*** Configuring CMake", "configuring"),
    ("-- Fetching upstream", "fetching llama.cpp, 77 MB"),
    ("-- Extracting and patching", "patching llama.cpp"),
    ("*** Building project", "compiling, minutes when it is the first time"),
    ("*** Installing project", "installing"),
)
NOTE = "-- Compiling for "  # what the library is for, which is printed
COMPILED = re.compile(r"\[(\d+)/(\d+)\] ")  # ninja's


class Steps:
    """Turns what pip, CMake and ninja say into a few lines."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._said = 0  # steps
        self._tenths = 0

    def line(self, text: str) -> str | None:
        """Return what to print when a line came, None for nothing."""
        text = text.strip()
        for number, (begin, name) in enumerate(STEPS, 1):
            if text.startswith(begin) and number > self._said:
                self._said = number
                return f"[{number + 1}/{len(STEPS) + 1}] {name}"
        if text.startswith(NOTE):
            return f"      {text.removeprefix('-- ')}"
        if match := COMPILED.match(text):
            done, total = int(match[1]), int(match[2])
            tenths = 10 * done // total
            if tenths > self._tenths:
                self._tenths = tenths
                return f"      {10 * tenths} %, {done} of {total} files, {time.monotonic() - self._since:.0f} s"
        return None


def install(words: Iterable[str]) -> int:
    """Run pip; returns its exit status."""
    steps, said = Steps(), []
    with subprocess.Popen([*PIP, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line)
            if news := steps.line(line):
                print(news, flush=True)
    if pip.returncode:
        sys.stdout.writelines(said)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
