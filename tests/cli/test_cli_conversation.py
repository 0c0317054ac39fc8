"""Conversations: what a turn costs, what is left of one that is stopped, saved and loaded ones."""

from itertools import islice

import pytest
from chat_templates import THINKING
from llamas import new

from pylongctx.cli.conversation import Conversation, forgets
from pylongctx.engine.prefix import longest_prefix
from pylongctx.errors import ContextFull
from pylongctx.methods import parse

STRIPPING = THINKING.replace("message.reasoning_content %}", "message.reasoning_content and loop.last %}")  # as Qwen3
CORM = "corm,window=64,recent=64"
METHODS = ["full", "selfextend", "longheads", CORM, "window,window=200"]
WORDS = 'root ::= [a-z ]+ "."'
ONE = {"n_threads": 1, "n_threads_batch": 1}


def never():
    return False


def said(pieces):
    return "".join(text for _, text in pieces)


@pytest.fixture
def talk(embedded_model):
    """Return a function that opens a conversation on the embedded model."""
    opened = []

    def open_one(method="full", n_ctx=4096, system="Tell me a story.", chat_format=None, **arguments):
        llm = new(embedded_model, n_ctx=n_ctx, method=method, chat_format=chat_format, **ONE)
        opened.append(llm)
        return Conversation(llm, system, {"max_tokens": 12, "temperature": 0.0} | arguments)

    yield open_one
    for llm in opened:
        llm.close()


# ---- what a turn costs ----


@pytest.mark.parametrize("method", METHODS)
def test_forty_turns_cost_what_is_new(talk, method):
    conversation = talk(method, grammar=WORDS)
    llm = conversation.llm
    for i in range(40):
        held, evaluated = llm.session.tokens.tolist(), llm.session.n_evaluated
        answer = said(conversation.ask(f"And what happened on day {i}?", never))
        turn, cost = conversation.turn, llm.session.n_evaluated - evaluated
        agreed = longest_prefix(held, llm.session.tokens)
        assert len(held) - agreed <= 12
        again = cost - (llm.n_tokens - agreed)  # the last answer, and how the template begins it
        assert again in range(25 if method == CORM else 1), i
        assert cost <= turn.n_prompt + turn.n_answer
        assert 0 < turn.n_prompt < 100
        assert 0 < turn.n_answer <= 12
        assert conversation.messages[-1] == {"role": "assistant", "content": answer}
    assert len(conversation.messages) == 81
    assert llm.n_tokens > 1500


@pytest.mark.parametrize("method", ["full", "longheads", CORM])
def test_thoughts_that_are_left_out_cost_the_last_turn_only(talk, method):
    """The next prompt differs where the thoughts began: there is the checkpoint of methods that forget."""
    grammar = 'root ::= "<think>\\n" [a-z ]{20,30} "\\n</think>\\n\\n" [a-z]{5,9}'
    conversation = talk(method, chat_format=STRIPPING, grammar=grammar, max_tokens=60, temperature=1.0, seed=3)
    for i in range(12):
        before = conversation.llm.session.n_evaluated
        kinds = {kind for kind, _ in conversation.ask(f"And on day {i}?", never)}
        assert kinds == {"reasoning_content", "content"}
        assert conversation.llm.session.n_evaluated - before < 200
    assert conversation.llm.n_tokens > 500


@pytest.mark.parametrize("method", ["full", "selfextend", CORM])
def test_another_answer_costs_the_answer_only(talk, method):
    conversation = talk(method)
    for i in range(6):
        said(conversation.ask(f"Question number {i}?", never))
    messages = [*conversation.messages]
    before = conversation.llm.session.n_evaluated
    again = said(conversation.ask_again(never))
    assert again == messages[-1]["content"]
    assert conversation.messages == messages
    assert conversation.turn.n_prompt <= 12  # where an answer begins
    assert conversation.llm.session.n_evaluated - before < 30


def test_which_methods_forget_what_was_said():
    assert [forgets(parse(method)) for method in METHODS] == [False, False, False, True, True]
    assert not forgets(None)


