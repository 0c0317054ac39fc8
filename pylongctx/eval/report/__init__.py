"""A report as Markdown with plots in separate files, and as one self-contained HTML file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pylongctx.attention.canvas import save
from pylongctx.eval.report.grids import Grid, choices_grid, grids
from pylongctx.eval.report.pictures import pictures
from pylongctx.eval.report.records import Evidence, is_embedded, load

NAME = "report"
TITLE = "Long context: results"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 2rem 0; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { padding: .15rem .7rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; }
thead { border-top: 2px solid #222; border-bottom: 1px solid #222; }
tbody { border-bottom: 2px solid #222; }
th.group { font-style: italic; padding-top: .5rem; }
figure { margin: 2.5rem 0; } figure img { max-width: 100%; } figcaption { color: #555; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Image:
    """A picture in files."""

    caption: str
    png: Path
    svg: Path

    def markdown(self, folder: Path) -> str:
        """Return it as Markdown in a file of ``folder``."""
        return f"![{self.caption.partition('.')[0]}]({self.png.relative_to(folder).as_posix()})\n\n*{self.caption}*"

    def html(self) -> str:
        """Return it as HTML with the embedded SVG."""
        data = b64encode(self.svg.read_bytes()).decode()
        short = escape(self.caption.partition(".")[0])
        image = f'<img alt="{short}" src="data:image/svg+xml;base64,{data}">'
        return f"<figure>{image}<figcaption>{escape(self.caption)}</figcaption></figure>"


def write_report(folder: str | Path, out: str | Path | None = None, draw: bool = True) -> list[Path]:
    """Write a report of the records in a folder; returns the paths of its two pages.

    ``out`` is ``NAME.md`` or ``NAME.html``: both are written, with plots in a folder NAME. None: ``report`` in the
    folder.
    """
    evidence = load(folder)
    stem = (Path(folder) / NAME if out is None else Path(out)).with_suffix("")
    shown = {model: list(_draw(evidence.of(model), stem)) if draw else [] for model in evidence.models}
    tables = {model: list(grids(evidence.of(model))) for model in evidence.models}
    texts = {".md": _markdown(evidence, tables, shown, stem.parent), ".html": _html(evidence, tables, shown)}
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(suffix) for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def _draw(evidence: Evidence, stem: Path) -> Iterator[Image]:
    for picture in pictures(evidence):
        yield Image(picture.caption, *save(picture.figure, stem / picture.name))


def _facts(evidence: Evidence) -> list[str]:
    """Return lines about the origin of the records and about failures."""
    names = {"command": "Command", "machine": "Machine", "version": "pylongctx"}
    lines = [f"{text}: {evidence.about[key]}" for key, text in names.items() if key in evidence.about]
    lines += [f"Model: {model}, trained on {evidence.trained(model) or 'unknown'} tokens" for model in evidence.models]
    failed = [f"Failed: {f['task']}, {f['method']} at {f['length']}: {f['reason']}" for f in evidence.failed]
    return [*lines, f"Records: {len(evidence.records)}", *failed]


def _heading(model: str) -> str:
    return f"{model}: a check of the methods" if is_embedded(model) else model


def _markdown(evidence: Evidence, tables: dict[str, list[Grid]], shown: dict[str, list[Image]], folder: Path) -> str:
    parts = [f"# {TITLE}", "\n".join(f"- {line}" for line in _facts(evidence))]
    for model in evidence.models:
        parts += [f"## {_heading(model)}", *(grid.markdown() for grid in tables[model])]
        parts += [picture.markdown(folder) for picture in shown[model]]
    return "\n\n".join([*parts, choices_grid(evidence).markdown()]) + "\n"


def _html(evidence: Evidence, tables: dict[str, list[Grid]], shown: dict[str, list[Image]]) -> str:
    facts = "".join(f"<li>{escape(line)}</li>" for line in _facts(evidence))
    parts = [f"<h1>{TITLE}</h1><ul>{facts}</ul>"]
    for model in evidence.models:
        parts += [f"<h2>{escape(_heading(model))}</h2>", *(grid.html() for grid in tables[model])]
        parts += [picture.html() for picture in shown[model]]
    body = "\n".join([*parts, choices_grid(evidence).html()])
    head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'
