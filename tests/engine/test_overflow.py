"""A chat or an answer that is longer than its context: what leaves, what stays, and that nothing is evaluated twice."""

import logging

import numpy as np
import pytest
from llamas import EXACT, F32, TEXT, new, script
from session import assert_same

from pylongctx import LlamaPromptLookupDecoding, LlamaRAMCache
from pylongctx.engine.prefix import longest_prefix
from pylongctx.errors import PromptTooLong

N_CTX = 256
SYSTEM = {"role": "system", "content": "Tell me a story."}
TEXTUAL = {3 + byte: -100.0 for byte in range(128, 256)}  # tokens of bytes that are not text
ENDLESS = {2: -100.0}  # the embedded model's end token


def evicting(path, **kwargs):
    return new(path, **{"n_ctx": N_CTX, "overflow": "evict_middle"} | kwargs)


@pytest.fixture
def llm(embedded_model):
    with evicting(embedded_model) as llm:
        yield llm


def said(i):
    return [
        {"role": "user", "content": f"And what happened on day {i}?"},
        {"role": "assistant", "content": f"On day {i} nothing happened."},
    ]


def history(n):
    """Return a conversation of ``n`` turns that waits for an answer."""
    return [SYSTEM, *(message for i in range(n) for message in said(i))][:-1]


def dropped(usage):
    details = usage.get("prompt_tokens_details", {})
    return details.get("dropped_tokens", 0), details.get("dropped_turns", 0)


def watch_drops(llm, monkeypatch):
    """Return the runs that leave the cache, as they do."""
    runs, drop = [], llm.session.context.drop

    def watched(first, end, seq=0):
        refusal = drop(first, end, seq)
        assert refusal == ""
        runs.append((first, end))
        return refusal

    monkeypatch.setattr(llm.session.context, "drop", watched)
    return runs


# ---- chats ----


def test_a_chat_far_beyond_the_context_evaluates_what_is_new(llm, monkeypatch):
    """Forty turns of which the context holds three; what an odd answer costs is what its tokens do not agree in."""
    runs, messages, n_gone = watch_drops(llm, monkeypatch), [SYSTEM], []
    for i in range(40):
        messages.append(said(i)[0])
        held, evaluated = llm.session.tokens.copy(), llm.session.n_evaluated
        runs.clear()
        done = llm.create_chat_completion(messages, max_tokens=12, temperature=1.5, seed=i, logit_bias=TEXTUAL)
        messages.append(done["choices"][0]["message"])
        for run in runs:
            held = np.delete(held, slice(*run))
        agreed = longest_prefix(held, llm.session.tokens)
        assert len(held) - agreed <= 12
        assert llm.session.n_evaluated - evaluated == llm.n_tokens - agreed
        assert llm.session.n_past == llm.n_tokens < N_CTX
        assert done["usage"]["prompt_tokens"] <= N_CTX - 12
        n_gone.append(dropped(done["usage"]))
    assert n_gone[:3] == [(0, 0)] * 3
    assert n_gone[3:] == sorted(set(n_gone[3:]))
    held = llm.detokenize(llm.session.tokens.tolist()).decode()
    assert held.startswith("<|im_start|>system\nTell me a story.<|im_end|>\n<|im_start|>user\n")
    assert "on day 39?" in held and "on day 0?" not in held and "on day 30?" not in held


def test_turns_leave_whole(llm):
    """What the model has read is the template of a shorter conversation."""
    usage = llm.create_chat_completion(history(12), max_tokens=8, temperature=0.0)["usage"]
    n = dropped(usage)[1]
    assert 3 < n < 11
    shorter = llm.apply_template([SYSTEM, *history(12)[1 + 2 * n :]])
    tokens = llm.session.tokens[: usage["prompt_tokens"]].tolist()
    assert llm.detokenize(tokens).decode() == shorter
    whole = len(llm.tokenize(llm.apply_template(history(12)).encode(), special=True))
    assert dropped(usage)[0] == whole - usage["prompt_tokens"]
    longer = llm.tokenize(llm.apply_template([SYSTEM, *history(12)[1 + 2 * (n - 1) :]]).encode(), special=True)
    assert len(tokens) <= N_CTX - 8 < len(longer)  # no turn left that need not


