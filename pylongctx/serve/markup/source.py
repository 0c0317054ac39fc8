"""Formulas, which are taken out of a text before Markdown is parsed: it would interpret their characters."""

import re
from dataclasses import dataclass, field

from pylongctx.serve.markup import formula

OPEN, CLOSE = "\ue000", "\ue001"  # around the number of a formula; private characters, which no text needs
PLACE = re.compile(f"{OPEN}(\\d+){CLOSE}")
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


@dataclass
class MarkupSource:
    """A text in which formulas are numbers between two private characters.

    Attributes
    ----------
    text : str
        For the parser.
    formulas : list of (str, str, bool)
        Of each its source, its LaTeX, and whether it stands alone.
    """

    text: str = ""
    formulas: list[tuple[str, str, bool]] = field(default_factory=list)

    def restore(self, text: str) -> str:
        """Return a part of the parsed text as it was written."""
        return PLACE.sub(lambda place: self.formulas[int(place[1])][0], text)

    def formula(self, number: str) -> str:
        """Return a formula as HTML."""
        written, latex, is_display = self.formulas[int(number)]
        return formula.as_html(latex, is_display, written)


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
