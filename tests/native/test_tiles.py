"""Tiles: 64 tokens of a prompt select together, and a text has the same tiles however it was read."""

import numpy as np
import pytest
from llamas import F32, new
from random_model import Shape
from session import assert_same
from tiny_gguf import make_model

from pylongctx import LongHeads

TILED = LongHeads(16, 48, n_recent=0, select="head", representation="keys2", position="dca", tile=64, tile_window=64)
SIZES = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_threads": 1, "n_threads_batch": 1}
N = 257  # four tiles and a token


@pytest.fixture
def start(open_session):
    """Return a function that opens a session on the tiny model."""
    return lambda method=str(TILED), **params: open_session("llama", method, **SIZES | params)


@pytest.fixture
def text(tokens) -> list[int]:
    return (tokens + tokens[::-1])[:N]


@pytest.fixture
def want(start, text) -> np.ndarray:
    return start().decode(text)


def test_tokens_of_a_tile_choose_together(start, text, want):
    """Where a token chooses for itself it reads other chunks; before anything is chosen nothing differs."""
    alone = start(str(TILED).replace("tile=64,tile_window=64", "tile=1")).decode(text)
    differs = (abs(alone - want).max(1) > 1e-3 * abs(want).max()).reshape(-1)
    assert not differs[:48].any()
    assert differs[192:256].mean() > 0.5


@pytest.mark.parametrize("n_ubatch", [64, 65, 100, 127, 128, 256])
def test_ubatches_end_with_tiles(start, text, want, n_ubatch):
    assert_same(start(n_ubatch=n_ubatch).decode(text), want)


@pytest.mark.parametrize("step", [64, 128, 192])
def test_batches_of_whole_tiles_give_the_same(start, text, want, step):
    assert_same(start().decode(text, step), want)


@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_number_of_threads_does_not_matter(start, text, want, n_threads):
    assert_same(start(n_threads_batch=n_threads).decode(text), want)


def test_a_tile_beside_tokens_of_other_sequences(start, text, want):
    """The others generate, or begin in the middle of a tile; their tokens choose for themselves."""
    session = start(n_seq_max=3)
    session.decode_mixed([(1, t) for t in text[:200]])
    mixed = [(2, 5), *((0, t) for t in text[:128]), (1, 7), (1, 9), (2, 6), *((0, t) for t in text[128:])]
    of_first = [i for i, (seq, _) in enumerate(mixed) if seq == 0]
    got = session.decode_mixed(mixed)
    assert_same(got[of_first], want)
    other = start(n_seq_max=3)
    other.decode_mixed([(1, t) for t in text[:200]])
    of_other = [i for i, (seq, _) in enumerate(mixed) if seq == 1]
    assert_same(got[of_other], other.decode_mixed([(1, 7), (1, 9)]))


@pytest.mark.parametrize("keep", [64, 128, 192])
def test_reading_again_from_a_tile(start, text, want, keep):
    session = start()
    session.decode(text)
    assert session.cut_back(keep, 0) == keep
    assert_same(session.decode(text[keep:]), want[keep:])


@pytest.mark.parametrize("n_batch", [64, 100, 150, 512])
def test_steps_of_a_prompt_end_with_tiles(model_path, text, n_batch):
    settings = {"method": TILED, "n_ctx": 512, "n_ubatch": n_batch, "n_batch": n_batch} | F32
    with new(model_path("llama"), **settings) as llm, new(model_path("llama"), **settings | {"n_ubatch": 512}) as other:
        for one in (llm, other):
            one.eval(text)
        assert_same(llm.session.last_logits, other.session.last_logits)


@pytest.mark.parametrize("shared", [30, 63, 64, 65, 100, 191, 193, 255])
def test_a_prompt_that_shares_part_of_a_tile(model_path, text, shared):
    """What tokens before the difference selected depends on the tokens after it, so their tile is evaluated again."""
    other = text[:shared] + [(token + 1) % 280 for token in text[shared:]]
    with new(model_path("llama"), method=TILED, n_ubatch=256, **F32) as llm:
        llm.prefill(other)
        want = llm.session.last_logits.copy()
        llm.reset()
        llm.prefill(text)
        before = llm.session.n_evaluated
        llm.prefill(other)
        assert_same(llm.session.last_logits, want)
        kept = N - (llm.session.n_evaluated - before)
        assert kept == shared // 64 * 64


def test_what_read_everything_is_kept(model_path, text):
    """Nothing of the first tile selects, so it may be cut anywhere."""
    with new(model_path("llama"), method=str(TILED) + ",select_from=192", n_ubatch=256, **F32) as llm:
        llm.prefill(text)
        assert [llm.session.rewind(n) for n in (191, 130, 60)] == [191, 130, 60]


def test_a_prompt_continues_an_answer_without_reading_it_again(model_path, text):
    with new(model_path("llama"), method=TILED, n_ubatch=256, **F32) as llm:
        llm.prefill(text[:140])
        llm.eval(text[140:141])
        before = llm.session.n_evaluated
        llm.prefill(text[:200])
        assert llm.session.n_evaluated - before == 59


