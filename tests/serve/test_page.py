"""The web page of the server: messages, files and errors."""

import itertools
import re
import shutil

import pytest
from needs import need
from page import COUNT, DROP, KEY, QUESTION, SENTENCES, TEMPLATE, Keys, Page
from routing import routing
from serving import forced, running

need("server", "fastapi", "httpx")

N_CTX = 8192
ROOM = """
const room = document.getElementById("room");
window.room = [];
new MutationObserver(() => window.room.push(room.textContent)).observe(room, { childList: true });
"""


@pytest.fixture(scope="module")
def server():
    with running(method="longheads", n_ctx=N_CTX, n_ubatch=256, chat_format=TEMPLATE) as server:
        yield server


# ---- what the server is ----


def test_the_header_names_model_method_and_context(page, server):
    assert page.text("#model") == server.http.get("/v1/models").json()["data"][0]["id"]
    assert page.text("#method summary") == "longheads"
    assert page.text("#sizes") == "context 8,192, 16 \u00d7 the trained 512"
    page.find("#method summary").click()
    choices = dict(zip(*[iter(page.text("#method dl").split("\n"))] * 2, strict=True))
    assert "longheads," + ",".join(map("=".join, choices.items())) == server.http.get("/v1/longctx").json()["method"]


# ---- chat ----


def test_an_answer_grows_and_has_its_numbers(page, server, monkeypatch):
    page.open(temperature="0", max_tokens="1500")
    forced(server, monkeypatch, COUNT)
    answer = page.ask("It was the best of times, it was the")
    seen = page.run("return window.seen.answer")
    assert len(seen) > 2
    assert [pair for pair in itertools.pairwise(seen) if not pair[1].strip().startswith(pair[0].strip())] == []
    assert seen[-1] == answer
    stats = page.text(".stats")
    for words in (
        r"prompt \d+ at [\d,.]+ t/s",
        r"answer 1,500 at [\d,.]+ t/s",
        r"context [\d,]+ / 8,192",
        r"KV cache [\d.]+ MiB",
    ):
        assert re.search(words, stats), (words, stats)
    assert "cut at the limit" in stats
    used = re.search(r"context ([\d,]+) /", stats)[1]
    assert page.text("#room") == f"{used} of 8,192 tokens"


def test_shift_and_enter_make_a_line(page):
    field = page.find("#text")
    field.send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert field.get_property("value") == "one\ntwo"
    field.send_keys(Keys.ENTER)
    page.answered()
    assert page.text(".user .text") == "one\ntwo"
    assert field.get_property("value") == ""


def test_a_second_turn_reads_its_new_tokens_only(page):
    page.ask("It was the best of times, " * 40)
    page.ask("it was the worst", 2)
    stats = page.text(".answer:last-child .stats")
    cached, read = (int(re.search(words, stats)[1]) for words in (r"(\d+) cached", r"prompt (\d+) at"))
    assert cached > 300 > 30 > read


def test_escape_stops_the_answer_on_the_server_too(page, server, monkeypatch):
    page.open(temperature="0")
    forced(server, monkeypatch, COUNT)
    page.send("It was the best of times, it was the")
    page.until(lambda: page.text(".answer > .text"))
    page.find("#text").send_keys(Keys.ESCAPE)
    page.answered()
    assert "stopped" in page.text(".stats")
    page.until(lambda: not any(slot["is_processing"] for slot in server.http.get("/slots").json()))


def test_thoughts_are_folded(page):
    message = {"id": "1", "role": "assistant", "reasoning": "Hm, *well*.", "content": "Yes.", "stats": {}}
    page.run_module("chat.js", "module.show(args)", message)
    assert page.text(".answer > .text") == "Yes."
    assert not page.find(".thought .text").is_displayed()
    page.find(".thought summary").click()
    page.until(lambda: page.text(".thought .text") == "Hm, well.")


# ---- files ----


def test_a_file_shows_its_size_and_the_progress_of_its_reading(page, server, haystack):
    chip = page.add(haystack)
    text = haystack.read_text()
    n_tokens = len(server.http.post("/tokenize", json={"content": text}).json()["tokens"])
    assert chip.startswith(f"haystack.txt {len(text):,} characters, {n_tokens:,} tokens")
    assert page.text("#room") == f"{n_tokens:,} of 8,192 tokens"
    page.run(ROOM)
    assert KEY in page.ask(QUESTION)
    seen = [re.match(r"Reading ([\d,]+) of ([\d,]+)", words) for words in page.run("return window.seen.progress")]
    read = [int(found[1].replace(",", "")) for found in seen if found]
    assert len(read) > 2
    assert read == sorted(read)
    assert n_tokens < int(seen[-1][2].replace(",", "")) < n_tokens + 64
    gauge = [int(words.partition(" of ")[0].replace(",", "")) for words in page.run("return window.room")]
    assert set(read) & set(gauge)  # it counts what is read


