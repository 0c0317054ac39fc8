"""Markdown, formulas and code of a model as HTML of a few harmless elements.

The parser is pulldown-cmark. Its events are written here, where every text is escaped: raw HTML is shown as text,
links lead to http, https and mailto only, and pictures become links, so that a text makes no browser ask another host.
"""

import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape, unescape
from textwrap import dedent
from typing import Any
from xml.etree.ElementTree import Element

import pyromark
from latex2mathml.converter import convert_to_element
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES

MAX_FORMULA = 2000  # characters; a longer formula is shown as it is written
TAGS = frozenset(
    "math mrow mi mn mo mtext ms mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts"
    " mprescripts none mtable mtr mtd mlabeledtr mstyle mpadded mphantom menclose merror".split()
)
ATTRIBUTES = frozenset(
    "display displaystyle scriptlevel mathvariant mathcolor mathsize stretchy fence form separator accent accentunder"
    " largeop movablelimits symmetric minsize maxsize linethickness rowspacing columnspacing columnlines"
    " rowlines notation width height depth lspace rspace voffset linebreak".split()
)
# latex2mathml takes these for identifiers, which have no space around them
OPERATORS = frozenset("\u00b1\u2022\u29f5~\u27c2\u27fa\u27f9")
VALUE = re.compile(r"[\w.+\-# ]{1,60}")
MAX_CODE = 20_000  # characters that are colored
MAX_SECONDS = 0.2  # seconds of this thread; some lexers are quadratic
LANGUAGES = frozenset(
    "bash sh shell zsh c cpp c++ csharp c# cs cmake css scss dart diff docker dockerfile go"
    " golang haskell hs html java javascript js jsx json julia jl kotlin latex tex lua make makefile"
    " nginx objective-c objc perl pl php powershell ps1 python py py3 python3 r ruby rb rust rs scala sql"
    " swift toml tsx typescript ts xml yaml yml".split()
)
OPEN, CLOSE = "\ue000", "\ue001"  # around the number of a formula; private characters, which no text needs
FORMULA_PLACE = re.compile(f"{OPEN}(\\d+){CLOSE}")
FENCE = re.compile(r" {0,12}(`{3,}|~{3,})")
LINE = r"\n(?![ \t]*\n)"  # a formula goes over lines, but not over an empty one
# No alternative goes over the opening sign of another formula, so the time is linear.
FORMULA = re.compile(
    r"\\\\"
    rf"|\\\(((?:[^\\`\n]|\\[^()`\n]|{LINE})+)\\\)"
    rf"|\\\[((?:[^\\`\n]|\\[^\[\]`\n]|{LINE})+)\\\]"
    rf"|\$\$((?:[^\\$`\n]|\\[^`\n]|{LINE})+)\$\$"
)
SPAN = re.compile(r"`[^`]+`")
BAR = re.compile(r"\\?\|")
MAX_DEPTH = 60  # elements in each other
MAX_TEXT = 400_000  # characters that are rendered
MAX_COLORED = 60_000  # characters of code in one text
MAX_LATEX = 40_000  # characters of formulas in one text
OPTIONS = (
    pyromark.Options.ENABLE_TABLES
    | pyromark.Options.ENABLE_STRIKETHROUGH
    | pyromark.Options.ENABLE_TASKLISTS
    | pyromark.Options.ENABLE_MATH
)
PLAIN = {
    **{"Paragraph": "p", "Emphasis": "em", "Strong": "strong", "Strikethrough": "del"},
    **{"Item": "li", "HtmlBlock": "p", "BlockQuote": "blockquote"},
}
EMPTY = {"SoftBreak": "\n", "HardBreak": "<br>", "Rule": "<hr>"}  # events without a text
ALIGN = {"Left": "", "None": "", "Center": ' class="center"', "Right": ' class="right"'}
TARGET = re.compile(r"(https?://|mailto:)[^\s\0-\x1f]+", re.IGNORECASE)
SPECIAL = re.compile(f'{OPEN}(?P<formula>\\d+){CLOSE}|https?://[^\\s<>"{OPEN}{CLOSE}]+')
SENTENCE = ".,:;!?'*_~"  # may end one
BREAK = re.compile(r"<br ?/?>", re.IGNORECASE)


