"""llm.trace() on the embedded model: what is recorded, when, and that nothing else changes."""

import numpy as np
import pytest
from llamas import TEXT, new

from pylongctx.attention import Trace, cover_rate

SIZE, WINDOW = 16, 128
METHOD = f"longheads,chunk_size={SIZE},window={WINDOW},n_recent=1,tile=1"
N = 300


@pytest.fixture(scope="module", params=["attention", "minmax", "keys2"])
def chunked(request, embedded_model):
    method = f"{METHOD},representation={request.param}"
    with new(embedded_model, method=method, n_threads=1, n_threads_batch=1) as llm:
        yield llm


@pytest.fixture
def tokens(chunked) -> list[int]:
    chunked.reset()
    return (chunked.tokenize(TEXT) * 20)[:N]


def lists(trace: Trace):
    """Yield (position, the chunks that one head read)."""
    for position, layers in zip(trace.positions, trace.chunks, strict=True):
        for read in layers.reshape(-1, layers.shape[-1]):
            yield int(position), read


def test_every_head_reads_its_window(chunked, tokens):
    with chunked.trace() as trace:
        chunked.eval(tokens)
    np.testing.assert_array_equal(trace.positions, np.arange(N))
    assert trace.chunks.dtype == np.int32
    assert trace.chunks.shape == (N, 4, 8, WINDOW // SIZE)
    assert (trace.chunk_size, trace.n_recent) == (SIZE, 1)
    for position, read in lists(trace):
        own, n_read = position // SIZE, (read >= 0).sum()
        assert n_read == min(own + 1, WINDOW // SIZE)
        assert (np.diff(read[:n_read]) > 0).all()
        assert (read[n_read:] == -1).all()
        assert {0, max(own - 1, 0), own} <= set(read.tolist())
    assert cover_rate(trace) > 0.9


def test_start_and_stop(chunked, tokens):
    with chunked.trace() as everything:
        chunked.eval(tokens)
    chunked.reset()
    with chunked.trace(100, 200) as trace:
        chunked.eval(tokens)
    np.testing.assert_array_equal(trace.positions, np.arange(100, 200))
    np.testing.assert_array_equal(trace.chunks, everything.chunks[100:200])


def test_a_trace_begins_at_the_current_token(chunked, tokens):
    chunked.eval(tokens[:150])
    with chunked.trace() as trace:
        chunked.eval(tokens[150:160])
        np.testing.assert_array_equal(trace.positions, np.arange(150, 160))
        chunked.eval(tokens[160:])
        assert trace.positions[-1] == N - 1
    last = trace.chunks
    chunked.eval(tokens[:20])
    assert trace.chunks is last
    np.testing.assert_array_equal(trace.positions, np.arange(150, N))


def test_what_is_evaluated_again_is_recorded_once(chunked, tokens):
    with chunked.trace() as trace:
        chunked.eval(tokens)
        chunked.n_tokens = 100
        chunked.eval(tokens[100:110])
    assert (np.diff(trace.positions) > 0).all()
    assert set(range(110)) <= set(trace.positions.tolist())


def test_a_trace_changes_no_logits(chunked, tokens):
    chunked.eval(tokens)
    plain = chunked.scores.copy()
    chunked.reset()
    with chunked.trace():
        chunked.eval(tokens)
    np.testing.assert_array_equal(chunked.scores, plain)


def test_an_error_in_the_block_keeps_the_record(chunked, tokens):
    with pytest.raises(KeyError), chunked.trace() as trace:
        chunked.eval(tokens[:40])
        raise KeyError("for the test")
    np.testing.assert_array_equal(trace.positions, np.arange(40))
    with chunked.trace() as again:
        pass
    assert again.chunks.shape[0] == 0


def test_traces_do_not_nest(chunked, tokens):
    with chunked.trace() as outer:
        with pytest.raises(RuntimeError, match="already being traced"), chunked.trace(3, 4):
            pass
        chunked.eval(tokens[:5])
    assert len(outer.positions) == 5


@pytest.mark.parametrize("span", [(5, 5), (6, 5), (0, 513), (600, None), (-1, 4), (0, 2**40)])
def test_ranges_are_checked(chunked, tokens, span):
    with (
        pytest.raises(ValueError, match=r"a trace needs 0 <= start < stop <= n_ctx \(512\)|must be from 0"),
        chunked.trace(*span),
    ):
        pass


def test_a_range_is_of_integers(chunked, tokens):
    with pytest.raises(TypeError, match="start must be an integer"), chunked.trace(1.5):
        pass


def test_a_trace_that_no_memory_holds_is_refused(chunked, tokens, monkeypatch):
    monkeypatch.setattr("pylongctx.attention.trace.ram_bytes", lambda: 10_000)
    with pytest.raises(MemoryError, match=r"record fewer queries: llm\.trace\(start, stop\)"), chunked.trace():
        pass
    with chunked.trace(0, 1):
        pass


@pytest.mark.parametrize("method", ["full", "window", "selfextend", None])
def test_a_method_without_chunks_says_so(embedded_model, method):
    message = r"does not read chunks.*use method='longheads'"
    with new(embedded_model, method=method) as llm, pytest.raises(ValueError, match=message), llm.trace():
        pass


def test_a_closed_llama_says_so(embedded_model):
    llm = new(embedded_model, method=METHOD)
    with pytest.raises(RuntimeError, match="this Llama is closed"), llm.trace():
        llm.close()


def test_save_and_load(chunked, tokens, tmp_path):
    with chunked.trace(100, 140) as trace:
        chunked.eval(tokens)
    trace.save(tmp_path / "trace.npz")
    loaded = Trace.load(tmp_path / "trace.npz")
    np.testing.assert_array_equal(loaded.chunks, trace.chunks)
    assert cover_rate(loaded) == cover_rate(trace)


# ---- going back ----


def count_decoded(llm, monkeypatch) -> list[int]:
    """Return a list that receives the number of tokens of every step."""
    steps, decode = [], llm.session.context.decode

    def counted(tokens, *rest):
        steps.append(len(tokens))
        decode(tokens, *rest)

    monkeypatch.setattr(llm.session.context, "decode", counted)
    return steps


@pytest.mark.parametrize("prefix", [200, 208, 209, 223, N - 1])
def test_a_reused_prefix_costs_a_chunk_at_most(chunked, tokens, prefix, monkeypatch):
    chunked.eval(tokens)
    other = [*tokens[:prefix], 300, 301, 302]
    steps = count_decoded(chunked, monkeypatch)
    next(chunked.generate(other, temp=0.0))
    assert len(other) - prefix <= sum(steps) < len(other) - prefix + SIZE
    reused = chunked.scores.copy()
    chunked.reset()
    chunked.eval(other)
    assert np.median(np.abs(reused - chunked.scores)) < 0.05  # a choice between equals may differ


# ---- several sequences ----

SMALL = "longheads,chunk_size=16,window=64"  # fits what the tiny model was trained on


@pytest.fixture
def read_chunks(ffi, lib, open_session):
    """Return a function: positions and chunks recorded of a sequence while (sequence, token) pairs are evaluated."""

    def read(pairs: list[tuple[int, int]], seq: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        session = open_session("llama", SMALL, n_ctx=512, n_seq_max=2, n_batch=50, n_ubatch=50, n_threads=1)
        assert lib.lctx_trace_start(session.ctx, seq, start, stop) == lib.LCTX_OK
        for i in range(0, len(pairs), 50):
            session.decode_mixed(pairs[i : i + 50])
        info = ffi.new("lctx_trace_info *")
        assert lib.lctx_trace_get(session.ctx, info, ffi.NULL, ffi.NULL) == lib.LCTX_OK
        positions = np.empty(info.n_query, np.int32)
        chunks = np.empty((info.n_query, info.n_layer, info.n_head, info.n_read), np.int32)
        buffers = [ffi.from_buffer("int32_t[]", array, require_writable=True) for array in (positions, chunks)]
        assert lib.lctx_trace_get(session.ctx, info, *buffers) == lib.LCTX_OK
        return positions, chunks

    return read


def test_the_sequence_that_was_asked_for_is_recorded(read_chunks):
    texts = np.random.default_rng(3).integers(3, 60, (2, N)).tolist()
    mixed = [pair for both in zip(*texts, strict=True) for pair in enumerate(both)]
    together = [read_chunks(mixed, seq, 250, 290) for seq in range(2)]
    alone = [read_chunks([(seq, token) for token in texts[seq]], seq, 250, 290) for seq in range(2)]
    for (positions, chunks), (_, expected) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(positions, np.arange(250, 290))
        assert (chunks == expected).mean() > 0.99  # a choice between equals may differ
    assert (together[0][1] == together[1][1]).mean() < 0.9


@pytest.mark.parametrize("seq", [-1, 2, 2**31 - 1])
def test_a_sequence_that_is_not_there_is_refused(lib, open_session, seq):
    session = open_session("llama", SMALL, n_ctx=64, n_seq_max=2)
    assert lib.lctx_trace_start(session.ctx, seq, 0, 10) == lib.LCTX_INVALID
    assert session.error == f"sequences are 0 .. 1, not {seq}"
