"""Drafts in the server: concurrent answers are those without drafts, and timings and metrics count the tokens."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from llamas import F32, TEXT, new
from mtp_models import make_apt
from needs import need
from serving import poster, running

need("server", "fastapi", "httpx")

from pylongctx import DraftChain, ModelDraft, MtpDraft, NgramDraft  # noqa: E402
from pylongctx.engine.drafting import DraftLength  # noqa: E402

PROMPTS = [TEXT.decode() * n for n in (2, 3)]
ASKED = {"n_predict": 40, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain(embedded_f32):
    with new(embedded_f32, **F32) as llm:
        bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
        return [
            llm(prompt, max_tokens=40, temperature=0.0, logit_bias=bias)["choices"][0]["text"] for prompt in PROMPTS
        ]


@pytest.fixture(scope="module")
def server(embedded_f32):
    with new(embedded_f32, n_parallel=2, **F32) as small:
        draft = DraftChain([NgramDraft(2, 8), ModelDraft(small)])
        with running(n_seq=2, path=embedded_f32, draft_model=draft, **F32) as server:
            yield server


def test_two_clients(server, plain):
    ask = poster(server)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: ask("/completion", prompt=prompt, **ASKED), PROMPTS))
    assert [answer["content"] for answer in answers] == plain
    for answer in answers:
        assert 0 < answer["timings"]["draft_n"] >= answer["timings"]["draft_n_accepted"] >= 0
    counts = {name: sum(answer["timings"][name] for answer in answers) for name in ("draft_n", "draft_n_accepted")}
    lines = server.http.get("/metrics").text.splitlines()
    found = dict(line.split() for line in lines if line.startswith("llamacpp:spec"))
    assert int(found["llamacpp:spec_decode_num_draft_tokens_total"]) >= counts["draft_n"]
    assert int(found["llamacpp:spec_decode_num_accepted_tokens_total"]) >= counts["draft_n_accepted"]
    assert int(found["llamacpp:spec_decode_num_drafts_total"]) > 0


def test_a_grammar_a_stop_and_logprobs(server, embedded_f32):
    """Each token is drawn from the logits of the model, by the rules of the request."""
    ask = poster(server)
    body = {"prompt": PROMPTS[0], "temperature": 0.0, "max_tokens": 24, "logprobs": 2, "stop": [" of"]}
    found = ask("/v1/completions", **body)["choices"][0]
    with new(embedded_f32, **F32) as llm:
        wanted = llm(PROMPTS[0], temperature=0.0, max_tokens=24, logprobs=2, stop=[" of"])["choices"][0]
    assert found["text"] == wanted["text"]
    assert found["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
    held = ask("/completion", prompt=PROMPTS[0], n_predict=12, grammar='root ::= ("ab" | "cd")+')["content"]
    assert set(held) <= set("abcd") and held


def test_a_rule_that_evicts_is_refused(embedded_model):
    from pylongctx.parallel import Host

    with pytest.raises(NotImplementedError, match="draft_model: corm evicts"):
        Host(str(embedded_model), 1, method="corm", draft_model=NgramDraft(), verbose=False)


def test_a_draft_model_that_fails_ends_its_request_only(embedded_model):
    def draft(tokens):
        raise RuntimeError("no draft today")

    with running(n_seq=2, path=embedded_model, draft_model=draft) as server:
        found = server.http.post("/completion", json={"prompt": "It was", "n_predict": 4})
        assert found.status_code == 500 and "no draft today" in found.text
        assert server.http.get("/health").status_code == 200
        assert server.http.post("/completion", json={"prompt": "It was", "n_predict": 0}).status_code == 200


def test_drafts_of_the_block_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(DraftLength, "choose", lambda self, times, n_others, most: min(4, most))
    path, said = make_apt(tmp_path, "glm4moe-nextn"), []
    for draft in (None, MtpDraft(2)):
        with running(n_seq=2, path=path, draft=draft, **F32) as server, ThreadPoolExecutor(2) as pool:
            ask = poster(server)
            texts = ("abcdefg" * 9, "hello" * 9)
            answers = list(pool.map(lambda prompt, ask=ask: ask("/completion", prompt=prompt, **ASKED), texts))
        said.append([answer["content"] for answer in answers])
    assert said[0] == said[1]
    assert all(0 < answer["timings"]["draft_n_accepted"] < answer["timings"]["draft_n"] for answer in answers)
