"""The program of a guarded worker, see ``process.py``: LIBRARY MEMORY MAX_TEXT.

It loads only the library, so that it starts in milliseconds. A call on stdin has its time limit in seconds, the
number of its texts, and each text preceded by its length. An answer on stdout has a success flag, its length, and
the text or the reason of the failure.
"""

import ctypes
import math
import os
import signal
import struct
import sys
import time
from collections import OrderedDict

MAX_TEMPLATES = 8  # templates to cache
INITIAL_LIMITS: dict[int, tuple[int, int]] = {}  # initial limits of this process
SAMPLE = "It was <s> the 1st\n\n\tof \u00e9\u20ac\U0001f600 ".encode() + bytes(range(1, 128)) + 64 * b" "
SIZES = 4096  # bytes, more than an lctx_sizes has


class GuardedLibrary:
    """The functions of the library that a worker calls."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        text, pointer, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32
        for name, result, arguments in (
            ("lctx_template_create", pointer, [text]),
            ("lctx_template_error", text, [pointer]),
            ("lctx_template_free", None, [pointer]),
            ("lctx_template_info", pointer, [pointer]),
            ("lctx_template_apply", pointer, [pointer, text]),
            ("lctx_schema_to_grammar", pointer, [text]),
            ("lctx_text_get", text, [pointer]),
            ("lctx_text_error", text, [pointer]),
            ("lctx_text_free", None, [pointer]),
            ("lctx_log_set_level", None, [number]),
            ("lctx_model_load", pointer, [text, text, text]),
            ("lctx_model_error", text, [pointer]),
            ("lctx_model_free", None, [pointer]),
            ("lctx_tokenize", number, [pointer, text, number, pointer, number, number, number]),
            ("lctx_token_to_piece", number, [pointer, number, pointer, number, number]),
            ("lctx_estimate", number, [pointer, text, text, text, number, text, ctypes.c_size_t]),
        ):
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self._lib.lctx_log_set_level(0)
        self._templates: OrderedDict[bytes, int] = OrderedDict()

    def call(self, name: bytes, *texts: bytes) -> bytes:
        """Return the text of a call; ValueError with the reason when it fails."""
        if name == b"try_model":
            return self._try_model(*texts)
        if name == b"schema_to_grammar":
            return self._text(self._lib.lctx_schema_to_grammar(texts[0]))
        template = self._template(texts[0])
        if name == b"template_info":
            return self._text(self._lib.lctx_template_info(template))
        return self._text(self._lib.lctx_template_apply(template, texts[1]))

    def _try_model(self, path: bytes, model: bytes, context: bytes, method: bytes, overrides: bytes) -> bytes:
        """Load a model without weights and create a context without memory; arguments are structs in hexadecimal."""
        handle = self._lib.lctx_model_load(path, bytes.fromhex(model.decode()), overrides)
        failure = self._lib.lctx_model_error(handle)
        if not failure:
            self._try_vocabulary(handle)
        if not failure and context:
            sizes, reason = ctypes.create_string_buffer(SIZES), ctypes.create_string_buffer(4096)
            params = ctypes.create_string_buffer(bytes.fromhex(context.decode()))
            self._lib.lctx_estimate(handle, params, method, sizes, 1, reason, len(reason))
            failure = reason.value
        self._lib.lctx_model_free(handle)
        return failure or b""

    def _try_vocabulary(self, model: int) -> None:
        """Turn a text into tokens and back."""
        tokens, piece = (ctypes.c_int32 * len(SAMPLE))(), ctypes.create_string_buffer(SIZES)
        for special in (1, 0):
            n = self._lib.lctx_tokenize(model, SAMPLE, len(SAMPLE), tokens, len(tokens), special, special)
            for token in tokens[: max(n, 0)]:
                self._lib.lctx_token_to_piece(model, token, piece, len(piece), special)

    def _text(self, found: int) -> bytes:
        failure, text = self._lib.lctx_text_error(found), self._lib.lctx_text_get(found)
        self._lib.lctx_text_free(found)
        if failure:
            raise ValueError(failure)
        return text or b""

    def _template(self, spec: bytes) -> int:
        if spec in self._templates:
            self._templates.move_to_end(spec)
            return self._templates[spec]
        template = self._lib.lctx_template_create(spec)
        if failure := self._lib.lctx_template_error(template):
            self._lib.lctx_template_free(template)
            raise ValueError(failure)
        self._templates[spec] = template
        if len(self._templates) > MAX_TEMPLATES:
            self._lib.lctx_template_free(self._templates.popitem(last=False)[1])
        return int(template)


def limit(name: str, most: int) -> None:
    """Set a limit of this process, not above its initial value; Windows has none, only the caller's clock."""
    if sys.platform == "win32":
        return
    import resource

    kind = getattr(resource, name)
    first, hard = INITIAL_LIMITS.setdefault(kind, resource.getrlimit(kind))
    resource.setrlimit(kind, (most if first == resource.RLIM_INFINITY else min(most, first), hard))


def answer(library: GuardedLibrary, most_text: int) -> tuple[bool, bytes]:
    """Run the call read from stdin."""
    seconds, n = struct.unpack("<QQ", read(16))
    limit("RLIMIT_CPU", math.ceil(time.process_time()) + seconds)
    parts = [read(*struct.unpack("<Q", read(8))) for _ in range(n)]
    try:
        text = library.call(*parts)
    except ValueError as reason:
        return False, reason.args[0].replace(b"std::bad_alloc", b"it takes too much memory")
    if len(text) > most_text:
        return False, b"the text is longer than %d MiB" % (most_text >> 20)
    return True, text


def read(size: int) -> bytes:
    """Return the next bytes of stdin; exits at its end."""
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        raise SystemExit
    return data


def main() -> None:
    """Answer calls until stdin ends."""
    path, memory, most_text = sys.argv[1], *map(int, sys.argv[2:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main program handles Ctrl-C
    library = GuardedLibrary(path)
    if sys.platform == "linux":  # macOS does not say what is used
        with open("/proc/self/statm", encoding="ascii") as sizes:
            limit("RLIMIT_AS", int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory)
    limit("RLIMIT_CORE", 0)
    while True:
        ok, text = answer(library, most_text)
        sys.stdout.buffer.write(struct.pack("<BQ", ok, len(text)) + text)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
