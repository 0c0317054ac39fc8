"""Reports: pictures of what is there, and pages that need nothing else."""

import json
import re
from html.parser import HTMLParser

import numpy as np
from needs import need
from reports import ABOUT, MODEL, answers, chunks, folder_of, record, texts

from pylongctx.cli import main
from pylongctx.eval.report.pictures import cells, chunk_map, is_grid, pictures
from pylongctx.eval.report.records import Evidence, load

# ---- pictures ----


def names(path, records):
    folder = folder_of(path, records)
    assert main(["report", folder]) == 0
    found = sorted(file.name.removeprefix("tiny-") for file in (path / "report").iterdir())
    assert [name.rpartition(".")[2] for name in found] == ["png", "svg"] * (len(found) // 2)
    return {name.rpartition(".")[0] for name in found}


def test_only_what_is_there_is_drawn(tmp_path):
    need("plot", "matplotlib")
    assert names(tmp_path, answers(methods=("full",))) == {"accuracy-passkey", "time", "prompt", "memory"}


def test_perplexities_are_drawn_by_length_and_position(tmp_path):
    need("plot", "matplotlib")
    curved = [texts(m, 1024, curve=[[9.0, 4], [20.0, 2]]) for m in ("full", "longheads")]
    drawn = names(tmp_path, [texts(curve=[[9.0, 4]]), *curved])
    assert drawn == {"perplexity-sliding-256", "position-sliding-256", "memory"}


def test_needles_are_a_map_and_memory_has_a_frontier(tmp_path):
    need("plot", "matplotlib")
    records = [r for depth in (0.0, 50.0) for r in answers("needle", depth_percent=depth)]
    drawn = names(tmp_path, records)
    assert drawn == {"accuracy-needle", "depths-needle", "frontier", "time", "prompt", "memory"}


def test_chunk_maps_are_of_the_longest_length_for_each_method_and_kv_type(tmp_path):
    need("plot", "matplotlib")
    shown = [chunks(), chunks(length=512, trial=1), chunks(length=512), chunks("longheads+corm", type_k="q8_0")]
    assert names(tmp_path, shown) == {"chunks-longheads", "chunks-longheads+corm-q8_0-f16"}
    captions = re.findall(r"^\*(.*Model.*)\*$", (tmp_path / "report.md").read_text(), re.M)
    assert "Chunks that longheads reads at 512 tokens" in captions[0]
    assert "Methods: longheads+corm q8_0/f16. Made by" in captions[1]


def test_a_chunk_map_tells_choices_from_duties_and_frames_the_pass_key():
    need("plot", "matplotlib")
    figure = chunk_map(chunks())
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), [[1, 2, 0, 0, 1, 1], [1, 0, 2, 0, 1, 1]])
    (frame,) = axes.patches
    assert (round(frame.get_bbox().x0 + 0.5), round(frame.get_bbox().x1 + 0.5)) == (1, 3)
    assert figure.get_suptitle() == "longheads at 256 tokens: 2 tokens of a right answer"


def test_a_map_holds_mean_scores():
    records = [
        *answers("needle", ("full",), (256,), depth_percent=0.0, score=1.0),
        *answers("needle", ("full",), (256,), depth_percent=0.0, score=0.0),
        *answers("needle", ("full",), (1024,), depth_percent=50.0, score=0.25),
    ]
    np.testing.assert_array_equal(cells(records, [0, 50], [256, 1024]), [[0.5, np.nan], [np.nan, 0.25]])


def test_scattered_pass_keys_are_not_a_map():
    assert not is_grid(answers(depth=0.31))
    assert is_grid([r for tenth in range(6) for r in answers(depth=tenth / 5)])


def test_the_frontier_is_what_nothing_beats():
    need("plot", "matplotlib")
    from pylongctx.eval.report.pictures import unbeaten

    assert unbeaten([(3, 50), (1, 20), (2, 50), (2, 10), (4, 90), (5, 80)]) == [(1, 20), (2, 50), (4, 90)]


# ---- pages ----


