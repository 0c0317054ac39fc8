"""Checkpoints of windows and recurrent states: what they save, and that nothing depends on them."""

from pathlib import Path
from threading import Event

import numpy as np
import pytest
from hybrid_files import WINDOWS, path_of
from llamas import EXACT, F32, greedy, new
from needs import need
from random_requests import small_blocks
from session import assert_same

from pylongctx import LlamaPromptLookupDecoding, LlamaRAMCache, LlamaState
from pylongctx.engine import session
from pylongctx.engine.session import TAIL
from pylongctx.errors import Aborted, InvalidInput
from pylongctx.store.finder import Finder

RECURRENT = ["qwen3next", "granitehybrid", "falcon-h1", "lfm2"]
METHODS = [
    None,
    "full",
    "longheads,chunk_size=16,window=64,representation=attention",
    "corm,window=8,recent=24,evict_every=16",
]
N = 150
SIZES = {"n_ubatch": 32, "n_ctx": 384} | F32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def text(tokens) -> list[int]:
    return [*tokens, *tokens[::-1]]


@pytest.fixture
def start(folder, open_llama):
    """Return a function from a model and a method to an open Llama."""
    return lambda name, method="full", **more: open_llama(path_of(folder, name), method=method, **SIZES | more)


def logits_after(llm, tokens) -> np.ndarray:
    """Return the logits after a text, with what the cache holds of it."""
    session = llm.session
    llm.prefill(tokens)
    assert session.tokens.tolist() == list(tokens)
    return session.last_logits.copy()


def cost(llm, tokens) -> int:
    """Return how many tokens are evaluated to know the logits after a text."""
    before = llm.session.n_evaluated
    logits_after(llm, tokens)
    return llm.session.n_evaluated - before


# ---- what they save ----


@pytest.mark.parametrize("method", ["full", "longheads,chunk_size=16,window=64", METHODS[2]])
@pytest.mark.parametrize("name", [*RECURRENT, *WINDOWS])
def test_a_turn_that_changes_its_end_evaluates_its_end(start, text, name, method):
    llm = start(name, method)
    chunk = 16 if "attention" in method else 1  # it comes back to where a chunk begins
    logits_after(llm, text[:N])
    answer = greedy(llm, text[:N], 40)
    new_message = text[200:230]
    history = [*text[:N], *answer[:-1]]
    assert cost(llm, [*history, *new_message]) <= len(new_message) + 1  # as it was
    other = [*text[: N - 3], *text[300:320]]
    assert cost(llm, other) < TAIL + 20 + chunk  # an answer without its thoughts
    assert cost(llm, other) == 0
    got = logits_after(llm, [*other, *new_message])
    edited = text[230:260]
    farther = 20 + TAIL + chunk if chunk > 1 else 1
    assert cost(llm, [*other, *edited]) < 30 + farther  # a message that is edited: back to where it begins
    llm.reset()
    assert_same(got, logits_after(llm, [*other, *new_message]), EXACT)


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_a_retry_evaluates_the_end_of_the_prompt(start, text, name):
    llm = start(name)
    first = greedy(llm, text[:N], 100)
    before = llm.session.n_evaluated
    assert greedy(llm, text[:N], 100) == first
    assert llm.session.n_evaluated - before <= TAIL + 99


def test_the_second_edit_of_a_place_is_cheap(start, text):
    llm = start("qwen3next")
    logits_after(llm, text[:N])
    one, two = [*text[:70], *text[200:250]], [*text[:70], *text[250:300]]
    assert cost(llm, one) == 120
    assert cost(llm, two) == 50


def test_a_long_prompt_is_taken_up_in_the_middle(start, text, monkeypatch):
    monkeypatch.setattr(session, "SPACING", 64)
    llm = start("qwen3next")
    logits_after(llm, text[:200])
    assert cost(llm, [*text[:130], 5, 6, 7]) == 5


