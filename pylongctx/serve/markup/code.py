"""Code with its words in classes, which the page's style sheet colors."""

import time
from functools import lru_cache
from html import escape

from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES

MAX_CODE = 20_000  # characters that are colored
MAX_SECONDS = 0.2  # seconds of this thread; some lexers are quadratic
LANGUAGES = frozenset(
    "bash sh shell zsh c cpp c++ csharp c# cs cmake css scss dart diff docker dockerfile go"
    " golang haskell hs html java javascript js jsx json julia jl kotlin latex tex lua make makefile"
    " nginx objective-c objc perl pl php powershell ps1 python py py3 python3 r ruby rb rust rs scala sql"
    " swift toml tsx typescript ts xml yaml yml".split()
)


@lru_cache(256)
def as_html(code: str, language: str) -> str:
    """Return code as HTML, without colors for an unknown language or when it is long or slow to read.

    Examples
    --------
    >>> as_html("x = 1", "python")
    '<span class="n">x</span> <span class="o">=</span> <span class="mi">1</span>'
    >>> as_html("a < b", "")
    'a &lt; b'
    """
    if language.lower() not in LANGUAGES or len(code) > MAX_CODE:
        return escape(code)
    end = time.thread_time() + MAX_SECONDS
    parts = []
    for kind, text in get_lexer_by_name(language.lower(), stripnl=False, ensurenl=False).get_tokens(code):
        name = STANDARD_TYPES.get(kind, "")
        shown = escape(text)
        parts.append(f'<span class="{name}">{shown}</span>' if name and name != "w" else shown)
        if time.thread_time() > end:
            return escape(code)
    return "".join(parts)