def formula_html(latex: str, is_display: bool, written: str) -> str:
    """Return a formula as HTML; what does not parse is shown as it was written.

    Examples
    --------
    >>> formula_html("x", False, "$x$")
    '<math display="inline"><mrow><mi>x</mi></mrow></math>'
    >>> formula_html(r"\\frac", False, r"$\\frac$")
    '<code>$\\\\frac$</code>'
    """
    found = _as_mathml(latex, is_display) if len(latex) <= MAX_FORMULA else None
    return f"<code>{escape(written)}</code>" if found is None else found


@lru_cache(4096)
def _as_mathml(latex: str, is_display: bool) -> str | None:
    try:
        element = convert_to_element(latex, display="block" if is_display else "inline")
        return "".join(_written_mathml(element))
    except Exception:  # it raises IndexError, KeyError, RecursionError and more than its own
        return None


def _written_mathml(element: Element) -> list[str]:
    """Return the pieces of an element as HTML."""
    if element.tag not in TAGS:
        raise ValueError(f"{element.tag} is not known to be harmless")
    tag = "mo" if element.tag == "mi" and unescape(element.text or "") in OPERATORS else element.tag
    known = [(name, value) for name, value in element.items() if name in ATTRIBUTES and VALUE.fullmatch(value)]
    if element.get("columnalign") in ("left", "right"):  # browsers go by styles
        known.append(("class", element.attrib["columnalign"]))
    attributes = "".join(f' {name}="{escape(value)}"' for name, value in known)
    parts = [f"<{tag}{attributes}>", escape(unescape(element.text or ""))]
    for child in element:
        parts += _written_mathml(child)
    return [*parts, f"</{tag}>"]