def test_checkpoints_are_counted(start, text):
    llm = start("qwen3next")
    before = llm.kv_usage()
    assert before.rest_bytes > 0
    llm.eval(text[:N])
    assert llm.kv_usage().rest_bytes > before.rest_bytes
    assert before.bytes == 0


def test_a_plain_model_has_nothing_else(embedded_model):
    with new(embedded_model) as llm:
        llm.eval([5] * 40)
        assert llm.kv_usage().rest_bytes == 0


# ---- nothing depends on them ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*RECURRENT, *WINDOWS])
def test_going_back_never_changes_what_follows(start, text, name, method):
    llm, fresh = start(name, method), start(name, method)
    for n in (120, 60, 3):
        logits_after(llm, text[:N])
        other = [*text[:n], *text[300 - n : 320]]
        got = logits_after(llm, other)
        fresh.reset()
        assert_same(got, logits_after(fresh, other), EXACT)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_an_abort_in_the_middle_of_a_prompt(start, text, name, method):
    llm, fresh = start(name, method), start(name, method)
    want = logits_after(fresh, text[:N])
    for at in (32, 64, 128):
        llm.reset()
        logits_after(llm, text[:20])
        llm.session.progress = lambda done, total, at=at: llm.abort() if done >= at else None
        with pytest.raises(Aborted):
            llm.eval(text[20:N])
        llm.session.progress, llm.session.context.abort = None, False
        n = llm.n_tokens
        assert llm.session.tokens.tolist() == text[:n]
        assert at <= n < N
        assert_same(logits_after(llm, text[:N]), want, EXACT)


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_an_abort_costs_no_more_than_the_way_from_the_checkpoint(start, text, name):
    llm = start(name)
    logits_after(llm, text[:N])
    stream = llm.generate(text[:N], temp=0.0)
    said = [next(stream) for _ in range(10)]
    llm.session.context.abort = True
    with pytest.raises(Aborted):
        llm.session.eval(np.array([5], np.int32))
    llm.session.context.abort = False
    assert llm.session.n_past >= N - TAIL
    before = llm.session.n_evaluated
    fresh = start(name)
    history = [*text[:N], *said]
    assert_same(logits_after(llm, history), logits_after(fresh, history), EXACT)
    assert llm.session.n_evaluated - before <= TAIL + 10


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["qwen3next", "lfm2", "gemma3"])
def test_a_state_continues_exactly(start, text, name, method):
    llm = start(name, method)
    logits_after(llm, text[:N])
    state = llm.save_state()
    said = greedy(llm, text[:N], 20)
    llm.reset()
    llm.eval(text[100:140])
    llm.load_state(state)
    assert greedy(llm, text[:N], 20) == said
    other = start(name, method)
    other.load_state(state)
    assert greedy(other, text[:N], 20) == said
    with_more = [*text[:N], *text[200:220]]
    assert_same(logits_after(other, with_more), logits_after(start(name, method), with_more), EXACT)


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_the_cache_of_states_gives_the_same_answers(start, name):
    prompts = ["It was the best of times", "It was the best of times, it was the worst", "She had"]
    plain = [start(name)(prompt, max_tokens=12, temperature=0.0)["choices"] for prompt in prompts]
    llm = start(name)
    llm.set_cache(LlamaRAMCache())
    for _ in range(2):
        assert [llm(prompt, max_tokens=12, temperature=0.0)["choices"] for prompt in prompts] == plain


