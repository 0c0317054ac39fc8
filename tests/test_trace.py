"""llm.trace() on the embedded model: what is recorded, when, and that nothing else changes."""

import numpy as np
import pytest
from llamas import TEXT, new

from pylongctx.inspect import Trace, cover_rate

SIZE, WINDOW = 16, 128
METHOD = f"longheads,chunk_size={SIZE},window={WINDOW}"
N = 300


@pytest.fixture(scope="module", params=["attention", "minmax"])
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
        with pytest.raises(RuntimeError, match="being traced already"), chunked.trace(3, 4):
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
    monkeypatch.setattr("pylongctx._tracing.os.sysconf", lambda name: 100)
    with pytest.raises(MemoryError, match=r"record fewer queries: llm\.trace\(start, stop\)"), chunked.trace():
        pass
    with chunked.trace(0, 1):
        pass


@pytest.mark.parametrize("method", ["full", "window", "selfextend", None])
def test_a_method_without_chunks_says_so(embedded_model, method):
    message = r"reads no chunks.*use method='longheads'"
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
    steps, decode = [], llm._session.context.decode

    def counted(tokens, *rest):
        steps.append(len(tokens))
        decode(tokens, *rest)

    monkeypatch.setattr(llm._session.context, "decode", counted)
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
