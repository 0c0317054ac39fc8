"""What the page makes of a model's text."""

import functools
import http.server
import threading
from importlib import resources

import pytest
from page import Page, open_browser

RENDER = "module.render(box, args[0]); return box.innerHTML"


@pytest.fixture(scope="module")
def page():
    """Return the page without a server behind it."""
    folder = str(resources.files("pylongctx") / "serve" / "page")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        driver = open_browser()
        page = Page(driver, f"http://127.0.0.1:{server.server_port}/")
        driver.get(page.url)
        yield page
        driver.quit()
        server.shutdown()


def test_text_of_a_model_is_never_markup(page):
    text = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) [b](https://b.example) **<b>c</b>**\n\n"
    html = page.run_module("markdown.js", RENDER, text + "```html\n<script>alert(1)</script>\n```")
    assert "&lt;img" in html
    assert "<script" not in html
    assert "[a](javascript:alert(1))" in html
    assert '<a href="https://b.example" target="_blank" rel="noopener noreferrer">b</a>' in html
    assert "<strong>&lt;b&gt;c&lt;/b&gt;</strong>" in html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* `c*d*`", "<p>a <em>b</em> <code>c*d*</code></p>"),
        ("## a\nb", "<h4>a</h4><p>b</p>"),
        ("a:\n- b\n  1. c\n- d", '<div><p>a:</p><ul><li>b<ol start="1"><li>c</li></ol></li><li>d</li></ul></div>'),
        ("48213. a", "<p>48213. a</p>"),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        ("| a | b |\n|--|--|\n| 1 | *2* |", "<tr><th>a</th><th>b</th></tr><tr><td>1</td><td><em>2</em></td></tr>"),
        ("---", "<hr>"),
    ],
)
def test_markdown(page, text, html):
    assert html in page.run_module("markdown.js", RENDER, text)


def test_text_in_pieces_becomes_what_it_becomes_at_once(page):
    text = "# a\n\nb *c*\n\n```py\nd = 1\n\ne = 2\n```\n\n- f\n- g\n\nh"
    script = "for (const text of args) module.render(box, text); return box.innerHTML"
    prefixes = [text[:n] for n in range(len(text) + 1)]
    assert page.run_module("markdown.js", script, *prefixes) == page.run_module("markdown.js", script, text)


HOSTILE = {
    "stars": "*a ",
    "double stars": "**a",
    "mixed stars": "*a **b ",
    "backticks": "`a ``b ",
    "growing backticks": "".join("`" * n + " " for n in range(1, 200)),
    "brackets": "[",
    "closed brackets": "[a] ",
    "links without an end": "[a](https://b ",
    "quotes": ">",
    "lists in lists": "".join(" " * n + "- a\n" for n in range(200)),
    "flat lists": "- a\n  - b\n",
    "tables": "| a | b\n",
    "bars": "|" * 50 + "  ",
    "rules": "- ",
    "fences": "```\na\n",
    "spaces": " " * 99 + "\n",
    "emphases": "*a* **b** `c` ",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_is_linear_in_the_text(page, name):
    """Sixteen times the text takes about sixteen times as long, and not 256; short times are those of the machine."""
    piece = HOSTILE[name]
    script = "const start = performance.now(); module.render(box, args[0]); return performance.now() - start"
    short, long = (page.run_module("markdown.js", script, piece * (n // len(piece))) for n in (25_000, 400_000))
    assert long < max(500, 64 * short)
