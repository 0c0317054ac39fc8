"""The chunk map under an answer: that of the server, read with keys and pointer, and only where it says something."""

import re

import numpy as np
import pytest
from needs import need
from page import CELLS, DROP, KEY, QUESTION, SENTENCES, TEMPLATE, Keys, Page, webdriver
from serving import running

need("server", "fastapi", "httpx")

from pylongctx.engine.tracer import Tracer  # noqa: E402

N_CTX = 8192


@pytest.fixture(scope="module")
def server():
    with running(method="longheads", n_ctx=N_CTX, n_ubatch=256, chat_format=TEMPLATE) as server:
        yield server


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
    shown = re.match(r"#(\d+) \u00b7 ([\d.]+) heads", page.text(".map .most li"))
    assert int(shown[1]) == best
    assert float(shown[2]) == pytest.approx(sums[best], abs=0.051)  # browsers round a half up, Python to even
    assert KEY[1:] in data["texts"][best]
    assert page.text(".map blockquote") == data["texts"][best].strip()


def test_the_map_is_read_with_keys_and_pointer(page, driver):
    page.run(DROP, "short.txt", SENTENCES * 90)
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


def test_a_text_that_all_heads_read_has_no_map(page):
    page.run(DROP, "short.txt", SENTENCES * 10)
    page.until(lambda: "tokens" in page.text("#files"))
    page.ask(QUESTION)
    page.until(lambda: "KV cache" in page.text(".stats"))
    assert not page.all(".map")


def test_a_reload_keeps_the_map(page, haystack):
    page.add(haystack)
    page.ask(QUESTION)
    page.until(lambda: page.all(".map"))
    best = page.text(".map .most li")
    page.reload()
    page.until(lambda: page.all(".map"))
    page.find(".map summary").click()  # it comes folded
    page.until(lambda: page.text(".map .most li") == best)


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