@pytest.mark.parametrize("more", [{}, {"swa_full": True}])
@pytest.mark.parametrize("name", [*RECURRENT, *WINDOWS])
def test_the_same_prompt_is_not_evaluated_again_after_a_restart(start, text, name, more):
    """A state of a prompt and its answer leads back to the end of the prompt."""
    llm = start(name, **more)
    answer = greedy(llm, text[:N], 40)
    state = LlamaState.from_bytes(llm.save_state().to_bytes())
    want = logits_after(start(name, **more), text[:N])
    for wanted, most in ((text[:N], TAIL), ([*text[: N - 3], *text[20:40]], TAIL + 20), ([*text[:N], *answer[:9]], 17)):
        restored = start(name, **more)
        restored.load_state(state)
        assert cost(restored, wanted) <= most
        if wanted == text[:N]:
            assert_same(restored.session.last_logits, want, EXACT)


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_a_cache_of_states_leads_back_to_the_end_of_a_prompt(start, text, name):
    llm, other = start(name), [text[0], *text[40:110]]  # begins with the same token
    llm.set_cache(LlamaRAMCache())
    for prompt in (text[:N], other):
        llm(prompt, max_tokens=20, temperature=0.0, logit_bias={2: -100.0})
    before = llm.session.n_evaluated
    llm(text[:N], max_tokens=1, temperature=0.0)
    assert llm.session.n_evaluated - before <= TAIL


def test_damaged_checkpoints_are_refused(start, text):
    llm = start("gemma3")
    greedy(llm, text[:N], 20)
    state = llm.save_state()
    before = np.array([N - TAIL, 1], np.int32).tobytes()  # the position of a checkpoint, and its number of streams
    at = state.llama_state.tobytes().rfind(before)
    assert at > 0
    for pos in (N - TAIL, N - TAIL - 1, N + 40, -5):
        rows = state.llama_state.copy()
        rows[at : at + 4] = np.array([pos], np.int32).view(np.uint8)
        changed = LlamaState(state.input_ids, state.logits, rows, state.identity, state.ends)
        if pos == N - TAIL:
            llm.load_state(changed)
            continue
        with pytest.raises(InvalidInput, match="the saved state"):
            llm.load_state(changed)
        assert llm.n_tokens == llm.session.n_past == 0


def test_a_state_that_cannot_be_cut_does_not_replace_what_can(start, text):
    llm = start("qwen3next")
    logits_after(llm, text[:N])
    longer = llm.save_state()
    logits_after(llm, [*text[:100], *text[200:250]])
    llm.states.checkpoint = longer
    llm.prefill(text[:120])
    assert llm.session.n_evaluated == 2 * N + 20  # the first 100 tokens are those that were held


# ---- drafts ----


@pytest.mark.parametrize("method", [None, "full"])
def test_windows_take_drafts_back(start, method):
    prompt = "It was the best of times, it was the worst of times, it was"
    want = start("gemma3", method)(prompt, max_tokens=60, temperature=0.0)["choices"]
    llm = start("gemma3", method, draft_model=LlamaPromptLookupDecoding())
    assert llm(prompt, max_tokens=60, temperature=0.0)["choices"] == want


# ---- several sequences ----


@pytest.fixture
def serve(folder):
    need("server", "fastapi", "httpx", "openai")
    from serving import running

    return lambda name, **more: running(path=path_of(folder, name), method="full", **SIZES | more)


def job(server, tokens, limit=4, **more):
    from pylongctx.engine.job import Job
    from pylongctx.engine.sampling.params import SamplingParams
    from pylongctx.engine.sampling.sampler import Sampler

    sampler = Sampler(server.host.model, SamplingParams(seed=1, temp=0.0))
    return Job(np.array(tokens, np.int32), sampler, limit, **more)


def finish(done):
    return [token for token, _ in done.drawn(done.take)]


