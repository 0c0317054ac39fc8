"""The list of conversations: search, names, deletion, and files to export and import."""

import json

import pytest
from needs import need
from page import TEMPLATE, Keys
from serving import running

need("server", "fastapi", "httpx")

FORMAT = "pylongctx-conversations"


SETTINGS = {"max_tokens": "6"}


@pytest.fixture(scope="module")
def server():
    with running(n_ctx=2048, chat_format=TEMPLATE) as server:
        yield server


@pytest.fixture
def downloads(driver, tmp_path):
    """Return a function that waits for a downloaded file of this name and returns its text."""
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})

    def text(page, name):
        page.until(lambda: (tmp_path / name).is_file(), f"the file {name} of {list(tmp_path.iterdir())}")
        return (tmp_path / name).read_text(encoding="utf-8")

    return text


def titles(page):
    return [element.text for element in page.all("#conversations li > :first-child")]


def ask_in_new(page, *texts):
    for text in texts:
        page.find("#new").click()
        page.ask(text)


def menu(page, title, button):
    page.click(f"Rename, export or delete {title}")
    page.find(button).click()


def bring(page, tmp_path, data, name="in.json"):
    """Import a file; returns what the page says."""
    path = tmp_path / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    page.find("#import-file").send_keys(str(path))
    page.until(lambda: "import" in page.text("#notice"))
    return page.text("#notice")


def test_a_deleted_conversation_can_be_brought_back(page):
    answer = page.ask("It was the best of times")
    ask_in_new(page, "It was the worst of times")
    assert titles(page) == ["It was the worst of times", "It was the best of times"]
    page.find("#conversations li:nth-child(2) button").click()
    menu(page, "It was the best of times", "#delete")
    page.until(lambda: titles(page) == ["It was the worst of times"])
    assert page.all("article") == []
    page.click("Undo")
    page.until(lambda: len(titles(page)) == 2)
    page.until(lambda: page.answer() == answer)
    page.reload()
    page.until(lambda: page.answer() == answer)


def test_a_conversation_gets_a_name(page):
    page.ask("It was the best of times")
    page.click("Rename, export or delete It was the best of times")
    page.find("#title").clear()
    page.find("#title").send_keys("Dickens", Keys.ENTER)
    page.until(lambda: titles(page) == ["Dickens"])
    page.ask("it was the worst of times", 2)
    page.reload()
    page.until(lambda: titles(page) == ["Dickens"])
    page.click("Rename, export or delete Dickens")
    page.find("#title").send_keys(" and more", Keys.ESCAPE)
    assert titles(page) == ["Dickens"]


def test_titles_and_texts_are_searched(page):
    ask_in_new(page, "The sea is wide", "A mountain", "Another one")
    page.ask("with the SEA in it", 2)
    page.find("#search").send_keys("sea")
    page.until(lambda: titles(page) == ["Another one", "The sea is wide"])
    page.find("#search").clear()
    page.find("#search").send_keys("mountain")
    page.until(lambda: titles(page) == ["A mountain"])
    page.find("#search").send_keys("eer")
    page.until(lambda: titles(page) == [])
    assert page.find("#nothing").is_displayed()
    page.find("#search").clear()
    page.find("#search").send_keys(Keys.SPACE)
    page.until(lambda: len(titles(page)) == 3)


def test_an_export_of_all_is_imported_again(page, downloads, tmp_path):
    (tmp_path / "book.txt").write_text("Once upon a time.")
    page.add(tmp_path / "book.txt")
    page.ask("Go on.")
    page.click("Again")  # a second version
    page.until(lambda: page.version() == "2/2")
    answer = page.answered()
    ask_in_new(page, "Another")
    page.find("#export-all").click()
    data = json.loads(downloads(page, "conversations.json"))
    assert (data["format"], data["version"], len(data["conversations"])) == (FORMAT, 1, 2)
    assert len(data["conversations"][1]["messages"]) == 3
    page.open(temperature="0", max_tokens="6")
    assert titles(page) == []
    assert bring(page, tmp_path, data) == "2 conversations were imported.\n\u00d7"
    page.until(lambda: titles(page) == ["Another", "Go on."])
    page.find("#conversations li:nth-child(2) button").click()
    page.until(lambda: page.answer() == answer)
    assert "book.txt" in page.text(".user .files")
    page.find(".answer [title='Previous version']").click()
    page.until(lambda: page.version() == "1/2")
    page.click("Again")
    page.until(lambda: page.version() == "3/3")
    page.answered()
    assert "Once upon a time." in page.sent()[-1]["messages"][0]["content"]


def test_one_conversation_is_exported_as_json_and_as_markdown(page, downloads, tmp_path):
    answer = page.ask("What is *this*, then?")
    ask_in_new(page, "Another")
    menu(page, "What is *this*, then?", "#export-markdown")
    text = downloads(page, "What-is-this-then.md")
    assert text.startswith("# What is *this*, then?\n\n## You\n\nWhat is *this*, then?\n\n## Answer")
    assert answer.split()[0] in text
    menu(page, "What is *this*, then?", "#export-json")
    [one] = json.loads(downloads(page, "What-is-this-then.json"))["conversations"]
    assert [message["role"] for message in one["messages"]] == ["user", "assistant"]
    assert bring(page, tmp_path, {"format": FORMAT, "version": 1, "conversations": [one]}).startswith(
        "1 conversation was"
    )
    assert len(titles(page)) == 2  # it was there already


def exported(**changes):
    message = {"id": "m", "parent": None, "role": "user", "time": 1, "content": "a"}
    one = {"id": "c", "title": "A", "time": 1, "messages": [message | changes.pop("message", {})]}
    return {"format": FORMAT, "version": 1, "conversations": [one | changes]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "it is not JSON"),
        ([1], "it is not an export of this page (format pylongctx-conversations)"),
        (exported() | {"version": 2}, "it has version 2, and this page reads version 1"),
        (exported() | {"conversations": {}}, "it has no list of conversations"),
        (exported(title=None), "conversation 1: title is a text"),
        (exported(message={"role": "system"}), "conversation 1, message 1: role is user or assistant"),
        (exported(message={"content": 1}), "conversation 1, message 1: content is a text"),
        (exported(message={"parent": "x"}), "conversation 1: a message follows x, which is not there"),
        (exported(message={"parent": "m"}), "conversation 1: messages follow each other in a circle"),
        (exported(message={"files": [{}]}), "conversation 1, message 1: id of a file is a text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_cannot_be_imported_is_refused_in_words(page, tmp_path, data, words):
    assert bring(page, tmp_path, data) == f"in.json cannot be imported: {words}.\n\u00d7"
    assert titles(page) == []


def test_an_imported_text_is_never_markup(page, tmp_path):
    text = "<img src=x onerror=window.hurt=1>"
    answer = {"id": "n", "parent": "m", "role": "assistant", "time": 2, "content": text, "reasoning": text}
    message = {"id": "m", "parent": None, "role": "user", "time": 1, "content": text}
    bring(page, tmp_path, exported(title=text, messages=[message, answer]))
    page.find("#conversations button").click()
    page.until(lambda: page.answer() == text)
    assert titles(page) == [text]
    assert page.all("main img, nav img") == []
    assert page.run("return window.hurt") is None
