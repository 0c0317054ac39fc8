"""The tokens of a prompt are those of its text, whatever was evaluated before; reuse is where tokens agree."""

import random

import pytest
from chat_templates import TOOLS
from llamas import EXACT, F32, new
from serving import running
from session import assert_same
from upstream import files

from pylongctx import Llama, LlamaRAMCache
from pylongctx.chat.conversation import find_marks, prompt_tokens
from pylongctx.engine.prefix import longest_prefix

RULE = "corm,window=64,recent=64"
KEYS = ("ann", "bob")


def turn(llm, messages, text, **kwargs):
    messages.append({"role": "user", "content": text})
    whole = {3 + byte: -100.0 for byte in range(128, 256)}  # only bytes that are text: others are not in the message
    done = llm.create_chat_completion(messages, **{"max_tokens": 12, "temperature": 1.5, "logit_bias": whole} | kwargs)
    messages.append({"role": "assistant", "content": done["choices"][0]["message"]["content"]})
    return done["usage"]


def spelled(llm, messages):
    """Return tokens of a prompt that its tokenizer does not make: letter by letter, between its special tokens."""
    tokens = []
    for token in llm.chat_tokens(messages):
        piece = llm.detokenize([token]).decode("utf-8", "ignore")
        tokens += [one for letter in piece for one in llm.tokenize(letter.encode(), add_bos=False)] or [token]
    return tokens


# ---- what a turn costs ----


@pytest.mark.parametrize("method", ["full", "selfextend", "longheads", RULE])
def test_forty_turns_cost_what_does_not_agree(embedded_model, method):
    """An answer in tokens that the tokenizer would not make is evaluated again, once; all else stays."""
    with new(embedded_model, n_ctx=4096, method=method) as llm:
        messages, n_odd = [{"role": "system", "content": "Tell me a story."}], 0
        for i in range(40):
            held, before = llm.session.tokens.tolist(), llm.session.n_evaluated
            usage = turn(llm, messages, f"And what happened on day {i}?", seed=i)
            agreed = longest_prefix(held, llm.session.tokens)
            assert len(held) - agreed <= 12
            cost = llm.session.n_evaluated - before - (llm.n_tokens - agreed)
            assert cost == 0 or (method == RULE and agreed < len(held))  # a rule goes back to its last eviction
            assert usage["prompt_tokens"] == len(llm.chat_tokens(messages[:-1]))
            n_odd += agreed < len(held)
        assert 0 < n_odd < 40
        assert llm.n_tokens > 1000


def test_asking_again_costs_the_last_answer_only(embedded_model):
    with new(embedded_model, n_ctx=4096, chat_format=TOOLS) as llm:
        messages = []
        for i in range(4):
            turn(llm, messages, f"Question {i}?", temperature=0.0)
        before = llm.session.n_evaluated
        again = llm.create_chat_completion(messages[:-1], max_tokens=12, temperature=0.0)
        assert again["choices"][0]["message"]["content"] == messages[-1]["content"]
        assert llm.session.n_evaluated - before < 60


def test_a_cache_brings_a_conversation_back(embedded_model):
    with new(embedded_model, n_ctx=4096) as llm:
        llm.set_cache(LlamaRAMCache())
        messages = []
        for i in range(3):
            turn(llm, messages, f"Question {i}?", temperature=0.0)
        llm.create_chat_completion([{"role": "user", "content": "Something else"}], max_tokens=2)
        before = llm.session.n_evaluated
        usage = turn(llm, messages, "And now?", temperature=0.0)
        assert llm.session.n_evaluated - before < usage["prompt_tokens"] / 2


# ---- what earlier requests do not change ----


WILD = {"temperature": 1.5}  # odd answers
LONGEST = 400  # letters of a conversation that are sent: what a context has room for


def conversation(chance):
    """Return messages of a few turns, whose texts begin as those of others."""
    roles = ["system"] * chance.randrange(2) + ["user", "assistant"] * chance.randrange(1, 4)
    starts, ends = ("The cat sat", "The cats", "It was", "hello"), ("", " ran.", " 12", "ly")
    return [{"role": role, "content": chance.choice(starts) + chance.choice(ends)} for role in roles[:-1]]


@pytest.mark.parametrize("seed", range(4))
def test_no_earlier_request_changes_a_prompt(embedded_f32, seed):
    """Other chats, their tokens by letters, odd answers, states: tokens and logits are those of an empty Llama."""
    chance, states = random.Random(seed), []
    with new(embedded_f32, **F32) as llm, new(embedded_f32, **F32) as fresh:
        llm.set_cache(LlamaRAMCache() if seed % 2 else None)
        messages = conversation(chance)
        for _ in range(12):
            kind = chance.choice(["chat", "go on", "letters", "text", "state"])
            if kind == "chat" or len(messages) > 8:
                messages = conversation(chance)
            elif kind == "go on":
                turn(llm, messages, "And then?", seed=seed)
                messages.append({"role": "user", "content": "Why?"})
            elif kind == "letters":
                llm(spelled(llm, messages), max_tokens=chance.randrange(3))
            elif kind == "text":
                llm(llm.apply_template(messages)[: chance.randrange(5, 90)], max_tokens=2, temperature=1.5)
            elif states:
                llm.load_state(chance.choice(states))
            done = llm.create_chat_completion(messages, max_tokens=1, temperature=0.0)
            fresh.reset()
            fresh.eval(fresh.tokenize(fresh.apply_template(messages).encode(), special=True))
            assert done["usage"]["prompt_tokens"] == fresh.n_tokens
            assert llm.session.tokens.tolist() == fresh.session.tokens.tolist() == llm.chat_tokens(messages)
            assert_same(llm.session.last_logits, fresh.session.last_logits, EXACT)
            states.append(llm.save_state())


