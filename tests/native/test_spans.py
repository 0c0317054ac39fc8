"""Spans of full attention (native/memory/spans.cpp) against llama.cpp, which rotates keys again when they move."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import LOGIT_TOLERANCE
from llamas import F32
from needs import need
from tiny_gguf import Shape, make_model

from pylongctx import Llama
from pylongctx.errors import LctxError

TOKENS = np.random.default_rng(5).integers(3, 96, 600).astype(np.int32)
DRIVER = Path(__file__).resolve().parents[1] / "support" / "shift_driver.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model.gguf", Shape(n_ctx_train=512))


@pytest.fixture
def start(model):
    """Return a function that opens a context with spans."""
    opened = []

    def open_llama(spans=3, **settings):
        settings = {"n_ctx": 1024, "n_ubatch": 48, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | settings
        opened.append(Llama(str(model), method=f"full,spans={spans}", **F32 | settings))
        return opened[-1]

    yield open_llama
    for llm in opened:
        llm.close()


@pytest.fixture
def moved(llama_cpp, model, tmp_path):
    """Return a function from steps to llama.cpp's logits after them."""

    def run(*steps):
        given = json.dumps([[step[0], *(np.asarray(one).tolist() for one in step[1:])] for step in steps])
        subprocess.run(
            [sys.executable, str(DRIVER), str(model), given, str(tmp_path / "logits.npy")],
            check=True,
            capture_output=True,
        )
        return np.load(tmp_path / "logits.npy")

    return run


def read(llm, tokens):
    """Return the rows of tokens that are read by themselves."""
    llm.reset()
    llm.eval(tokens)
    return llm.session.context.slice(0, len(tokens))


def check(llm, want):
    np.testing.assert_allclose(llm.scores[-1], want, atol=LOGIT_TOLERANCE * np.abs(want).max())


def drop(llm, first, end):
    refusal = llm.session.context.drop(first, end)
    kept = np.concatenate([llm.session.tokens[:first], llm.session.tokens[end:]])
    if not refusal:
        llm.session.input_ids[: len(kept)] = kept
        llm.session.n_tokens = len(kept)
    return refusal


@pytest.mark.parametrize(
    ("first", "end", "n"), [(64, 128, 192), (1, 2, 3), (63, 130, 257), (0, 65, 129), (5, 300, 301)]
)
def test_rows_after_removed_ones_are_seen_from_nearer(start, moved, first, end, n):
    llm = start()
    llm.eval(TOKENS[:n])
    assert drop(llm, first, end) == ""
    assert llm.session.n_past == n - (end - first)
    llm.eval(TOKENS[n : n + 50])
    steps = ["eval", 0, TOKENS[:n]], ["rm", 0, first, end], ["add", 0, end, -1, first - end]
    check(llm, moved(*steps, ["eval", 0, TOKENS[n : n + 50]]))


def test_rows_leave_again_and_again(start, moved):
    """Dropping what follows a system prompt takes two spans, however often; dropping elsewhere takes more."""
    llm, steps, n = start(3), [], 0
    for at, size in ((40, 70), (40, 1), (40, 129), (90, 30)):
        llm.eval(TOKENS[n : n + 150])
        steps += [["eval", 0, TOKENS[n : n + 150]], ["rm", 0, at, at + size], ["add", 0, at + size, -1, -size]]
        n += 150
        assert drop(llm, at, at + size) == ""
    assert "at most 3 spans" in drop(llm, 200, 201)
    llm.eval(TOKENS[:33])
    check(llm, moved(*steps, ["eval", 0, TOKENS[:33]]))


PLACES = [(64, 0, 128), (1, 64, 65), (37, 1, 150), (130, 5, 3), (200, 100, 63)]  # rows before, skipped, placed


@pytest.mark.parametrize(("before", "skip", "n"), PLACES)
def test_a_text_stands_where_it_was_not_read(start, moved, before, skip, n):
    llm = start()
    text, prompt, question = TOKENS[:200], TOKENS[200 : 200 + before], TOKENS[500:520]
    rows = read(llm, text)
    llm.reset()
    llm.eval(prompt)
    llm.session.context.insert_slice(rows, skip, n)
    llm.session.input_ids[before : before + n] = text[skip : skip + n]
    llm.session.n_tokens = before + n
    llm.eval(question)
    shift = before - skip
    want = moved(
        ["eval", 1, text], ["rm", 1, skip + n, -1], ["rm", 1, 0, skip], ["add", 1, 0, -1, shift], ["eval", 0, prompt],
        ["cp", 1, 0, 0, -1], ["eval", 0, question],
    )  # fmt: skip
    check(llm, want)


