"""The HTML of a model's text: what Markdown becomes, that nothing in it is active, and how long it takes."""

import doctest
import re
import time

import pytest
from html_checks import Checked
from needs import need

need("server", "fastapi", "httpx", "pyromark", "latex2mathml", "pygments")

from serving import running  # noqa: E402

from pylongctx.serve import markup  # noqa: E402
from pylongctx.serve.markup import MAX_DEPTH, MAX_TEXT, blocks, prepare  # noqa: E402


def html(text):
    """Return the HTML of a text, which has been checked, with addresses of links alone."""
    found = "".join(blocks(text))
    Checked(found)
    return found.replace(' target="_blank" rel="noopener noreferrer"', "")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "a *b* _c_ __d__ ***e*** ~~f~~",
            "a <em>b</em> <em>c</em> <strong>d</strong> <em><strong>e</strong></em> <del>f",
        ),
        ("## a\nb\nc", "<h3>a</h3><p>b\nc</p>"),
        ("a  \nb<br>c<BR/>", "<p>a<br>b<br>c<br></p>"),
        ("a:\n- b\n  1. c\n- d", "<p>a:</p><ul><li>b<ol><li>c</li></ol></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> a\n\n---", "<blockquote><p>a</p></blockquote><hr>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        (
            "- [x] a\n- [ ] b",
            'aria-label="done">\u2611</span> a</li><li><span class="task" role="img" aria-label="to do">',
        ),
        ('[a](https://b.example/c "d")', '<a href="https://b.example/c" title="d">a</a>'),
        ("![a](https://b.example)", '<p><a href="https://b.example">a</a></p>'),
        ("![](https://b.example)", '<a href="https://b.example">https://b.example</a>'),
        ("[![a](https://b.example)](https://c.example)", '<p><a href="https://c.example">a</a></p>'),
        ("see https://b.example/c_d_e, or", 'see <a href="https://b.example/c_d_e">https://b.example/c_d_e</a>, or'),
        ("(https://b.example/c_(d))", '(<a href="https://b.example/c_(d)">https://b.example/c_(d)</a>)'),
        ("<me@b.example>", '<a href="mailto:me@b.example">me@b.example</a>'),
        ("<b>c</b> & <", "<p>&lt;b&gt;c&lt;/b&gt; &amp; &lt;</p>"),
        ("`a < b`", "<code>a &lt; b</code>"),
    ],
)
def test_markdown(text, wanted):
    assert wanted in html(text)


def test_tables_have_alignments_and_bars_in_code():
    found = html("a | b\n:-: | -:\n`x|y` | \\(|z|\\)\n1 |")
    assert '<thead><tr><th class="center">a</th><th class="right">b</th></tr></thead>' in found
    assert '<td class="center"><code>x|y</code></td>' in found
    assert found.count("<td") == 4
    assert "|z|" in re.sub("<[^>]+>", "", found)


@pytest.mark.parametrize(
    "text",
    [
        "$x_1$",
        r"\(x_1\)",
        "$$x_1$$",
        r"\[x_1\]",
        "$$\n+ 1\n- x_1\n$$",
        r"**\(x_1\)**",
        "> \\[\n> x_1\n> \\]",
        r"- \(x_1\)",
    ],
)
def test_formulas_become_mathml(text):
    assert "<msub><mi>x</mi><mn>1</mn></msub>" in html(text).replace("<mo>&gt;</mo>", "")


@pytest.mark.parametrize(
    "text",
    [
        "$5 and $10",
        "it is $5-$10, or ($5) or ($6)",
        r"\\(a\\)",
        r"`\(a\)`",
        "```\n\\[a\\]\n```",
        "\\(a",
        "\\[a\n\nb\\]",
    ],
)
def test_what_looks_like_a_formula_stays_text(text):
    assert "<math" not in html(text)


def test_code_shows_formulas_as_they_are_written():
    assert Checked(html("~~~\nre.sub(r'\\[a\\]', '$$b$$')\n~~~")).text == "re.sub(r'\\[a\\]', '$$b$$')"
    assert "<code>\\(a\\)</code>" in html("    x\n\n`\\(a\\)`")


@pytest.mark.parametrize("latex", [r"\frac", "{" * 300, "x" * (markup.MAX_FORMULA + 1), r"\begin{no}", "a^b^c"])
def test_a_formula_that_does_not_parse_is_shown_as_its_source(latex):
    assert Checked(html(f"\\({latex}\\)")).text == f"\\({latex}\\)"


def test_code_in_a_list_can_be_copied_and_run():
    found = html("1. a:\n\n     ```python\n     if x:\n         y\n     ```\n")
    assert re.search(r"<figcaption><span>python</span></figcaption>", found)
    assert Checked(found.partition("<code>")[2].partition("</code>")[0]).text == "if x:\n    y"


def test_colors_are_for_short_code_of_known_languages():
    assert '<span class="k">if</span>' in html("```python\nif x: pass\n```")
    assert "<span class" not in html("```nonsense\nif x: pass\n```")
    assert "<span class" not in html(f"```python\n{'if x: pass' * markup.MAX_CODE}\n```")


@pytest.mark.parametrize("language", sorted(markup.LANGUAGES))
def test_every_language_has_a_lexer(language):
    assert Checked(markup.code_html("a = 1 < 2\n\n", language)).text == "a = 1 < 2\n\n"


