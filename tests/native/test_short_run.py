"""``tests/gpu/short_run.py`` without a GPU: the script itself, its limits, and what it writes into a page."""

import json
import time
from argparse import Namespace

import numpy as np
import pytest
from gpu import counters, pages, short_run
from native_ops import Rows, Shape
from needs import need

from pylongctx.models import embedded_model

CARD = {"step": "card", "card": "GPU 1", "driver": "1.2", "cuda": "13.0", "date": "2026-11-28", "version": "0.1"}
PAGE = f"# GPUs\n\n{pages.BEGIN}\n\n#### GPU 0\n\nold 0\n\n#### GPU 1\n\nold 1\n\n{pages.END}\n\nafter\n"
LAYER = {"phase": "decode", "kv": "f16", "depth": 8192, "stock": 20.0, "step": 15.04}
SMALL = Shape(4, 2, 64, neox=True, base=1e6)


def run(folder, steps, monkeypatch, **given) -> tuple[int, list[dict]]:
    monkeypatch.setattr(short_run, "DRY", steps)
    status = short_run.run(Namespace(**{"out": folder, "seconds": 60.0, "rows": None, "dry": True} | given))
    return status, [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def test_a_dry_run_gives_a_line_for_every_step_and_a_section(tmp_path):
    """All that a run on a card does, with tiny steps."""
    rows = tmp_path / "rows.npz"
    Rows.random(SMALL, 1024, 1024).save(rows)
    assert short_run.main(["run", str(tmp_path / "out"), "--dry", "--rows", str(rows)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "lines.jsonl").read_text().splitlines()]
    results, layers, counted = (step.name for step in short_run.DRY)
    assert [line["step"] for line in lines] == ["card", results, layers, "layers recorded", counted]
    assert all("result" in line or line["error"] == "ncu is not there" for line in lines[1:])
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert short_run.main(["merge", str(tmp_path / "out"), "--page", str(page)]) == 0
    assert "| 1024 rows " in page.read_text()
    assert "| 1024 rows of a text " in page.read_text()


def test_a_step_beyond_its_limit_is_ended_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(short_run, "command", lambda step, to: ["sh", "-c", step.words[0].format(to)])
    steps = (short_run.Step("slow", 1, ("sleep 60",)), short_run.Step("none", 9, ("true",)),
             short_run.Step("quick", 9, ("echo '{{\"x\": 1}}' > {}",)))  # fmt: skip
    start = time.monotonic()
    status, (card, slow, none, quick) = run(tmp_path, steps, monkeypatch)
    assert time.monotonic() - start < 30
    assert status == 1
    assert card["step"] == "card"
    assert slow["error"] == "no result after 1 s"
    assert none["error"] == "no result, see none.txt"
    assert quick["result"] == {"x": 1}


def test_what_was_not_right_is_not_timed(tmp_path, monkeypatch):
    """With products of warpgroups, on cards that have them: the environment asks for them in these steps alone."""
    monkeypatch.setattr(short_run, "command", lambda step, to: ["sh", "-c", step.words[0].format(to)])
    asked = "echo $LCTX_CUDA_WGMMA > {}; exit "
    steps = [short_run.Step("plain", 9, (f"{asked} 0",)), short_run.Step("right", 9, (f"{asked} 0",), wgmma=True),
             short_run.Step("timed", 9, (f"{asked} 0",), after="right", wgmma=True),
             short_run.Step("wrong", 9, (f"{asked} 1",), wgmma=True),
             short_run.Step("not timed", 9, (f"{asked} 0",), after="wrong", wgmma=True)]  # fmt: skip
    monkeypatch.setattr(short_run, "has_wgmma", lambda: True)
    status, lines = run(tmp_path, steps, monkeypatch)
    assert status == 1
    assert [line.get("result") for line in lines[1:]] == [0, 1, 1, 1, None]
    assert lines[-1]["error"] == "wrong did not find everything right"
    monkeypatch.setattr(short_run, "has_wgmma", lambda: False)
    _, lines = run(tmp_path, steps, monkeypatch)
    assert [line["step"] for line in lines] == ["card", "plain"]


def test_no_step_begins_when_time_is_over(tmp_path, monkeypatch):
    card = short_run.card() | {"step": "card"}
    assert run(tmp_path, short_run.DRY, monkeypatch, seconds=1.0) == (0, [card])


def test_rows_of_a_text_are_one_step_more(tmp_path):
    args = Namespace(dry=False, rows=tmp_path / "rows.npz")
    names = [step.name for step in short_run.steps_of(args)]
    assert names[names.index("layers f16 32768") + 1] == "layers recorded"
    assert len(set(names)) == len(names)


# ---- rows of a text ----


def test_rows_come_back_from_a_file_and_a_step_has_its_own(tmp_path):
    rows = Rows.random(SMALL, 100, 20)
    rows.save(tmp_path / "rows.npz")
    again = Rows.load(tmp_path / "rows.npz")
    assert again.shape == SMALL
    np.testing.assert_allclose(again.k, rows.k, rtol=1e-3, atol=1e-6)
    one = again.step(90, 10)
    assert len(one.k) == len(one.v) == 90
    np.testing.assert_array_equal(one.q, again.q[:10])
    np.testing.assert_array_equal(again.step(100, 1).q, again.q[-1:])
    for n_rows in (89, 101):
        with pytest.raises(ValueError, match=f"a step ends at 90 to 100 of these rows, not at {n_rows}"):
            again.step(n_rows, 10)


def test_a_recorded_layer_has_the_keys_of_the_model(tmp_path):
    """The first layer's are known: the normed embedding times its matrices."""
    need("stock", "llama_cpp")
    from model_oracle import Model
    from record_rows import record

    model = Model.load(embedded_model())
    text = "The gulls were quiet, and nobody wrote down the weather. " * 20
    rows = record(str(embedded_model()), text, 64, layer=0, n_batch=32)
    import llama_cpp

    tokens = llama_cpp.Llama(str(embedded_model()), vocab_only=True, verbose=False).tokenize(text.encode())[:64]
    x = model.norm(model.tensors["token_embd.weight"][tokens], "blk.0.attn_norm")
    for name in "qkv":
        want = model.linear(x, f"blk.0.attn_{name}").reshape(getattr(rows, name).shape)
        got = getattr(rows, name).astype(np.float32)
        assert abs(got - want).max() < 0.02 * abs(want).max(), name  # activations in 8 bits
    assert rows.shape.n_head == model.meta["attention.head_count"]


# ---- pages ----


def test_a_section_replaces_that_of_the_same_card():
    layers = {"layers": [LAYER | {"method": "full"}, LAYER | {"method": "longheads", "step": 123.4}]}
    lines = [CARD, {"step": "layers f16 8192", "result": layers}, {"step": "model", "error": "no result after 9 s"}]
    page = pages.merged(PAGE, lines)
    assert "old 0" in page
    assert "old 1" not in page
    assert page.endswith(f"{pages.END}\n\nafter\n")
    assert "GPU 1, driver 1.2, CUDA 13.0, 2026-11-28; `python tests/gpu/short_run.py`." in page
    assert "| 8192 rows" in page
    assert "| 20.0      | 15.0 | 123       |" in page
    assert "Without a result: model (no result after 9 s)." in page
    assert pages.merged(page, lines) == page


def test_layers_by_wgmma_have_lines_of_their_own():
    layers = [{"layers": [LAYER | {"method": "full", "step": step}]} for step in (15.04, 9.5)]
    lines = [CARD, {"step": "results wgmma", "result": {"checks": [{"n": 9, "refused": 2, "wrong": 1}]}},
             {"step": "layers f16 8192", "result": layers[0]},
             {"step": "layers wgmma", "result": layers[1]}]  # fmt: skip
    page = pages.merged(PAGE, lines)
    assert "By wgmma: 6 right, 1 wrong, 2 not served." in page
    assert [line.split()[-2] for line in page.splitlines() if line.startswith("| 8192 rows")] == ["15.0", "9.5"]


def test_a_page_without_markers_or_a_run_without_a_card_is_refused():
    with pytest.raises(ValueError, match="the page has no <!-- short runs -->"):
        pages.merged("# GPUs\n", [CARD])
    with pytest.raises(ValueError, match="first line"):
        pages.merged(PAGE, [])


def test_counters_are_read_with_their_units(tmp_path):
    file = tmp_path / "ncu.csv"
    file.write_text(
        '==PROF== Connected\n"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread","dram"\n'
        '"","","ns","register/thread",""\n"0","attend","1,234","168","n/a"\n"1","merge","(!) n/a","32",""\n'
    )
    assert counters.read(file) == [
        {"kernel": "attend", "us": 1.234, "registers": 168.0}, {"kernel": "merge", "registers": 32.0}
    ]  # fmt: skip
    file.write_text("==ERROR== no permission\n")
    assert counters.read(file) == []
