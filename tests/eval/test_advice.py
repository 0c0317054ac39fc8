"""What a text will take: the formula, the bytes of the library, and the words of ``pylongctx doctor MODEL``."""

import json

import pytest
from llamas import new
from random_model import Shape
from tiny_gguf import make_model

from pylongctx.cli import main
from pylongctx.eval import advice
from pylongctx.eval.advice import Advice, Speed, Tiers, advise, measure

READ, WRITE = Speed(1e-3, 1e-6, 1e-8), Speed(2e-3, 1e-7, 1e-9)


@pytest.fixture
def known_speed(monkeypatch):
    monkeypatch.setattr(advice, "measure", lambda path, **options: (READ, WRITE))


def test_the_formula_of_a_speed():
    assert READ.of_full(1000) == pytest.approx(2e-3)
    assert READ.of_longheads(767, 256, 768) == READ.of_full(767)  # all is read before select_from
    assert READ.of_longheads(768, 256, 768) == pytest.approx(1e-3 + 256e-6 + 7.68e-6)


def test_inside_and_beyond_the_trained_context(embedded_model, known_speed):
    inside, beyond = (advise(str(embedded_model), n) for n in (17, 4000))
    assert inside.n_ctx_train == 512
    assert [one.method for one in inside.estimates] == ["full", "longheads", "kvzip"]
    assert [one.method for one in beyond.estimates] == ["dca", "longheads"]
    dense, chosen = beyond.estimates
    assert dense.read == pytest.approx(4000 * 1e-3 + 4000**2 / 2 * 1e-6, rel=1e-3)
    assert chosen.read == pytest.approx(4000 * 1e-3 + 4000 * 512e-6 + 4000**2 / 2 * 1e-8, rel=0.03)
    assert beyond.best is chosen
    assert chosen.token == pytest.approx(2e-3 + 256e-7 + 4000e-9)


def test_windows_are_those_that_the_library_chooses(tmp_path, known_speed):
    """Heads that select together read half as much more, tiles as much as without them."""
    shape = Shape(n_embd=512, n_head=8, n_head_kv=2, n_layer=1, n_ctx_train=8192)
    path = make_model(tmp_path / "group.gguf", shape)
    chosen = advise(str(path), 8000).estimates[1]
    assert chosen.token == pytest.approx(2e-3 + 3072e-7 + 8000e-9)
    read = 8000 * 1e-3 + (5120**2 / 2 + 2880 * 4096) * 1e-6 + (8000**2 - 5120**2) / 2 * 1e-8
    assert chosen.read == pytest.approx(read, rel=0.03)


def test_bytes_are_those_that_a_context_takes(embedded_model, known_speed):
    found = advise(str(embedded_model), 400)
    (full,) = (one for one in found.estimates if one.method == "full")
    with new(embedded_model, method="full", n_ctx=1536) as llm:
        llm.eval([5] * 1500)
        assert llm.kv_usage().bytes <= full.kv_bytes["f16"] < 1.2 * llm.kv_usage().bytes
    assert full.kv_bytes["q8_0"] < 0.6 * full.kv_bytes["f16"]
    assert full.kv_bytes["q4_0"] < 0.3 * full.kv_bytes["f16"]
    assert found.kv_type == "f16"


def test_a_file_takes_what_memory_does_not(embedded_model, known_speed):
    tiers = advise(str(embedded_model), 20_000).tiers
    full = next(one for one in advise(str(embedded_model), 20_000).estimates if one.method == "dca")
    assert tiers.fits
    assert 2 * tiers.memory < full.kv_bytes["f16"]
    assert tiers.disk == pytest.approx(full.kv_bytes["f16"], rel=0.02)


def test_a_compressed_text_is_read_and_replayed_and_takes_a_part(embedded_model, known_speed):
    full, _, kvzip = advise(str(embedded_model), 500).estimates
    assert kvzip.read == pytest.approx(2.5 * full.read)
    assert kvzip.token == pytest.approx(2e-3 + 175e-7)
    with new(embedded_model, method="kvzip", n_ctx=1536) as llm:  # the rest of the context is for answers
        llm.eval([5] * 500)
        llm.compress(0.35)
        llm.eval([5] * 1000)
        assert llm.kv_usage().bytes <= kvzip.kv_bytes["f16"] < 1.3 * llm.kv_usage().bytes
    assert kvzip.fits == full.fits


def test_a_smaller_type_where_f16_does_not_fit():
    sizes = {"f16": 10, "q8_0": 5, "q4_0": 3}
    for kv_type, fitting in (("q8_0", ("q8_0", "q4_0")), ("q4_0", ("q4_0",)), ("", ())):
        one = advice.Estimate("full", 1.0, 1.0, sizes, {kv: kv in fitting for kv in sizes})
        assert Advice(512, 100, (one,), Tiers(1, 10, fits=True)).kv_type == kv_type


def test_a_measured_speed_is_a_number_of_this_machine(embedded_model):
    reading, writing = measure(str(embedded_model))
    assert 0 < reading.of_full(2048) < 1 and 0 < writing.of_full(2048) < 1  # seconds of a token of 4.5 M weights
    assert min(reading.weights, reading.key, reading.score, writing.weights, writing.key, writing.score) >= 0


def test_doctor_says_what_a_text_takes(embedded_model, known_speed, capsys):
    assert main(["doctor", str(embedded_model), "--length", "4000"]) == 0
    said = capsys.readouterr().out
    assert "a text of 4000 tokens" in said and "trained context: 512 tokens" in said
    assert "Fastest: method='longheads'" in said
    assert "kvzip" not in said  # for texts within the trained context
    assert main(["doctor", str(embedded_model), "--length", "400"]) == 0
    assert "kvzip, compress(0.35)" in capsys.readouterr().out
    assert main(["doctor", str(embedded_model), "--length", "4000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["kv_type"], found["length"]) == ("longheads", "f16", 4000)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--length", "5"], "pylongctx doctor MODEL --length N"), (["MODEL", "--length", "0"], "at least 1, not 0")],
)
def test_mistakes(words, message, embedded_model, capsys):
    assert main(["doctor", *(str(embedded_model) if word == "MODEL" else word for word in words)]) == 1
    assert message in capsys.readouterr().err
