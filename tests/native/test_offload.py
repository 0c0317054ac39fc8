"""Rows in a slower memory: the same logits whatever lies close; the CPU stands for both sides of a bus."""

import numpy as np
import pytest
from cases import SPECS
from llamas import TEXT, new
from session import assert_same
from tiny_gguf import Shape, sparse_model

from pylongctx.engine.context import OffloadUsage
from pylongctx.errors import InvalidInput
from pylongctx.models import embedded_model
from pylongctx.planning import Plan

KEYS = SPECS["longheads-keys"]
METHODS = ["longheads-minmax", "longheads-attention", "longheads-keys", "longheads-selfextend"]
CASES = [
    *((SPECS[name], "host") for name in METHODS),
    (KEYS, "disk"),
    (KEYS.replace("dca", "selfextend").replace("keys2", "keys1"), "disk"),
]
SIZES = {"n_ctx": 320, "n_batch": 64, "n_ubatch": 32, "n_threads": 2, "n_threads_batch": 2, "n_seq_max": 2}
N = 250
PAGES = 4  # of 64 rows
UNITS = 4  # of 16 rows, of a page
HEADS = 2 * 2  # KV heads of all layers of the tiny model
ROW_BYTES = 2 * 4 * 64  # of K and V of a head of the embedded model


@pytest.fixture
def start(open_session, ffi, tmp_path):
    """Return a function that opens a session with a number of units per head close; None: no offload."""
    folder = ffi.new("char[]", str(tmp_path).encode())
    folders = {"host": {}, "disk": {"kv_offload_folder": folder}}

    def start(spec, n_staged, where="host", **params):
        offload = {"kv_offload": n_staged * unit_bytes(open_session, spec)} | folders[where] if n_staged else {}
        return open_session("llama", spec, **SIZES | params | offload)

    return start


def unit_bytes(open_session, spec) -> int:
    """Bytes of one unit of all heads, as the library counts them."""
    session = open_session("llama", spec, **SIZES | {"kv_offload": 2**64 - 1})
    return usage(session).unit_bytes * HEADS


def usage(session):
    info = session.ffi.new("lctx_offload_info *")
    assert session.lib.lctx_offload_usage(session.ctx, info) == session.lib.LCTX_OK
    return info


def least_staged(start, spec, where="host") -> int:
    """The smallest number of units that is accepted."""
    for n in range(1, 64):
        try:
            session = start(spec, n, where)
        except ValueError as refusal:
            assert "every token reads" in str(refusal)
            assert "do not fit into" in str(refusal)
            continue
        assert usage(session).n_staged == n
        return n
    raise AssertionError("no number of units is accepted")


@pytest.mark.parametrize(("spec", "where"), CASES)
@pytest.mark.parametrize("step", [1, 13, 64])
def test_the_same_logits(start, tokens, spec, where, step):
    want = start(spec, None).decode(tokens[:N], step)
    least = least_staged(start, spec, where)
    for n_staged in (least, least + 3, 5 * 64):
        session = start(spec, n_staged, where)
        np.testing.assert_array_equal(session.decode(tokens[:N], step), want)


def test_every_unit_is_counted(start, tokens):
    spec = SPECS["longheads-minmax"]
    roomy = start(spec, 64)
    roomy.decode(tokens[:N], 1)
    u = usage(roomy)
    assert u.n_staged == 2 * 5 * UNITS  # no more than two sequences of 320 rows have
    assert u.n_far == 0
    assert u.n_miss == HEADS * PAGES * UNITS  # each unit once, since runs bring whole pages: it stays
    tight = start(spec, least_staged(start, spec))
    tight.decode(tokens[:N], 1)
    v = usage(tight)
    assert v.n_hit + v.n_miss + v.n_far == u.n_hit + u.n_miss
    assert v.n_miss + v.n_far >= u.n_miss


def test_more_than_fits_is_read_all_the_same(tmp_path):
    """A ubatch of a prompt reads more than a token."""
    logits = []
    for budget in ({}, {"kv_offload": "host"}, {"kv_offload": "disk", "kv_offload_path": tmp_path}):
        with new(embedded_model(), method="longheads", n_ctx=4096, n_batch=512, n_ubatch=512, **budget) as llm:
            llm.eval(llm.tokenize(TEXT * 150)[:3000])
            logits.append(llm.scores.copy())
            assert (llm.offload_usage().far > 0) == bool(budget)
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


@pytest.mark.parametrize(("spec", "where"), CASES)
def test_sequences_copies_and_states(start, tokens, spec, where):
    sessions = [start(spec, n_staged, where) for n_staged in (None, least_staged(start, spec, where))]
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
    assert_same(answers[1], answers[0])  # where no query chooses, other numbers of columns are multiplied together