def test_two_texts_in_another_order(start, moved):
    llm = start()
    texts = TOKENS[:100], TOKENS[100:263]
    rows = [read(llm, text) for text in texts]
    llm.reset()
    llm.eval(TOKENS[300:310])
    for i in (1, 0):
        llm.session.context.insert_slice(rows[i], 0, len(texts[i]))
    llm.session.input_ids[10:273] = np.concatenate(texts[::-1])
    llm.session.n_tokens = 273
    llm.eval(TOKENS[310:320])
    steps = [["eval", 0, TOKENS[300:310]]]
    for at, text in ((10, texts[1]), (173, texts[0])):
        steps += [["eval", 1, text], ["add", 1, 0, -1, at], ["cp", 1, 0, 0, -1], ["rm", 1, 0, -1]]
    check(llm, moved(*steps, ["eval", 0, TOKENS[310:320]]))


def test_without_spans_in_use_it_is_full_attention(model, start):
    llm = start(4)
    with Llama(str(model), method="full", n_ctx=1024, n_ubatch=48, n_threads=1, verbose=False, **F32) as full:
        for one in (llm, full):
            one.eval(TOKENS[:257])
        check(llm, full.scores[-1])


def test_states_and_copies_have_spans(start):
    llm = start(3, n_ctx=512)
    llm.eval(TOKENS[:200])
    assert drop(llm, 30, 130) == ""
    state = llm.save_state()
    llm.eval(TOKENS[200:240])
    want = llm.scores[-1].copy()
    other = start(3, n_ctx=512)
    other.load_state(state)
    other.eval(TOKENS[200:240])
    np.testing.assert_array_equal(other.scores[-1], want)
    assert other.session.context.n_exact() == 30
    assert [(place.first, place.end) for place in other.session.placed] == [(30, 100)]


def test_a_state_with_damaged_spans_is_refused(start):
    llm = start(3)
    llm.eval(TOKENS[:200])
    assert drop(llm, 30, 130) == ""
    context = llm.session.context
    state = context.state()
    at = next(i for i in range(0, 400) if state[i : i + 20].view(np.int32).tolist() == [2, 0, 0, 30, 100])
    for wrong in ([0, 0, 0, 30, 100], [9, 0, 0, 30, 100], [2, 1, 0, 30, 100], [2, 0, -1, 30, 100], [2, 0, 0, 0, 100],
                  [2, 0, 0, 100, 100], [2, 0, 0, 30, -31], [2, 0, 0, 30, 1 << 25]):  # fmt: skip
        damaged = state.copy()
        damaged[at : at + 20] = np.array(wrong, np.int32).view(np.uint8)
        with pytest.raises(LctxError, match="spans"):
            context.set_state(damaged)
        assert context.n_past() == 0
    context.set_state(state)
    assert context.n_past() == 100


def test_going_back_ends_spans(start):
    llm = start(2)
    llm.eval(TOKENS[:200])
    want = llm.scores[-1].copy()
    assert drop(llm, 30, 130) == ""
    assert llm.session.context.n_exact() == 30
    assert llm.session.rewind(30) == 30
    assert llm.session.context.n_exact() == 30
    llm.eval(TOKENS[30:200])
    np.testing.assert_allclose(llm.scores[-1], want, atol=1e-5 * np.abs(want).max())
    assert llm.session.context.n_exact() == 200


def test_what_cannot_be_is_refused_and_changes_nothing(model, start):
    llm = start(2)
    rows = read(llm, TOKENS[:100])
    context = llm.session.context
    for first, end in ((-1, 5), (5, 5), (50, 101)):
        assert "are not in sequence" in context.drop(first, end)
    for skip, n in ((-1, 5), (0, 0), (0, 101), (99, 2)):
        with pytest.raises(LctxError, match="does not have these rows"):
            context.insert_slice(rows, skip, n)
    context.insert_slice(rows, 10, 80)
    with pytest.raises(LctxError, match="spans=3"):
        context.insert_slice(rows, 0, 100)
    with pytest.raises(LctxError, match="read elsewhere"):
        context.slice(0, 180)
    assert context.n_past() == 180
    damaged = rows.copy()
    damaged[-64:] = 255  # NaN
    llm.reset()
    llm.eval(TOKENS[:70])
    with pytest.raises(LctxError, match="not finite"):
        context.insert_slice(damaged, 0, 100)
    assert context.n_past() == 70
    with Llama(str(model), method="full", n_ctx=256, verbose=False, **F32) as full:
        full.eval(TOKENS[:100])
        assert "method=full,spans=N" in full.session.context.drop(5, 10)
        with pytest.raises(LctxError, match="spans=N"):
            full.session.context.insert_slice(full.session.context.slice(0, 100), 0, 50)


def test_a_rule_and_spans_do_not_go_together(model):
    for method in ("full,spans=2+corm", "full,spans=257"):
        with pytest.raises(ValueError, match="spans"):
            Llama(str(model), method=method, verbose=False)


@pytest.mark.parametrize("arch", ["gemma3", "qwen3next"])
def test_windows_and_recurrent_states_keep_their_place(tmp_path, arch):
    need("stock", "llama_cpp")
    from hybrid_files import path_of

    with Llama(str(path_of(tmp_path, arch)), method="full,spans=2", n_ctx=256, verbose=False) as llm:
        llm.eval(TOKENS[:100].tolist())
        assert "windows or recurrent states" in llm.session.context.drop(5, 10)
