"""What the browser keeps: after a reload, for two tabs, from an earlier version, and when it has no room."""

import json

import pytest
from needs import need
from page import COUNT, TEMPLATE, Keys, opened
from serving import forced, running

need("server", "fastapi", "httpx")

TEXT = "It was the best of times, it was the"
# what an earlier version kept
OLD = {
    "list": [{"id": "2", "title": "Second"}, {"id": "1", "title": "First"}],
    "1": {
        "id": "1",
        "messages": [
            {
                "role": "user",
                "content": "First",
                "files": [{"name": "a.txt", "text": "inside", "length": 6, "tokens": 2}],
            },
            {
                "role": "assistant",
                "content": "One",
                "reasoning": "",
                "stats": {"used": 9, "n_ctx": 10},
                "id": "chatcmpl-1",
            },
        ],
    },
    "2": {"id": "2", "messages": [{"role": "user", "content": "Second", "files": []}]},
}
KEPT = """
return new Promise((resolve, reject) => {
  const request = indexedDB.open("pylongctx");
  request.onerror = () => reject(request.error);
  request.onsuccess = () => {
    const messages = request.result.transaction("messages").objectStore("messages").getAll();
    messages.onsuccess = () => { request.result.close(); resolve(messages.result); };
  };
});
"""
# a browser that takes nothing into some stores
NO_ROOM = """
const names = [...arguments], put = IDBObjectStore.prototype.put;
IDBObjectStore.prototype.put = function (value) {
  if (names.includes(this.name)) throw new DOMException("full", "QuotaExceededError");
  return put.call(this, value);
};
"""


@pytest.fixture(scope="module")
def server():
    with running(n_ctx=8192, n_seq=2, chat_format=TEMPLATE) as server:
        yield server


def texts(page, n):
    page.until(lambda: len(page.all(".answer")) == n)
    return [element.get_property("textContent") for element in page.all(".answer > .text")]


def writing(page, server, monkeypatch):
    """Ask for an answer that does not end soon, and wait for its beginning."""
    page.open(temperature="0")
    forced(server, monkeypatch, COUNT)
    page.send(TEXT)
    page.until(lambda: page.all(".answer > .text") and page.answer())


# ---- one tab ----


def is_busy(server):
    return any(slot["is_processing"] for slot in server.http.get("/slots").json())


def test_a_reload_goes_on_with_the_answer(page, server, monkeypatch):
    writing(page, server, monkeypatch)
    for n in (400, 800):
        page.until(lambda n=n: len(page.answer()) > n)
        page.reload()
        page.until(lambda: page.all(".answer.running") and page.answer())
    assert is_busy(server)
    found = page.answered()
    assert found.strip() == COUNT
    assert "stopped" not in page.text(".stats")
    page.reload()
    assert texts(page, 1) == [found]
    assert [request["request"]["url"] for request in page.requests()].count(f"{server.url}/v1/chat/completions") == 1


def test_an_answer_that_goes_on_after_a_reload_is_stopped(page, server, monkeypatch):
    writing(page, server, monkeypatch)
    page.until(lambda: len(page.answer()) > 400)
    page.reload()
    page.until(lambda: page.all(".answer.running") and page.answer())
    page.find("#stop").click()
    found = page.answered()
    assert COUNT.startswith(found.strip())
    page.until(lambda: not is_busy(server))
    page.reload()
    assert texts(page, 1) == [found]


def test_a_reload_keeps_what_was_written_and_says_nothing_wrong(driver, monkeypatch):
    with running(n_ctx=8192, settings={"rejoin": 0.0}, chat_format=TEMPLATE) as server, opened(driver, server) as page:
        writing(page, server, monkeypatch)
        page.until(lambda: any(message["role"] == "assistant" and message["content"] for message in page.run(KEPT)))
        page.reload()
        page.until(lambda: page.all(".answer") and page.answer())
        assert "stopped" in page.text(".stats")
        assert not page.find(".trouble").is_displayed()
        assert not page.find("#notice").is_displayed()
        page.until(lambda: not is_busy(server))


def test_a_reload_opens_the_same_conversation(page):
    first = page.ask("It was the best of times")
    page.find("#new").click()
    page.ask("It was the worst of times")
    page.find("#conversations li:nth-child(2) button").click()
    page.until(lambda: page.questions() == ["It was the best of times"])
    page.reload()
    page.until(lambda: page.questions() == ["It was the best of times"])
    assert page.answer() == first


def test_a_draft_is_there_after_a_reload_in_its_conversation(page):
    page.ask("It was")
    page.find("#text").send_keys("not sent", Keys.SHIFT, Keys.ENTER, Keys.NULL, "yet")
    page.reload()
    page.until(lambda: page.find("#text").get_property("value") == "not sent\nyet")
    page.find("#new").click()
    assert page.find("#text").get_property("value") == ""
    page.find("#text").send_keys("another")
    page.find("#conversations button").click()
    page.until(lambda: page.find("#text").get_property("value") == "not sent\nyet")
    page.find("#text").send_keys(Keys.ENTER)
    page.answered(2)
    page.find("#new").click()
    assert page.find("#text").get_property("value") == "another"