@pytest.mark.parametrize(("heads", "spec", "want"), [
    ((8, 2), "longheads", ("group", 3072, 4096, 5120)),
    ((8, 1), "longheads", ("group", 3072, 4096, 5120)),
    ((6, 2), "longheads", ("head", 2048, 4096, 5120)),
    ((8, 2), "longheads,select=head", ("head", 2048, 4096, 5120)),
    ((6, 2), "longheads,select=group", ("group", 3072, 4096, 5120)),
    ((8, 2), "longheads,window=2048", ("head", 2048, 4096, 2048)),
    ((8, 2), "longheads,representation=minmax", ("head", 2048, None, 6144)),
    ((8, 2), "longheads,tile=1", ("group", 3072, None, 9216)),
])  # fmt: skip
def test_many_heads_of_a_kv_head_select_together_by_default(tmp_path, heads, spec, want):
    """They read half as much more than heads that select alone; what a prompt reads does not depend on it."""
    n_head, n_head_kv = heads
    shape = Shape(n_embd=64 * n_head, n_head=n_head, n_head_kv=n_head_kv, n_layer=1, n_ctx_train=8192)
    with new(make_model(tmp_path / "model.gguf", shape), method=spec, n_ctx=8192, n_ubatch=64) as llm:
        chosen = llm.method
        assert (chosen.select, chosen.window, chosen.tile_window, chosen.select_from) == want


def test_a_state_is_continued_with_the_same_tiles(model_path, text):
    with new(model_path("llama"), method=TILED, n_ubatch=256, **F32) as llm:
        llm.eval(text)
        want = llm.session.last_logits.copy()
        llm.reset()
        llm.eval(text[:128])
        state = llm.save_state()
        llm.reset()
        llm.load_state(state)
        llm.eval(text[128:])
        assert_same(llm.session.last_logits, want)


def test_a_stored_text_is_continued_with_the_same_tiles(model_path, tmp_path):
    """What the store has is blocks of 512 tokens, whose end is the end of a tile."""
    text = np.random.default_rng(1).integers(3, 280, 700).tolist()
    settings = {"method": TILED, "n_ctx": 1024, "n_ubatch": 256} | F32
    with new(model_path("llama"), **settings) as llm:
        llm.eval(text)
        want = llm.session.last_logits.copy()
    for _ in range(2):
        with new(model_path("llama"), kv_store=tmp_path, **settings) as llm:
            llm.prefill(text[:600])
            llm.prefill(text)
            assert llm.session.n_tokens == len(text)
    with new(model_path("llama"), kv_store=tmp_path, **settings) as llm:
        llm.prefill(text)
        assert_same(llm.session.last_logits, want, 0.05)


@pytest.mark.parametrize("cuts", [(), (64,), (128, 64), (256,)])
def test_deterministic_tiles_have_the_same_bits(model_path, text, cuts):
    found = []
    for n_threads, sizes in ((1, ()), (3, cuts)):
        with new(model_path("llama"), method=TILED, n_ubatch=256, deterministic=True, n_threads_batch=n_threads) as llm:
            for n in (*sizes, N):
                if piece := text[llm.n_tokens : llm.n_tokens + n]:
                    llm.eval(piece)
            found.append(llm.session.last_logits.copy())
    np.testing.assert_array_equal(*found)


def test_tokens_of_deterministic_prompts_choose_for_themselves(model_path):
    """By default: what a tile reads depends on how the text was divided."""
    with new(model_path("llama"), method=LongHeads(chunk_size=16, window=48), deterministic=True) as llm:
        assert llm.method.tile == 1
        assert "deterministic: every token of a prompt chooses for itself" in llm.session.context.why


def test_a_ubatch_that_holds_no_tile_is_said(start, model_path):
    with new(model_path("llama"), method=LongHeads(chunk_size=16, window=48), n_ubatch=63) as llm:
        assert llm.method.tile == 1
        assert "n_ubatch 63 is less than a tile of 64" in llm.session.context.why
    with pytest.raises(
        ValueError, match="a tile of 64 tokens does not fit into n_ubatch 63; raise n_ubatch, or use tile=1"
    ):
        start(n_ubatch=63)


@pytest.mark.parametrize("method", ["longheads,tile=64", "longheads,window=48,tile=64,position=full"])
def test_defaults_are_filled_in(model_path, method):
    with new(model_path("llama"), method=method) as llm:
        assert (llm.method.tile, llm.method.tile_window % 16) == (64, 0)
        assert str(llm.method) in str(new_of(llm))


def new_of(llm):
    """Return the method of an object that is opened with the string of another's."""
    with new(llm.model_path, method=str(llm.method)) as again:
        return again.method


def test_evicting_tiles_equal_the_sum_of_their_parts(start, text):
    """A border that is the end of a tile changes no tile."""
    method = f"{TILED}+h2o,budget=96,evict_every=64"
    assert_same(start(method, n_ubatch=128).decode(text), start(method).decode(text))


def test_a_trace_has_what_each_token_of_a_tile_reads(model_path, text):
    """The same of the far chunks, and of its own tile as much as there is before it."""
    with new(model_path("llama"), method=TILED, n_ubatch=256) as llm, llm.trace(start=192) as trace:
        llm.eval(text)
    of_tile = [
        {i for i in read if 0 <= i < 12}
        for layers in trace.chunks[:64]
        for read in layers.reshape(-1, layers.shape[-1])
    ]
    n_list, n_head_kv, n_layer = len({frozenset(read) for read in of_tile}), 2, trace.chunks.shape[1]
    assert 1 < n_list <= n_head_kv * n_layer
    assert {len(read) for read in of_tile} == {6}  # the first, three in which an angle of dca ends, and the best two
    assert [max(read) for read in trace.chunks[:64, 0, 0]] == [(192 + i) // 16 for i in range(64)]
