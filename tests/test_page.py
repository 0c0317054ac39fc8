"""The web page of the server: what a user does, and what is seen."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from needs import need
from page import CELLS, DROP, TEMPLATE, Keys, Page, browsing, opened, webdriver
from routing import routing
from serving import running

need("server", "fastapi", "httpx")

from pylongctx.engine.tracer import Tracer  # noqa: E402

N_CTX = 8192
KEY = "48213"
SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
QUESTION = "What is the pass key? The pass key is"


@pytest.fixture(scope="module")
def server():
    with running(method="longheads", n_ctx=N_CTX, n_ubatch=256, chat_format=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def driver():
    with browsing() as driver:
        yield driver


@pytest.fixture
def page(driver, server):
    with opened(driver, server) as page:
        yield page


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "haystack.txt"
    path.write_text(
        f"{INTRO} {SENTENCES * 130}The pass key is {KEY}. Remember it. {KEY} is the pass key. {SENTENCES * 139}"
    )
    return path


# ---- what the server is ----


def test_the_header_names_model_method_and_context(page, server):
    assert page.text("#model") == server.http.get("/v1/models").json()["data"][0]["id"]
    assert page.text("#method summary") == "longheads"
    assert page.text("#sizes") == "context 8,192, 16 \u00d7 the trained 512"
    page.find("#method summary").click()
    choices = dict(zip(*[iter(page.text("#method dl").split("\n"))] * 2, strict=True))
    assert "longheads," + ",".join(map("=".join, choices.items())) == server.http.get("/v1/longctx").json()["method"]


# ---- chat ----


def test_an_answer_grows_and_has_its_numbers(page):
    page.open(temperature="0", max_tokens="1500")
    answer = page.ask("It was the best of times, it was the")
    seen = page.run("return window.seen.answer")
    assert len(seen) > 2
    assert all(after.startswith(before) for before, after in itertools.pairwise(seen))
    assert seen[-1] == answer
    stats = page.text(".stats")
    for words in (
        r"prompt \d+ at [\d,.]+ t/s",
        r"answer 1,500 at [\d,.]+ t/s",
        r"context [\d,]+ / 8,192",
        r"KV [\d.]+ MiB, full [\d.]+ MiB",
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


def test_escape_stops_the_answer_on_the_server_too(page, server):
    page.open(temperature="0")
    page.send("It was the best of times, it was the")
    page.until(lambda: page.text(".answer > .text"))
    page.find("#text").send_keys(Keys.ESCAPE)
    page.answered()
    assert "stopped" in page.text(".stats")
    page.until(lambda: not any(slot["is_processing"] for slot in server.http.get("/slots").json()))


def test_a_reload_keeps_what_was_written(page):
    page.open(temperature="0")
    page.send("It was the best of times, it was the")
    page.until(lambda: page.text(".answer > .text"))
    page.reload()
    assert page.answer()
    assert "stopped" in page.text(".stats")


def test_a_stopped_answer_is_written_again(page):
    page.open(temperature="0", max_tokens="5000")
    page.send("It was the best of times, it was the")
    page.until(lambda: page.text(".answer > .text"))
    page.find("#stop").click()
    stopped = page.answered()
    page.run("localStorage['pylongctx:settings'] = arguments[0]", json.dumps({"temperature": "0", "max_tokens": "3"}))
    page.reload()
    assert page.answer() == stopped
    page.click("Again")
    page.until(lambda: "answer 3 at" in page.text(".stats"))
    assert stopped.startswith(page.answer())
    assert "stopped" not in page.text(".stats")


def test_an_edited_message_replaces_what_followed(page):
    page.ask("It was the best")
    page.ask("it was the worst", 2)
    page.click("Edit")
    page.find(".user textarea").send_keys(" of times", Keys.ENTER)
    page.until(lambda: len(page.all(".answer")) == 1)
    page.answered()
    assert [element.text for element in page.all(".user .text")] == ["It was the best of times"]


def test_escape_leaves_a_message_as_it_was(page):
    page.ask("It was the best")
    page.click("Edit")
    page.find(".user textarea").send_keys(" of times", Keys.ESCAPE)
    assert page.text(".user .text") == "It was the best"


def test_conversations_are_kept(page):
    first = page.ask("It was the best of times")
    page.find("#new").click()
    page.ask("It was the worst of times")
    page.reload()
    titles = [element.text for element in page.all("#conversations li > :first-child")]
    assert titles == ["It was the worst of times", "It was the best of times"]
    page.all("#conversations button")[2].click()
    assert page.answer() == first
    page.click("Delete It was the best of times")
    assert page.all("article") == []
    page.click("Undo")
    assert page.answer() == first


def test_the_settings_are_sent(page):
    page.find("#open-settings").click()
    for name, value in (("system", "Be brief."), ("max_tokens", "7"), ("top_p", "0.5")):
        field = page.find(f"#settings [name={name}]")
        field.clear()
        field.send_keys(value)
    page.find("#settings .primary").click()
    page.reload()
    page.ask("It was")
    [sent] = [request["request"] for request in page.requests() if request["request"]["url"].endswith("completions")]
    body = json.loads(sent["postData"])
    assert (body["max_tokens"], body["top_p"], body["temperature"]) == (7, 0.5, 0)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_thoughts_are_folded(page):
    message = {"role": "assistant", "reasoning": "Hm, *well*.", "content": "Yes.", "stats": {}}
    page.run_module("chat.js", "module.append(args[0], {})", message)
    assert page.text(".answer > .text") == "Yes."
    assert not page.find(".thought .text").is_displayed()
    page.find(".thought summary").click()
    assert page.text(".thought .text") == "Hm, well."


# ---- files ----


def test_a_file_shows_its_size_and_the_progress_of_its_reading(page, server, haystack):
    chip = page.add(haystack)
    text = haystack.read_text()
    n_tokens = len(server.http.post("/tokenize", json={"content": text}).json()["tokens"])
    assert chip.startswith(f"haystack.txt {len(text):,} characters, {n_tokens:,} tokens")
    assert page.text("#room") == f"{n_tokens:,} of 8,192 tokens"
    assert KEY in page.ask(QUESTION)
    seen = [re.match(r"Reading ([\d,]+) of ([\d,]+)", words) for words in page.run("return window.seen.progress")]
    read = [int(found[1].replace(",", "")) for found in seen if found]
    assert len(read) > 2
    assert read == sorted(read)
    assert n_tokens < int(seen[-1][2].replace(",", "")) < n_tokens + 64


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


def test_files_that_the_browser_cannot_keep_are_named(page, haystack):
    page.run("localStorage.filler = 'x'.repeat(5 * 2 ** 20 - 20000)")
    page.add(haystack)
    page.ask("What is this?")
    assert "no room for the files" in page.text("#notice")
    page.reload()
    assert "haystack.txt" in page.text(".user")
    page.click("Again")
    page.until(lambda: "haystack.txt was too large" in page.text("#notice"))


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


# ---- the chunk map ----


def test_the_map_is_that_of_the_server(page, server, haystack):
    page.open(temperature="0", max_tokens="4")  # the key alone
    page.add(haystack)
    page.ask(QUESTION)
    page.until(lambda: page.all(".map"))
    page.until(lambda: page.run("return document.querySelector('.map canvas').width") > N_CTX / 16)
    id = server.ask(lambda: server.engine.tracer.record.id)
    data = server.http.get("/v1/longctx", params={"id": id}).json()["chunk_map"]
    counts = np.array(data["counts"])
    assert counts.shape == (data["n_layer"] * data["n_head"], data["n_chunk"])
    painted = np.array(page.run(CELLS, *counts.shape))
    assert (painted == (counts > 0)).all()
    sums = counts.sum(0) / len(data["positions"])
    own = data["positions"][0] // data["chunk_size"]
    best = np.argmax(sums[1 : own - data["n_recent"]]) + 1  # the first and the last chunks are read by all
    assert page.text(".map .most li").startswith(f"#{best} \u00b7 {sums[best]:.1f} heads")
    assert KEY[1:] in data["texts"][best]
    assert page.text(".map blockquote") == data["texts"][best].strip()


def test_the_map_is_read_with_keys_and_pointer(page, driver):
    page.run(DROP, "short.txt", SENTENCES * 20)
    page.until(lambda: "tokens" in page.text("#files"))
    page.ask(QUESTION)
    page.until(lambda: page.all(".map"))
    frame = page.find(".frame")
    frame.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert page.text(".where").startswith("Chunk 1, tokens 16 to 31: read by")
    assert frame.get_attribute("aria-valuenow") == "1"
    width, n_chunk = frame.size["width"], int(frame.get_attribute("aria-valuemax")) + 1
    x = int(width * (5.5 / n_chunk - 0.5))  # from the middle
    webdriver.ActionChains(driver).move_to_element_with_offset(frame, x, 20).perform()
    words = page.text(".where").split(", by ")
    assert re.fullmatch(r"Chunk 5, tokens 80 to 95: read by [\d.]+ of 32 heads per token", words[0])
    assert re.fullmatch(r"head \d of layer \d for \d+ % of the tokens", words[1])


def test_the_map_of_another_answer_is_not_shown(page, haystack, monkeypatch):
    own = Tracer.chunk_map
    monkeypatch.setattr(Tracer, "chunk_map", lambda tracer: own(tracer) | {"id": "chatcmpl-another"})
    page.add(haystack)
    page.ask(QUESTION)
    page.answered()
    assert not page.all(".map")


@pytest.mark.parametrize(("method", "name"), [("full", "full"), (None, "llama.cpp's own")])
def test_a_method_without_chunks_has_no_map(driver, method, name):
    with running(method=method) as server:
        page = Page(driver, f"{server.url}/")
        page.open(max_tokens="3")
        assert page.text("#method summary") == name
        page.ask("It was")
        page.until(lambda: "answer 3 at" in page.text(".stats"))
        assert page.all(".map, .trouble > *") == []
        assert ("KV" in page.text(".stats")) == bool(method)


# ---- width ----


@pytest.fixture
def phone(driver, page):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield page
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_phone_needs_no_horizontal_scroll(phone, haystack):
    phone.add(haystack)
    phone.ask(QUESTION)
    phone.until(lambda: phone.all(".map"))
    phone.find("#method summary").click()
    phone.find("#menu").click()
    assert phone.find("#new").is_displayed()
    names = ["html", "#log", "#composer", "header"]
    too_wide = "const box = document.querySelector(arguments[0]); return box.scrollWidth - box.clientWidth"
    assert [phone.run(too_wide, name) for name in names] == [0] * len(names)
    phone.find("#new").click()
    assert not phone.find("#side").is_displayed()


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
        assert asked in several.http.get("/metrics").text
        page.reload()
        assert page.find("#models").get_property("value") == "two"
