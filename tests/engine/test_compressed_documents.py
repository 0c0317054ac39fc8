"""Documents that are compressed when they are read: what a prompt reads of them, the store, refusals."""

import numpy as np
import pytest
from llamas import F32, TEXT, new
from model_oracle import Model
from oracle import Full
from oracle_compress import CompressedModel, largest_weights
from oracle_evict import Evicting
from oracle_rules import Kvzip
from test_compress import held
from test_corm import open_llama, random_tokens
from test_methods import assert_same_logits
from tiny_gguf import Shape, make_model

from pylongctx import H2O
from pylongctx import Full as FullMethod
from pylongctx import Kvzip as KvzipMethod
from pylongctx.engine import compress
from pylongctx.engine.documents import Document, Placed
from pylongctx.errors import ContextFull, LctxError

METHOD = "full,spans=3+kvzip"
SIZES = {"n_ctx": 640, "n_batch": 64, "n_ubatch": 16}
ONE = (TEXT * 6).decode()
TWO = "A tale of two cities, the period was so far like the present period that nobody knew it. " * 8


@pytest.fixture
def llm(embedded_f32):
    with new(embedded_f32, method=METHOD, n_ctx=1536, logits_all=False, **F32) as opened:
        yield opened


@pytest.fixture
def start(model_path):
    opened = []

    def open_one(method=METHOD, path=None, **settings):
        opened.append(open_llama(path or model_path("llama"), method, **SIZES | settings))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def compressed(llm, tokens, ratio):
    """Return the part of a text that is read by itself and compressed, and which rows its heads hold."""
    llm.reset()
    llm.eval(tokens)
    compress.compress(llm.session, ratio)
    return llm.session.context.slice(0, len(tokens)), held(llm)


def place(llm, rows, tokens, skip=0):
    tokens = np.array(tokens, np.int32)
    first, end = llm.n_tokens, llm.n_tokens + len(tokens) - skip
    llm.session.place(Placed(first, end, Document("", "", tokens, rows=rows), skip), tokens[skip:])


# ---- what a prompt reads ----


@pytest.mark.parametrize(
    ("before", "n", "skip"), [(0, 130, 0), (1, 65, 0), (63, 130, 7), (65, 257, 64), (100, 129, 128)]
)
def test_a_prompt_reads_the_rows_that_stayed(tmp_path, start, before, n, skip):
    """In a model of one layer no row has read another one: the oracle reads all in place."""
    path = make_model(tmp_path / "model.gguf", Shape(n_layer=1, n_ctx_train=512))
    prompt, text, rest = random_tokens(1, before), random_tokens(2, n), random_tokens(3, 20)
    with_text = start(path=path)
    rows, kept = compressed(with_text, text, 0.4)
    with_text.reset()
    if prompt:
        with_text.eval(prompt)
    place(with_text, rows, text, skip)
    with_text.eval(rest)
    end = before + n - skip
    whole = np.concatenate([np.ones((*kept.shape[:2], before), dtype=bool), kept[..., skip:]], axis=-1)
    np.testing.assert_array_equal(held(with_text)[..., :end], whole)
    model = Model.load(path)
    oracle = CompressedModel(model.meta, model.tensors, model.rope, whole, [])
    want = oracle.logits([*prompt, *text[skip:], *rest], Evicting(Full(), Kvzip(end, 0.4)))
    assert_same_logits(np.array(with_text.scores[end : end + len(rest)]), want[end:])


@pytest.mark.parametrize("replay", ["", ",replay=text"])
def test_a_prompt_with_a_text_of_its_own_span_is_compressed(tmp_path, start, monkeypatch, replay):
    """Queries of a replay read their piece, wherever the spans of it begin and end."""
    monkeypatch.setattr(compress, "PIECE", 64)
    monkeypatch.setattr(compress, "LEAST", 16)
    path = make_model(tmp_path / "model.gguf", Shape(n_layer=1, n_ctx_train=512))
    parts = [random_tokens(seed, n) for seed, n in ((1, 63), (2, 130), (3, 7))]
    llm = start(METHOD + replay, path)
    llm.eval(parts[1])
    rows = llm.session.context.slice(0, 130)
    llm.reset()
    llm.eval(parts[0])
    place(llm, rows, parts[1])
    llm.eval(parts[2])
    pieces = list(compress.replays(llm.session, llm.session.tokens, SIZES["n_ctx"] - 200))
    compress.compress(llm.session, 0.4)
    kept = held(llm)
    scores = largest_weights(Model.load(path), Full(), [*parts[0], *parts[1], *parts[2]], pieces, not replay)
    least = np.sort(scores, axis=None)[-kept.sum()]
    assert len(pieces) > 1 and kept.sum() == int(0.4 * 200 * kept[..., 0].size)
    np.testing.assert_array_equal(kept[scores > least + 1e-4], True)
    np.testing.assert_array_equal(kept[scores < least - 1e-4], False)


