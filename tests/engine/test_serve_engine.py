"""Several sequences in one engine: equal to one at a time, fair, freed when no client waits, within the memory."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llamas import METHODS, TEXT, greedy, new
from needs import need
from serving import ALIAS, PATIENCE, events, running
from stored import text

httpx = need("server", "fastapi", "httpx")

from pylongctx.engine.job import Cancelled, Job  # noqa: E402
from pylongctx.engine.reuse import Fetch  # noqa: E402
from pylongctx.engine.sampling.params import SamplingParams  # noqa: E402
from pylongctx.engine.sampling.sampler import Sampler  # noqa: E402
from pylongctx.errors import ContextFull  # noqa: E402

PROMPTS = [TEXT.decode()[7 * i :] * (1 + i % 3) for i in range(8)]
N = 24
LONGHEADS = "longheads,chunk_size=16,window=128"


@pytest.fixture(scope="module")
def server():
    with running(n_seq=4) as server:
        yield server


@pytest.fixture
def engine(server):
    server.erase()
    return server.engine


def job(server, tokens, limit=4, **more):
    return Job(np.array(tokens, np.int32), Sampler(server.host.model, SamplingParams(seed=1, temp=0.0)), limit, **more)


def tokens_of(server):
    return server.host.model.tokenize(TEXT)


def finish(done):
    """Return the tokens of a job."""
    return [token for token, _ in done.drawn(done.take)]


def stream(server, prompt, **more):
    """Return the text of a greedy completion that is streamed."""
    given = {"model": ALIAS, "prompt": prompt, "max_tokens": N, "temperature": 0, "stream": True} | more
    return "".join(chunk.choices[0].text for chunk in server.client.completions.create(**given))


@pytest.mark.parametrize("method", [*METHODS, "corm,window=64,recent=64"])
def test_parallel_streams_equal_one_at_a_time(embedded_f32, method):
    """In f32: other batches round quantized activations otherwise."""
    with new(embedded_f32, method=method) as llm:
        alone = [llm.create_completion(prompt, max_tokens=N, temperature=0)["choices"][0]["text"] for prompt in PROMPTS]
    with running(n_seq=8, path=embedded_f32, method=method) as server, ThreadPoolExecutor(8) as pool:
        with server.held():
            streams = [pool.submit(stream, server, prompt) for prompt in PROMPTS]
            server.wait_for(lambda: server.engine.n_waiting == 8)
        assert [one.result(PATIENCE) for one in streams] == alone
        assert server.engine.counters.steps < 8 * N  # they ran together


def test_more_requests_than_sequences_wait_their_turn(server, engine):
    with ThreadPoolExecutor(9) as pool:
        texts = list(pool.map(lambda _: stream(server, PROMPTS[0]), range(9)))
    assert len(set(texts)) == 1
    assert engine.n_busy == engine.n_waiting == 0


def test_a_long_prompt_does_not_hold_up_others(server, engine):
    order = []
    long = job(server, tokens_of(server) * 12, progress=lambda job: order.append(("long", job.n_read)))
    others = [job(server, [1, 5 + i], 4, progress=lambda job: order.append(("short", job.n_read))) for i in range(2)]
    with server.held():
        for one in (long, *others):
            engine.submit(one)
    for one in (*others, long):
        finish(one)
    steps = [n for name, n in order if name == "long" and n]
    assert steps[0] == 64 - 4  # the others read 2 tokens each in the same step
    assert steps[1:4] == [60 + 62 * i for i in range(1, 4)]  # and write one each in the next ones
    assert order.index(("short", 2)) < order.index(("long", steps[1]))


def test_two_long_prompts_are_read_at_the_same_pace(server, engine):
    order = []
    both = [
        job(
            server,
            [1, 9 + i, *tokens_of(server) * 6],
            progress=lambda job, i=i: order.append(i) if job.n_read else None,
        )
        for i in range(2)
    ]
    with server.held():
        for one in both:
            engine.submit(one)
    assert all(len(finish(one)) == 4 for one in both)
    assert sorted(order[:2]) == sorted(order[2:4]) == [0, 1]


def test_a_prompt_takes_what_is_left_of_the_time_of_a_step(server, engine, monkeypatch):
    """With an answer in the step: 10 ms for the step, 2.5 ms more for a token of a prompt, 150 ms for both."""
    pace, steps, evaluate = engine._engine._pace, [], engine._engine._evaluate
    monkeypatch.setattr(pace, "add", lambda n, seconds: None)
    monkeypatch.setattr(pace, "_seconds", 0.15)
    monkeypatch.setattr(pace, "_alone", 0.01)
    monkeypatch.setattr(pace, "_each", 0.0025)

    def record(shares):
        steps.append({share.job: len(share.part) for share in shares})
        evaluate(shares)

    monkeypatch.setattr(engine._engine, "_evaluate", record)
    beside: list[int] = []
    while not beside:  # a step without the answer, whose reader is slow on a busy machine, is whole
        writing, long = job(server, [1, 5, 6], 400), job(server, tokens_of(server) * 3, 0)
        reader = threading.Thread(target=lambda one=writing: finish(one))
        engine.submit(writing)
        reader.start()
        server.wait_for(lambda one=writing: one.n_generated > 2)
        engine.submit(long)
        finish(long)
        engine.cancel(writing, reader_done=True)
        reader.join(PATIENCE)
        server.wait_for(lambda: engine.n_busy == 0)
        assert sum(step.get(long, 0) for step in steps) == len(long.tokens)
        beside = [step[long] for step in steps if long in step and len(step) == 2]
    assert pace.most(512) == 48 >= max(beside)


def test_a_prompt_goes_where_most_of_it_is(server, engine):
    tokens = tokens_of(server)
    for first in (tokens[:20], [1, *tokens[20:]]):
        finish(_submitted(engine, job(server, first)))
    again = _submitted(engine, job(server, [1, *tokens[20:], 7]))
    finish(again)
    assert again.n_cached == len(tokens) - 20 + 1
    assert [slot.session.n_tokens > 0 for slot in engine.slots] == [True, True, False, False]


def test_a_new_prompt_takes_the_sequence_that_was_not_used_for_longest(server, engine):
    for i in range(5):
        finish(_submitted(engine, job(server, [1, *range(50 + 30 * i, 75 + 30 * i)])))
    assert [int(slot.session.tokens[1]) for slot in engine.slots] == [170, 80, 110, 140]


def test_a_long_conversation_is_not_cut_for_a_new_one_that_begins_alike(server, engine):
    tokens = tokens_of(server)
    long = [1, *tokens[:20], *tokens * 2]
    finish(_submitted(engine, job(server, long)))
    new = _submitted(engine, job(server, [1, *tokens[:20], 5, 6, 7]))
    finish(new)
    assert new.n_cached == 21
    assert [slot.session.n_tokens for slot in engine.slots[:2]] == [len(long) + 3, len(new.tokens) + 3]


def test_what_a_busy_sequence_holds_is_shared(server, engine):
    tokens = tokens_of(server) * 3
    first, second = job(server, tokens, 50), job(server, [*tokens, 9])
    engine.submit(first)
    first.take()  # it has read its prompt, and writes until the reader lags too much
    engine.submit(second)
    alone = finish(second)
    assert second.n_cached == len(tokens)
    engine.cancel(first)
    server.erase()
    with new(server.host.model_path) as llm:
        assert alone == greedy(llm, [*tokens, 9], 4)


@pytest.mark.parametrize("method", ["full", LONGHEADS, "corm,window=64,recent=64"])
def test_several_choices_read_their_prompt_once(method):
    with running(n_seq=3, method=method) as server:
        given = {"model": ALIAS, "prompt": PROMPTS[0] * 6, "max_tokens": N, "temperature": 0, "n": 3}
        with ThreadPoolExecutor(1) as pool, server.held():
            asked = pool.submit(server.client.completions.create, **given)
            server.wait_for(lambda: server.engine.n_waiting == 3)
            server.release()
            answer = asked.result(PATIENCE)
        assert len({choice.text for choice in answer.choices}) == 1
        assert server.engine.counters.prompt_tokens == answer.usage.prompt_tokens


def _submitted(engine, one):
    engine.submit(one)
    return one


def test_loading_from_the_store_pauses_while_another_sequence_runs(tmp_path, monkeypatch):
    rests, go_on = [], Fetch.go_on
    monkeypatch.setattr(Fetch, "go_on", lambda self, rest: (rests.append(rest), go_on(self, rest)))
    with running(n_seq=2, n_ctx=2048, n_ubatch=512, kv_store=str(tmp_path)) as server:
        endless = job(server, [1, 5, 6], 400, slot=1)
        for others in (False, True):
            rests.clear()
            for _ in range(2):  # the first one fills the store
                server.host.store.flush()
                server.engine.erase(0, None).result(PATIENCE)
                finish(_submitted(server.engine, job(server, text(), 0, slot=0)))
            assert len(rests) == (3 if not others else 6)
            assert all(rests) if others else not any(rests)
            server.engine.submit(endless)
            endless.take()
        server.engine.cancel(endless)


# ---- the end of a job ----


def test_a_client_that_goes_away_frees_its_sequence_within_one_step(server, engine, monkeypatch):
    steps, cancelled, allowed = [], threading.Event(), threading.Semaphore(3)
    decode, cancel = engine.context.decode, engine.cancel

    def one_step(*args):
        assert allowed.acquire(timeout=PATIENCE)
        steps.append(len(args[0]))
        return decode(*args)

    def note(*args, **more):
        cancel(*args, **more)
        cancelled.set()

    monkeypatch.setattr(engine.context, "decode", one_step)
    monkeypatch.setattr(engine, "cancel", note)
    body = {"prompt": PROMPTS[1] * 7, "stream": True, "return_progress": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        chunks = events(response)
        assert [next(chunks)["prompt_progress"]["processed"] for _ in range(4)] == [0, 64, 128, 192]
    assert cancelled.wait(PATIENCE)
    allowed.release(100)
    server.wait_for(lambda: engine.n_busy == 0)
    assert steps in ([64] * 3, [64] * 4)
    assert engine.slots[0].last.n_read in (192, 256)  # the last step may have been given up


def test_a_closed_stream_of_openai_ends_its_job(server, engine):
    cancelled, forever = engine.counters.cancelled, {server.host.model.info.token_eos: -100}
    given = {"model": ALIAS, "prompt": "It", "max_tokens": 500, "logit_bias": forever, "stream": True}
    with server.held():  # so that the answer cannot be complete before
        chunks = server.client.completions.create(**given)
        server.wait_for(lambda: engine.n_waiting == 1)  # the status comes before the prompt is queued
        chunks.close()
        server.wait_for(lambda: engine.waiting and engine.waiting[0].cancelled)
    server.wait_for(lambda: engine.n_busy == engine.n_waiting == 0)
    assert engine.counters.cancelled == cancelled + 1


@pytest.mark.parametrize("body", [{}, {"echo": True, "logprobs": 0}, {"n": 3}])
def test_a_client_that_leaves_before_the_whole_answer_ends_its_jobs(server, engine, body):
    before, n = engine.counters.cancelled, body.get("n", 1)
    text = json.dumps({"prompt": PROMPTS[2], "max_tokens": 400} | body)
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    with server.held():
        with socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port)) as client:
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n{text}".encode())
            server.wait_for(lambda: engine.n_waiting == n)
        server.wait_for(lambda: all(job.cancelled for job in engine.waiting))
    server.wait_for(lambda: engine.n_busy == engine.n_waiting == 0)
    assert engine.counters.cancelled == before + n


def test_a_stop_string_ends_the_job_too(server, engine):
    text = stream(server, PROMPTS[3], max_tokens=40)
    completed = engine.counters.completed
    assert stream(server, PROMPTS[3], max_tokens=400, stop=[text[12:16]]) == text[: text.index(text[12:16])]
    server.wait_for(lambda: engine.n_busy == 0)
    assert engine.counters.completed == completed + 1


def test_the_engine_waits_for_a_slow_reader(server, engine):
    slow, quick = job(server, [1, 5, 6], 60), job(server, [1, 7, 8], 60)
    engine.submit(slow)
    engine.submit(quick)
    finish(quick)
    assert slow.n_generated < 8
    assert len(finish(slow)) == 60


def test_a_failure_of_one_job_leaves_the_others(server, engine, monkeypatch):
    bad, good = job(server, [1, 5, 6], 20), job(server, [1, 7, 8], 20)
    monkeypatch.setattr(bad.sampler, "sample", lambda row, decide=None: (_ for _ in ()).throw(ContextFull("no", 1)))
    with server.held():
        engine.submit(bad)
        engine.submit(good)
    with pytest.raises(ContextFull):
        finish(bad)
    assert len(finish(good)) == 20


def test_closing_ends_jobs_and_threads(embedded_model):
    with running() as server:
        one = job(server, [1, 5, 6], 400)
        server.engine.submit(one)
        one.take()
        server.engine.close()
        with pytest.raises(Cancelled):
            finish(one)
        assert not server.engine.is_alive
        late = job(server, [1, 5, 6])
        server.engine.submit(late)
        with pytest.raises(Cancelled):
            late.take()
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_failed_says_so(monkeypatch):
    with running() as server:
        monkeypatch.setattr(server.engine.context, "step", lambda *args: 1 / 0)
        failed = server.http.post("/v1/completions", json={"prompt": "a"})
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        for path in ("/health", "/v1/completions"):
            answer = server.http.request("GET" if path == "/health" else "POST", path, json={"prompt": "a"})
            assert answer.status_code == 503
            assert "restart the server" in answer.json()["error"]["message"]


# ---- memory ----


def test_pages_go_back_when_sequences_are_erased(server, engine):
    stream(server, PROMPTS[0])
    assert server.metric("kv_bytes") > 0
    for seq in range(4):
        server.http.post(f"/slots/{seq}", params={"action": "erase"}, json={}).raise_for_status()
    assert server.metric("kv_bytes") == 0


def test_idle_sequences_make_room_and_what_never_fits_is_refused(embedded_model):
    with new(embedded_model) as llm:
        llm.eval(llm.tokenize(TEXT) * 5)
        limit = llm.kv_usage().bytes
    with running(n_seq=3, kv_limit=limit) as server:
        tokens = tokens_of(server)
        for i in range(3):
            finish(_submitted(server.engine, job(server, [1, 100 + i, *tokens * 3])))
        tight = [_submitted(server.engine, job(server, [1, 200 + i, *tokens * 4], 100)) for i in range(2)]
        ends = []
        for one in tight:
            try:
                ends.append(len(finish(one)))
            except ContextFull:
                ends.append("full")
        assert "full" in ends
        finish(_submitted(server.engine, job(server, tokens)))  # and the engine continues
