"""The Compress button of the chat page: its dialog, the request, and what the user reads after it."""

import json

import pytest
from needs import need
from page import QUESTION, TEMPLATE
from serving import running

need("server", "fastapi", "httpx")

N_CTX = 8192


@pytest.fixture(scope="module")
def server():
    with running(method="kvzip", n_ctx=N_CTX, n_ubatch=256, chat_format=TEMPLATE) as server:
        yield server


def compress(page, percent):
    page.click("Compress")
    page.until(lambda: page.find("#compression").is_displayed())
    page.find("#kept").clear()
    page.find("#kept").send_keys(percent)
    assert "KV cache are freed" in page.text("#cost")
    page.find("#compression [value=compress]").click()
    page.until(lambda: "KV cache went from" in page.text("#notice"))
    return page.text("#notice")


def test_a_conversation_is_compressed_and_continues(page, server, haystack):
    page.open(temperature="0", max_tokens="4")
    page.add(haystack)
    page.ask(QUESTION)
    page.until(lambda: "KV cache" in page.text(".stats"))
    before = server.ask(server.host.kv_bytes)
    compress(page, "40")
    n_held = max(slot.session.n_tokens for slot in server.engine.slots)
    assert server.ask(server.host.kv_bytes) < 0.6 * before
    page.ask("And again?", n=2)
    page.until(lambda: "cached" in page.text(".answer:last-of-type .stats"))
    assert f"{n_held:,} cached" in page.text(".answer:last-of-type .stats")
    (request,) = [one["request"] for one in page.requests() if "action=compress" in one["request"]["url"]]
    assert json.loads(request["postData"])["ratio"] == 0.4


def test_a_conversation_that_the_server_has_lost_is_not_compressed(page, server):
    page.ask("One", n=1)
    page.until(lambda: "KV cache" in page.text(".stats"))
    server.erase()
    page.click("Compress")
    page.until(lambda: page.find("#compression").is_displayed())
    page.find("#compression [value=compress]").click()
    page.until(lambda: "no longer holds" in page.text("#notice"))


def test_cancel_leaves_everything(page, server):
    page.ask("One", n=1)
    page.until(lambda: "KV cache" in page.text(".stats"))
    before = server.ask(server.host.kv_bytes)
    page.click("Compress")
    page.until(lambda: page.find("#compression").is_displayed())
    page.find("#cancel-compression").click()
    assert not page.find("#notice").is_displayed()
    assert server.ask(server.host.kv_bytes) == before


def test_other_methods_have_no_button(driver):
    from page import opened

    with running(method="full", n_ctx=512, chat_format=TEMPLATE) as server, opened(driver, server) as page:
        page.ask("One", n=1)
        page.until(lambda: "KV cache" in page.text(".stats"))
        assert not [one for one in page.all(".answer footer button") if one.text == "Compress" and one.is_displayed()]