def test_two_texts_in_one_prompt(start):
    one, two = random_tokens(1, 150), random_tokens(2, 97)
    llm = start()
    parts = [(*compressed(llm, text, 0.3), text) for text in (one, two)]
    llm.reset()
    llm.eval(random_tokens(3, 21))
    for rows, _, text in reversed(parts):
        place(llm, rows, text)
    llm.eval(random_tokens(4, 9))
    np.testing.assert_array_equal(held(llm)[..., 21 : 21 + 97], parts[1][1])
    np.testing.assert_array_equal(held(llm)[..., 21 + 97 : -9], parts[0][1])
    state, before = llm.save_state(), np.array(llm.scores[-1])
    llm.eval(random_tokens(5, 9))
    after = np.array(llm.scores[-1])
    other = start()
    other.load_state(state)
    np.testing.assert_array_equal(other.session.last_logits, before)
    other.eval(random_tokens(5, 9))
    np.testing.assert_array_equal(other.scores[-1], after)


def test_nothing_compressed_is_full_attention(start):
    text, rest = random_tokens(1, 150), random_tokens(2, 20)
    logits = []
    for method, ratio in (("full,spans=3", None), (METHOD, None), (METHOD, 1.0)):
        llm = start(method)
        llm.eval(text)
        if ratio:
            compress.compress(llm.session, ratio)
        rows = llm.session.context.slice(0, len(text))
        llm.reset()
        llm.eval(random_tokens(3, 30))
        place(llm, rows, text, 11)
        llm.eval(rest)
        logits.append(np.array(llm.scores[-1]))
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


def test_a_prompt_goes_back_to_the_end_of_its_last_text(start):
    text = random_tokens(1, 150)
    llm = start()
    rows, _ = compressed(llm, text, 0.4)
    llm.reset()
    llm.eval(random_tokens(2, 30))
    place(llm, rows, text)
    llm.eval(random_tokens(3, 20))
    context = llm.session.context
    assert context.truncate(185) == "" == context.truncate(180)
    assert "evicted" in context.truncate(179)
    compress.compress(llm.session, 0.1)  # all of it, once more
    assert held(llm).sum() <= 0.1 * 200 * held(llm)[..., 0].size + 1


# ---- refusals ----


def test_what_does_not_fit_changes_nothing(start):
    text = random_tokens(1, 300)
    rows, _ = compressed(start(), text, 0.5)
    larger = start()
    larger.eval(random_tokens(2, 130))
    limited = start(kv_limit=larger.kv_usage().bytes)
    limited.eval(random_tokens(2, 70))
    logits, usage = np.array(limited.scores[-1]), limited.kv_usage()
    context = limited.session.context
    damaged = rows.copy()
    damaged[400:408] = 255
    for given, skip, n, reason in (
        (rows, 0, 300, "kv_limit"),
        (rows, 0, 301, "does not have these rows"),
        (rows[:-1], 0, 100, "shorter"),
        (np.concatenate([rows, rows[:16]]), 0, 100, "longer"),
        (damaged, 0, 100, "lists of rows"),
    ):
        with pytest.raises(LctxError, match=reason):
            context.insert_slice(given, skip, n)
        now = limited.kv_usage()
        assert now.bytes == usage.bytes
        np.testing.assert_array_equal(now.rows, usage.rows)
    limited.session.n_tokens -= 1
    limited.eval(random_tokens(2, 70)[-1:])
    np.testing.assert_allclose(limited.scores[-1], logits, atol=1e-5)
    assert "spans=N" in context.drop(5, 10)
    with pytest.raises(LctxError, match="one slice"):
        whole = start()
        compressed(whole, text, 0.5)
        whole.session.context.slice(64, 128)


