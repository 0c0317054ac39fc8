"""The map of the chunks that a traced answer of the server has read."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llamas import TEXT
from serving import PATIENCE, running
from test_serve_engine import LONGHEADS, PROMPTS, N, job, stream


def test_a_traced_answer_leaves_a_map_of_its_chunks():
    with running(method=LONGHEADS) as server:
        assert server.http.get("/v1/longctx").json()["chunk_map"] is None
        body = {"prompt": PROMPTS[0] * 6, "max_tokens": 5, "temperature": 0, "longctx": {"trace": True}}
        answer = server.http.post("/v1/completions", json=body).json()
        n_prompt = answer["usage"]["prompt_tokens"]
        assert server.http.get("/v1/longctx").json()["chunk_map"] is None  # it has texts of the prompt
        assert server.http.get("/v1/longctx", params={"id": "cmpl-1"}).json()["chunk_map"] is None
        found = server.http.get("/v1/longctx", params={"id": answer["id"]}).json()
        map = found["chunk_map"]
        assert found["method"].startswith("longheads,chunk_size=16")
        assert map["id"] == answer["id"]
        assert map["positions"] == list(range(n_prompt - 1, n_prompt + 4 - 1 + 1))
        assert np.shape(map["counts"]) == (map["n_layer"] * map["n_head"], map["n_chunk"])
        assert (np.array(map["counts"])[:, 0] == 5).all()  # every head reads the first chunk for every token
        assert np.sum(map["counts"], axis=1).tolist() == [5 * 8] * len(map["counts"])  # window / chunk_size chunks
        assert TEXT.decode().startswith(map["texts"][0].strip()[:10])
        assert sum(one["kv_rows"] for one in found["sequences"]) > 0


def test_traced_answers_are_the_same_and_recorded_one_at_a_time():
    with running(n_seq=3, method=LONGHEADS) as server:
        texts = [PROMPTS[i] * 4 for i in range(3)]
        plain = [stream(server, text) for text in texts]
        server.erase()
        with ThreadPoolExecutor(3) as pool, server.held():
            traced = [pool.submit(stream, server, text, extra_body={"longctx": {"trace": True}}) for text in texts]
            server.wait_for(lambda: server.engine.n_waiting == 3)
            server.release()
            assert [one.result(PATIENCE) for one in traced] == plain
        last = server.ask(lambda: server.engine.tracer.record)
        n_prompts = [len(server.host.model.tokenize(text.encode())) for text in texts]
        assert last.n_prompt in n_prompts
        assert last.positions.tolist() == list(range(last.n_prompt - 1, last.n_prompt + N - 1))


def test_a_busy_first_sequence_does_not_hold_up_a_trace():
    with running(method=LONGHEADS) as server:
        endless = job(server, [1, 5, 6], 400)
        server.engine.submit(endless)
        endless.take()
        stream(server, PROMPTS[1], extra_body={"longctx": {"trace": True}})
        assert server.engine.slots[0].job is endless
        assert len(server.ask(lambda: server.engine.tracer.record).positions) == N


def test_the_record_is_there_for_who_has_the_answer():
    with running(method=LONGHEADS) as server:
        traced = job(server, [1, 5, 6], 400, id="this one", traced=True)
        server.engine.submit(traced)
        traced.take()
        with server.engine._wake:  # what the engine sees together
            server.engine.cancel(traced, reader_done=True)
            found = server.engine.call(lambda: server.engine.tracer.record)
        assert found.result(PATIENCE).id == "this one"
