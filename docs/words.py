"""Words that documents, help, error messages and comments avoid: ``python docs/words.py`` lists where they are.

An exception is a comment in a paragraph, ``<!-- words: TERM: REASON -->``, or at the end of a line of Python,
``# words: TERM: REASON``. Code blocks, code spans and addresses are not looked at.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
ADVICE = {
    r"anew": "again",
    r"behind(?! \S+(?: \S+){0,2} (?:interface|API|proxy|server))": "after",
    r"beside": "next to, with, in addition to, compared with",
    r"shall": "must, or the present tense",
    r"who(?:m|so)?ever": "anyone who",
    r"somebody": "someone, or say who: a user, a process",
    r"nobody": "no one, or say who: no user, no process",
    r"so many": "that many, or up to N",
    r"but for": "except",
    r"(?<!there\s)(?:is|are|was|were) no(?! longer| more| less| fewer| larger| smaller| better)": "is not a",
    r"one of both": "either",
    r"unequal": "different",
    r"meanwhile": "while that happens",
    r"in silence": "silently",
    r"in vain": "unnecessarily",
    r"(?:go|goes|going|gone|went) on": "continue",
    r"wish(?:es|ed)?": "request, want",
    r"told": "notified, reported",
}
WORDS = [(re.compile(rf"\b{word}\b".replace(" ", r"\s+"), re.IGNORECASE), advice) for word, advice in ADVICE.items()]
CODE = r"^( *)```.*?^\1```$|`[^`]*`"
NOT_PROSE = re.compile(rf"{CODE}|\]\([^)]*\)|https?://\S+|<!--(?! words:).*?-->|\{{#.*?\}}", re.DOTALL | re.MULTILINE)
EXCEPTION = re.compile(r"words: ([^:]+): \S")
PYTHON = ("pylongctx", "tests", "bench", "examples", "native", "docs")
C = ("*.h", "*.cpp", "*.cu", "*.comp", "*.glsl")
# a comment of C, which may span several lines of //, or a string, which may look as if it had one
C_TEXT = re.compile(r'//[^\n]*(?:\n\s*//[^\n]*)*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


class Finding(NamedTuple):
    """A word that is avoided, where it is, and what to write instead."""

    place: str
    word: str
    advice: str


def main() -> int:
    """Print every finding and return the exit status."""
    found = [*documents(), *messages(), *helps(), *comments()]
    for finding in found:
        print(f"{finding.place}: {finding.word!r}: write {finding.advice}")
    return 1 if found else 0


def look(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the offset, the word and the advice of every finding in a text."""
    for pattern, advice in WORDS:
        yield from ((found.start(), " ".join(found[0].split()), advice) for found in pattern.finditer(text))


# ---- documents ----


def documents() -> Iterator[Finding]:
    """Yield the findings of the Markdown files."""
    for path in (*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").rglob("*.md"))):
        name = str(path.relative_to(ROOT))
        for line, word, advice in in_markdown(path.read_text(encoding="utf-8")):
            yield Finding(f"{name}:{line}", word, advice)


def in_markdown(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the word and the advice of every finding in the prose of a page."""
    prose = NOT_PROSE.sub(lambda part: re.sub(r"[^\n]", "_", part[0]), text)
    line = 1
    for paragraph in re.split(r"(\n{2,})", prose):
        allowed = {word.lower() for word in EXCEPTION.findall(paragraph)}
        for start, word, advice in look(re.sub(r"<!--.*?-->", lambda part: "_" * len(part[0]), paragraph)):
            if word.lower() not in allowed:
                yield line + paragraph.count("\n", 0, start), word, advice
        line += paragraph.count("\n")


# ---- the package ----


def messages() -> Iterator[Finding]:
    """Yield the findings of the messages of exceptions that the package raises."""
    for path in sorted((ROOT / "pylongctx").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    allowed = EXCEPTION.findall("\n".join(lines[part.lineno - 1 : part.end_lineno]))
                    place = f"{path.relative_to(ROOT)}:{part.lineno}"
                    yield from (
                        Finding(place, word, advice) for _, word, advice in look(part.value) if word not in allowed
                    )


def helps() -> Iterator[Finding]:
    """Yield the findings of the help of every command."""
    from pylongctx.cli import make_parser

    for name, parser in make_parser().commands().items():
        texts = [parser.description, parser.epilog, *(group.title for group in parser._action_groups)]
        texts += [action.help for action in parser._actions]
        for _, word, advice in (found for text in texts if text for found in look(text)):
            yield Finding(f"pylongctx {name} --help", word, advice)


# ---- comments ----


def comments() -> Iterator[Finding]:
    """Yield the findings of comments, of docstrings, and of what C code reports."""
    for folder in PYTHON:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from in_texts(path, python_texts(path))
    for path in sorted(path for pattern in C for path in (ROOT / "native").rglob(pattern)):
        source = path.read_text(encoding="utf-8")
        yield from in_texts(path, ((source.count("\n", 0, m.start()) + 1, m[0]) for m in C_TEXT.finditer(source)))


def python_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment and docstring."""
    with path.open("rb") as file:
        yield from ((t.start[0], t.string) for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, node.body[0].value.value  # type: ignore[attr-defined]


def in_texts(path: Path, texts: Iterable[tuple[int, str]]) -> Iterator[Finding]:
    """Yield the findings of texts of a file; code spans are not looked at."""
    for line, text in texts:
        allowed = EXCEPTION.findall(text)
        prose = re.sub(r"\n\s*//", "\n", re.sub(r"`[^`\n]*`", "_", text))
        for start, word, advice in look(prose):
            if word not in allowed:
                at = line + prose.count("\n", 0, start)
                yield Finding(f"{path.relative_to(ROOT)}:{at}", word, advice)


if __name__ == "__main__":
    sys.exit(main())