def test_conversations_of_an_earlier_version_are_taken_over(page):
    for key, value in OLD.items():
        page.run("localStorage[`pylongctx:${arguments[0]}`] = arguments[1]", key, json.dumps(value))
    page.reload()
    page.until(lambda: len(page.all("#conversations li")) == 2)
    assert [element.text for element in page.all("#conversations li > :first-child")] == ["Second", "First"]
    page.find("#conversations li:nth-child(2) button").click()
    assert texts(page, 1) == ["One"]
    assert "a.txt" in page.text(".user .files")
    assert page.run("return Object.keys(localStorage)") == ["pylongctx:settings"]
    page.click("Again")
    page.until(lambda: "prompt" in page.text(".stats"))
    [body] = page.sent()
    assert body["messages"] == [{"role": "user", "content": "a.txt:\n\ninside\n\nFirst"}]


def test_files_that_the_browser_cannot_keep_are_named(page, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was the best of times. " * 70)
    page.run(NO_ROOM, "parts")
    page.add(path)
    page.ask("What is this?")
    page.until(lambda: "no room for the files" in page.text("#notice"))
    page.ask("And now?", 2)
    [body] = page.sent()[1:]
    assert "best of times" in body["messages"][0]["content"]  # this page has it still
    page.reload()
    assert texts(page, 2)
    assert "book.txt" in page.text(".user")
    page.click("Again")
    page.until(lambda: "book.txt was too large" in page.text("#notice"))
    assert texts(page, 2)


def test_a_browser_without_room_says_so_and_continues(page):
    page.run(NO_ROOM, "conversations", "messages", "parts")
    page.ask("It was")
    page.until(lambda: "no room for this conversation" in page.text("#notice"))
    page.ask("the best", 2)
    page.until(lambda: "context" in page.all(".stats")[-1].text)


def test_a_browser_that_keeps_nothing_says_so_and_continues(page, driver):
    script = {"source": "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); };"}
    made = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
    try:
        page.reload()
        page.until(lambda: "keeps nothing" in page.text("#notice"))
        page.ask("It was")
        page.ask("the best", 2)
        assert "context" in page.all(".stats")[-1].text
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


# ---- two tabs ----


@pytest.fixture
def tabs(page, driver):
    """Return functions that go to the first tab, and to a second one of the same page."""
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    second = driver.current_window_handle
    driver.switch_to.window(first)
    yield lambda: driver.switch_to.window(first), lambda: driver.switch_to.window(second)
    driver.switch_to.window(second)
    driver.close()
    driver.switch_to.window(first)


def test_two_tabs_keep_all_messages_and_show_them(page, tabs):
    first, second = tabs
    a = page.ask("Say A.")
    second()
    page.reload()
    assert texts(page, 1) == [a]
    b = page.ask("Say B.", 2)
    first()
    assert texts(page, 2) == [a, b]
    assert page.questions() == ["Say A.", "Say B."]
    c = page.ask("Say C.", 3)
    second()
    assert texts(page, 3) == [a, b, c]
    page.reload()
    assert texts(page, 3) == [a, b, c]


def test_messages_of_two_tabs_at_the_same_time_are_branches(page, tabs):
    first, second = tabs
    page.ask("Say A.")
    second()
    page.reload()
    page.until(lambda: page.all(".answer"))
    page.run("BroadcastChannel.prototype.postMessage = () => {}")  # as when both are sent before news come
    b = page.ask("Say B.", 2)
    first()
    c = page.ask("Say C.", 2)
    page.reload()
    page.until(lambda: len(page.all(".answer")) == 2)
    assert page.questions() == ["Say A.", "Say C."]
    assert page.answer() == c
    page.all(".user")[1].find_element("css selector", "[title='Previous version']").click()
    assert page.questions() == ["Say A.", "Say B."]
    assert page.answer() == b


def test_an_answer_that_another_tab_writes_is_shown_while_it_grows(page, tabs, server, monkeypatch):
    first, second = tabs
    writing(page, server, monkeypatch)
    second()
    page.reload()
    page.until(lambda: page.all(".answer.running") and page.answer())
    page.send("Now?")
    page.until(lambda: "Another tab writes an answer" in page.text("#notice"))
    length = len(page.answer())
    page.until(lambda: len(page.answer()) > length)
    first()
    page.find("#stop").click()
    stopped = page.answered()
    second()
    page.until(lambda: not page.all(".answer.running"))
    page.until(lambda: page.answer() == stopped)


def test_a_conversation_that_another_tab_deletes_is_closed(page, tabs):
    first, second = tabs
    page.ask("Say A.")
    second()
    page.reload()
    page.until(lambda: page.all(".answer"))
    page.click("Rename, export or delete Say A.")
    page.find("#delete").click()
    page.until(lambda: not page.all("article"))
    first()
    page.until(lambda: not page.all("article"))
    assert page.all("#conversations li") == []
