"""A chat turn evaluates its new tokens only, whatever tokens the model has chosen for its words."""

import pytest
from chat_templates import TOOLS
from llamas import EXACT, F32, new
from session import assert_same

from pylongctx import Llama, LlamaRAMCache
from pylongctx.chat.history import prompt_tokens
from upstream import files


@pytest.fixture
def counted(embedded_model, monkeypatch):
    """Return a function from arguments to a Llama and the list of numbers of tokens that it evaluates."""
    opened = []

    def open_counted(path=embedded_model, **kwargs):
        llm, counts = new(path, **{"n_ctx": 4096} | kwargs), []
        decode = llm.session.context.decode
        monkeypatch.setattr(
            llm.session.context, "decode", lambda tokens, *args: counts.append(len(tokens)) or decode(tokens, *args)
        )
        opened.append(llm)
        return llm, counts

    yield open_counted
    for llm in opened:
        llm.close()


def turn(llm, messages, text, **kwargs):
    messages.append({"role": "user", "content": text})
    whole = {3 + byte: -100.0 for byte in range(128, 256)}  # no bytes that are no text: they are not in the message
    done = llm.create_chat_completion(messages, **{"max_tokens": 12, "temperature": 1.5, "logit_bias": whole} | kwargs)
    messages.append({"role": "assistant", "content": done["choices"][0]["message"]["content"]})
    return done["usage"]


@pytest.mark.parametrize("method", ["full", "selfextend", "longheads", "corm,window=64,recent=64"])
def test_forty_turns_cost_what_is_new(counted, method):
    llm, counts = counted(method=method)
    messages = [{"role": "system", "content": "Tell me a story."}]
    for i in range(40):
        counts.clear()
        known = llm.n_tokens
        usage = turn(llm, messages, f"And what happened on day {i}?", seed=i)
        assert sum(counts) == llm.n_tokens - known
        assert llm.n_tokens - usage["prompt_tokens"] <= usage["completion_tokens"]
        assert 0 < usage["prompt_tokens"] - known < 90
    assert llm.n_tokens > 1000


def test_the_tokens_of_an_answer_stay_what_they_were(embedded_model):
    """Random tokens are not those that the tokenizer makes of their text, and are reused all the same."""
    with new(embedded_model) as llm:
        odd = [
            1,
            *llm.tokenize(b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False, True),
            *b"\x60\x61\x62",
        ]
        text = llm._model.detokenize(odd[1:]).decode().removeprefix(" ")
        prompt = f"{text}<|im_end|>\n<|im_start|>user\nmore"
        found = prompt_tokens(llm._model, prompt, odd)
        plain = prompt_tokens(llm._model, prompt, [])
        assert found[: len(odd)] == odd
        assert plain[: len(odd)] != odd
        assert llm.detokenize(found) == llm.detokenize(plain)


def test_another_conversation_is_not_mixed_in(llm):
    def tokens(text, known):
        return prompt_tokens(llm._model, text, known)

    first = tokens("<|im_start|>user\nThe cat sat", [])
    for other in ("<|im_start|>user\nThe cats ran", "Something else", "<|im_start|>user\nThe c"):
        assert tokens(other, first) == tokens(other, [])
    assert tokens("<|im_start|>user\nThe cat sat", first) == first


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "qwen2", "phi-3"])
def test_real_vocabularies(name, tmp_path_factory):
    folder = files(tmp_path_factory.getbasetemp())
    with Llama(str(folder / f"ggml-vocab-{name}.gguf"), vocab_only=True, verbose=False) as llm:
        marks = {"llama-spm": ("<s>", "</s>"), "llama-bpe": ("<|start_header_id|>", "<|eot_id|>")}
        start, end = marks.get(name, ("<|im_start|>", "<|im_end|>") if name == "qwen2" else ("<|user|>", "<|end|>"))
        said = f"{start}user\nHello w\u00f6rld{end}\n{start}assistant\nSure"
        known = prompt_tokens(llm._model, said, [])
        pieces = {llm._model.piece(token): token for token in range(llm.n_vocab())}
        odd = [*known, pieces[b"l"], pieces[b"y"]]
        prompt = f"{said}ly{end}\n{start}user\nAnd then?{end}\n"
        found = prompt_tokens(llm._model, prompt, odd)
        assert found[: len(odd)] == odd
        assert llm.detokenize(found, special=True) == llm.detokenize(
            prompt_tokens(llm._model, prompt, []), special=True
        )


def test_asking_again_costs_the_last_answer_only(counted):
    llm, counts = counted(chat_format=TOOLS)
    messages = []
    for i in range(4):
        turn(llm, messages, f"Question {i}?", temperature=0.0)
    last = messages[:-1]
    counts.clear()
    again = llm.create_chat_completion(last, max_tokens=12, temperature=0.0)
    assert again["choices"][0]["message"]["content"] == messages[-1]["content"]
    assert sum(counts) < 60


def test_a_cache_brings_a_conversation_back(counted):
    llm, counts = counted()
    llm.set_cache(LlamaRAMCache())
    messages = []
    for i in range(3):
        turn(llm, messages, f"Question {i}?", temperature=0.0)
    llm.create_chat_completion([{"role": "user", "content": "Something else"}], max_tokens=2)
    counts.clear()
    usage = turn(llm, messages, "And now?", temperature=0.0)
    assert sum(counts) < usage["prompt_tokens"] / 2


def test_the_same_answer_as_without_reuse(counted, embedded_f32):
    llm, _ = counted(path=embedded_f32, **F32)
    messages = []
    for i in range(3):
        turn(llm, messages, f"Question {i}?", seed=i)
    warm, held = llm.scores[-1].copy(), llm.session.tokens.tolist()
    llm.reset()
    llm.eval(held)
    assert_same(llm.scores[-1], warm, EXACT)
    messages.append({"role": "user", "content": "And then?"})
    tokens = prompt_tokens(llm._model, llm.apply_template(messages), llm.session.tokens.tolist())
    assert tokens[: llm.n_tokens] == list(llm.session.tokens)[: len(tokens)]
    llm.reset()
    llm.eval(tokens)
    cold = llm.scores[-1].copy()
    llm.reset()
    llm.eval(tokens[:-5])
    llm.eval(tokens[-5:])
    assert_same(llm.scores[-1], cold, EXACT)
