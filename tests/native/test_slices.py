"""Parts of a sequence (native/memory/slice.cpp): what follows the rows that are there is appended, else refused."""

import random

import numpy as np
import pytest
from tiny_gguf import Shape, make_model

from pylongctx import Llama
from pylongctx._lib import lib
from pylongctx.errors import LctxError

pytestmark = pytest.mark.check

METHODS = {
    "full": lib.LCTX_SLICES_ROWS,
    "selfextend,group_size=8,neighbor_window=33": lib.LCTX_SLICES_ROWS,
    "longheads,chunk_size=16,window=64,representation=outlier": lib.LCTX_SLICES_ROWS,
    "longheads,chunk_size=16,window=64,position=dca": lib.LCTX_SLICES_ROWS,
    "longheads,chunk_size=32,window=96,representation=attention": lib.LCTX_SLICES_ROWS,
    "full,spans=3": lib.LCTX_SLICES_ROWS,
    "full,spans=3+kvzip": lib.LCTX_SLICES_ROWS,
    "window,n_sink=4,window=60": lib.LCTX_SLICES_NONE,
    "corm,window=64": lib.LCTX_SLICES_NONE,
}
WITH_PARTS = [method for method, kind in METHODS.items() if kind]
SETTINGS = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
TOKENS = np.random.default_rng(3).integers(3, 96, 300).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model.gguf", Shape(n_ctx_train=128))


def new(model, method):
    return Llama(str(model), method=method, **SETTINGS)


def context_of(llm):
    return llm.session.context


@pytest.fixture
def slices(model):
    """Return a function from a method to the slices of 64 tokens of a text."""

    def get(method, n=256):
        pieces = []
        with new(model, method) as llm:
            for first in range(0, n, 64):
                llm.eval(TOKENS[first : first + 64])
                pieces.append(context_of(llm).slice(first, first + 64))
        return pieces

    return get


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_kind_of_slice_or_refuses(model, method):
    with new(model, method) as llm:
        assert context_of(llm).slice_kind == METHODS[method]
        llm.eval(TOKENS[:128])
        if not METHODS[method]:
            with pytest.raises(LctxError, match="no slices"):
                context_of(llm).slice(0, 64)


@pytest.mark.parametrize("method", WITH_PARTS)
def test_slices_make_the_sequence_again(model, slices, method):
    pieces = slices(method)
    with new(model, method) as one, new(model, method) as other:
        for i in range(0, 256, 64):
            one.eval(TOKENS[i : i + 64])
        for i, piece in enumerate(pieces):
            other.session.append(np.array(TOKENS[64 * i : 64 * (i + 1)], np.int32), piece)
        for llm in (one, other):
            llm.eval(TOKENS[256:])
        np.testing.assert_array_equal(one.scores[-1], other.scores[-1])
        assert other.kv_usage().bytes == one.kv_usage().bytes


@pytest.mark.parametrize("method", WITH_PARTS)
def test_what_does_not_follow_is_refused(model, slices, method):
    first, second, *_ = slices(method)
    with new(model, method) as llm:
        context = context_of(llm)
        with pytest.raises(LctxError, match="does not follow"):
            context.append_slice(second)
        llm.eval(TOKENS[:63])
        with pytest.raises(LctxError, match="does not follow"):
            context.append_slice(first)
        assert llm.session.n_past == 63
        llm.eval(TOKENS[63:64])
        context.append_slice(second)
        assert llm.session.n_past == 128


@pytest.mark.parametrize(("first", "end"), [(0, 129), (1, 64), (64, 64), (64, 0), (-64, 64), (32, 96)])
def test_slices_that_there_are_none_of(model, first, end):
    with new(model, "full") as llm:
        llm.eval(TOKENS[:128])
        with pytest.raises(LctxError, match="begins with a page"):
            context_of(llm).slice(first, end)


def test_near_keys_that_were_overwritten(model):
    with new(model, WITH_PARTS[1]) as llm:
        llm.eval(TOKENS)
        with pytest.raises(LctxError, match="near keys"):
            context_of(llm).slice(0, 64)


def test_a_slice_of_another_method_or_type(model, slices):
    (piece, *_) = slices("full", 64)
    with new(model, WITH_PARTS[1]) as llm, pytest.raises(LctxError, match="it was written with full"):
        context_of(llm).append_slice(piece)
    with Llama(str(model), type_k="f32", **SETTINGS) as llm, pytest.raises(LctxError, match="type is another one"):
        context_of(llm).append_slice(piece)
    with Llama(str(model), method=None, **SETTINGS) as llm, pytest.raises(LctxError, match="no slices"):
        context_of(llm).append_slice(piece)


def test_a_context_without_a_rest(model):
    with new(model, "full") as llm:
        llm.eval(TOKENS[:64])
        for call in (lambda: context_of(llm).foreign(), lambda: context_of(llm).set_foreign(np.zeros(9, np.uint8))):
            with pytest.raises(LctxError, match="neither windows nor"):
                call()
        assert llm.session.n_past == 64


@pytest.mark.parametrize("method", WITH_PARTS)
def test_damaged_slices(model, slices, method):
    """Whatever is in a slice, the sequence ends where it did or has the slice, and continues."""
    rng = random.Random(method)
    first, second, *_ = slices(method)
    with new(model, method) as llm:
        context = context_of(llm)
        for _ in range(150):
            llm.reset()
            llm.session.rewind(0)
            llm.session.append(np.array(TOKENS[:64], np.int32), first)
            data = bytearray(second.tobytes())
            for _ in range(rng.choice([1, 4])):
                data[rng.randrange(256 if rng.random() < 0.7 else len(data))] = rng.choice([0, 1, 64, 127, 128, 255])
            kind = rng.randrange(6)
            data = data[: rng.randrange(len(data))] if kind == 0 else data + bytes(rng.randrange(1, 9)) * (kind == 1)
            try:
                context.append_slice(np.frombuffer(bytes(data), np.uint8))
            except LctxError:
                assert llm.session.n_past == 64
                llm.eval(TOKENS[64:70])
            else:
                assert llm.session.n_past == 128
                context.truncate(64)
            assert np.isfinite(llm.scores).all()
