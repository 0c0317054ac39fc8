"""Documents that are ranked, by a tiny encoder with a head of random weights."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from needs import need
from random_model import Shape, write_model
from serving import running
from tiny_models import RECIPES

from pylongctx import Llama
from pylongctx.cli import main

need("server", "fastapi", "httpx")

QUERY = "What is a panda?"
DOCUMENTS = ["hi", "it is a bear", "The giant panda is a bear of China.", "hi there"]
CLS, RANK = 2, 4  # llama.cpp's kinds of pooling
SMALL = {"n_ctx": 0, "n_threads": 1, "verbose": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    bert = RECIPES["bert"]
    outer = f"{bert.outer} cls=embd,embd+b cls.output=1,embd+b"
    shape = replace(Shape(n_ctx_train=128), **bert.shape)
    return write_model(tmp_path_factory.mktemp("rank") / "r.gguf", replace(bert, arch="bert", outer=outer), shape)


@pytest.fixture(scope="module")
def server(path):
    embedder = Llama(str(path), embedding=True, pooling_type=RANK, **SMALL)
    with running(n_seq=1, path=path, n_ctx=128, embedder=embedder) as server:
        yield server


@pytest.fixture
def rank(server):
    def post(path="/v1/rerank", status=200, **body):
        response = server.http.post(path, json={"query": QUERY, "documents": DOCUMENTS} | body)
        assert response.status_code == status, response.text
        return response.json()

    return post


def scores(path, pairs):
    """Return what the head makes of the first token's vector, by its definition."""
    tensors = {one.name: one.data.astype(np.float64) for one in gguf.GGUFReader(str(path)).tensors}
    with Llama(str(path), embedding=True, pooling_type=CLS, **SMALL) as llm:
        first = np.array(llm.embed(pairs), np.float64)
    hidden = np.tanh(first @ tensors["cls.weight"].T + tensors["cls.bias"])
    return (hidden @ tensors["cls.output.weight"].T + tensors["cls.output.bias"])[:, 0]


def pairs(server, documents, tail=()):
    """Return the tokens of question and documents."""
    model = server.host.model
    query = [*model.start, *model.tokenize(QUERY.encode(), False)]
    return [[*query, *tail, *model.tokenize(text.encode(), False), *tail] for text in documents]


def test_documents_come_by_their_scores(server, rank, path):
    found = rank()
    expected = scores(path, pairs(server, DOCUMENTS))
    assert [one["index"] for one in found["results"]] == np.argsort(-expected).tolist()
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx(sorted(expected, reverse=True), 1e-3)
    n_tokens = sum(map(len, pairs(server, DOCUMENTS)))
    assert (found["object"], found["model"]) == ("list", "tiny")
    assert found["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert all(one.keys() == {"index", "relevance_score"} for one in found["results"])


@pytest.mark.parametrize("route", ["/rerank", "/reranking", "/v1/reranking", "/v2/rerank"])
def test_every_route_says_the_same(rank, route):
    assert rank(route, model="any") == rank()


def test_the_best_ones_and_their_texts(rank):
    whole = rank()["results"]
    found = rank(top_n=2, return_documents=True)["results"]
    assert [one | {"document": {"text": DOCUMENTS[one["index"]]}} for one in whole[:2]] == found
    assert len(rank(top_n=99)["results"]) == len(DOCUMENTS)
    assert rank(documents=[{"text": text} for text in DOCUMENTS]) == rank()


def test_the_form_of_text_embeddings_inference(rank):
    plain = rank()["results"]
    found = rank(documents=None, texts=DOCUMENTS, return_text=True)
    assert found == [
        {"index": one["index"], "score": one["relevance_score"], "text": DOCUMENTS[one["index"]]} for one in plain
    ]
    assert all(one.keys() == {"index", "score"} for one in rank(documents=None, texts=DOCUMENTS))


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", {"image": "b"}]}, "documents[1]"),
        ({"query": None}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["a"] * 2049}, "2048"),
        ({"documents": ["word " * 900]}, "128"),
    ],
)
def test_what_cannot_be_ranked_is_said(rank, body, name):
    assert name in rank(status=400, **body)["error"]["message"]


@pytest.fixture
def read(server, monkeypatch):
    """Return a function from flags of the vocabulary to the tokens of a pair."""
    from pylongctx.serve.texts import pair_tokens

    def pair(query, document, template=None, **flags):
        class Model:
            tokenize, start = server.host.model.tokenize, server.host.model.start
            info = type("Info", (), {"token_eos": 2, "token_sep": 7, "add_eos": 0, "add_sep": 0} | flags)

        class Host:
            model, tokens = Model, server.host.tokens
            metadata = {"tokenizer.chat_template.rerank": template} if template else {}

        return pair_tokens(Host, query, document)

    return pair


def test_what_stands_between_a_question_and_a_document(server, read):
    tokens, start = server.host.tokens, server.host.model.start
    a, b = tokens("abc", False), tokens("de", False)
    assert read("abc", "de") == [*start, *a, *b]
    assert read("abc", "de", add_eos=1) == [*start, *a, 2, *b, 2]
    assert read("abc", "de", add_eos=1, add_sep=1) == [*start, *a, 2, 7, *b, 2]
    assert read("abc", "de", add_eos=1, token_eos=-1) == [*start, *a, 7, *b, 7]
    assert read("{document}", "de", template="Q {query} D {document}!") == tokens("Q {document} D de!")


def test_a_ranker_makes_no_vectors(server):
    response = server.http.post("/v1/embeddings", json={"input": "a"})
    assert (response.status_code, "--embeddings" in response.text) == (501, True)


def test_other_servers_rank_nothing(embedded_model):
    embedder = Llama(str(embedded_model), embedding=True, pooling_type=1, **SMALL)
    for more in ({}, {"embedder": embedder}):
        with running(n_seq=1, **more) as server:
            response = server.http.post("/rerank", json={"query": "a", "documents": ["b"]})
            assert (response.status_code, "--reranking" in response.text) == (501, True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [([], "has no head that judges documents"), (["--pooling", "mean"], "--pooling rank, not mean")],
)
def test_a_model_without_a_head_is_refused(capsys, words, reason):
    assert main(["serve", "--port", "0", "-c", "256", "--reranking", *words]) == 1
    assert reason in capsys.readouterr().err
