"""llama-server's route for text between two others, and the suffix of completions."""

import pytest
from needs import need
from serving import poster, running

httpx = need("server", "fastapi", "httpx")

from pylongctx.parallel import Host  # noqa: E402


@pytest.fixture(scope="module")
def server():
    with running(n_seq=2, seed=42, settings={"n_predict": 64}) as server:
        yield server


@pytest.fixture
def ask(server):
    return poster(server)


FILL = {"input_prefix": "int main() {\n", "prompt": "    int n = ", "input_suffix": "}\n"}


def test_a_model_without_the_tokens_cannot_fill_in(server, ask):
    assert "fim_pre" in ask("/infill", 501, **FILL)["error"]["message"]


@pytest.fixture
def tokens(server, monkeypatch):
    """Let five tokens of the model be those of a model that can."""
    names = dict.fromkeys(("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep"))
    found = {name: 200 + i for i, name in enumerate(names)}
    monkeypatch.setitem(vars(server.host), "fill_tokens", found)
    return found


def test_what_is_between_two_texts_is_written(server, ask, tokens):
    found = ask("/infill", **FILL, n_predict=3, temperature=0)
    same = ask("/completion", prompt=_spelled(server, tokens), n_predict=3, temperature=0)
    assert found["tokens_predicted"] == 3
    assert [found[name] for name in ("prompt", "content")] == [same[name] for name in ("prompt", "content")]


def test_a_suffix_may_come_first(server, ask, tokens):
    spelled = _spelled(server, tokens)
    at, middle = spelled.index(tokens["fim_pre"]), spelled.index(tokens["fim_suf"])
    swapped = [*spelled[:at], *spelled[middle:-1], *spelled[at:middle], spelled[-1]]
    with running(n_seq=1, settings={"spm_infill": True}) as other:
        vars(other.host)["fill_tokens"] = tokens
        found = other.http.post("/infill", json=FILL | {"n_predict": 3, "temperature": 0}).json()
    same = ask("/completion", prompt=swapped, n_predict=3, temperature=0)
    assert [found[name] for name in ("prompt", "content")] == [same[name] for name in ("prompt", "content")]


@pytest.mark.parametrize("n", [1, 2])
def test_completions_have_a_suffix(ask, tokens, n):
    texts = {"prompt": FILL["input_prefix"] + FILL["prompt"], "suffix": FILL["input_suffix"]}
    found = ask("/v1/completions", **texts, max_tokens=3, temperature=0, n=n)
    body = {"input_prefix": texts["prompt"], "input_suffix": texts["suffix"]}
    same = ask("/infill", **body, n_predict=3, temperature=0)
    assert [choice["text"] for choice in found["choices"]] == [same["content"]] * n
    assert found["usage"]["prompt_tokens"] == same["tokens_evaluated"]
    for more in ({"prompt": [1, 2]}, {"echo": True}):
        assert ask("/v1/completions", 400, **texts | more)["error"]["param"] == "suffix"


def test_completions_have_no_suffix_without_the_tokens(ask):
    assert "fim_pre" in ask("/v1/completions", 501, prompt="a", suffix="b")["error"]["message"]


def _spelled(server, tokens):
    """Return the prompt by the definition: project, file, prefix, suffix, middle."""
    of = lambda text: server.host.model.tokenize(text.encode(), False, False)  # noqa: E731
    start = [
        server.host.model.info.token_bos,
        tokens["fim_rep"],
        *of("myproject\n"),
        tokens["fim_sep"],
        *of("filename\n"),
    ]
    prefix = of(FILL["input_prefix"]) + of(FILL["prompt"])
    return [*start, tokens["fim_pre"], *prefix, tokens["fim_suf"], *of(FILL["input_suffix"]), tokens["fim_mid"]]


def test_other_files_come_before(server, ask, tokens):
    extra = [{"filename": "llama.h", "text": "LLAMA_API int32_t llama_n_threads();\n"}]
    prompt = ask("/infill", **FILL, input_extra=extra, n_predict=1)["prompt"]
    assert prompt.index("llama.h") < prompt.index("LLAMA_API") < prompt.index("int main")


@pytest.mark.parametrize(
    "extra", [{}, {"filename": "ok"}, {"filename": 123}, {"filename": 123, "text": "abc"}, {"text": 4}]
)
def test_a_file_must_be_one(server, ask, tokens, extra):
    ask("/infill", 400, **FILL, input_extra=[extra])


def test_the_tokens_are_those_of_the_file(embedded_model):
    host = Host(str(embedded_model), 1, n_ctx=256, n_threads=1, verbose=False)
    try:
        assert host.fill_tokens == {}
        host.metadata |= {"tokenizer.ggml.prefix_token_id": "7", "tokenizer.ggml.fim_mid_token_id": "9"}
        del host.fill_tokens
        assert host.fill_tokens == {"fim_pre": 7, "fim_mid": 9}
    finally:
        host.close()
