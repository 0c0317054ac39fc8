"""Reports: tables as the papers have them, pictures of what is there, pages that need nothing else."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from needs import need

from pylongctx.cli import main
from pylongctx.report.ability import abilities
from pylongctx.report.grids import choices_grid, grids
from pylongctx.report.heat import cells, is_grid
from pylongctx.report.pictures import chunk_map, pictures
from pylongctx.report.records import Evidence, in_order, label, load, short
from pylongctx.report.records import perplexity as perplexity_of

MODEL = "tiny.gguf"
ABOUT = {"command": "pylongctx matrix m.toml --out here", "models": {MODEL: 512}, "methods": ["full", "longheads"]}


def record(asked="full", length=256, task="passkey", **fields):
    usual = {"asked": asked, "method": asked, "rope": "", "type_k": "f16", "type_v": "f16", "options": {}}
    usual |= {"seed": 0, "id": "0"}
    return usual | {"model": MODEL, "length": length, "task": task} | fields


def answers(task="passkey", methods=("full", "longheads"), lengths=(256, 1024), **fields):
    costs = {"kv_bytes": 2**20, "peak_rss": 2**30, "token_seconds": 0.002, "prompt_per_second": 900.0}
    scored = {"passkey": "strict", "vt": "string_match"}.get(task, "score")
    return [
        record(m, n, task, **({scored: float(m != "full" or n < 512)} | costs | fields))
        for m in methods
        for n in lengths
    ]


def texts(method="full", length=256, nll=1.0, **fields):
    return record(
        method, length, "perplexity", mode="sliding", stride=256, nll=10 * nll, n_scored=10, kv_bytes=2**20, **fields
    )


def chunks(method="longheads", length=256, top1=1.0, **fields):
    numbers = {"cover_rate": 0.75, "gini": 0.5, "hit_rate_top1": top1, "hit_rate_top5": 1.0}
    parts = {"first": numbers | {"gini": 0.25}, "all": numbers, "positions": [90, 91], "chunk_size": 16}
    heads = [[[0, 2], [1, 1], [4, 2], [5, 2]], [[0, 2], [2, 1], [4, 2], [5, 2]]]
    seen = {"forced": [2, 0, 0, 0, 2, 2], "reads": [heads]}
    said = {"right": True, "answer_chunks": [1, 2], "seed": 0, "trial": 0}
    return record(method, length, "chunks", **{**parts, **seen, **said, **fields})


def folder_of(path, records, about=ABOUT, failed=()):
    lines = [json.dumps(r | {"digest": str(i)}) for i, r in enumerate(records)]
    (path / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (path / "about.json").write_text(json.dumps(about))
    (path / "failed.json").write_text(json.dumps(list(failed)))
    return str(path)


def grid(records, title):
    return next(found for found in grids(Evidence(records, ABOUT)) if found.title.startswith(title))


# ---- methods on the same samples ----


def test_methods_beside_full_on_the_same_samples():
    right = {"full": (1, 1, 0, 1), "longheads": (1, 0, 0, 1), "corm": (1, 1), "tova": (1, 1, 0, 1)}
    costs = {"seconds": 2.0, "tokens_read": 100, "kv_bytes": 3 * 2**20}
    records = [
        record(method, 512, "quality", id=str(i), score=float(score), **costs)
        for method, scores in right.items()
        for i, score in enumerate(scores)
    ]
    rows = {row[0]: row[1:] for row in grid(records, "quality at 512 tokens").rows}
    assert rows["full"] == ["4", "75.0 [25.0, 100.0]", "", "", "100", "2.0", "3.00 MiB"]
    n, score, difference, ratio, *_ = rows["longheads"]
    assert (n, score.split()[0], difference, ratio) == ("4", "50.0", "-25.0 [-75.0, +0.0]", "0.67")
    assert rows["corm"][:4] == ["2", "100.0 [100.0, 100.0]", "+0.0 [+0.0, +0.0]", "1.00"]  # of the two it has
    assert rows["tova"][2:4] == ["+0.0 [+0.0, +0.0]", "1.00"]  # every answer is that of full
    more = records + [r | {"task": "coursera"} for r in records]
    assert {row[0]: row[1] for row in grid(more, "all tasks and lengths").rows} == {
        "full": "8",
        "longheads": "8",
        "tova": "8",
        "corm": "4",
    }


def test_without_full_nothing_is_compared():
    records = [record(method, 512, "quality", score=1.0) for method in ("longheads", "corm")]
    assert not [found for found in grids(Evidence(records, ABOUT)) if " at 512 tokens" in found.title]


# ---- names ----


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "full"),
        ({"rope": "ntk"}, "ntk"),
        ({"asked": "longheads+corm,window=256", "rope": "dynamic"}, "longheads+corm@dynamic"),
        ({"type_k": "q8_0", "type_v": "q8_0"}, "full q8_0"),
        ({"type_k": "q8_0"}, "full q8_0/f16"),
    ],
)
def test_labels_leave_out_what_is_usual(fields, name):
    assert label(record() | fields) == name


def test_short_specs_keep_what_was_chosen():
    assert short("longheads,window=64+corm,window=256,recent=8") == "longheads,window=64+corm,recent=8"


def test_records_are_in_the_order_of_the_matrix():
    found = in_order(
        [record("window"), record("longheads"), record("full", 1), record("full", 2)], ["full", "longheads"]
    )
    assert [(r["asked"], r["length"]) for r in found] == [("full", 1), ("full", 2), ("longheads", 256), ("window", 256)]


# ---- tables ----


def test_perplexities_are_of_all_tokens_and_large_ones_are_not_told():
    records = [
        texts(nll=np.log(4)),
        texts(nll=np.log(16)),
        texts(length=1024, nll=8),
        texts("longheads", nll=np.log(3)),
    ]
    assert perplexity_of(records[:2]) == pytest.approx(8)
    found = grid(records, "Perplexity (sliding, stride 256)")
    assert found.columns == ["Method", "256", "1024"]
    groups = [["Full attention"], ["full", "8.00", ">1e3"], ["Restricted attention"], ["longheads", "3.00", ""]]
    assert found.rows == groups


def test_retrieval_is_by_length():
    found = grid(answers() + answers(lengths=(256,), strict=0.0), "passkey")
    assert found.rows[1] == ["full", "50.0", "0.0"]
    assert found.rows[3] == ["longheads", "50.0", "100.0"]
    assert found.note == "samples per method and length: 1 to 2"


def test_pass_keys_of_more_digits_have_their_own_table():
    found = [g.title for g in grids(Evidence(answers() + answers("passkey-9-digits", strict=1.0)))]
    assert [title.partition(",")[0] for title in found[:2]] == ["passkey", "passkey-9-digits"]
    assert not any(title.startswith("L-Eval") for title in found)


def test_ruler_has_a_mean_of_tasks():
    records = (
        answers("vt", ("full",), (256,))
        + answers("vt", ("full",), (256,))
        + answers("cwe", ("full",), (256,), score=0.0)
    )
    assert grid(records, "RULER, mean of 2 tasks").rows == [["full", "50.0"]]


def test_what_the_model_cannot_do_itself_is_said():
    weak = answers("vt", ("full",), (256,), string_match=0.25)
    far = answers("vt", ("full",), (1024,), string_match=1.0)  # beyond the trained length
    method = answers("vt", ("longheads",), (256,), string_match=1.0)
    records = [*weak, *far, *method, *answers("cwe", ("full",), (256,), string_match=0.5)]
    assert grid(records, "Full attention, ").rows == [
        ["vt", "256", "25.0", "not comparable by this task"],
        ["cwe", "256", "50.0", ""],
    ]
    remark = "the model cannot do this: full attention has 25 % right at 256 tokens"
    assert grid(records, "vt,").note.endswith(remark)
    assert remark not in grid(records, "cwe,").note
    assert [g.title.partition(", ")[0] for g in grids(Evidence(records, ABOUT)) if "RULER" in g.title] == ["RULER"]


def test_the_mean_of_ruler_is_told_without_what_the_model_cannot_do():
    records = [
        r
        for task, right in (("vt", 0.0), ("cwe", 0.5), ("fwe", 1.0))
        for r in answers(task, ("full",), (256,), string_match=right)
    ]
    assert grid(records, "RULER, mean of 3 tasks").rows == [["full", "50.0"]]
    able = grid(records, "RULER, mean of the 2 tasks that the model can do")
    assert (able.rows, able.note) == ([["full", "75.0"]], "cwe, fwe")


@pytest.mark.parametrize(
    "plain", [{"asked": "full"}, {"asked": "none"}, {"asked": "full", "rope": "ntk"}, {"type_k": "q4_0"}]
)
def test_by_itself_is_full_attention_with_an_unscaled_f16_cache(plain):
    records = [r | plain for r in answers("vt", ("full",), (256,), string_match=0.0)]
    assert abilities(Evidence(records, ABOUT)).keys() == ({"vt"} if len(plain) == 1 and "asked" in plain else set())


def test_nothing_is_said_of_a_model_whose_trained_length_is_not_known():
    assert abilities(Evidence(answers("vt", ("full",), (256,), string_match=0.0))) == {}


def test_perplexity_by_position_is_in_parts():
    points = [[10 * np.log(2 + i), 10] for i in range(20)]
    records = [texts(length=5000, curve=points), texts("longheads", length=5000, curve=points[:16])]
    found = grid(records, "Perplexity by position in texts of 5000 tokens")
    assert found.columns == ["Method", *(f"to {n}" for n in (768, 1536, 2304, 3072, 3840, 4608, 5000))]
    assert found.rows[1] == ["full", "2.88", "5.94", "8.96", "11.97", "14.98", "17.98", "20.49"]
    assert found.rows[3][-3:] == ["14.98", "17.00", ""]


def test_longbench_is_as_in_the_paper():
    records = [*answers("lcc", lengths=(256,), score=0.5), *answers("qasper", ("full",), (256,), score=0.25)]
    found = grid(records, "LongBench, 256 tokens")
    assert found.columns == ["Method", "Qspr.", "Lcc", "Avg."]
    assert found.rows[1] == ["full", "25.0", "50.0", "37.50"]
    assert found.rows[3] == ["longheads", "", "50.0", ""]


def test_multiple_choice_has_a_column_per_file():
    found = grid(answers("quality", score=1.0) + answers("coursera", score=0.0), "Other tasks, 1024")
    assert found.columns == ["Method", "quality", "coursera", "Avg."]
    assert found.rows[1] == ["full", "100.0", "0.0", "50.00"]


def test_costs_have_units():
    assert grid(answers(), "Time per token").rows[1] == ["full", "2.00", "2.00"]
    assert grid(answers(), "KV memory").rows[1] == ["full", "1.00 MiB", "1.00 MiB"]
    assert grid(answers(), "Peak memory").rows[1] == ["full", "1.00 GiB", "1.00 GiB"]


def test_chunks_that_are_read_are_a_table_for_each_length():
    records = [chunks(), chunks(top1=None, trial=1), chunks("longheads+corm", top1=None), chunks(length=512)]
    found = grid(records, "Chunks that are read, 256 tokens")
    assert found.columns == ["Method", "cover rate", "Gini", "hit rate, top 1", "hit rate, top 5"]
    assert found.rows == [
        ["first answer token"],
        ["longheads", "75 %", "0.25", "100 %", "100 %"],
        ["longheads+corm", "75 %", "0.25", "-", "100 %"],
        ["all answer tokens"],
        ["longheads", "75 %", "0.50", "100 %", "100 %"],
        ["longheads+corm", "75 %", "0.50", "-", "100 %"],
    ]
    assert len(list(grids(Evidence(records, ABOUT)))) == 2


def test_choices_name_method_and_options():
    chosen = "longheads,window=128"
    records = [record("longheads", n, method=chosen, options={"rope_freq_base": 2e6}) for n in (700, 256)]
    assert choices_grid(Evidence(records)).rows == [["longheads", chosen, "256, 700", "rope_freq_base=2e+06"]]


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
    assert drawn == {"accuracy-needle", "depths-needle", "frontier-needle", "time", "prompt", "memory"}


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


def test_scattered_pass_keys_are_no_map():
    assert not is_grid(answers(depth=0.31))
    assert is_grid([r for tenth in range(6) for r in answers(depth=tenth / 5)])


def test_the_frontier_is_what_nothing_beats():
    need("plot", "matplotlib")
    from pylongctx.report.pictures import unbeaten

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
    assert {"accuracy-needle", "depths-needle", "perplexity-last-64", "memory", "time", "frontier-needle"} <= drawn
    markdown = (out / "report.md").read_text()
    assert re.findall(r"^\| (full|longheads@ntk) \| \d", markdown, re.M)[:2] == ["full", "longheads@ntk"]
