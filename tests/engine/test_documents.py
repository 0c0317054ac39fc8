"""Documents: texts that are read by themselves, and placed in prompts (pylongctx/engine/documents.py)."""

import random

import numpy as np
import pytest
from hybrid_files import path_of
from llamas import EXACT, F32, TEXT, new
from serving import running
from session import assert_same

from pylongctx import LlamaRAMCache
from pylongctx.engine import documents
from pylongctx.engine.documents import EDGE_TOKENS, FRESH_TOKENS, MIN_SPAN
from pylongctx.errors import LctxError

ONE = (TEXT * 6).decode()
TWO = "A tale of two cities, the period was so far like the present period that nobody knew it. " * 8
SPANS = "full,spans=4"
MARKS = ("</s>", "<s>", "<unk>")  # the embedded model's special tokens


@pytest.fixture
def llm(embedded_f32):
    with new(embedded_f32, method=SPANS, n_ctx=1024, logits_all=False, **F32) as opened:
        yield opened


def ask(llm, prompt, **options):
    """Return the usage of an answer of one token, and how many tokens were evaluated for it."""
    before = llm.session.n_evaluated
    answer = llm(prompt, max_tokens=1, temperature=0, **options)
    return answer["usage"]["prompt_tokens"], llm.session.n_evaluated - before


def test_texts_in_any_order_are_not_read_again(llm):
    one, two = llm.read(ONE, name="one"), llm.read(TWO, name="two")
    assert [document.name for document in llm.documents] == ["one", "two"]
    for start, first, second in (("Read.", one, two), ("Now read this:", two, one), ("", two, two)):
        llm.reset()
        n, n_evaluated = ask(llm, f"{start} {first}\n\n{second} Who?")
        fresh = n - len(first.tokens) - len(second.tokens) + 2 * FRESH_TOKENS
        assert abs(n_evaluated - fresh) <= 4 * EDGE_TOKENS
        assert [place.document for place in llm.session.placed] == [first, second]


def test_the_same_text_at_its_own_place_is_exact(llm, embedded_f32):
    one = llm.read(ONE)
    llm.reset()
    _, n_evaluated = ask(llm, f"{one} It was")
    assert n_evaluated < FRESH_TOKENS + 2 * EDGE_TOKENS
    assert llm.session.context.n_exact() == llm.session.n_tokens
    with new(embedded_f32, method="full", n_ctx=1024, **F32) as full:
        ask(full, f"{one} It was")
        want = full.session.last_logits
        np.testing.assert_allclose(llm.session.last_logits, want, atol=1e-5 * np.abs(want).max())


def test_a_text_elsewhere_changes_little(llm):
    """Compared with reading everything: the model still continues with the text that it has read."""
    one = llm.read(ONE)
    prompt = f"Read this. {one} It was the best of times, it was the worst of"
    llm.reset()
    ask(llm, prompt)
    placed = llm.session.last_logits.copy()
    llm.forget(one)
    ask(llm, prompt)
    read = llm.session.last_logits
    assert placed.argmax() == read.argmax()
    assert np.abs(placed - read).max() < 0.2 * np.abs(read).max()


def test_who_did_not_ask_gets_what_was_read_in_place(llm, embedded_f32):
    one = llm.read(ONE)
    prompt = f"Read this. {one} Who?"
    ask(llm, prompt)
    state = llm.save_state()
    llm.forget(one)
    for load in (False, True):
        if load:
            llm.load_state(state)
        n, n_evaluated = ask(llm, prompt)
        assert n_evaluated > n - 40, "rows of the document were used"
        got = llm.session.last_logits
        with new(embedded_f32, method="full", n_ctx=1024, **F32) as full:
            ask(full, prompt)
            np.testing.assert_allclose(got, full.session.last_logits, atol=1e-4 * np.abs(got).max())


@pytest.mark.parametrize("how", ["checkpoint", "cache"])
def test_states_with_documents_give_others_what_was_read_in_place(llm, embedded_f32, how):
    one = llm.read(ONE)
    prompt = f"Read this. {one} Who?"
    llm.set_cache(LlamaRAMCache() if how == "cache" else None)
    ask(llm, prompt)
    if how == "checkpoint":
        llm.checkpoint()
    llm.forget(one)
    llm.reset()
    n, n_evaluated = ask(llm, prompt)
    assert n - 40 < n_evaluated < n  # what comes before the document is in the state
    with new(embedded_f32, method="full", n_ctx=1024, **F32) as full:
        ask(full, prompt)
        assert_same(llm.session.last_logits, full.session.last_logits, 1e-4)