@pytest.fixture(scope="module")
def server(embedded_f32):
    pytest.importorskip("fastapi")
    with running(n_seq=2, path=embedded_f32, settings={"api_keys": KEYS}, **F32) as server:
        yield server


@pytest.mark.parametrize("seed", range(3))
def test_no_earlier_request_changes_a_prompt_of_a_server(server, embedded_f32, seed):
    """Of any owner, in any sequence, with and without cache_prompt: usage, counts and texts are those of a new one."""
    chance = random.Random(seed)

    def post(path, **body):
        found = server.http.post(path, json=body, headers={"Authorization": f"Bearer {chance.choice(KEYS)}"})
        assert found.status_code == 200, found.text
        return found.json()

    with new(embedded_f32, **F32) as fresh:
        messages = conversation(chance)
        for _ in range(15):
            where = {"id_slot": chance.choice([-1, 0, 1]), "cache_prompt": chance.random() < 0.7, "temperature": 0}
            kind = chance.choice(["chat", "go on", "letters", "mixed"])
            if kind == "chat" or len(messages) > 8:
                messages = conversation(chance)
            elif kind == "go on":
                said = post("/v1/chat/completions", messages=messages, max_tokens=12, **where | WILD | {"seed": seed})
                messages += [said["choices"][0]["message"], {"role": "user", "content": "Why?"}]
            elif kind == "letters":
                post("/v1/completions", prompt=spelled(fresh, messages)[:LONGEST], max_tokens=2, **where)
            else:
                post("/completion", prompt=[*spelled(fresh, messages)[:20], "ly sat"], n_predict=2, **where)
            fresh.reset()
            want = fresh.create_chat_completion(messages, max_tokens=4, temperature=0.0)
            got = post("/v1/chat/completions", messages=messages, max_tokens=4, **where)
            n = len(fresh.tokenize(fresh.apply_template(messages).encode(), special=True))
            assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"] == n
            assert got["choices"][0]["message"]["content"] == want["choices"][0]["message"]["content"]
            asked = {"messages": messages}
            assert post("/v1/chat/completions/input_tokens", **asked) == {"input_tokens": n}
            system = {"system": messages[0]["content"]} if messages[0]["role"] == "system" else {}
            asked = {"messages": messages[len(system) :], **system}
            assert post("/v1/messages/count_tokens", **asked) == {"input_tokens": n}
            usage = post("/v1/messages", **asked, max_tokens=1)["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n


# ---- documents in a prompt ----


def plain_in(prompt, text, marks):
    """Return where the special tokens of a text are in a prompt that has the text once or several times."""
    found, start = [], prompt.find(text)
    while start >= 0:
        found += [(start + first, start + end) for first, end in find_marks(text, marks)]
        start = prompt.find(text, start + len(text))
    return found


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "qwen2", "phi-3"])
def test_a_document_is_text_in_real_vocabularies(name, tmp_path_factory):
    """Its tokens are those of the text alone, except for those at its ends; special tokens around it are special."""
    folder = files(tmp_path_factory.getbasetemp())
    with Llama(str(folder / f"ggml-vocab-{name}.gguf"), vocab_only=True, verbose=False) as llm:
        model, chance = llm._model, random.Random(1)
        marks = chance.sample(sorted(model.special_texts), 2)
        for mark in marks:
            assert model.is_special(*model.tokenize(mark.encode(), False, True))
            text = " ".join(chance.choice([mark, "the cat", "h\u00f6rt 12,", "\n\n", "x" + mark]) for _ in range(24))
            for before, after in ((f"{mark}user\n", mark), ("", f"\n{mark}"), (f"{mark}a {mark}b ", ""), ("a ", " b")):
                prompt = before + text + after
                found = prompt_tokens(model, prompt, plain_in(prompt, text, model.special_texts))
                assert sum(map(model.is_special, found[len(model.start) :])) == (before + after).count(mark)
                alone = model.tokenize(text.encode(), False, False)[8:-8]
                assert any(found[i : i + len(alone)] == alone for i in range(len(found)))
                plain = [*model.start, *model.tokenize((before + after).encode(), False, True)]
                assert prompt_tokens(model, before + after) == plain


def test_where_a_special_token_is_text(embedded_model):
    """At the beginning and the end of a document, several times, and where one is begun in it."""
    with new(embedded_model, vocab_only=True) as llm:
        model, mark, token = llm._model, "</s>", llm.token_eos()
        for text in (f"{mark}q", f"q{mark}", f"{mark}q{mark * 2}z{mark}", f" {mark}q ", "q"):
            for prompt, n in ((text, 0), (mark + text, 1), (f"{text} {text}{mark}", 1), (f"{mark} a{text}b{mark}", 2)):
                found = prompt_tokens(model, prompt, plain_in(prompt, text, model.special_texts))
                assert found.count(token) == n, (text, prompt)
                back = llm.detokenize(found, special=True).decode().removeprefix("<s>")
                assert back.replace(" ", "") == prompt.replace(" ", "")
