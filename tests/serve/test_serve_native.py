"""llama-server's own routes, by the assertions of its test suite."""

from dataclasses import replace

import pytest
from llamas import TEXT
from needs import need
from serving import ALIAS, poster, running, stream

httpx = need("server", "fastapi", "httpx")

from pylongctx import LlamaState  # noqa: E402

PROMPT = "I believe the meaning of life is"
COUNTS = {"index", "id_slot", "tokens_predicted", "tokens_evaluated", "content", "tokens", "stop"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots") / "deep"
    with running(n_seq=2, seed=42, settings={"slot_folder": folder, "n_predict": 64}) as server:
        server.folder = folder
        yield server


@pytest.fixture
def ask(server):
    return poster(server)


# ---- /completion ----


def test_first_tokens_are_kept_where_others_can_leave(ask):
    refused = ask("/completion", 400, prompt=PROMPT, n_keep=4)["error"]
    assert refused["param"] == "n_keep"
    assert "--overflow evict_middle" in refused["message"]
    assert ask("/completion", prompt=PROMPT, n_keep=0, n_predict=1)["tokens_predicted"] == 1


@pytest.mark.parametrize(("n", "return_tokens"), [(8, False), (96, True)])
def test_a_completion(server, ask, n, return_tokens):
    found = ask("/completion", n_predict=n, prompt=PROMPT, return_tokens=return_tokens, ignore_eos=True)
    assert found["timings"]["prompt_n"] == found["tokens_evaluated"] == len(server.host.model.tokenize(PROMPT.encode()))
    assert found["timings"]["predicted_n"] == found["tokens_predicted"] == n
    assert found["truncated"] is False
    assert found["stop_type"] == "limit"
    assert isinstance(found["has_new_line"], bool)
    assert found["model"] == ALIAS
    assert len(found["tokens"]) == (n if return_tokens else 0)
    if return_tokens:
        assert ask("/detokenize", tokens=found["tokens"])["content"].strip() == found["content"].strip()


def test_a_stream_is_the_whole_in_parts(server, ask):
    whole = ask("/completion", n_predict=8, prompt=PROMPT, temperature=0)
    *parts, end = stream(server, n_predict=8, prompt=PROMPT, temperature=0)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert all(set(part) == COUNTS and part["tokens"] for part in parts)
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert end["stop"] is True
    assert end["content"] == ""
    assert end["generation_settings"]["n_predict"] == 8
    assert end["generation_settings"]["seed"] == 42
    assert end["generation_settings"]["temperature"] == 0


def test_progress_comes_before_the_first_batch(server, ask):
    found = stream(server, prompt=TEXT.decode() * 4, n_predict=2, return_progress=True)
    progress = [one["prompt_progress"] for one in found if "prompt_progress" in one]
    assert progress[0]["processed"] == progress[0]["cache"] == 0
    assert progress[-1]["processed"] == progress[-1]["total"] > 64
    assert "prompt_progress" in found[0]


def test_prompts_of_tokens_and_texts(server, ask):
    tokens = ask("/tokenize", content=PROMPT, add_special=True)["tokens"]
    text = ask("/completion", prompt=PROMPT, temperature=0, n_predict=6)["content"]
    assert ask("/completion", prompt=tokens, temperature=0, n_predict=6)["content"] == text
    both = ask("/completion", prompt=[tokens, PROMPT], temperature=0, n_predict=6)
    assert [one["content"] for one in both] == [text, text]
    assert [one["index"] for one in both] == [0, 1]
    mixed = ask("/completion", prompt=[1, 2, 3, PROMPT, 7, 8, PROMPT], n_predict=3)
    middle = server.host.model.tokenize(PROMPT.encode(), False, True)
    assert mixed["tokens_evaluated"] == 5 + 2 * len(middle)
    begun = ask("/completion", prompt=[[PROMPT, 5]], n_predict=1)
    assert begun[0]["tokens_evaluated"] == len(tokens) + 1
    assert ask("/completion", prompt={"prompt_string": PROMPT}, temperature=0, n_predict=6)["content"] == text
    for wrong in ([], 5, [1.5], [True], {"prompt_string": "a", "multimodal_data": ["x"]}, [[1, None]]):
        ask("/completion", 400, prompt=wrong)


def test_several_choices(server, ask):
    found = ask("/completion", prompt=PROMPT, n=2, seed=5, temperature=1.5, n_predict=16)
    assert found[0]["content"] != found[1]["content"]
    assert found[1]["generation_settings"]["seed"] == 6


def test_only_the_fields_that_are_wanted(ask):
    fields = ["content", "generation_settings/n_predict", "prompt"]
    found = ask("/completion", prompt=PROMPT, n_predict=5, response_fields=fields)
    assert set(found) == set(fields)
    assert found["generation_settings/n_predict"] == 5
    assert found["prompt"].endswith(PROMPT)


@pytest.mark.parametrize("streamed", [False, True])
def test_probabilities(server, ask, streamed):
    body = {"prompt": PROMPT, "n_probs": 10, "temperature": 0.0, "n_predict": 5}
    *parts, end = stream(server, **body) if streamed else [ask("/completion", **body)]
    found = [one for part in parts or [end] for one in part["completion_probabilities"]]
    assert len(found) == 5
    for token in found:
        assert token["id"] > 0
        assert bytes(token["bytes"]).decode() == token["token"]
        assert token["logprob"] <= 0.0
        assert len(token["top_logprobs"]) == 10
        assert token["top_logprobs"][0]["id"] == token["id"]  # greedy
        assert token["top_logprobs"][0]["logprob"] == pytest.approx(token["logprob"], abs=1e-5)
        assert all(other["id"] >= 0 and other["logprob"] <= 0 for other in token["top_logprobs"])


@pytest.mark.parametrize("streamed", [False, True])
def test_probabilities_after_the_samplers(server, ask, streamed):
    body = {"prompt": PROMPT, "n_probs": 10, "temperature": 1.5, "min_p": 0.0, "n_predict": 6}
    body |= {"post_sampling_probs": True, "top_k": 5, "top_p": 1.0, "seed": 3}
    *parts, end = stream(server, **body) if streamed else [ask("/completion", **body)]
    found = [one for part in parts or [end] for one in part["completion_probabilities"]]
    assert end["generation_settings"]["post_sampling_probs"] is True
    assert len(found) == 6
    for token in found:
        assert token.keys() == {"id", "token", "bytes", "prob", "top_probs"}
        probs = [one["prob"] for one in token["top_probs"]]
        assert len(probs) == 5  # top_k
        assert sum(probs) == pytest.approx(1.0)
        assert probs == sorted(probs, reverse=True)
        assert {one["id"]: one["prob"] for one in token["top_probs"]}[token["id"]] == token["prob"]


def test_after_the_samplers_a_greedy_token_is_sure(ask):
    found = ask("/completion", prompt=PROMPT, n_probs=3, temperature=0, n_predict=2, post_sampling_probs=True)
    for token in found["completion_probabilities"]:
        assert token["prob"] == 1.0
        assert [(one["id"], one["prob"]) for one in token["top_probs"]] == [(token["id"], 1.0)]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_samplers_of_llama_cpp(server, ask, path):
    """XTC leaves out the likeliest token, and temperature 0 takes the next one: it was the likeliest but one."""
    body = {"temperature": 0, "max_tokens": 1}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": PROMPT}

    def answer(**more):
        found = ask(path, **body, **more)
        choice = found.get("choices", [found])[0]
        return choice.get("content") or choice.get("text") or choice["message"]["content"]

    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.0}  # all but the least likely one of three
    assert answer() == answer(samplers=["top_k", "temperature"], top_k=3) == answer(**xtc, samplers="kt")
    assert answer() != answer(**xtc, top_k=3, samplers=["top_k", "xtc", "temperature"])