def test_which_rules_go_with_spans(embedded_model):
    assert str(FullMethod(spans=3) + KvzipMethod()) == METHOD
    with pytest.raises(ValueError, match="KV entries of spans can only be evicted with kvzip"):
        FullMethod(spans=3) + H2O()
    with new(embedded_model, method="full,spans=3") as llm, pytest.raises(ValueError, match=r"spans=N\+kvzip"):
        llm.read(ONE, ratio=0.5)


@pytest.mark.parametrize(("ratio", "error"), [(0, ValueError), (1.5, ValueError), ("half", TypeError)])
def test_a_ratio_is_a_share(llm, ratio, error):
    with pytest.raises(error, match="ratio"):
        llm.read(ONE, ratio=ratio)


def test_a_replay_needs_room(embedded_f32):
    with new(embedded_f32, method=METHOD, n_ctx=512, **F32) as llm:
        n = len(llm.tokenize(ONE.encode()))
        with pytest.raises(ContextFull, match="replay"):
            llm.read(ONE * (480 // n), ratio=0.5)
        assert llm(ONE, max_tokens=1)["usage"]["completion_tokens"] == 1


# ---- documents ----


def test_documents_are_compressed_and_named(llm):
    one, two = llm.read(ONE, name="one", ratio=0.4), llm.read(TWO, name="two")
    assert llm.session.n_tokens > 0, "of the one that was not compressed"
    assert one.rows.nbytes < 0.5 * len(one.tokens) / len(two.tokens) * two.rows.nbytes
    assert llm.read(ONE, name="one", ratio=0.4) is one
    parts = [{"type": "document", "name": "one"}, {"type": "document", "text": ONE, "name": "one"}]
    for part in parts:
        llm.create_chat_completion([{"role": "user", "content": [part]}], max_tokens=1)
        assert [place.document for place in llm.session.placed] == [one]
    usage = llm.kv_usage()
    assert usage.rows.min() < 0.7 * llm.n_tokens
    assert llm.read(ONE, name="one").ratio is None
    assert llm.read(ONE, name="one").rows.nbytes > 2 * one.rows.nbytes


def test_who_did_not_ask_reads_the_whole_text(llm, embedded_f32):
    llm.read(ONE, name="one", ratio=0.4)
    llm.forget("one")
    llm(f"{ONE} Who?", max_tokens=1, temperature=0)
    assert llm.kv_usage().rows.min() == llm.n_tokens
    with new(embedded_f32, method="full", n_ctx=1536, **F32) as full:
        full(f"{ONE} Who?", max_tokens=1, temperature=0)
        want = full.session.last_logits
        np.testing.assert_allclose(llm.session.last_logits, want, atol=1e-4 * np.abs(want).max())


def test_an_earlier_process_has_compressed_it(embedded_f32, tmp_path):
    options = {"method": METHOD, "n_ctx": 2048, "kv_store": tmp_path / "kv"} | F32
    prompt = f"Read this. {ONE} Who?"

    def ask(**read):
        with new(embedded_f32, **options) as llm:
            document = llm.read(ONE, **read) if read else None
            n_read = llm.session.n_evaluated
            llm(prompt, max_tokens=1, temperature=0)
            return n_read, document and document.rows, llm.session.last_logits.copy()

    first = ask(ratio=0.4)
    again = ask(ratio=0.4)
    assert first[0] > 100
    assert again[0] == 0
    np.testing.assert_array_equal(again[1], first[1])
    np.testing.assert_array_equal(again[2], first[2])
    assert len(ask(ratio=0.5)[1]) > len(first[1])
    whole = ask()
    with new(embedded_f32, method="full,spans=3+kvzip", n_ctx=2048, **F32) as plain:
        plain(prompt, max_tokens=1, temperature=0)
        np.testing.assert_allclose(whole[2], plain.session.last_logits, atol=1e-4 * np.abs(whole[2]).max())
    stored = sorted((tmp_path / "kv").glob("??/*.document"))
    assert len(stored) == 2
    for path in stored:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    np.testing.assert_array_equal(ask(ratio=0.4)[1], first[1])


def test_a_document_that_lost_its_rows_is_compressed_again(llm):
    """An adapter takes them, for one."""
    one = llm.read(ONE, ratio=0.4)
    rows = one.rows
    llm.session.clear()
    one.rows = None
    llm(f"Read this. {one} Who?", max_tokens=1)
    np.testing.assert_array_equal(one.rows, rows)
    assert [place.document for place in llm.session.placed] == [one]