class Page(HTMLParser):
    """The sources, captions and rows of a page; every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.open, self.captions = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["figcaption"]:
            self.captions.append(data)


def test_pages_hold_tables_pictures_and_captions(tmp_path):
    need("plot", "matplotlib")
    failed = [{"task": "passkey", "method": "tova", "length": 9, "reason": "ValueError: a <reason>"}]
    folder = folder_of(tmp_path, [*answers(), *answers(methods=("window",))], failed=failed)
    assert main(["report", folder, "--out", str(tmp_path / "new" / "page.html")]) == 0
    html, markdown = ((tmp_path / "new" / f"page.{suffix}").read_text() for suffix in ("html", "md"))
    page = Page(html)
    assert len(page.sources) == len(page.captions) == 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    for text in (*page.captions, *re.findall(r"^\*(.*Model.*)\*$", markdown, re.M)):
        assert f"Model: {MODEL}, trained on 512 tokens. Methods: full, longheads, window." in text
        assert text.endswith(f"Made by: {ABOUT['command']}")
    linked = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert len(linked) == 5
    assert all((tmp_path / "new" / name).exists() for name in linked)
    assert "| full | 100.0 | 0.0 |" in markdown
    assert "a &lt;reason&gt;" in html


def test_without_pictures_there_are_tables_only(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "new" / "page.md"
    assert main(["report", folder_of(tmp_path, answers()), "--no-pictures", "--out", str(out)]) == 0
    assert "| full | 100.0 | 0.0 |" in out.read_text()
    assert "![" not in out.read_text()
    assert not out.with_suffix("").exists()


def test_a_caption_names_the_methods_that_are_drawn():
    need("plot", "matplotlib")
    records = [*answers(), *answers("vt", methods=("window",))]
    captions = {picture.name: picture.caption for picture in pictures(Evidence(records, ABOUT))}
    assert "Methods: full, longheads. Made" in captions["tiny-accuracy-passkey"]
    assert "Methods: window. Made" in captions["tiny-accuracy-vt"]
    assert "Methods: full, longheads, window. Made" in captions["tiny-memory"]


def test_the_embedded_model_comes_last_and_is_called_a_check(tmp_path, embedded_model):
    records = [record(strict=1.0, model=name) for name in (embedded_model.name, "real.gguf")]
    assert Evidence(records).models == ["real.gguf", embedded_model.name]
    assert main(["report", folder_of(tmp_path, records), "--no-pictures"]) == 0
    heads = re.findall(r"^## (.*)$", (tmp_path / "report.md").read_text(), re.M)
    assert heads == ["real.gguf", f"{embedded_model.name}: a check of the methods"]


def test_several_files_are_one_report(tmp_path):
    folder_of(tmp_path, answers())
    more = record("tova", strict=1.0) | {"digest": "another"}
    (tmp_path / "more.jsonl").write_text(json.dumps(more) + "\n")
    assert len(load(tmp_path).records) == 5


def test_a_folder_without_records_says_how_to_make_some(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert f"{tmp_path} has no records; create them with pylongctx matrix" in capsys.readouterr().err


def test_without_matplotlib_the_report_says_how_to_install(tmp_path, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", folder_of(tmp_path, answers())]) == 1
    assert "pip install 'pylongctx[plot]'" in capsys.readouterr().err


# ---- from nothing ----


def test_a_matrix_becomes_a_report(tmp_path, capsys):
    need("plot", "matplotlib")
    (tmp_path / "text.txt").write_text(" ".join(f"It was chapter {i}." for i in range(400)))
    (tmp_path / "m.toml").write_text(
        'methods = ["full", "longheads@ntk"]\nlengths = [256, 700]\n[llama]\nn_threads = 1\n'
        '[[tasks]]\nkind = "needle"\npasskey = true\ndepth_percents = [0, 100]\nmax_tokens = 6\n'
        "final_context_length_buffer = 80\n"
        '[[tasks]]\nkind = "perplexity"\nmode = "last"\nstride = 64\nchunks = 1\nfile = "text.txt"\n'
    )
    out = tmp_path / "out"
    assert main(["matrix", str(tmp_path / "m.toml"), "--out", str(out)]) == 0
    assert main(["report", str(out)]) == 0
    drawn = {file.stem.partition("q8_0-")[2] for file in (out / "report").iterdir()}
    assert {"accuracy-needle", "depths-needle", "perplexity-last-64", "memory", "time", "frontier"} <= drawn
    markdown = (out / "report.md").read_text()
    assert re.findall(r"^\| (full|longheads@ntk) \| \d", markdown, re.M)[:2] == ["full", "longheads@ntk"]