def test_samplers_are_reported(ask):
    given = {
        "top_n_sigma": 2.0,
        "xtc_probability": 0.1,
        "xtc_threshold": 0.2,
        "dynatemp_range": 0.3,
        "dynatemp_exponent": 1.5,
        "adaptive_target": 0.4,
        "adaptive_decay": 0.5,
        "min_keep": 2,
        "dry_multiplier": 0.8,
        "dry_base": 1.6,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 100,
        "dry_sequence_breakers": ["\n", "."],
        "samplers": ["dry", "top_k", "xtc", "temperature"],
    }
    reported = ask("/completion", prompt=PROMPT, n_predict=1, **given)["generation_settings"]
    assert {name: reported[name] for name in given} == given
    reported = ask("/completion", prompt=PROMPT, n_predict=1)["generation_settings"]
    assert reported["samplers"][:3] == ["penalties", "dry", "top_n_sigma"]
    assert reported["dry_sequence_breakers"] == ["\n", ":", '"', "*"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dry_multiplier", "much"),
        ("dry_base", 0.5),
        ("dry_sequence_breakers", "none"),
        ("dry_sequence_breakers", ["a"] * 65),
        ("dry_penalty_last_n", 2**31),
        ("xtc_probability", 2),
        ("samplers", "kk"),
        ("samplers", ["top_k"] * 65),
        ("top_n_sigma", [1]),
        ("adaptive_decay", 1.0),
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_sampler_that_makes_no_sense(ask, path, name, value):
    assert ask(path, 400, prompt="a", max_tokens=1, **{name: value})["error"]["message"].startswith(name)


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_bias_of_tokens_and_of_texts(server, ask, as_object, as_text):
    first = ask("/completion", prompt=PROMPT, n_predict=1, temperature=0, return_tokens=True)
    piece = server.host.model.piece(first["tokens"][0]).decode()
    assert server.host.model.tokenize(piece.encode(), False, False)[-1:] == first["tokens"]
    key = piece if as_text else first["tokens"][0]
    bias = {key: -100} if as_object else [[key, False]]
    found = ask("/completion", prompt=PROMPT, n_predict=12, temperature=0, return_tokens=True, logit_bias=bias)
    assert not set(first["tokens"]) & set(found["tokens"])


@pytest.mark.parametrize("bias", [5, "a", [[1]], [[1, "a"]], [[1, None]], [[1.5, 1]], {"5": True}, [[10**6, 1]]])
def test_a_bias_that_makes_no_sense(ask, bias):
    assert "logit_bias" in ask("/completion", 400, prompt="a", logit_bias=bias)["error"]["message"] or bias == [
        [10**6, 1]
    ]


def test_the_end_token_can_be_ignored(server, ask):
    sure = {token: 100 for token in server.host.model.end_tokens.tolist()}
    found = ask("/completion", prompt=PROMPT, n_predict=9, logit_bias=sure)
    assert (found["stop_type"], found["tokens_predicted"]) == ("eos", 0)
    found = ask("/completion", prompt=PROMPT, n_predict=9, logit_bias=sure, ignore_eos=True)
    assert (found["stop_type"], found["tokens_predicted"]) == ("limit", 9)
    reported = {one["token"]: one["bias"] for one in found["generation_settings"]["logit_bias"]}
    assert reported == dict.fromkeys(server.host.model.end_tokens.tolist())  # None: it never comes


def test_a_stop_string(server, ask):
    text = ask("/completion", prompt=PROMPT, temperature=0, n_predict=12)["content"]
    found = ask("/completion", prompt=PROMPT, temperature=0, n_predict=12, stop=["never said", text[4:7]])
    assert found["content"] == text[: text.index(text[4:7])]
    assert (found["stop_type"], found["stopping_word"]) == ("word", text[4:7])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n_probs", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_an_answer_that_ends_inside_a_character_has_all_its_tokens(server, ask, n, n_probs, streamed):
    body = {"prompt": "x", "grammar": 'root ::= "\u65e5\u672c"', "n_predict": n, "n_probs": n_probs, "temperature": 0}
    if streamed:
        *parts, whole = stream(server, **body)
        found = {"content": "".join(part["content"] for part in parts)}
        for name in ("tokens", "completion_probabilities"):
            found[name] = [one for part in parts for one in part.get(name, ())]
        found["tokens_predicted"] = whole["tokens_predicted"]
    else:
        found = ask("/completion", return_tokens=True, **body)
    assert found["content"] == "\u65e5\u672c"[: n // 3]
    assert found["tokens_predicted"] == len(found["tokens"]) == n
    reported = found.get("completion_probabilities", [])
    assert bytes(b for one in reported for b in one["bytes"]) == ("\u65e5\u672c".encode()[:n] if n_probs else b"")
    assert [one["id"] for one in reported] == (found["tokens"] if n_probs else [])


def test_a_stop_string_that_begins_the_answer_leaves_its_tokens(ask):
    found = ask("/completion", prompt="x", grammar='root ::= "ab"', stop=["ab"], return_tokens=True, n_predict=9)
    assert found["stopping_word"] == "ab" and found["content"] == ""
    assert len(found["tokens"]) == found["tokens_predicted"] > 0


def test_an_answer_that_fills_the_context_is_truncated(server, ask):
    with running(n_seq=1, n_ctx=128) as small:
        found = small.http.post("/completion", json={"prompt": "Hi", "n_predict": -1, "ignore_eos": True}).json()
        assert found["truncated"] is True
        assert found["tokens_evaluated"] + found["tokens_predicted"] == small.host.n_ctx


def test_penalties_look_back_as_far_as_requested(ask):
    given = {"prompt": "a", "n_predict": 24, "temperature": 0, "repeat_penalty": 1e6, "return_tokens": True}
    all_of_it = ask("/completion", **given, repeat_last_n=-1)["tokens"]
    assert len(set(all_of_it)) == len(all_of_it)
    nothing = ask("/completion", **given, repeat_last_n=0)["tokens"]
    assert nothing == ask("/completion", **given | {"repeat_penalty": 1.0})["tokens"]
    ask("/completion", 400, prompt="a", repeat_last_n=-2)


def test_a_token_that_is_streamed_has_its_timings(server, ask):
    chunks = stream(server, "/v1/completions", prompt=PROMPT, max_tokens=3, timings_per_token=True)
    assert all("predicted_per_second" in chunk["timings"] for chunk in chunks)
    assert all("timings" in one for one in stream(server, prompt=PROMPT, n_predict=3, timings_per_token=True))


# ---- sequences ----


def test_a_sequence_is_chosen_saved_and_restored(server, ask):
    france, germany = "What is the capital of France?", "What is the capital of Germany?"
    first = ask("/completion", prompt=france, id_slot=1, n_predict=4, temperature=0)
    assert first["id_slot"] == 1
    assert first["timings"]["prompt_n"] == first["tokens_evaluated"]
    saved = ask("/slots/1?action=save", filename="slot1.bin")
    assert saved["n_saved"] == first["tokens_cached"]
    assert saved["n_written"] == (server.folder / "slot1.bin").stat().st_size
    assert server.folder.stat().st_mode & 0o077 == 0
    expected = ask("/completion", prompt=germany, id_slot=1, n_predict=4, temperature=0)
    n_new = expected["timings"]["prompt_n"]
    assert 0 < n_new < expected["tokens_evaluated"]
    server.erase()
    restored = ask("/slots/0?action=restore", filename="slot1.bin")
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = ask("/completion", prompt=germany, id_slot=0, n_predict=4, temperature=0)
    assert again["timings"]["prompt_n"] == n_new
    assert again["content"] == expected["content"]
    ask("/slots/0?action=erase")
    assert ask("/completion", prompt=germany, id_slot=0, n_predict=1)["timings"]["cache_n"] == 0


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a" * 200, "/etc/passwd", "a\n", "nowhere.bin", None])
def test_a_file_of_another_place_is_refused(server, ask, name):
    assert ask("/slots/0?action=restore", 400, filename=name)["error"]["param"] == "filename"


def test_a_damaged_file_is_refused(server, ask):
    ask("/completion", prompt=PROMPT, id_slot=0, n_predict=1)
    ask("/slots/0?action=save", filename="whole.bin")
    data = (server.folder / "whole.bin").read_bytes()
    for n in (0, 7, 40, len(data) - 1):
        (server.folder / "cut.bin").write_bytes(data[:n])
        ask("/slots/1?action=restore", 400, filename="cut.bin")
    assert ask("/completion", prompt=PROMPT, id_slot=1, n_predict=1)["stop"] is True


@pytest.mark.parametrize("key", ["header", "pages", "weights"])
def test_a_file_of_another_model_is_refused(server, ask, key):
    ask("/completion", prompt=PROMPT, id_slot=0, n_predict=1)
    ask("/slots/0?action=save", filename="own.bin")
    state = LlamaState.load(server.folder / "own.bin")
    replace(state, identity={**state.identity, key: "0" * 64}).save(server.folder / "other.bin")
    message = ask("/slots/0?action=restore", 400, filename="other.bin")["error"]["message"]
    assert "it belongs to another model of the same name, 'pylongctx-tiny' (llama" in message
    ask("/slots/0?action=restore", filename="own.bin")


def test_an_empty_sequence_cannot_be_saved(ask):
    assert "holds nothing" in ask("/slots/0?action=save", 400, filename="a")["error"]["message"]


def test_a_prompt_can_be_evaluated_again(ask):
    for reuse, n_cached in ((True, 0), (False, 0), (True, 1)):
        found = ask("/completion", prompt=PROMPT, n_predict=1, cache_prompt=reuse)
        assert (found["timings"]["cache_n"] > 0) == n_cached
    for seq in (2, -2):
        assert ask("/completion", 400, prompt="a", id_slot=seq)["error"]["param"] == "id_slot"


# ---- facts and texts ----


def test_the_defaults_are_reported(server, ask):
    props = server.http.get("/props").json()
    assert ".gguf" in props["model_path"]
    assert props["default_generation_settings"]["n_ctx"] == 512
    params = props["default_generation_settings"]["params"]
    assert (params["seed"], params["temperature"], params["top_k"], params["n_predict"]) == (42, 0.8, 40, 64)
    given = ask("/completion", prompt="a", n_predict=1)["generation_settings"]
    assert {name: given[name] for name in params if name != "n_predict"} == {
        name: value for name, value in params.items() if name != "n_predict"
    }


def test_tokens_come_with_their_pieces(server, ask):
    content = "This is a test string with unicode \u5abd and emoji \U0001f917"
    found = ask("/tokenize", content=content, with_pieces=True)["tokens"]
    assert [token["id"] for token in found] == ask("/tokenize", content=content)["tokens"]
    spelled = b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in (token["piece"] for token in found))
    assert spelled.decode().strip() == content
    assert all(token["piece"] for token in found)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_conversation_without_the_begin_of_an_answer(ask, wanted):
    messages = [{"role": "user", "content": "What is today?"}]
    prompt = ask("/apply-template", messages=messages, add_generation_prompt=wanted)["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n") == wanted
    ask("/v1/chat/completions", 200 if wanted else 400, messages=messages, add_generation_prompt=wanted, max_tokens=1)


# ---- the sum of it ----


def test_metrics_have_histograms(server, ask):
    before = server.metric("time_to_first_token_seconds_count")
    ask("/completion", prompt=PROMPT, n_predict=4)
    stream(server, prompt=PROMPT, n_predict=4)
    assert server.metric("time_to_first_token_seconds_count") == before + 2
    assert server.metric("time_to_first_token_seconds_sum") > 0
    assert server.metric("time_per_output_token_seconds_count") >= 1
    assert server.metric('http_request_seconds_count{route="/completion"}') >= 2


def test_penalties_count_the_prompt_where_the_server_was_told_so(server, monkeypatch):
    post = poster(server)
    likeliest = server.host.tokens("It")
    asked = {"prompt": "It was the best", "n_predict": 1, "temperature": 0.0, "logit_bias": [[likeliest[0], 99.0]]}

    def first(**more):
        return post("/completion", **asked, repeat_last_n=-1, return_tokens=True, **more)["tokens"]

    assert first() == first(repeat_penalty=1e6) == likeliest
    monkeypatch.setattr(server.host, "penalizes_prompt", True)
    assert first() == likeliest != first(repeat_penalty=1e6)
