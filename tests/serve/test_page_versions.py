"""Versions of answers and questions, continued answers, answers that repeat themselves, and several at once."""

import pytest
from needs import need
from page import COUNT, TEMPLATE, Keys
from serving import forced, running

need("server", "fastapi", "httpx")

TEXT = "It was the best of times, it was the"


@pytest.fixture(scope="module")
def server():
    with running(n_ctx=4096, n_seq=2, chat_format=TEMPLATE) as server:
        yield server


def turn(page, where, label):
    """Click an arrow of the last message of a kind."""
    page.all(where)[-1].find_element("css selector", f"[title='{label} version']").click()


def test_again_keeps_the_former_answer(page):
    page.open(temperature="2", max_tokens="12", seed="1")
    first = page.ask(TEXT)
    page.run("localStorage['pylongctx:settings'] = JSON.stringify({ temperature: '2', max_tokens: '12', seed: '2' })")
    page.reload()
    page.click("Again")
    page.until(lambda: page.version() == "2/2")
    second = page.answered()
    assert second != first
    turn(page, ".answer", "Previous")
    page.until(lambda: page.answer() == first)
    page.ask("and then", 2)
    page.reload()
    page.until(lambda: len(page.all(".answer")) == 2)
    assert page.all(".answer > .text")[0].get_property("textContent") == first
    page.find(".answer [title='Next version']").click()
    page.until(lambda: len(page.all(".answer")) == 1)
    assert page.answer() == second


def test_an_edited_message_is_a_branch_and_what_followed_stays(page):
    page.ask("It was the best")
    last = page.ask("it was the worst", 2)
    page.click("Edit")
    page.find(".user textarea").send_keys(" of times", Keys.ENTER)
    page.until(lambda: page.questions() == ["It was the best of times"])
    page.answered()
    assert page.sent()[-1]["messages"] == [{"role": "user", "content": "It was the best of times"}]
    turn(page, ".user", "Previous")
    page.until(lambda: page.questions() == ["It was the best", "it was the worst"])
    assert page.answer() == last
    page.reload()
    page.until(lambda: page.questions() == ["It was the best", "it was the worst"])


def test_escape_leaves_a_message_as_it_was(page):
    page.ask("It was the best")
    page.click("Edit")
    page.find(".user textarea").send_keys(" of times", Keys.ESCAPE)
    assert page.questions() == ["It was the best"]
    assert not page.find(".user .versions").is_displayed()


def test_an_answer_that_was_cut_continues(page, server, monkeypatch):
    page.open(temperature="0", max_tokens="8")
    first = page.ask(TEXT)
    page.click("Continue")
    page.until(lambda: len(page.answer()) > len(first))
    both = page.answered()
    assert both.startswith(first)
    page.open(temperature="0", max_tokens="16")
    assert page.ask(TEXT) == both
    messages = [body["messages"] for body in page.sent()]
    assert [message["role"] for message in messages[1]] == ["user", "assistant"]
    assert page.sent()[1]["continue_final_message"] is True


def test_a_stopped_answer_continues_and_one_that_ended_does_not(page, server, monkeypatch):
    page.open(temperature="0", max_tokens="3000")
    forced(server, monkeypatch, COUNT)
    page.send(TEXT)
    page.until(lambda: page.all(".answer > .text") and page.answer())
    page.find("#stop").click()
    stopped = page.answered()
    forced(server, monkeypatch, " and the end.")
    page.click("Continue")
    page.until(lambda: "and the end." in page.answer())
    assert page.answered().split() == [*stopped.split(), "and", "the", "end."]
    assert not [button for button in page.all(".answer button") if button.text == "Continue" and button.is_displayed()]
    assert "stopped" not in page.text(".stats")


def test_a_stopped_answer_without_a_text_is_written_again_in_its_place(page, server):
    page.open(temperature="0", max_tokens="4")
    with server.held():
        page.send(TEXT)
        page.until(lambda: page.all(".answer.running"))
        page.find("#text").send_keys(Keys.ESCAPE)
        page.until(lambda: not page.all(".answer.running"))
    page.click("Again")
    page.until(page.answer)
    page.answered()
    assert not page.find(".answer .versions").is_displayed()


# ---- loops ----


def test_an_answer_that_repeats_itself_is_stopped(page, server, monkeypatch):
    page.open(temperature="0")
    forced(server, monkeypatch, "It begins. " + "The sea is wide and the sky is blue. " * 100)
    page.ask(TEXT)
    assert "the answer repeats itself" in page.text(".trouble")
    assert page.answer().count("The sea") < 30
    page.until(lambda: not any(slot["is_processing"] for slot in server.http.get("/slots").json()))
    page.reload()
    page.until(lambda: "the answer repeats itself" in page.text(".trouble"))
    page.find(".trouble button").click()
    assert page.find("#settings").is_displayed()


@pytest.mark.parametrize(
    ("pieces", "is_loop"),
    [
        ([5, 6, 7] * 22, True),
        ([*range(66)], False),
        ([1] * 63, False),
        ([1] * 64, True),
        ([*range(128)] * 4, True),
        ([*range(129)] * 4, False),
        ([*range(50)] * 3, False),
        ([9, *[1, 2] * 31], False),
    ],
)
def test_the_rule_of_loops_is_that_of_the_terminal(page, pieces, is_loop):
    from pylongctx.chat.loops import is_loop as rule

    assert rule(pieces) == is_loop
    script = "window.result = module.isLoop(args)"
    page.run_module("loops.js", script, *map(str, pieces))
    assert page.run("return window.result") == is_loop


# ---- several at once ----


def test_another_conversation_is_answered_at_the_same_time(page, server, monkeypatch):
    page.open(temperature="0")
    forced(server, monkeypatch, COUNT)
    page.send("One")
    page.until(lambda: page.all(".answer > .text") and page.answer())
    page.send("more")
    page.until(lambda: "This conversation is being answered" in page.text("#notice"))
    assert page.find("#text").get_property("value") == "more"
    page.find("#new").click()
    page.send("Two")
    page.until(lambda: page.questions() == ["Two"] and page.answer())
    assert len(page.all("#conversations .busy")) == 2
    page.find("#stop").click()
    page.answered()
    assert len(page.all("#conversations .busy")) == 1
    page.find("#conversations li:nth-child(2) button").click()
    page.until(lambda: page.questions() == ["One"])
    page.find("#stop").click()
    page.answered()
    assert page.all("#conversations .busy") == []


def test_a_reader_who_waits_for_a_sequence_sees_it(page, server):
    page.open(temperature="0", max_tokens="4")
    with server.held():
        for text in ("One", "Two", "Three"):
            page.find("#new").click()
            page.send(text)
            page.until(lambda text=text: page.questions() == [text])
        assert page.text(".progress") == "Waiting: the server answers another message first"
    page.until(lambda: page.answer())
    page.until(lambda: not page.all("#conversations .busy"))