def test_an_answer_about_a_file_has_quotes(page, haystack):
    page.add(haystack)
    assert KEY in page.ask(QUESTION)
    page.find(".quotes summary").click()
    page.until(lambda: page.text(".quotes li"))
    line = next(i for i, text in enumerate(haystack.read_text().splitlines(), 1) if KEY in text)
    assert page.text(".quotes li").startswith(f"haystack.txt, line {line:,}\n")
    assert KEY in page.text(".quotes li blockquote")


def test_an_answer_without_a_file_has_no_quotes(page):
    page.ask("It was")
    assert not page.find(".quotes").is_displayed()


def test_a_dropped_file_that_is_too_long_is_refused_before_sending(page):
    page.run(DROP, "long.txt", SENTENCES * 400)
    page.until(lambda: page.text("#room").startswith("Does not fit"))
    assert "the context has 8,192. Send less, or start the server with --ctx-size" in page.text("#room")
    assert not page.find("#send").is_enabled()
    page.send("What is this?")
    assert page.all("article") == []
    page.click("Remove long.txt")
    assert page.find("#send").is_enabled()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("\0\1\2", "zeros.bin is not a text file"),
        (" \n", "zeros.bin is empty"),
        ("x" * (64 * N_CTX + 1), "far more than the 8,192 tokens of the context can hold"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_words(page, content, words):
    page.run(DROP, "zeros.bin", content)
    page.until(lambda: words in page.text("#notice"))
    assert page.all("#files li") == []


def test_a_long_paste_becomes_a_file(page):
    page.run(
        "const data = new DataTransfer(); data.setData('text/plain', arguments[0]);"
        "const paste = new ClipboardEvent('paste', { clipboardData: data, cancelable: true });"
        "document.getElementById('text').dispatchEvent(paste)",
        SENTENCES * 60,
    )
    page.until(lambda: "tokens" in page.text("#files"))
    assert page.text("#files").startswith(f"pasted text {len(SENTENCES) * 60:,} characters")


# ---- errors ----


def test_a_key_is_asked_for(driver):
    with running(settings={"api_keys": ("secret",)}) as locked:
        page = Page(driver, f"{locked.url}/")
        driver.get(page.url)
        page.until(lambda: "asks for an API key" in page.text("#notice"))
        page.find("#notice button").click()
        page.find("#settings [name=key]").send_keys("secret", Keys.ENTER)
        page.until(lambda: page.text("#sizes"))
        assert page.ask("It was")
        page.reload()
        assert not page.find("#notice").is_displayed()


def test_an_overflow_says_the_way_out(page):
    page.ask("It was")
    page.click("Edit")
    page.run("document.querySelector('.user textarea').value = arguments[0]", SENTENCES * 400)
    page.find(".user textarea").send_keys(Keys.ENTER)
    page.until(lambda: "too long for the context" in page.text("#log"))
    assert re.search(r"\([\d,]+ tokens, the context has 8,192\).*--ctx-size", page.text(".trouble"))


def test_a_server_that_is_gone_is_said(page, driver):
    driver.set_network_conditions(offline=True, latency=0, throughput=0)
    page.ask("It was")
    driver.delete_network_conditions()
    assert "The server does not answer" in page.text(".trouble")
    page.click("Again")
    page.until(lambda: page.text(".answer > .text"))
    page.answered()
    assert not page.find(".trouble").is_displayed()


# ---- several models ----


def test_a_model_is_chosen_of_several(driver, embedded_model, tmp_path):
    for name in ("one", "two"):
        shutil.copy(embedded_model, tmp_path / f"{name}.gguf")
    with routing(tmp_path) as several:
        page = Page(driver, f"{several.url}/")
        page.open(temperature="0", max_tokens="4")
        assert [option.text for option in page.all("#models option")] == ["one", "two"]
        page.find("#models option[value=two]").click()
        page.ask("Hello")
        assert several.loaded() == {"one", "two"}
        asked = 'pylongctx_http_requests_total{model="two",route="/v1/chat/completions",status="200"} 1.0'
        page.until(lambda: asked in several.http.get("/metrics").text)
        page.reload()
        assert page.find("#models").get_property("value") == "two"