def test_what_is_held_with_its_documents_is_used_again(llm):
    one = llm.read(ONE)
    ask(llm, f"Read this. {one} Who?")
    assert ask(llm, f"Read this. {one} Who? What?")[1] < 8
    two = llm.read(TWO)
    ask(llm, f"Read this. {two} Who?")
    assert ask(llm, f"Read this. {two}")[1] <= 2 + EDGE_TOKENS


def test_going_back_into_a_document_reads_the_rest(llm):
    one = llm.read(ONE)
    prompt = f"Read this. {one} Who?"
    n, _ = ask(llm, prompt)
    llm.n_tokens = 100
    assert n - 105 <= ask(llm, prompt)[1] <= n - 100


def test_messages_name_documents(llm):
    llm.read(ONE, name="one")
    question = {"type": "text", "text": "Who?"}
    for part in ({"type": "document", "name": "one"}, {"type": "document", "text": ONE}):
        llm.reset()
        before = llm.session.n_evaluated
        answer = llm.create_chat_completion([{"role": "user", "content": [part, question]}], max_tokens=1)
        if "name" in part:
            assert llm.session.n_evaluated - before < answer["usage"]["prompt_tokens"] - 100
        assert len(llm.session.placed) == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "document", "name": "nobody"}, "no document 'nobody'"),
        ({"type": "document"}, "a 'text', a 'name', or both"),
        ({"type": "document", "text": 5}, "a 'text', a 'name', or both"),
        ({"type": "document", "text": ONE, "source": {}}, "no field 'source'"),
        ({"type": "document", "text": "short"}, f"at least {MIN_SPAN} tokens"),
    ],
)
def test_parts_that_are_not_documents(llm, part, message):
    with pytest.raises(ValueError, match=message):
        llm.create_chat_completion([{"role": "user", "content": [part]}], max_tokens=1)


def test_refusals(embedded_model, llm):
    with pytest.raises(ValueError, match="does not fit"):
        llm.read(ONE * 20)
    with pytest.raises(ValueError, match="no document"):
        llm.forget("one")
    for method in ("full", "longheads", None):
        with new(embedded_model, method=method) as other, pytest.raises(ValueError, match="full,spans=N"):
            other.read(ONE)


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_windows_and_recurrent_states_are_refused(tmp_path, name):
    with new(path_of(tmp_path, name), method=SPANS) as llm, pytest.raises(ValueError, match="recurrent states"):
        llm.read(ONE)


def test_as_many_as_there_are_spans(embedded_f32):
    with new(embedded_f32, method="full,spans=2", n_ctx=1024, **F32) as llm:
        one, two = llm.read(ONE), llm.read(TWO)
        ask(llm, f"Read. {one} {two} Who?")
        assert [place.document for place in llm.session.placed] == [max(one, two, key=lambda d: len(d.tokens))]


def test_all_rows_are_evaluated_where_they_are_wanted(llm):
    one = llm.read(ONE)
    answer = llm(f"Read. {one} Who?", max_tokens=1, echo=True, logprobs=1)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) > len(one.tokens)
    assert llm.session.placed == ()


def test_the_oldest_leave_where_bytes_are_limited(llm):
    one, two = llm.read(ONE), llm.read(TWO)
    documents = llm._solo.engine.documents
    documents.limit = two.rows.nbytes + one.rows.nbytes + 4096
    llm.read(ONE)  # is used again
    three = llm.read(TWO.replace("present", "past"))
    assert llm.documents == [one, three] and documents.bytes <= documents.limit
    llm.reset()
    ask(llm, f"Read. {two} {one} Who?")
    assert [place.document for place in llm.session.placed] == [one]


def test_a_document_that_cannot_be_read_is_read_in_place(llm, monkeypatch):
    one = llm._solo.engine.documents.add(ONE)
    context = llm.session.context
    monkeypatch.setattr(context, "slice", lambda *_: (_ for _ in ()).throw(LctxError("broken", 1)))
    n, _ = ask(llm, f"Read. {one} Who?")
    assert llm.session.n_tokens == n and llm.session.placed == ()
    monkeypatch.undo()
    assert llm.read(ONE).rows is not None


def test_an_interrupted_reading_is_done_again(llm):
    def stop(done, total):
        raise KeyboardInterrupt

    one = llm._solo.engine.documents.add(ONE)
    llm.session.progress = stop
    with pytest.raises(KeyboardInterrupt):
        llm.read(ONE)
    llm.session.progress = None
    ask(llm, f"Read. {one} Who?")
    assert llm.session.placed[0].document is one


def test_an_adapter_makes_documents_be_read_again(llm):
    one = llm.read(ONE)
    llm._solo.engine.documents.clear()
    llm.reset()
    ask(llm, f"Read. {one} Who?")
    assert one.rows is not None and len(llm.session.placed) == 1


