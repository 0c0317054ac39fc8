"""The page for everybody: phones, fingers, screen readers, and as an installed program."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import lacks, need
from page import QUESTION, TEMPLATE, write_haystack
from serving import forced, running

need("server", "fastapi", "httpx")

TEXT = """# Title\n\nA *word*, [a link](https://b.example) and \\(x_1\\).\n\n- [x] a\n- b\n\n```python
def f(x):  # a comment
    return "text", 1
```\n\n|a|b|\n|-|-:|\n|1|2|\n\n> quoted\n\n$$\\frac{a}{b}$$"""
FINGER = 44  # pixels
# what can be touched is that large, or a link inside a text
SMALL = """
const names = "button, select, input:not([hidden]), textarea, summary";
const visible = [...document.querySelectorAll(names)].filter((element) => element.checkVisibility());
const name = (element) => element.id || element.className || element.textContent;
return visible.map((element) => [name(element), element.getBoundingClientRect()])
  .filter(([, { width, height }]) => Math.min(width, height) < arguments[0] - 0.5)
  .map(([name, { width, height }]) => `${name}: ${width} x ${height}`);
"""


@pytest.fixture(scope="module")
def server():
    with running(method="longheads", n_ctx=8192, n_ubatch=256, chat_format=TEMPLATE) as server:
        yield server


@pytest.fixture
def phone(driver, page):
    size = {"width": 390, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    yield page
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_phone_needs_no_horizontal_scroll(phone, tmp_path):
    phone.add(write_haystack(tmp_path))
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


def test_wide_code_formulas_and_tables_scroll_by_themselves(phone, server, monkeypatch):
    long = " + ".join(f"x_{{{i}}}" for i in range(40))
    row = "|".join(f"column {i}" for i in range(12))
    rule = "|".join("-" * 12)
    forced(server, monkeypatch, f"$${long}$$\n\n```\n{''.join(map(str, range(99)))}\n```\n\n|{row}|\n|{rule}|\n|{row}|")
    phone.open(temperature="0", max_tokens="2000")
    phone.ask("Write.")
    phone.until(lambda: phone.all("table"))
    assert (
        phone.run(
            "const { scrollWidth, clientWidth } = document.getElementById('log'); return scrollWidth - clientWidth"
        )
        == 0
    )
    for name in ("math", "pre", ".wide"):
        assert phone.run(
            "const box = document.querySelector(arguments[0]); return box.scrollWidth > box.clientWidth", name
        )


def test_touch_targets_are_large_enough_for_fingers(phone):
    phone.ask("It was")
    phone.click("Again")
    phone.until(lambda: phone.version() == "2/2")
    phone.answered()
    assert phone.run(SMALL, FINGER) == []
    phone.find("#menu").click()
    assert phone.run(SMALL, FINGER) == []
    phone.click("Rename, export or delete It was")
    assert phone.run(SMALL, FINGER) == []
    phone.find("#close-conversation").click()
    phone.find("#open-settings").click()
    phone.run("document.getElementById('samplers').open = true")
    assert phone.run(SMALL, FINGER) == []
    fields = "[...document.querySelectorAll('input, textarea, select')]"
    assert set(phone.run(f"return {fields}.map((field) => getComputedStyle(field).fontSize)")) == {"16px"}


def test_the_page_can_be_installed(page, server, driver):
    manifest = server.http.get("/manifest.webmanifest")
    assert manifest.headers["content-type"].startswith("application/manifest+json")
    for icon in manifest.json()["icons"]:
        found = server.http.get(f"/{icon['src']}")
        assert (found.status_code, found.headers["content-type"]) == (200, icon["type"])
    assert driver.execute_cdp_cmd("Page.getAppManifest", {})["errors"] == []
    assert driver.execute_cdp_cmd("Page.getInstallabilityErrors", {})["installabilityErrors"] == []


# ---- axe ----


@pytest.fixture(scope="module")
def axe():
    """Return axe-core as a script."""
    npm = shutil.which("npm")
    root = subprocess.run([npm, "root", "-g"], capture_output=True, text=True).stdout.strip() if npm else ""
    path = Path(root) / "axe-core" / "axe.min.js"
    if not root or not path.is_file():
        lacks("axe")
    return path.read_text(encoding="utf-8")


def violations(page, axe):
    page.run(axe)
    script = "const done = arguments[0]; axe.run().then(({ violations }) => done(JSON.stringify(violations)))"
    found = json.loads(page.driver.execute_async_script(script))
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page, server, axe, monkeypatch, tmp_path, theme):
    page.open(temperature="0", theme=theme, max_tokens="6")
    page.add(write_haystack(tmp_path))
    page.ask(QUESTION)
    page.until(lambda: page.all(".map"))
    assert violations(page, axe) == []
    page.open(temperature="0", theme=theme, max_tokens="400")
    forced(server, monkeypatch, TEXT)
    page.ask("Write.")
    page.click("Again")
    page.until(lambda: page.version() == "2/2")
    page.answered()
    assert violations(page, axe) == []
    page.find("#conversations .icon").click()
    assert violations(page, axe) == []
    page.find("#close-conversation").click()
    page.find("#open-settings").click()
    page.find("#samplers summary").click()
    assert violations(page, axe) == []