def run(server, *jobs):
    """Return what jobs that begin together say."""
    with server.held():
        for one in jobs:
            server.engine.submit(one)
    return [finish(one) for one in jobs]


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_sequences_keep_checkpoints_of_their_own(serve, start, text, name):
    first = [text[:N], text[40:170], text[100:180]]
    second = [[*tokens[:-4], *text[200:220]] for tokens in first]
    alone = start(name)
    said = [greedy(alone, tokens, 6) for tokens in [*first, *second]]
    with serve(name, n_seq=3) as server:
        assert run(server, *(job(server, tokens, 6) for tokens in first)) == said[:3]
        jobs = [job(server, tokens, 6) for tokens in second]
        assert run(server, *jobs) == said[3:]
        n = [len(one.tokens) - one.n_cached for one in jobs]
        assert n == [TAIL - 4 + 20] * 3 if name == "qwen3next" else max(n) <= TAIL - 4 + 20


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_a_step_that_fails_takes_back_all_its_sequences(serve, start, text, name):
    """After a native abort in a joint batch, what is left of each sequence is determined, and the others continue."""
    prompts = [text[:N], text[40:170]]
    said = [greedy(start(name), tokens, 6) for tokens in prompts]
    with serve(name, n_seq=3) as server:
        kept = job(server, text[5:90], 3)
        run(server, kept)
        jobs = [job(server, tokens, 6) for tokens in prompts]
        jobs[0].progress = lambda one: setattr(server.engine.context, "abort", one.n_read > 60)
        with server.held():
            for one in jobs:
                server.engine.submit(one)
        for one in jobs:
            with pytest.raises(Aborted):
                finish(one)
        server.ask(lambda: setattr(server.engine.context, "abort", False))
        again = job(server, text[5:90], 3)
        run(server, again)
        assert 85 - TAIL <= again.n_cached < 85
        assert run(server, *(job(server, tokens, 6) for tokens in prompts)) == said


def test_a_common_beginning_is_copied_where_the_other_parted(serve, text):
    begin = text[:120]
    with serve("qwen3next", n_seq=3) as server:
        for i, n_cached in enumerate((0, 0, 120)):
            one = job(server, [*begin, *text[200 + 30 * i : 230 + 30 * i]])
            run(server, one)
            assert one.n_cached == n_cached


def test_a_prompt_waits_for_a_checkpoint_of_the_one_that_is_read(serve, text):
    with serve("qwen3next", n_seq=2) as server:
        jobs = [job(server, [*text[:180], *text[200 + 30 * i : 230 + 30 * i]]) for i in range(2)]
        run(server, *jobs)
        assert [one.n_cached for one in jobs] == [0, 180]


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_rows_without_their_state_are_not_copied(serve, start, text, name, tmp_path, monkeypatch):
    """Another prompt begins as one whose rows have come from the store, and the recurrent state not yet."""
    small_blocks(monkeypatch)
    prompt, fetch, go = text[:200], Finder.fetch, Event()

    def slow(self, piece):
        *rows, last = fetch(self, piece)
        yield from rows
        go.wait(60)
        yield last

    with serve(name, n_seq=2, kv_store=str(tmp_path)) as server:
        run(server, job(server, prompt))
        server.host.store.flush()
        server.erase()
        monkeypatch.setattr(Finder, "fetch", slow)
        first, second = (job(server, tokens, with_rows=True) for tokens in (prompt, [*prompt[:192], 7, 8]))
        server.engine.submit(first)
        server.wait_for(lambda: server.engine.slots[0].session.n_tokens == 192)
        server.engine.submit(second)
        server.wait_for(lambda: second.started_at or second.forerunner is first)
        go.set()
        for one in (first, second):
            _, row = one.take()
            assert_same(row, logits_after(start(name), one.tokens.tolist()), 10 * EXACT)


@pytest.mark.parametrize("name", ["qwen3next", "gemma2"])
def test_logprobs_of_a_prompt_that_is_read_in_parts(start, text, name):
    """A step that ends at a checkpoint may not overwrite the logits of the step before."""
    prompt = text[:100]
    llm = start(name, n_ubatch=128)
    choice = llm.create_completion(prompt, max_tokens=1, echo=True, logprobs=1, temperature=0.0)["choices"][0]
    got = np.array(choice["logprobs"]["token_logprobs"][1:100])
    whole = start(name, n_ubatch=128, logits_all=True)
    whole.eval(prompt)
    logits = whole.scores[:99].astype(np.float64)
    want = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    np.testing.assert_allclose(got, want[np.arange(99), prompt[1:]], atol=1e-3)