# ---- what is stopped ----


@pytest.mark.parametrize("method", ["full", "longheads", CORM])
def test_a_stopped_answer_is_part_of_the_conversation(talk, method):
    conversation, seen = talk(method, grammar=WORDS, max_tokens=40), []
    said(conversation.ask("Hello?", never))
    for _, text in conversation.ask("And then?", lambda: len(seen) >= 3):
        seen.append(text)
    assert conversation.turn.reason is None
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(seen)}
    before, known = conversation.llm.session.n_evaluated, conversation.llm.n_tokens
    said(conversation.ask("Go on.", never))
    assert conversation.llm.session.n_evaluated - before == conversation.llm.n_tokens - known
    assert conversation.turn.reason in ("stop", "length")


def test_a_message_without_an_answer_is_not_a_part_of_the_conversation(talk):
    conversation = talk()
    said(conversation.ask("Hello?", never))
    messages = [*conversation.messages]
    assert said(conversation.ask("And then?", lambda: True)) == ""
    assert conversation.messages == messages
    assert said(conversation.ask_again(lambda: True)) == ""
    assert conversation.messages == messages


def test_an_answer_that_is_dropped_halfway_leaves_a_conversation(talk):
    conversation = talk(grammar=WORDS, max_tokens=40)
    answer = conversation.ask("Hello?", never)
    begun = said(islice(answer, 2))
    answer.close()
    assert [message["content"] for message in conversation.messages] == ["Tell me a story.", "Hello?", begun]


def test_too_long_a_message_changes_nothing(talk):
    for method in ("full", CORM):
        conversation = talk(method, n_ctx=300)
        said(conversation.ask("Hello?", never))
        messages, n_tokens = [*conversation.messages], conversation.llm.n_tokens
        with pytest.raises(ContextFull, match=r"Requested tokens \(\d+\) exceed context window of 300"):
            said(conversation.ask("word " * 400, never))
        assert conversation.messages == messages
        assert conversation.llm.n_tokens == n_tokens


# ---- other conversations ----


@pytest.mark.parametrize("method", ["full", CORM])
def test_a_saved_conversation_continues(talk, tmp_path, method):
    first, second = talk(method), talk(method, system=None)
    for text in ("Hello?", "And then?"):
        said(first.ask(text, never))
    first.save(tmp_path / "chat")
    second.load(tmp_path / "chat")
    assert second.messages == first.messages
    assert said(second.ask("Go on.", never)) == said(first.ask("Go on.", never))
    assert second.turn.n_prompt == first.turn.n_prompt


def test_what_cannot_be_loaded_changes_nothing(talk, tmp_path, embedded_model):
    first, other, small = talk(), talk(CORM), talk(n_ctx=64)
    said(first.ask("Hello, hello, hello, what is the matter with you today, my friend?", never))
    said(other.ask("Hi", never))
    first.save(tmp_path / "chat")
    first.llm.save_state().save(tmp_path / "state")
    for conversation, name, message in (
        (other, "chat", "cannot be continued here: it was saved with method='full', this object has method='corm"),
        (small, "chat", "exceed context window of 64"),
        (other, "state", "holds no conversation"),
        (other, "missing", "No such file"),
    ):
        messages, n_tokens = [*conversation.messages], conversation.llm.n_tokens
        with pytest.raises((ValueError, OSError), match=message):
            conversation.load(tmp_path / name)
        assert (conversation.messages, conversation.llm.n_tokens) == (messages, n_tokens)


def test_another_method_reads_the_conversation(talk, embedded_model):
    conversation = talk()
    for text in ("Hello?", "And then?"):
        said(conversation.ask(text, never))
    with new(embedded_model, n_ctx=2048, method=CORM, **ONE) as llm:
        conversation.switch(llm)
        known = llm.n_tokens
        assert known > 50
        said(conversation.ask("Go on.", never))
        assert conversation.turn.n_prompt < 60