def test_where_a_prompt_has_a_document(llm):
    one = llm.read(ONE)
    find, own = llm._solo.engine.documents.find, one.tokens
    other = np.full(40, own.max() + 1, np.int32)
    (place,) = find(np.concatenate([other, own, other]))
    assert (place.first, place.end, place.skip) == (40 + FRESH_TOKENS, 40 + len(own), FRESH_TOKENS + len(one.start))
    edges = own.copy()
    edges[[0, 3, -1, -4]] = other[0]
    assert len(find(np.concatenate([other, edges, other]))) == 1
    assert find(np.concatenate([own, other]))[0].end == len(own)
    assert find(own)[0].end == len(own) - 1  # the last token's logits are wanted
    damaged = own.copy()
    damaged[len(own) // 2] = other[0]
    assert find(damaged) == () == find(own[:MIN_SPAN]) == find(own[: len(own) // 2]) == find(other[:3])
    assert find(own, "somebody") == ()
    assert documents.PROBE + EDGE_TOKENS <= FRESH_TOKENS


def test_no_run_of_a_document_is_too_short_to_be_looked_for(llm):
    one = llm.read(ONE)
    find, own = llm._solo.engine.documents.find, one.tokens
    other = np.full(40, own.max() + 1, np.int32)
    for n in range(1, 41):
        for first in range(len(own) - n + 1):
            run = own[first : first + n]
            assert find(run) == find(np.concatenate([other[n:], run])) == find(np.concatenate([run, other[n:]])) == ()


@pytest.mark.parametrize("seed", range(2))
def test_short_prompts_are_answered_as_by_an_empty_context(llm, embedded_f32, seed):
    """Of 1 to 40 tokens, which end as a document at some place of it does."""
    one, chance = llm.read(ONE), random.Random(seed)
    with new(embedded_f32, method="full", n_ctx=1024, **F32) as full:
        for n in chance.sample(range(1, 41), 40):
            first, n_own = chance.randrange(len(one.tokens) - n), chance.randrange(n + 1)
            prompt = [300] * (n - n_own) + one.tokens[first : first + n_own].tolist()
            ask(llm, prompt)
            full.reset()
            full.eval(prompt)
            assert llm.session.placed == ()
            assert_same(llm.session.last_logits, full.session.last_logits, EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_orders_of_documents_are_answered_as_by_an_empty_context(llm, embedded_f32, seed):
    """Whatever was asked before, and in whatever order they were read."""
    chance = random.Random(seed)
    texts = {"one": ONE, "two": TWO, "three": ONE.replace("best", "first")}
    with new(embedded_f32, method=SPANS, n_ctx=1024, **F32) as fresh:
        for opened in (llm, fresh):
            for name in chance.sample([*texts], 3):
                opened.read(texts[name], name=name)
        for _ in range(6):
            names, words = chance.choices([*texts], k=chance.randrange(4)), ["Read.", "", "\n\n", "Who? "]
            prompt = "".join(texts[name] + chance.choice(words) for name in names)
            prompt = chance.choice(words) + prompt + chance.choice(["", "Which times?", "It"]) or "It"
            ask(llm, prompt)
            fresh.reset()
            ask(fresh, prompt)
            held, want = ([(p.first, p.end, p.document.name) for p in opened.session.placed] for opened in (llm, fresh))
            assert held == want
            assert [name for _, _, name in held] == names
            assert llm.session.tokens.tolist() == fresh.session.tokens.tolist()
            assert_same(llm.session.last_logits, fresh.session.last_logits, EXACT)


def marked(mark):
    """Return a text with a mark at its ends, where it is looked for, and elsewhere."""
    return f"{mark}It was {mark}{mark} {mark}the best" + ONE + f"x{mark} " + ONE + mark


@pytest.mark.parametrize("mark", MARKS)
def test_a_document_with_the_text_of_a_special_token_is_placed(llm, embedded_f32, mark, caplog):
    """In a chat it is text, as where it is read, whether it was read before or not."""
    one = llm.read(marked(mark), name="one")
    (token,) = llm.tokenize(mark.encode(), add_bos=False, special=True)
    content = [{"type": "document", "name": "one"}, {"type": "text", "text": f"Who{mark}?"}]
    before = llm.session.n_evaluated
    usage = llm.create_chat_completion([{"role": "user", "content": content}], max_tokens=1)["usage"]
    (place,) = llm.session.placed
    assert place.document is one
    assert llm.session.n_evaluated - before < usage["prompt_tokens"] - len(one.tokens) + FRESH_TOKENS + 2 * EDGE_TOKENS
    held = llm.session.tokens.tolist()
    assert held[place.first : place.end] == one.tokens[FRESH_TOKENS:][: place.end - place.first].tolist()
    assert token not in held[1:]  # the other part of the message is text, too
    with new(embedded_f32, method=SPANS, n_ctx=1024, **F32) as fresh:
        content[0] = {"type": "document", "text": one.text}
        assert fresh.chat_tokens([{"role": "user", "content": content}]) == held
        fresh.create_chat_completion([{"role": "user", "content": content}], max_tokens=1)
        assert_same(llm.session.last_logits, fresh.session.last_logits, EXACT)
    assert "evaluated again" not in caplog.text


@pytest.mark.parametrize("mark", MARKS)
def test_a_document_in_other_tokens_is_named_in_the_log(llm, embedded_f32, mark, caplog):
    """In a plain prompt the text of a special token is one: then all is read again, and the log says so once."""
    one, two = llm.read(marked(mark), name="one"), llm.read(TWO, name="two")
    with new(embedded_f32, method="full", n_ctx=1024, **F32) as full:
        for prompt in (f"Read. {one} Who?", f"Look: {one}"):
            for opened in (llm, full):
                ask(opened, prompt)
            assert llm.session.placed == ()
            assert_same(llm.session.last_logits, full.session.last_logits, EXACT)
    ask(llm, f"Read. {two} Who?")
    logs = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(logs) == 1
    assert logs[0].startswith(f"document 'one' is evaluated again in a prompt: its {len(one.tokens)} tokens are not in")


def test_a_document_that_a_template_rewrites_is_named_in_the_log(embedded_f32, caplog):
    template = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    with new(embedded_f32, method=SPANS, n_ctx=1024, chat_format=template, **F32) as llm:
        messages = [{"role": "user", "content": [{"type": "document", "text": ONE, "name": "one"}]}]
        for _ in range(2):
            done = llm.create_chat_completion(messages, max_tokens=1, temperature=0.0)
        assert done["choices"][0]["finish_reason"] == "length"
        assert llm.session.placed == ()
    logs = [record.getMessage() for record in caplog.records if "evaluated again" in record.getMessage()]
    assert logs == ["document 'one' is evaluated again in a prompt: the chat template changes its text"]


def test_an_earlier_process_has_read_it(embedded_f32, tmp_path):
    text = ONE * 3
    options = {"method": SPANS, "n_ctx": 1024, "kv_store": tmp_path / "kv"} | F32
    with new(embedded_f32, **options) as llm:
        rows = llm.read(text).rows
        ask(llm, f"Read this. {text} Who?")  # whose rows are not stored
    with new(embedded_f32, **options) as llm:
        before = llm.session.n_evaluated
        np.testing.assert_array_equal(llm.read(text).rows, rows)
        assert llm.session.n_evaluated - before < 64
        ask(llm, f"Read this. {text} Who?")
        n_evaluated = llm.session.n_evaluated
        llm.forget(text)
        n, _ = ask(llm, f"Read this. {text} Who?")
        assert llm.session.n_evaluated - n_evaluated > n - 64


def test_a_server_counts_documents_as_it_places_them():
    """Those of who asks, with the text of special tokens, by text and by name."""
    with running(1, n_ctx=2048, method=SPANS, settings={"api_keys": ("ann", "bob")}) as server:

        def post(path, key, part, status=200):
            content = [{"type": "text", "text": "Read."}, {"type": "document", "name": "one", **part}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            found = server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
            assert found.status_code == status, found.text
            return found.json()

        for part in ({"text": marked("</s>")}, {}):
            usage = post("/v1/chat/completions", "ann", part)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > len(marked("")) // 8
            counted = post("/v1/chat/completions/input_tokens", "ann", part)
            assert counted == {"input_tokens": usage["prompt_tokens"]}
            assert marked("</s>").strip() in post("/apply-template", "ann", part)["prompt"]
        for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/apply-template"):
            assert "no document 'one'" in post(path, "bob", {}, 400)["error"]["message"]


def test_a_server_reads_a_document_once():
    with running(2, n_ctx=2048, method=SPANS) as server:
        used = []
        for start in ("Read this.", "Please read:", "Look:"):
            content = [{"type": "text", "text": start}, {"type": "document", "text": ONE, "name": "one"}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
            used.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert min(used) > 100
        source = {"type": "text", "media_type": "text/plain", "data": ONE}
        content = [{"type": "document", "source": source, "title": "One"}, {"type": "text", "text": "Who?"}]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = server.http.post("/v1/messages", json=asked).raise_for_status().json()
        assert answer["usage"]["cache_read_input_tokens"] > 100
        content[0]["source"] = {"type": "url", "url": "http://nowhere"}
        assert server.http.post("/v1/messages", json=asked).status_code == 400
        body["messages"][0]["content"] = [{"type": "document", "name": "nobody"}]
        assert "no document" in server.http.post("/v1/chat/completions", json=body).json()["error"]["message"]
