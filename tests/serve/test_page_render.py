"""How the page shows the text of an answer: blocks that the server makes, those that have not changed left alone."""

import threading

import pytest
from needs import need
from page import TEMPLATE
from serving import forced, running

need("server", "fastapi", "httpx", "pyromark", "latex2mathml", "pygments")

from pylongctx.serve import markup  # noqa: E402

TEXT = "A *word*, \\(x_1\\):\n\n- a\n- b\n\n```python\nif x:\n    y = 1\n```\n\n|a|b|\n|-|-|\n|1|2|"
SHOW = "module.show([{ role: 'assistant', content: args[0], reasoning: '', stats: {} }])"
RENDER = "document.getElementById('log').replaceChildren(box); box.id = 'box'; module.render(box, args[0])"


@pytest.fixture(scope="module")
def server():
    with running(n_ctx=2048, chat_format=TEMPLATE) as server:
        yield server


def blocks(page, selector=".answer > .text"):
    page.until(lambda: not page.all("[aria-busy=true]"))
    script = "return [...document.querySelector(arguments[0]).children].map((block) => block.source)"
    return page.run(script, selector)


def test_an_answer_is_rendered_while_it_is_written(page, server, monkeypatch):
    page.open(temperature="0", max_tokens="400")
    forced(server, monkeypatch, TEXT)
    page.ask("Write.")
    assert blocks(page) == markup.blocks(TEXT)
    assert page.text(".answer .k") == "if"
    assert page.text(".answer msub") == "x\n1"
    asked = [request["request"] for request in page.requests() if request["request"]["url"].endswith("/render")]
    assert len(asked) > 1


def test_code_is_copied_as_text(page):
    page.run_module("chat.js", SHOW, TEXT)
    page.until(lambda: page.all("figure.code"))
    page.run("navigator.clipboard.writeText = (text) => { window.copied = text; }")
    page.click("Copy this code")
    assert page.run("return window.copied") == "if x:\n    y = 1"


def test_blocks_that_did_not_change_stay(page):
    page.run_module("render.js", RENDER, "a\n\nb *c*")
    assert blocks(page, "#box") == ["<p>a</p>", "<p>b <em>c</em></p>"]
    page.run("document.querySelector('#box p').dataset.mark = 'kept'")
    page.run("window.getSelection().selectAllChildren(document.querySelector('#box p'))")
    script = "module.render(document.getElementById('box'), args[0])"
    page.run_module("render.js", script, "a\n\nb *c* d\n\n# e")
    assert blocks(page, "#box") == ["<p>a</p>", "<p>b <em>c</em> d</p>", "<h2>e</h2>"]
    assert page.find("#box p").get_attribute("data-mark") == "kept"
    assert page.run("return String(window.getSelection())") == "a"
    page.run_module("render.js", script, "a")
    assert blocks(page, "#box") == ["<p>a</p>"]


def test_one_request_at_a_time_and_the_last_text_at_the_end(page, monkeypatch):
    running_now, most, gate = [], [], threading.Event()

    def slow(text):
        running_now.append(text)
        most.append(len(running_now))
        gate.wait(10)
        running_now.pop()
        return [f"<p>{text}</p>"]

    monkeypatch.setattr(markup, "blocks", slow)
    page.run_module("render.js", RENDER, "text 0")
    page.until(lambda: running_now)
    for i in range(1, 6):
        page.run_module("render.js", "module.render(document.getElementById('box'), args[0])", f"text {i}")
    gate.set()
    assert blocks(page, "#box") == ["<p>text 5</p>"]
    assert most == [1, 1]  # those in between were not asked for


def test_a_text_that_was_known_is_not_overwritten_by_an_older_one(page, monkeypatch):
    again = "module.render(document.getElementById('box'), args[0])"
    page.run_module("render.js", RENDER, "known")
    assert blocks(page, "#box") == ["<p>known</p>"]
    asked, gate = threading.Event(), threading.Event()

    def slow(text):
        asked.set()
        gate.wait(10)
        return [f"<p>{text}</p>"]

    monkeypatch.setattr(markup, "blocks", slow)
    page.run_module("render.js", again, "older")
    assert asked.wait(10)
    page.run_module("render.js", again, "known")
    gate.set()
    page.run_module("render.js", "const other = document.createElement('p'); module.render(other, args[0])", "other")
    page.until(lambda: sum(request["request"]["url"].endswith("/render") for request in page.requests()) == 3)
    assert blocks(page, "#box") == ["<p>known</p>"]


def test_a_server_that_does_not_render_leaves_the_text(page, monkeypatch):
    def fail(text):
        raise ValueError("no")

    monkeypatch.setattr(markup, "blocks", fail)
    page.run_module("render.js", RENDER, "*not* shown before")
    page.until(lambda: not page.all("[aria-busy=true]"))
    assert page.text("#box") == "*not* shown before"
    monkeypatch.undo()
    page.run_module("render.js", "module.render(document.getElementById('box'), args[0])", "*a*")
    assert blocks(page, "#box") == ["<p><em>a</em></p>"]