INJECTIONS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<div onclick='alert(1)'>\n\n</div><style>*{}</style><!-- a --><?php ?><![CDATA[x]]>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:x) [c](data:text/html,x) [d](vbscript:x) [e](file:///etc/passwd)",
    "[a](java&#115;cript:x) [b](&#1;javascript:x) [c](//evil.example) [d](/v1/models) <javascript:x>",
    "![a](data:image/svg+xml,x) ![b](javascript:x) [c]\n\n[c]: javascript:x",
    '[a](https://b.example/"onclick="x) [b](https://b.example "\\" onclick=x \'") https://b.example/"onmouseover="x',
    '```"><script>\n</code></pre><script>x</script>\n```',
    r"\(\href{javascript:alert(1)}{x}\) \(\style{background:url(x)}{y}\) \(\class{a}{\cssId{b}{c}}\)",
    r"\(\text{<img src=x onerror=y>}\) \(\text{&lt;script&gt;}\) $\color{red;}{x}$ \(\unicode{x3c}script>\)",
    r"$</math><script>x</script>$ \(\mathrm{<script>}\) $$\includegraphics{http://b.example/x.png}$$",
    "|<script>|\n|-|\n|<img src=x>|\n\n# <h1 onclick=x>\n\n- <input autofocus onfocus=x>",
    "\ue0000\ue001 \ue00099\ue001 \ue000\\(x\\)\ue001 \0",
    "<details open ontoggle=x><summary>a</summary></details>\n\n<br onclick=x>",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_nothing_of_a_text_is_active(text):
    for block in blocks(text):
        found = Checked(block)
        assert not [link for link in found.links if "script" in link]


def test_what_is_too_deep_or_too_long_is_plain_text():
    for text in ("> " * (MAX_DEPTH + 1) + "*a*", "- " * MAX_DEPTH + "> *a*", "*a*" * (MAX_TEXT // 3 + 1)):
        [block] = blocks(text)
        assert block.startswith('<p class="plain">')
        assert Checked(block).text == text
    assert "<em>" in "".join(blocks("> " * (MAX_DEPTH - 3) + "*a*"))


HOSTILE = [
    *(
        "[",
        "![",
        "> ",
        "*",
        "_a *b ",
        "$a$",
        "$a$ ",
        "\\(",
        "\\[",
        "\\(a\\) ",
        "\\(a\n",
        "`",
        "``` ",
        "`a ``b ",
        "<",
        "<a ",
    ),
    *(
        "&",
        "&amp;",
        "- ",
        "1. ",
        "* a\n",
        "- a\n  ",
        "[a](",
        "[a]: ",
        "[x]: y\n",
        "[^1]",
        "http://",
        "http://x ",
        "http://a)",
    ),
    *(
        "|",
        "|a|b|\n",
        "| a | b |\n|---|---|\n",
        "a|b\n-|-\n|",
        "`|`\n|-|\n",
        "$$",
        "$$a",
        "***",
        "~~",
        "\\",
        "#",
        "<!--",
    ),
    *(" ", "\n", "a  \n", "a\n\n", "> a\n", "```\na\n", "```py\na = 1\n```\n", "- - - -\n", "\\begin{matrix}", "\r\n"),
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_time_is_linear_in_the_text(piece):
    """Four times the text takes about four times as long, and not 16; short times are those of the machine."""

    def seconds(n):
        began = time.thread_time()
        for block in blocks(piece * (n // len(piece))):
            assert block
        return time.thread_time() - began

    short, long = seconds(55_000), seconds(220_000)
    assert long < max(2.0, 10 * short)


@pytest.mark.parametrize("piece", ["a b ", "a.b", "\n ", "{{", "&", '"""', "a:\n", "/*\n", "<"])
@pytest.mark.parametrize("language", ["java", "typescript", "make", "yaml", "python", "c"])
def test_lexers_that_are_slow_are_stopped(language, piece):
    began = time.thread_time()
    markup.code_html(piece * (markup.MAX_CODE // len(piece)), language)
    assert time.thread_time() - began < 2.0


def test_the_source_is_found_again():
    text = "a \\(b\\) $$c$$ `\\(d\\)` \\\\(e\\\\)"
    found = prepare(text)
    assert [latex for _, latex, _ in found.formulas] == ["b", "c", "d"]
    assert found.restore(found.text) == text


def test_the_examples_run():
    result = doctest.testmod(markup)
    assert result.attempted and not result.failed


# ---- the route ----


def test_the_server_renders_for_those_who_may_ask():
    with running(settings={"api_keys": ("secret",)}) as server:
        body = {"text": "a *b*\n\nc"}
        assert server.http.post("/render", json=body).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        found = server.http.post("/render", json=body, headers=headers)
        assert found.json() == {"blocks": ["<p>a <em>b</em></p>", "<p>c</p>"]}
        wrong = server.http.post("/render", json={"text": 1}, headers=headers)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text")
        foreign = server.http.post("/render", json=body, headers=headers | {"Origin": "http://evil.example"})
        assert foreign.status_code == 403


def test_a_server_without_the_page_does_not_render():
    with running(settings={"page": False}) as server:
        assert server.http.post("/render", json={"text": "a"}).status_code == 404