@lru_cache(256)
def code_html(code: str, language: str) -> str:
    """Return code as HTML, without colors for an unknown language or when it is long or slow to read.

    Examples
    --------
    >>> code_html("x = 1", "python")
    '<span class="n">x</span> <span class="o">=</span> <span class="mi">1</span>'
    >>> code_html("a < b", "")
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


@dataclass
class MarkupSource:
    """A text in which formulas are numbers between two private characters."""

    text: str = ""
    formulas: list[tuple[str, str, bool]] = field(default_factory=list)  # source, LaTeX, whether it stands alone

    def restore(self, text: str) -> str:
        """Return a part of the parsed text as it was written."""
        return FORMULA_PLACE.sub(lambda place: self.formulas[int(place[1])][0], text)

    def formula(self, number: str) -> str:
        """Return a formula as HTML."""
        written, latex, is_display = self.formulas[int(number)]
        return formula_html(latex, is_display, written)


def prepare(text: str) -> MarkupSource:
    """Return a text whose formulas in ``\\(..\\)``, ``\\[..\\]`` and ``$$..$$`` are taken out, but not those in code.

    A bar in code inside a table is escaped, as GitHub's Markdown wants it and models do not write it.

    Examples
    --------
    >>> prepare(r"so \\(a_1\\)").formulas
    [('\\\\(a_1\\\\)', 'a_1', False)]
    """
    source = MarkupSource()
    clean = text.replace("\r\n", "\n").replace("\0", "\ufffd").replace(OPEN, "\ufffd").replace(CLOSE, "\ufffd")
    parts = [part if is_code else _prose(source, part) for is_code, part in _fenced(clean)]
    source.text = "".join(parts)
    return source


def _fenced(text: str) -> list[tuple[bool, str]]:
    """Return the pieces of a text, each with whether it is fenced code."""
    pieces: list[tuple[bool, str]] = []
    lines: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        found = FENCE.match(line)
        if fence:
            lines.append(line)
            if found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                pieces.append((True, "".join(lines)))
                lines, fence = [], ""
        elif found:
            pieces.append((False, "".join(lines)))
            lines, fence = [line], found[1]
        else:
            lines.append(line)
    return [*pieces, (bool(fence), "".join(lines))]


def _prose(source: MarkupSource, text: str) -> str:
    def take(found: "re.Match[str]") -> str:
        group = found.lastindex
        if group is None or not found[group].strip():
            return found[0]
        source.formulas.append((found[0], found[group].strip(), group > 1))
        return f"{OPEN}{len(source.formulas) - 1}{CLOSE}"

    text = FORMULA.sub(take, text)
    return _tables(text) if "|" in text and "`" in text else text


def _tables(text: str) -> str:
    """Escape the bars in code inside tables."""
    lines = text.split("\n")
    is_table = False
    for i, line in enumerate(lines):
        if _is_delimiter(line) and i:
            is_table = True
            lines[i - 1] = _escaped(lines[i - 1])
        elif not line.strip(" \t>"):
            is_table = False
        elif is_table:
            lines[i] = _escaped(line)
    return "\n".join(lines)


def _is_delimiter(line: str) -> bool:
    """Return whether a line is the one between the head and the body of a table."""
    bare = set(line.strip(" \t>"))
    return {"|", "-"} <= bare <= set("|-: \t")


def _escaped(line: str) -> str:
    return SPAN.sub(lambda span: BAR.sub(r"\\|", span[0]), line)


class TooDeepError(ValueError):
    """A text has too many elements in each other."""


def blocks(text: str) -> list[str]:
    """Return the blocks of a Markdown text as HTML, each well-formed by itself.

    A text that is too long, or whose quotes and lists are too deep in each other, is one block of plain text.

    Examples
    --------
    >>> blocks("# a\\n\\n*b* <i>")
    ['<h2>a</h2>', '<p><em>b</em> &lt;i&gt;</p>']
    """
    if len(text) > MAX_TEXT:
        return [plain(text)]
    try:
        return Writer(prepare(text)).write()
    except TooDeepError:
        return [plain(text)]


def plain(text: str) -> str:
    """Return a text as one block that is shown as it is."""
    return f'<p class="plain">{escape(text)}</p>'


class Writer:
    """Writes the events of one text."""

    def __init__(self, source: MarkupSource) -> None:
        self._source = source
        self._blocks: list[str] = []
        self._parts: list[str] = []  # of the block that is being written
        self._ends: list[str] = []  # of the elements that are open
        self._lines: list[str] | None = None  # the lines of a block of code
        self._language = ""
        self._math = ""  # in dollars; what follows decides whether they were prices
        self._columns: tuple[str, ...] = ()  # alignments of the table
        self._cell = ("td", 0)
        self._links: list[tuple[int, str]] = []  # where each began, and its address
        self._n_colored = self._n_latex = 0

    def write(self) -> list[str]:
        """Return the blocks."""
        for event in pyromark.events(self._source.text, options=OPTIONS):
            kind, value = (event, None) if isinstance(event, str) else next(iter(event.items()))
            if self._math:
                self._end_math(kind, value)
            if kind in EMPTY:
                self._parts.append(EMPTY[kind])
            else:
                getattr(self, f"_{kind.lower()}")(value)
            if not self._ends:
                self._blocks.append("".join(self._parts))
                self._parts = []
        return self._blocks

    # ---- elements ----

    def _start(self, value: Any) -> None:
        name, more = (value, None) if isinstance(value, str) else next(iter(value.items()))
        if len(self._ends) >= MAX_DEPTH:
            raise TooDeepError
        if tag := PLAIN.get(name):
            self._open(f"<{tag}>", f"</{tag}>")
        else:
            getattr(self, f"_start_{name.lower()}")(more)

    def _end(self, value: Any) -> None:
        if self._lines is not None:
            self._end_code()
        name = value if isinstance(value, str) else next(iter(value))
        if name in ("Link", "Image"):
            self._end_link()
        self._parts.append(self._ends.pop())

    def _open(self, start: str, end: str) -> None:
        self._parts.append(start)
        self._ends.append(end)

    def _start_heading(self, more: Any) -> None:
        tag = f"h{min(int(more['level'][1]) + 1, 6)}"  # the page has h1 itself
        self._open(f"<{tag}>", f"</{tag}>")

    def _start_list(self, more: Any) -> None:
        if more is None:
            self._open("<ul>", "</ul>")
        else:
            self._open("<ol>" if more == 1 else f'<ol start="{more}">', "</ol>")

    def _start_codeblock(self, more: Any) -> None:
        self._lines = []
        words = more["Fenced"].split(maxsplit=1) if isinstance(more, dict) else []
        self._language = self._source.restore(words[0])[:30] if words else ""
        caption = f"<figcaption><span>{escape(self._language)}</span></figcaption>"
        self._open(f'<figure class="code">{caption}<pre tabindex="0"><code>', "</code></pre></figure>")

    def _end_code(self) -> None:
        text = self._source.restore("".join(self._lines or ())).removesuffix("\n")
        if len(self._ends) > 1:
            text = dedent(text)  # of a list that was indented more than its marks need
        self._n_colored += len(text)
        self._parts.append(code_html(text, self._language if self._n_colored <= MAX_COLORED else ""))
        self._lines = None

    def _start_link(self, more: Any) -> None:
        address = self._source.restore(more["dest_url"])
        if more["link_type"] == "Email":
            address = f"mailto:{address}"
        if any(known for _, known in self._links):  # a picture in a link is its text
            address = ""
        self._links.append((len(self._parts) + 1, address if TARGET.fullmatch(address) else ""))
        title = self._source.restore(more["title"])
        if self._links[-1][1]:
            self._open(_link(address, title), "</a>")
        else:
            self._open("", "")

    _start_image = _start_link

    def _end_link(self) -> None:
        start, address = self._links.pop()
        if not "".join(self._parts[start:]).strip():
            self._parts.append(escape(address))

    def _start_table(self, more: Any) -> None:
        self._columns = more
        self._open('<div class="wide" tabindex="0"><table>', "</tbody></table></div>")

    def _start_tablehead(self, more: Any) -> None:
        self._cell = ("th", 0)
        self._open("<thead><tr>", "</tr></thead><tbody>")

    def _start_tablerow(self, more: Any) -> None:
        self._cell = ("td", 0)
        self._open("<tr>", "</tr>")

    def _start_tablecell(self, more: Any) -> None:
        tag, column = self._cell
        self._cell = (tag, column + 1)
        align = ALIGN[self._columns[column]] if column < len(self._columns) else ""
        self._open(f"<{tag}{align}>", f"</{tag}>")

    # ---- what stands in them ----

    def _text(self, value: str) -> None:
        if self._lines is not None:
            self._lines.append(value)
            return
        at = 0
        for found in SPECIAL.finditer(value):
            self._parts.append(escape(value[at : found.start()]))
            at = found.start() + self._special(found)
        self._parts.append(escape(value[at:]))

    def _special(self, found: "re.Match[str]") -> int:
        """Write a formula or an address; returns how many characters it has."""
        if number := found["formula"]:
            self._formula(*self._source.formulas[int(number)])
            return len(found[0])
        address = _bare(found[0])
        shown = escape(address)
        self._parts.append(shown if self._links or not TARGET.fullmatch(address) else f"{_link(address)}{shown}</a>")
        return len(address)

    def _code(self, value: str) -> None:
        self._parts.append(f"<code>{escape(self._source.restore(value))}</code>")

    def _html(self, value: str) -> None:
        shown = [escape(piece) for piece in BREAK.split(self._source.restore(value))]
        self._parts.append("<br>".join(shown))

    _inlinehtml = _html

    def _tasklistmarker(self, value: bool) -> None:
        box, label = ("\u2611", "done") if value else ("\u2610", "to do")
        self._parts.append(f'<span class="task" role="img" aria-label="{label}">{box}</span> ')

    # ---- formulas ----

    def _inlinemath(self, value: str) -> None:
        self._math = value

    def _displaymath(self, value: str) -> None:
        latex = self._source.restore(value)
        self._formula(f"$${latex}$$", latex, True)

    def _end_math(self, kind: str, value: Any) -> None:
        """Write what stands between two dollars; before a digit, the second one belongs to a price."""
        latex, self._math = self._source.restore(self._math), ""
        if kind == "Text" and value[:1].isdigit():
            self._parts.append(escape(f"${latex}$"))
        else:
            self._formula(f"${latex}$", latex, False)

    def _formula(self, written: str, latex: str, is_display: bool) -> None:
        self._n_latex += len(latex)
        if self._n_latex > MAX_LATEX:
            self._parts.append(escape(written))
        else:
            self._parts.append(formula_html(latex, is_display, written))


def _link(address: str, title: str = "") -> str:
    more = f' title="{escape(title)}"' if title else ""
    return f'<a href="{escape(address)}"{more} target="_blank" rel="noopener noreferrer">'


def _bare(address: str) -> str:
    """Return an address in a text without the punctuation that ends its sentence, and without a bracket around it."""
    address = address.rstrip(SENTENCE)
    extra = min(address.count(")") - address.count("("), len(address) - len(address.rstrip(")")))
    return address[:-extra].rstrip(SENTENCE) if extra > 0 else address