@pytest.mark.parametrize("spec", ["full", "window", "selfextend", "longheads+corm"])
def test_other_methods_are_refused(open_session, spec):
    with pytest.raises(ValueError, match=r"method=longheads does, .* does not; use longheads without an eviction rule"):
        open_session("llama", spec, **SIZES | {"kv_offload": 1 << 30})


def test_a_context_of_llama_cpp_is_refused(open_session):
    with pytest.raises(ValueError, match="kv_offload needs method=longheads"):
        open_session("llama", "", **SIZES | {"kv_offload": 1 << 30})


def test_too_little_names_what_is_needed():
    spec, message = (
        "longheads,window=512,n_recent=29",
        r"every token reads \d+ MiB of rows, which do not fit into a buffer of 1 MiB",
    )
    with pytest.raises(InvalidInput, match=message):
        new(embedded_model(), method=spec, n_ctx=8192, kv_offload="host", kv_offload_mib=1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kv_offload": "tape"}, "kv_offload must be 'host' or 'disk' or None, not 'tape'"),
        ({"kv_offload_mib": 100}, "kv_offload_mib needs kv_offload='host' or 'disk'"),
        ({"kv_offload": "host", "kv_offload_path": "/tmp"}, "kv_offload_path needs kv_offload='disk'"),
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
        assert got.bytes_moved == (got.misses + got.far) * got.unit_bytes
    with new(embedded_model(), method="longheads", n_ctx=4096) as plain:
        assert plain.offload_usage() == OffloadUsage(*10 * [0], 0.0)


# ---- what it takes ----

LLAMA_8B = {"n_vocab": 128256, "n_embd": 4096, "n_layer": 32, "n_head": 32, "n_head_kv": 8, "n_ff": 14336}
GIB = 2**30


@pytest.fixture
def llama_8b(tmp_path):
    """Return a function from the room on the device to the bytes of K and V there, at 131072 tokens of Llama-3.1-8B."""
    path = sparse_model(tmp_path / "8b.gguf", Shape(**LLAMA_8B, n_ctx_train=131072))
    with Plan(str(path), {"n_gpu_layers": 0}, {"n_ctx": 131072}, "longheads") as plan:
        size = plan.sizes()[0]
        whole = size.k + size.v
        assert whole == 16 * GIB

        def there(room: int, method: str = "longheads") -> int:
            size = plan.sizes(method=method, kv_offload=room)[0]
            return size.k + size.v - whole  # the host holds all of K and V in addition

        yield there


def test_the_memory_that_is_given_is_enough(llama_8b):
    """The example of docs/gpu.md."""
    assert llama_8b(GIB) == GIB
    assert llama_8b(GIB, "longheads,window=4096") == GIB
    with pytest.raises(InvalidInput, match=r"every token reads \d\d MiB of rows, .* a buffer of 8 MiB"):
        llama_8b(8 << 20)


def test_without_a_number_it_is_a_part_of_the_cache(llama_8b):
    """What is read before heads choose, or twice what they choose: a group chooses 6144 of 131072 rows."""
    assert 1.5 * GIB <= llama_8b(2**64 - 1) < 1.6 * GIB
    assert GIB <= llama_8b(2**64 - 1, "longheads,window=4096") < 1.1 * GIB


@pytest.mark.parametrize("chunk_size", [16, 32, 48, 64, 128])
def test_chunks_of_any_size(open_file, embedded_model, chunk_size):
    """Units are chunks where these divide 64, else pages."""
    spec = f"longheads,chunk_size={chunk_size},window={min(512, 8 * chunk_size)},n_recent=1"
    sizes = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "n_threads": 2, "n_threads_batch": 2}
    tokens = np.random.default_rng(chunk_size).integers(5, 500, 900).tolist()
    plain = open_file(embedded_model, spec, **sizes)
    assert (
        plain.lib.lctx_trace_start(plain.ctx, 0, 0, 1) == plain.lib.LCTX_OK
    )  # its graphs choose too where all is read
    staged = open_file(embedded_model, spec, **sizes, kv_offload=2**64 - 1)
    for part, step in ((tokens[:830], 128), (tokens[830:], 1)):
        np.testing.assert_array_equal(staged.decode(part, step), plain.decode(part, step))
    u = usage(staged)
    assert u.unit_bytes == (chunk_size if 64 % chunk_size == 0 else 64) * ROW_BYTES
    assert u.n_hit > 10 * u.n_miss > 0
