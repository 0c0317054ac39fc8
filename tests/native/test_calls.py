"""The C API with arguments that make no sense: refused or done as lctx.h says, never an abort, and nothing is lost."""

from pathlib import Path

import pytest
import thinning
from drivers import CASES, drive
from hybrid_files import path_of
from session import Session

from pylongctx.eval.peak import peak_memory, reset_peak_memory

SIZES = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 3, "n_threads": 1, "n_threads_batch": 1}
ROUNDS = 1000 if thinning.run_all else 20  # of 20 calls each


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("calls")


@pytest.mark.parametrize(("model", "method"), CASES["calls"])
def test_no_call_ends_the_process(folder, model, method):
    assert drive("calls", folder, model, method, ROUNDS) == {0: ROUNDS}


@pytest.mark.parametrize("method", ["", "full"])
def test_a_batch_beyond_all_bounds_takes_no_memory(lib, ffi, model_path, method):
    """Without causal attention llama.cpp does not bound it by n_ctx, and keeps a number for every token of it."""
    reset_peak_memory()
    before = peak_memory()
    try:
        with Session(ffi, lib, model_path("llama"), method, **SIZES | {"n_batch": 2**31}, attention_type=1) as session:
            assert lib.lctx_context_n_batch(session.ctx) == 2**22
    except ValueError as reason:
        assert method and "causal" in str(reason)
    assert peak_memory() - before < 2**30


# ---- llama.cpp's own memory ----


@pytest.fixture
def own(open_session, tokens):
    """A context without a method whose first sequence holds 60 tokens."""
    session = open_session("llama", "", **SIZES)
    session.decode(tokens[:60])
    yield session
    session.clear()


def logits_after(session, seq: int, token: int):
    return session.decode_mixed([(seq, token)])[0]


@pytest.mark.parametrize("n", [30, 1, 59, 60, 61, -1])
def test_a_prefix_is_copied(own, tokens, n):
    kept = min(n, 60) if n >= 0 else 60
    assert own.copy(0, 1, n)
    assert [own.length(seq) for seq in range(3)] == [60, kept, 0]
    got = logits_after(own, 1, 9)
    own.clear()
    own.decode(tokens[:kept])
    assert abs(got - logits_after(own, 0, 9)).max() < 1e-4


def test_a_copy_of_nothing_and_to_itself(own):
    assert own.copy(0, 1)
    assert own.copy(0, 1, 0)
    assert own.copy(0, 0, 10)
    assert own.copy(0, 0)
    assert [own.length(seq) for seq in range(3)] == [60, 0, 0]


@pytest.mark.parametrize("seq", [-(2**31), -2, -1, 3, 99, 2**31 - 1])
def test_a_sequence_that_there_is_not_is_refused(own, lib, seq):
    state = own.save(0)
    assert not own.remove_tail(0, seq)
    assert not own.copy(0, seq)
    assert not own.copy(seq, 0)
    assert not own.copy(seq, seq)
    assert lib.lctx_seq_checkpoint(own.ctx, seq) == 0
    assert "sequences are 0 .. 2" in own.error
    own.keep(seq)
    assert own.restorable(10, seq) == 0
    if seq >= 0:
        assert lib.lctx_state_size(own.ctx, seq) == 0
        assert not own.restore(state, seq)
    assert [own.length(s) for s in range(3)] == [60, 0, 0]
    assert own.save(0) == state


def test_others_are_forgotten(own):
    for seq in (1, 2):
        assert own.copy(0, seq)
    own.keep(1)
    assert [own.length(seq) for seq in range(3)] == [0, 60, 0]


def test_what_cannot_go_back_is_refused_and_stays(ffi, lib, folder, tokens):
    with Session(ffi, lib, path_of(folder, "qwen3next"), "", **SIZES) as session:
        session.decode(tokens[:60])
        for p0, p1 in ((30, -1), (30, 60), (0, 30), (59, 60)):
            assert lib.lctx_seq_rm(session.ctx, 0, p0, p1) == 0
            assert "recurrent state" in session.error
        assert not session.copy(0, 1, 30)
        assert [session.length(seq) for seq in range(2)] == [60, 0]
        assert session.copy(0, 1)
        assert session.remove_tail(0, 1)
        assert [session.length(seq) for seq in range(2)] == [60, 0]