@pytest.mark.parametrize(("chat_format", "n_ctx"), [("llama-2", 256), ("llama-3", 512), ("chatml", 1024)])
def test_every_template_continues_from_what_stays(embedded_model, chat_format, n_ctx):
    """Where the system prompt is a part of the first turn, with calls of tools, with markers that are plain text."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    calls = chat_format == "chatml"
    with evicting(embedded_model, n_ctx=n_ctx, chat_format=chat_format) as llm:
        messages, counts = [SYSTEM], []
        for i in range(11):
            question, answer = said(i)
            messages.append(question)
            before = llm.session.n_evaluated
            more = {"tools": tools} if calls else {}
            usage = llm.create_chat_completion(messages, max_tokens=4, temperature=0.0, **more)["usage"]
            counts.append((llm.session.n_evaluated - before, dropped(usage)[1]))
            call = {"id": f"call{i}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            looked = {"role": "tool", "tool_call_id": f"call{i}", "content": "nothing " * 12}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, looked][: 2 * calls]
            messages.append(answer)
        assert counts[1][1] == 0
        assert counts[-1][1] > 2
        assert max(n for n, _ in counts[2:]) <= counts[1][0] + 2  # one digit more


def test_the_last_turn_stays_or_is_an_error(llm):
    long = {"role": "user", "content": "word " * 150}
    usage = llm.create_chat_completion([*history(3), said(3)[1], long], max_tokens=4)["usage"]
    assert dropped(usage)[1] == 3
    with pytest.raises(PromptTooLong) as caught:
        llm.create_chat_completion([*history(3), said(3)[1], {**long, "content": "word " * 600}])
    assert caught.value.n_ctx == N_CTX
    assert llm.create_chat_completion(history(1), max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_text_that_is_too_long_to_be_tokenized_leaves_too(llm, monkeypatch):
    monkeypatch.setattr("pylongctx.engine.session.UNCHECKED_BYTES", 0)
    n_bytes = llm.session.model.longest_piece * N_CTX + 1
    messages = [SYSTEM, {"role": "user", "content": "x" * n_bytes}, *history(1)[1:]]
    n, n_turn = dropped(llm.create_chat_completion(messages, max_tokens=4)["usage"])
    assert n_turn == 1
    assert n > 0


# ---- exactness ----


def test_an_answer_that_lacks_nothing_is_exact(embedded_model, llm):
    """Rows that have read what left serve only answers that lack turns themselves."""
    llm.create_chat_completion(history(12), max_tokens=8, temperature=0.0)
    assert llm.session.seam is None  # nothing that was read has left
    llm.create_chat_completion([*history(12), said(11)[1], *said(12)[:1]], max_tokens=8, temperature=0.0)
    seam, held = llm.session.seam, llm.session.tokens.copy()
    assert 0 < seam < len(held) - 64
    before = llm.session.n_evaluated
    llm(held.tolist(), max_tokens=1)
    assert llm.session.n_evaluated - before == len(held) - seam
    assert llm.session.seam is None
    with new(embedded_model, method="full,spans=2", n_ctx=N_CTX) as fresh:
        fresh(held.tolist(), max_tokens=1)
        assert_same(llm.session.last_logits, fresh.session.last_logits, EXACT)


def test_rows_that_stay_are_what_they_were(embedded_model):
    """After a drop the next token sees the rows of the whole text, at the distances of the shorter one."""
    with evicting(embedded_model, **F32) as llm, evicting(embedded_model, **F32) as other:
        tokens = np.array(llm.tokenize(TEXT * 8)[:200], np.int32)
        for one in (llm, other):
            one.eval(tokens[:150])
        assert llm.session.drop(10, 90) == ""
        assert other.session.context.drop(10, 90) == ""
        assert llm.session.tokens.tolist() == np.delete(tokens[:150], slice(10, 90)).tolist()
        assert llm.session.n_past == llm.n_tokens == 70
        with pytest.raises(RuntimeError, match="no logits"):
            _ = llm.session.last_logits
        assert (llm.session.context.state() == other.session.context.state()).all()
        llm.eval(tokens[150:160])
        dropped_logits = llm.session.last_logits.copy()
        other.reset()
        other.eval(np.delete(tokens[:160], slice(10, 90)))
        again = other.session.last_logits
        assert dropped_logits.argmax() == again.argmax()
        assert 1e-3 < abs(dropped_logits - again).max() / abs(again).max() < 0.5


def test_a_second_run_leaves_at_the_seam(llm):
    """Two spans are enough where what left begins as what comes after it."""
    tokens = np.array([1, *[9, 8, 7] * 40], np.int32)
    llm.eval(tokens)
    assert llm.session.drop(10, 16) == ""
    assert llm.session.drop(19, 25) == ""  # [10, 16) is the same text
    assert llm.session.seam == 10
    llm.session.input_ids[20:40] = 5
    assert "spans=3" in llm.session.drop(30, 37)
    assert llm.n_tokens == llm.session.n_past == len(tokens) - 12


def test_logits_of_all_tokens_move_with_them(embedded_model):
    with evicting(embedded_model, logits_all=True) as llm:
        llm.eval(llm.tokenize(TEXT * 4)[:100])
        rows = llm.scores.copy()
        assert llm.session.drop(20, 50) == ""
        assert (llm.scores == np.delete(rows, slice(20, 50), axis=0)).all()


# ---- while an answer is written ----


def test_an_answer_continues_beyond_the_context(llm, monkeypatch):
    """Turns leave one after the other, and the answer is what it would be: the logits processor sees all of it."""
    runs, text = watch_drops(llm, monkeypatch), " It was a day as any other." * 14
    force = script(llm, text)
    done = llm.create_chat_completion(
        history(3), max_tokens=400, temperature=0.0, logits_processor=force, logprobs=True
    )
    choice = done["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].strip() == text.strip()
    assert len(choice["logprobs"]["content"]) == done["usage"]["completion_tokens"]
    assert dropped(done["usage"]) == (sum(end - first for first, end in runs), len(runs))
    assert 0 < len(runs) < 3
    held = llm.detokenize(llm.session.tokens.tolist()).decode()
    assert held.startswith("<|im_start|>system\nTell me a story.<|im_end|>\n<|im_start|>user\n")
    before = llm.session.n_evaluated
    messages = [*history(3), choice["message"], *said(3)[:1]]
    llm.create_chat_completion(messages, max_tokens=1, temperature=0.0)
    assert llm.session.n_evaluated - before < 60  # the next turn continues from there


def test_an_answer_ends_where_it_fills_the_context_alone(llm):
    done = llm.create_chat_completion(history(3), temperature=0.0, logit_bias=ENDLESS)
    assert done["choices"][0]["finish_reason"] == "length"
    assert dropped(done["usage"])[1] == 2
    alone = len(llm.tokenize(llm.apply_template([SYSTEM, *said(2)[:1]]).encode(), special=True))
    assert done["usage"]["completion_tokens"] == N_CTX - alone
    assert llm.create_chat_completion(history(1), max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("drafts", [False, True])
def test_a_completion_loses_half_of_what_follows_its_first_tokens(embedded_model, monkeypatch, drafts):
    draft = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=6) if drafts else None
    with evicting(embedded_model, draft_model=draft) as llm:
        runs, prompt = watch_drops(llm, monkeypatch), llm.tokenize(TEXT)[:40]
        text = " It was the best of times, it was the worst of times." * 40
        done = llm(prompt, max_tokens=600, temperature=0.0, logits_processor=script(llm, text, end=False))
        assert done["usage"]["completion_tokens"] == 600
        assert text.startswith(done["choices"][0]["text"])
        assert {first for first, _ in runs} == {5}
        assert [end for _, end in runs] == [130] * len(runs)
        assert dropped(done["usage"]) == (sum(end - first for first, end in runs), 0)
        assert llm.session.tokens[:5].tolist() == prompt[:5]


def test_drafts_change_no_answer_beyond_the_context(embedded_model):
    answers = []
    for draft in (None, LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=6)):
        with evicting(embedded_model, draft_model=draft, **F32) as llm:
            done = llm(TEXT.decode(), max_tokens=400, temperature=0.0, logit_bias=ENDLESS)
            answers.append((done["choices"][0]["text"], done["usage"]))
    assert answers[0] == answers[1]


def test_a_completion_without_a_limit_ends_where_the_context_does(llm):
    done = llm(TEXT.decode(), max_tokens=None, temperature=0.0, logit_bias=ENDLESS)
    assert done["usage"]["total_tokens"] == N_CTX
    assert done["choices"][0]["finish_reason"] == "length"
    assert dropped(done["usage"]) == (0, 0)
    with pytest.raises(PromptTooLong):
        llm("word " * 300, max_tokens=1)


def test_a_grammar_holds_an_answer_beyond_the_context(llm):
    grammar = 'root ::= ("ab" "c" | "d")+'
    done = llm("x", max_tokens=500, temperature=1.0, seed=1, grammar=grammar, logit_bias=ENDLESS)
    text = done["choices"][0]["text"]
    assert done["usage"]["completion_tokens"] == 500
    assert set(text.replace("abc", "").replace("d", "").removesuffix("ab").removesuffix("a")) == set()


# ---- kept and written ----


def test_a_cache_of_states_takes_nothing_away(llm):
    """It has states that share more with a prompt than the sequence before the turns have left."""
    llm.set_cache(LlamaRAMCache(1 << 28))
    n_whole, messages = 0, [SYSTEM, *(message for i in range(12) for message in (said(i % 5)[0], said(i)[1]))]
    for n in range(1, 12):
        before = llm.session.n_evaluated
        usage = llm.create_chat_completion(messages[: 2 * n], max_tokens=4, temperature=0.0)["usage"]
        assert llm.session.n_evaluated - before < 80
        n_whole += dropped(usage) == (0, 0)
        assert len(llm.cache.cache_state) == n_whole  # what has read what left is in none
    assert 2 < n_whole < 7


def test_a_limit_of_memory_lets_turns_leave_too(embedded_model):
    with evicting(embedded_model, n_ctx=1024) as free:
        free.create_chat_completion(history(3), max_tokens=4)
        limit = free.kv_usage().bytes
    with evicting(embedded_model, n_ctx=1024, kv_limit=limit) as llm:
        done = llm.create_chat_completion(history(3), max_tokens=120, temperature=0.0, logit_bias=ENDLESS)
        assert done["usage"]["completion_tokens"] == 120
        assert dropped(done["usage"])[1] == 2
        assert llm.kv_usage().peak_bytes <= limit


def test_a_saved_sequence_knows_its_seam(embedded_model, llm):
    for n in (10, 11):
        llm.create_chat_completion(history(n), max_tokens=4, temperature=0.0)
    state, seam = llm.save_state(), llm.session.seam
    assert seam
    with evicting(embedded_model) as other:
        other.load_state(state)
        assert other.session.seam == seam
        before = other.session.n_evaluated
        other.create_chat_completion(history(12), max_tokens=4, temperature=0.0)
        assert other.session.n_evaluated - before < 80


def test_what_has_read_what_left_is_not_stored(embedded_model, tmp_path):
    """A later process answers from the store as if nothing had left."""
    with evicting(embedded_model, n_ctx=1024, kv_store=tmp_path) as llm:
        for n in (36, 40, 44):
            llm.create_chat_completion(history(n), max_tokens=4, temperature=0.0)
        assert llm.session.seam
        tokens = llm.session.tokens.tolist()
        assert len(tokens) > 600
    with evicting(embedded_model, n_ctx=1024, kv_store=tmp_path) as llm, evicting(embedded_model, n_ctx=1024) as plain:
        for one in (llm, plain):
            one(tokens, max_tokens=1, temperature=0.0)
        assert_same(llm.session.last_logits, plain.session.last_logits, EXACT)


def test_a_store_is_not_asked_for_more_than_stays(llm, monkeypatch):
    class Store:
        asked = 0

        def finder(self, owner):
            return self

        def covers(self, tokens, held):
            Store.asked += 1

        def planned(self, tokens, pieces):
            pass

    monkeypatch.setattr(llm._solo.engine._loader, "_library", Store())
    for n in (10, 11):
        llm.create_chat_completion(history(n), max_tokens=4, temperature=0.0)
    assert llm.session.seam
    assert Store.asked == 1


def test_the_log_says_why_an_answer_ends_early(llm, caplog, monkeypatch):
    monkeypatch.setattr(llm.session, "verbose", True)
    monkeypatch.setattr(llm.session.context, "drop", lambda *run: "no")
    with caplog.at_level(logging.INFO, "pylongctx"):
        done = llm.create_chat_completion(history(3), max_tokens=400, temperature=0.0, logit_bias=ENDLESS)
    assert done["choices"][0]["finish_reason"] == "length"
    assert "nothing can be evicted: no" in caplog.text
