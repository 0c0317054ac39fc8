"""What a context that loses its middle needs, and the parts that decide what leaves."""

import numpy as np
import pytest
from test_overflow import evicting

from pylongctx import Full
from pylongctx.chat.conversation import left_out, turns
from pylongctx.engine.model import Model
from pylongctx.engine.overflow import Halves
from pylongctx.engine.prefix import find_gap

pytestmark = pytest.mark.check

# ---- what it needs ----


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"overflow": "shift"}, "overflow must be 'error' or 'evict_middle', not 'shift'"),
        ({"overflow": "h2o"}, "not 'h2o': an eviction rule is part of the method, such as 'longheads+h2o'"),
        ({"method": None}, "not llama.cpp's own KV cache (method=None)"),
        ({"method": "longheads"}, "not 'longheads': use method='full', or leave it out"),
        ({"method": "corm"}, "not 'corm"),
        ({"method": Full(spans=1)}, "not 'full,spans=1'"),
        ({"embedding": True}, "cannot be combined with embedding or vocab_only"),
        ({"vocab_only": True}, "cannot be combined with embedding or vocab_only"),
    ],
)
def test_only_full_attention_can_lose_its_middle(embedded_model, arguments, reason):
    with pytest.raises(ValueError) as caught:
        evicting(embedded_model, **arguments)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("method", "spec"), [("auto", 2), ("full", 2), (Full(), 2), (Full(spans=5), 5)])
def test_full_attention_gets_two_spans(embedded_model, method, spec):
    with evicting(embedded_model, method=method) as llm:
        assert llm.method == Full(spans=spec)


@pytest.mark.parametrize("name", ["gemma2", "mamba"])
def test_a_model_whose_states_have_read_what_leaves_is_refused(model_path, name):
    with pytest.raises(ValueError, match="overflow='evict_middle' needs full attention in all layers"):
        evicting(model_path(name))


# ---- parts ----


@pytest.mark.parametrize(
    ("roles", "begins"),
    [
        ("user", [0]),
        ("system user assistant user", [1, 3]),
        ("system developer user assistant tool tool assistant user assistant", [2, 7]),
        ("system assistant user assistant user", [1, 2, 4]),
        ("user user system user", [0, 1, 3]),
        ("system", []),
        ("", []),
    ],
)
def test_a_turn_is_a_question_with_all_that_follows(roles, begins):
    assert turns([{"role": role, "content": ""} for role in roles.split()]) == begins


def test_a_gap_is_found_where_most_of_a_text_follows_it():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50, 500).astype(np.int32)
    for first, end in ((0, 40), (100, 300), (400, 460)):
        shorter = np.concatenate([np.delete(text, slice(first, end)), text[:7]])
        gap = find_gap(text, shorter)
        assert np.array_equal(np.delete(text, slice(*gap)), np.delete(text, slice(first, end)))
    assert find_gap(text, text) is None
    assert find_gap(text, text[:300]) is None
    assert find_gap(text, np.delete(text, slice(400, 470))) is None  # too little comes after it
    assert find_gap(np.tile(text[:3], 400), np.tile(text[:3], 300)) is None
    assert find_gap(text[:0], text) is None


def test_half_of_what_follows_the_first_tokens_leaves():
    assert Halves(5).next(105) == (5, 55, 0)
    assert Halves(5).next(6) is None
    assert Halves(9).next(3) is None


def test_runs_of_tokens_are_found_in_renderings(embedded_model):
    model = Model(str(embedded_model), {"vocab_only": True})
    mark = [model.info.token_eos]
    assert left_out(model, [7, *mark, 8, 9, *mark, 8, 6], [7, *mark, 8, 6]) == (1, 4)  # not (2, 5), the same tokens
    assert left_out(model, [7, 8, 9, 8, 6], [7, 8, 6]) == (2, 4)
    assert left_out(model, [7, 8, 9], []) == (0, 3)
    for shorter in ([7, 6, 9], [7, 8, 9], [7, 8, 9, 9], [9]):
        assert left_out(model, [7, 8, 9], shorter) == ((0, 2) if shorter == [9] else None)
    model.close()
