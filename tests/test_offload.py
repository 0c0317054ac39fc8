"""Pages in memory of the host: the same logits whatever lies on the device; the CPU stands for both sides."""

import numpy as np
import pytest
from cases import SPECS
from llamas import TEXT, new

from pylongctx.engine.context import OffloadUsage
from pylongctx.errors import InvalidInput
from pylongctx.models import embedded_model

METHODS = ["longheads-minmax", "longheads-attention", "longheads-keys", "longheads-selfextend"]
SIZES = {"n_ctx": 320, "n_batch": 64, "n_ubatch": 32, "n_threads": 2, "n_threads_batch": 2, "n_seq_max": 2}
N = 250
BLOCKS = 4  # of 64 rows
HEADS = 2 * 2  # KV heads of all layers of the tiny model


@pytest.fixture
def start(open_session):
    """Return a function that opens a session with so many pages per head on the device; None: no offload."""

    def start(spec, n_staged, **params):
        offload = {} if n_staged is None else {"kv_offload": n_staged * page_bytes(open_session, spec)}
        return open_session("llama", spec, **SIZES | params | offload)

    return start


def page_bytes(open_session, spec) -> int:
    """Bytes of one page of all heads, as the library counts them."""
    session = open_session("llama", spec, **SIZES | {"kv_offload": 2**64 - 1})
    return usage(session).page_bytes * HEADS


def usage(session):
    info = session.ffi.new("lctx_offload_info *")
    assert session.lib.lctx_offload_usage(session.ctx, info) == session.lib.LCTX_OK
    return info


def least_staged(start, spec) -> int:
    """The smallest number of pages that is accepted."""
    for n in range(1, 64):
        try:
            start(spec, n)
        except ValueError as refusal:
            assert "does not" not in str(refusal)
            assert "do not fit into" in str(refusal)
            continue
        return n
    raise AssertionError("no number of pages is accepted")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("step", [1, 13, 64])
def test_the_same_logits(start, tokens, name, step):
    spec = SPECS[name]
    want = start(spec, None).decode(tokens[:N], step)
    for n_staged in (least_staged(start, spec), 5 * 64):
        session = start(spec, n_staged)
        np.testing.assert_array_equal(session.decode(tokens[:N], step), want)


def test_every_page_is_counted(start, tokens):
    spec = SPECS["longheads-minmax"]
    roomy = start(spec, 64)
    roomy.decode(tokens[:N], 1)
    u = usage(roomy)
    assert u.n_staged == 2 * 5  # no more than two sequences of 320 rows have
    assert u.n_far == 0
    assert u.n_miss == HEADS * BLOCKS  # each page once: it stays
    tight = start(spec, least_staged(start, spec))
    tight.decode(tokens[:N], 1)
    v = usage(tight)
    assert v.n_hit + v.n_miss + v.n_far == u.n_hit + u.n_miss
    assert v.n_miss + v.n_far >= u.n_miss


def test_more_pages_than_fit_are_read_where_they_are():
    """A ubatch of a prompt reads more pages than a token."""
    logits = []
    for budget in ({}, {"kv_offload": "host"}):
        with new(embedded_model(), method="longheads", n_ctx=4096, n_batch=512, n_ubatch=512, **budget) as llm:
            llm.eval(llm.tokenize(TEXT * 150)[:3000])
            logits.append(llm.scores.copy())
            assert (llm.offload_usage().far > 0) == bool(budget)
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", METHODS)
def test_sequences_copies_and_states(start, tokens, name):
    spec = SPECS[name]
    sessions = [start(spec, n_staged) for n_staged in (None, least_staged(start, spec))]
    answers = []
    for s in sessions:
        out = [s.decode(tokens[:200], 32)]
        out.append(s.decode_mixed([(1, t) for t in tokens[50:80]]))
        assert s.copy(0, 1), s.error  # what lay close of sequence 1 is void
        out.append(s.decode_mixed([(1, t) for t in tokens[200:230]]))
        state = s.save(1)
        cut = s.cut_back(190, 0)
        out.append(s.decode_mixed([(0, t) for t in tokens[cut:240]][:48]))
        assert s.restore(state, 0), s.error
        out.append(s.decode_mixed([(0, t) for t in tokens[230:260]]))
        s.clear()
        out.append(s.decode(tokens[40:140], 32))
        answers.append(np.concatenate(out))
    np.testing.assert_array_equal(answers[1], answers[0])


@pytest.mark.parametrize("spec", ["full", "window", "selfextend", "longheads+corm"])
def test_other_methods_are_refused(open_session, spec):
    with pytest.raises(ValueError, match=r"method=longheads does, .* does not; use longheads without an eviction rule"):
        open_session("llama", spec, **SIZES | {"kv_offload": 1 << 30})


def test_a_context_of_llama_cpp_is_refused(open_session):
    with pytest.raises(ValueError, match="kv_offload needs method=longheads"):
        open_session("llama", "", **SIZES | {"kv_offload": 1 << 30})


def test_too_little_names_what_is_needed():
    with pytest.raises(InvalidInput, match=r"reads \d+ MiB of pages, which do not fit into 1 MiB of the device"):
        new(embedded_model(), method="longheads", n_ctx=8192, kv_offload="host", kv_offload_mib=1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kv_offload": "disk"}, "kv_offload must be 'host' or None"),
        ({"kv_offload_mib": 100}, "kv_offload_mib needs kv_offload='host'"),
        ({"kv_offload": "host", "kv_offload_mib": 0}, "kv_offload_mib"),
    ],
)
def test_bad_arguments(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        new(embedded_model(), method="longheads", **arguments)


def test_python():
    with new(embedded_model(), method="longheads", n_ctx=4096, n_batch=512, n_ubatch=512, kv_offload="host") as llm:
        prompt = llm.tokenize(TEXT * 60)[:2000]
        llm.eval(prompt)
        want = llm.offload_usage()
        assert isinstance(want, OffloadUsage)
        assert want.staged > 0
        for token in prompt[:8]:
            llm.eval([token])
        got = llm.offload_usage()
        assert 0 < got.hit_rate <= 1
        assert got.hits > want.hits
        assert got.bytes_moved == (got.misses + got.far) * got.page_bytes
    with new(embedded_model(), method="longheads", n_ctx=4096) as plain:
        assert plain.offload_usage() == OffloadUsage(0, 0, 0, 0, 0, 0)
