"""The Python snippets of the README run as they stand, on the embedded model."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
# A section whose snippets share their names, one after the other.
SECTIONS = ["Chat, tools, JSON"]


def snippets(section: str) -> list[str]:
    """Return the indented or fenced Python blocks of a section."""
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL).group(1)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS)
def test_snippets_run(section, embedded_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(embedded_model)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    found, names = snippets(section), {}
    assert len(found) >= 3
    for i, code in enumerate(found):
        exec(compile(code, f"README.md, {section}, snippet {i + 1}", "exec"), names)
    assert capsys.readouterr().out
