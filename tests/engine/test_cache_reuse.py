"""Prompts whose oldest turns a client left out: what follows the gap is reused on request, and only then."""

import numpy as np
import pytest
from llamas import EXACT, F32, new
from needs import need
from serving import poster, running
from session import assert_same

from pylongctx.engine.prefix import find_gaps
from pylongctx.errors import InvalidInput

need("server", "fastapi", "httpx")

LEAST = 16
RNG = np.random.default_rng(5)
SYSTEM, *TURNS = ([int(token) for token in RNG.integers(20, 400, n)] for n in (37, *RNG.integers(23, 41, 9)))
TITLE = [int(token) for token in RNG.integers(20, 400, 61)]


def prompt(first, end):
    """Return the system prompt and some turns."""
    return [1, *SYSTEM, *(token for turn in TURNS[first:end] for token in turn)]


def completions(server):
    """Return a function that completes tokens, and returns the answer and how many tokens were evaluated."""
    post = poster(server)

    def complete(tokens, **more):
        asked = {"n_predict": 4, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
        found = post("/completion", prompt=tokens, **asked | more)
        return found["tokens"], found["timings"]["prompt_n"]

    return complete


@pytest.fixture(params=[1, 3])
def server(request, embedded_f32):
    with running(request.param, path=embedded_f32, cache_reuse=LEAST, settings={"parked_bytes": 64 << 20}, **F32) as it:
        yield it


# ---- gaps ----


def test_gaps_are_found_in_order():
    text = RNG.integers(0, 30, 400).astype(np.int32)
    shorter = np.delete(text, [*range(50, 90), *range(200, 203), *range(300, 340)])
    for most, n in ((0, 50), (1, 160), (2, 257), (3, len(shorter)), (9, len(shorter))):
        gaps, held = find_gaps(text, shorter, 24, most)
        assert len(gaps) == min(most, 3) and abs(held - n) < 3  # the tokens next to a gap may be equal by chance
        left = text
        for gap in gaps:
            left = np.delete(left, slice(*gap))
        assert np.array_equal(left[:held], shorter[:held])
    assert find_gaps(text, np.concatenate([text[:50], text[90:110], text[:9]]), 24, 9) == ([], 50)  # 20 tokens follow


# ---- trimmed conversations ----


def test_a_client_that_leaves_out_old_turns_costs_what_is_new(server):
    complete = completions(server)
    complete(prompt(0, 4))
    for i in range(1, 5):
        assert complete(prompt(i, i + 4))[1] <= len(TURNS[i + 3]) + 1
    assert complete(prompt(5, 9), n_cache_reuse=0)[1] >= len(prompt(5, 9)) - len(SYSTEM) - 3


def test_a_title_in_between_costs_a_trimmed_conversation_nothing(embedded_f32):
    settings = {"parked_bytes": 64 << 20}
    with running(1, path=embedded_f32, cache_reuse=LEAST, settings=settings, **F32) as server:
        complete = completions(server)
        for i in range(4):
            n = complete(prompt(i, i + 4))[1]
            assert i == 0 or n <= len(TURNS[i + 3]) + 1
            assert complete(TITLE)[1] <= len(TITLE)


def test_rows_behind_a_gap_are_seen_at_their_new_distances(embedded_f32):
    """They are those of the whole text, as after the same run has left a sequence."""
    with new(embedded_f32, cache_reuse=LEAST, **F32) as llm, new(embedded_f32, method="full,spans=2", **F32) as other:
        llm(prompt(0, 4), max_tokens=1)
        llm(prompt(2, 5), max_tokens=1)
        assert llm.n_tokens == len(prompt(2, 5))
        first = len(prompt(0, 0))
        other.eval(prompt(0, 4))
        assert other.session.drop(first, len(prompt(0, 2))) == ""
        other.eval(TURNS[4])
        assert_same(llm.session.last_logits, other.session.last_logits, EXACT)
        other.reset()
        other.eval(prompt(2, 5))
        assert abs(llm.session.last_logits - other.session.last_logits).max() > 1e-3


def test_several_gaps_need_spans(embedded_f32):
    found = []
    for spec in ("full,spans=3", "full"):
        with new(embedded_f32, cache_reuse=LEAST, method=spec, **F32) as llm:
            llm(prompt(0, 7), max_tokens=1)
            before = llm.session.n_evaluated
            llm([*prompt(1, 3), *prompt(4, 8)[1 + len(SYSTEM) :]], max_tokens=1)
            found.append(llm.session.n_evaluated - before)
    assert found[0] <= len(TURNS[7]) + 1 < len(TURNS[4]) < found[1]


def test_what_is_shorter_is_evaluated(embedded_f32):
    most = max(map(len, TURNS))
    with new(embedded_f32, cache_reuse=most + 1, **F32) as llm:
        llm(prompt(0, 2), max_tokens=1)
        before = llm.session.n_evaluated
        llm(prompt(1, 3), max_tokens=1)  # one turn follows the gap
        assert llm.session.n_evaluated - before >= len(prompt(1, 3)) - len(SYSTEM) - 3


def test_a_parked_sequence_that_has_all_is_preferred(embedded_f32):
    """A gap in the sequence, which was used for a shorter text, loses to the whole text in memory."""
    with running(1, path=embedded_f32, cache_reuse=LEAST, settings={"parked_bytes": 64 << 20}, **F32) as server:
        complete = completions(server)
        want = complete(prompt(2, 9))[0]
        complete([*prompt(0, 0), *TURNS[0], *TURNS[2]])
        again, n = complete(prompt(2, 9))
        assert (again, n) == (want, 1)


# ---- exactness ----


def test_without_it_every_answer_is_exact(embedded_f32):
    with running(1, path=embedded_f32, **F32) as server:
        complete = completions(server)
        complete(prompt(0, 4))
        n = complete(prompt(1, 5))[1]
        assert n >= len(prompt(1, 5)) - len(SYSTEM) - 3
        response = server.http.post("/completion", json={"prompt": TITLE, "n_predict": 1, "n_cache_reuse": LEAST})
        assert response.status_code == 400 and "--cache-reuse 16" in response.text


def test_a_request_may_ask_for_an_exact_answer(server):
    complete = completions(server)
    want = complete(prompt(2, 6), n_predict=24)[0]
    for slot in server.engine.slots:
        server.http.post(f"/slots/{slot.id}?action=erase", json={}, headers={"X-Requested-With": "test"})
    complete(prompt(0, 5))
    complete(prompt(2, 6))
    assert complete(prompt(2, 6), n_predict=24, n_cache_reuse=0)[0] == want


def test_nothing_with_a_gap_is_stored(embedded_f32, tmp_path):
    """What another process loads was computed without what left."""
    long = prompt(0, 9) * 3
    cut = [*long[:40], *long[100:]]
    with new(embedded_f32, n_ctx=2048, cache_reuse=LEAST, kv_store=str(tmp_path), **F32) as llm:
        llm(long, max_tokens=1)
        llm(cut, max_tokens=1)
        assert llm.session.seam == 40
    with new(embedded_f32, n_ctx=2048, kv_store=str(tmp_path), method="full,spans=2", **F32) as llm:
        llm(cut, max_tokens=1)
        assert llm.session.n_evaluated == len(cut)
        llm(long, max_tokens=1)
        assert llm.session.n_evaluated < len(cut) + len(long) - 500


# ---- what it needs ----


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"method": None}, "cache_reuse=16 needs full attention, not llama.cpp's own KV cache"),
        ({"method": "longheads"}, "cache_reuse=16 needs full attention, not 'longheads'"),
        ({"method": "corm"}, "cache_reuse=16 needs full attention, not 'corm"),
        ({"embedding": True}, "cache_reuse=16 needs completions"),
        ({"deterministic": True}, "lets answers depend on earlier prompts"),
        ({"cache_reuse": -1}, "cache_reuse must be"),
    ],
)
def test_what_cannot_have_gaps_is_refused(embedded_model, arguments, reason):
    with pytest.raises((ValueError, InvalidInput)) as caught:
        new(embedded_model, **{"cache_reuse": LEAST} | arguments)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["gemma2", "mamba"])
def test_windows_and_recurrent_states_have_read_what_left(model_path, name):
    with pytest.raises(ValueError, match="cache_reuse=16 needs full attention in all layers"):
        new(model_path(name), cache_reuse=LEAST)
