"""Commands as a user runs them: with pipes, or in a pseudo-terminal that is read until something appears."""

import atexit
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from pylongctx.models import embedded_model

DEADLINE = 60
CTRL_C, CTRL_D, UP, TAB = "\x03", "\x04", "\x1b[A", "\t"
PASTE = "\x1b[200~{}\x1b[201~"  # what a terminal sends around a pasted text
MODES = re.compile("\x1b\\[\\?2004[hl]\r?")  # that pastes are marked: not a part of what is shown
CACHE = tempfile.mkdtemp(prefix="pylongctx-tests-")  # history and conversations
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)


def environment(**more):
    """Return an environment with one thread, and without the settings of the user who runs the tests."""
    drop = ("LCTX_METHOD", "LLAMA_ARG_", "NO_COLOR", "FORCE_COLOR")
    return (
        {key: value for key, value in os.environ.items() if not key.startswith(drop)}
        | {"LLAMA_ARG_THREADS": "1", "LLAMA_ARG_MODEL": str(embedded_model()), "LCTX_CACHE": CACHE}
        | more
    )


def run(*args, input="", **env):
    """Run a command with pipes; ``input`` is text or bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "pylongctx", *args],
        input=input if isinstance(input, bytes) else input.encode(),
        capture_output=True,
        env=environment(**env),
        timeout=2 * DEADLINE,
        check=False,
    )
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


class Terminal:
    """A command in a terminal of its own, where Ctrl-C reaches it as it does from a keyboard."""

    def __init__(self, *args, **env):
        self.master, slave = pty.openpty()

        def own_terminal():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "pylongctx", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=own_terminal,
            env=environment(TERM="xterm", COLUMNS="100", **env),
        )
        os.close(slave)
        self.unread = ""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt_prompt(self):
        """Press Ctrl-C when the command waits for keys: Python's input() misses one in the moment before."""
        end = time.monotonic() + DEADLINE
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < end, "the command does not wait for keys"
            os.sched_yield()
        self.type(CTRL_C)

    def until(self, text):
        """Read until a text appears; returns everything up to its end."""
        end = time.monotonic() + DEADLINE
        while text not in self.unread:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            more = self._read() if ready else b""
            assert more, f"{text!r} did not appear, only {self.unread!r}"
            self.unread = MODES.sub("", self.unread + more.decode("utf-8", "replace"))
        found, self.unread = self.unread[: self.unread.index(text) + len(text)], self.unread.partition(text)[2]
        return found

    def ask(self, text):
        """Type a line at the prompt; returns what is answered, up to the next prompt."""
        self.type(text + "\n")
        return self.until("\n> ")

    def end(self):
        """Read the rest and return the exit status."""
        while self._read():
            pass
        return self.process.wait(DEADLINE)

    def _read(self):
        try:
            return os.read(self.master, 1 << 16)
        except OSError:  # the other end is closed
            return b""
