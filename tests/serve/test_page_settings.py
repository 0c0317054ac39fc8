"""The settings of the page: what is sent, what is shown where they are empty, and the theme."""

import re
from importlib import resources

import pytest
from chat_templates import THINKING
from needs import need
from page import Keys, opened
from serving import running

need("server", "fastapi", "httpx")

from pylongctx.serve.bodies import ChatBody  # noqa: E402

SETTINGS = {"max_tokens": "6"}


@pytest.fixture(scope="module")
def server():
    with running(n_ctx=2048, chat_format=THINKING, settings={"sampling": {"top_k": 17}}) as server:
        yield server


def open_settings(page):
    page.find("#open-settings").click()
    page.until(lambda: page.find("#settings [name=top_k]").get_attribute("placeholder"))
    return lambda name: page.find(f"#settings [name={name}]")


def kept(page):
    return page.run("return JSON.parse(localStorage['pylongctx:settings'])")


def test_all_samplers_are_sent_as_the_server_takes_them(page):
    field = open_settings(page)
    page.find("#samplers summary").click()
    names = page.run("return [...document.querySelectorAll('#settings [type=number]')].map((field) => field.name)")
    known = set(ChatBody.model_fields) | {"mirostat"}
    assert set(names) <= known
    assert len(names) > 20
    values = {name: "1" for name in names} | {"temperature": "0.5", "mirostat_tau": "2.5", "max_tokens": "5"}
    for name, value in values.items():
        field(name).clear()
        field(name).send_keys(value)
    field("system").send_keys("Be brief.")
    page.find("#settings .primary").click()
    page.ask("It was")
    assert not page.find(".trouble").is_displayed(), page.text(".trouble")
    body = page.sent()[-1]
    assert {name: body[name] for name in names} == {name: float(value) for name, value in values.items()}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.reload()
    assert kept(page)["mirostat_tau"] == "2.5"


def test_an_empty_field_shows_what_the_server_does(page):
    field = open_settings(page)
    shown = {name: field(name).get_attribute("placeholder") for name in ("top_k", "temperature", "seed", "max_tokens")}
    assert shown == {"top_k": "17", "temperature": "0.8", "seed": "random", "max_tokens": "all"}
    page.find("#cancel-settings").click()
    page.ask("It was")
    assert "top_k" not in page.sent()[-1]


@pytest.mark.parametrize("leave", ["escape", "cancel"])
def test_escape_and_cancel_save_nothing(page, leave):
    before = kept(page)
    field = open_settings(page)
    field("temperature").clear()
    field("temperature").send_keys("1.5")
    if leave == "escape":
        field("temperature").send_keys(Keys.ESCAPE)
    else:
        page.find("#cancel-settings").click()
    page.until(lambda: not page.find("#settings").is_displayed())
    assert kept(page) == before
    assert open_settings(page)("temperature").get_property("value") == "0"


def test_a_number_that_makes_no_sense_is_not_taken(page):
    field = open_settings(page)
    field("top_p").send_keys("5")
    page.find("#settings .primary").click()
    assert page.find("#settings").is_displayed()
    assert field("top_p").get_property("validationMessage")
    page.find("#reset-settings").click()
    page.find("#settings .primary").click()
    assert not page.find("#settings").is_displayed()
    assert (kept(page)["top_p"], kept(page)["temperature"]) == ("", "")


def test_thinking_is_turned_off_where_the_template_has_it(page, server):
    assert "enable_thinking" in server.http.get("/props").json()["chat_template"]
    field = open_settings(page)
    page.until(lambda: field("thinking").is_displayed())
    field("thinking").send_keys("off")
    page.find("#settings .primary").click()
    page.ask("It was")
    assert page.sent()[-1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_thinking_is_not_offered_by_other_templates(driver):
    with running(n_ctx=512) as plain, opened(driver, plain) as page:
        field = open_settings(page)
        assert not field("thinking").is_displayed()


def test_the_theme_is_kept_and_shown_at_once(page, driver):
    ground = "return getComputedStyle(document.body).backgroundColor"
    colors = {}
    for theme in ("dark", "light"):
        field = open_settings(page)
        field("theme").send_keys(theme)
        page.find("#settings .primary").click()
        colors[theme] = page.run(ground)
        page.reload()
        assert page.run(ground) == colors[theme]
    assert colors["dark"] != colors["light"]
    open_settings(page)("theme").send_keys("as the system")
    page.find("#settings .primary").click()
    for theme, color in colors.items():
        feature = {"name": "prefers-color-scheme", "value": theme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        page.until(lambda color=color: page.run(ground) == color)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_of_code_and_hints_can_be_read(theme):
    style = (resources.files("pylongctx.serve") / "page" / "style.css").read_text()
    block = re.findall(r":root[^{]*\{(.*?)\n\}", style, re.DOTALL)[theme == "dark"]
    color = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    for ground in ("ground", "sunken"):
        for name in ("ink", "faint", "word", "string", "number", "name", "type"):
            low, high = sorted([luminance(color[name]), luminance(color[ground])])
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)
