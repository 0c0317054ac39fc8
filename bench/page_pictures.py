"""Takes the pictures of the web page under docs/assets, in a headless Chromium.

    python bench/page_pictures.py [--model MODEL] [NAME ...]

The server and the page are the real ones. What the model writes is given here, except in the picture
``chunks``. Fonts are those of this machine.
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from page import QUESTION, TEMPLATE, Page, browsing, write_haystack  # noqa: E402
from serving import running  # noqa: E402

from pylongctx.engine.job import Job  # noqa: E402

ASSETS = ROOT / "docs" / "assets"
LARGEST = 150_000  # bytes of a picture
DESKTOP = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
PHONE = {"width": 390, "height": 780, "deviceScaleFactor": 2, "mobile": True}
EQUATION = "How do I solve a quadratic equation, and how in Python?"
ANSWER = r"""The roots of \(ax^2 + bx + c = 0\) are

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

The *discriminant* \(D = b^2 - 4ac\) says what they are:

| discriminant | roots | example |
|:--|:--|--:|
| $D > 0$ | two real ones | $x^2 - 1$ |
| $D = 0$ | one real one | $x^2$ |
| $D < 0$ | two complex ones | $x^2 + 1$ |

In Python:

```python
import cmath

def roots(a, b, c):
    "Return both roots, complex where they have to be."
    d = cmath.sqrt(b * b - 4 * a * c)
    return (-b + d) / (2 * a), (-b - d) / (2 * a)
```

So `roots(1, 0, -1)` returns $1$ and $-1$."""


class Studio:
    """A server and a browser: ``take`` writes a picture."""

    def __init__(self, server, driver):
        self.server, self.driver = server, driver
        self.page = Page(driver, f"{server.url}/")

    def begin(self, size, theme, **settings):
        """Open an empty page of a size and a theme."""
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.page.open(temperature="0", theme=theme, **settings)

    def ask(self, question, answer):
        """Ask a question to which the model writes a given answer."""
        self.write(answer, lambda: self.page.send(question))

    def write(self, answer, ask):
        """Let the model write a given answer to what ``ask`` asks, and wait for its end."""
        model, page = self.server.host.model, self.page
        wanted = [*model.tokenize(answer.encode(), False, True), model.info.token_eos]
        with patch.object(Job, "choose", lambda job, tokens, row: wanted[job.n_generated]):
            ask()
            page.until(lambda: page.all(".stats span") and not page.all(".answer.running, [aria-busy=true]"))
            page.until(lambda: answer.split()[-1].strip("$.*") in page.answer())

    def take(self, name, scroll="0"):
        """Write a picture of what is seen."""
        self.page.run(f"document.getElementById('log').scrollTop = {scroll}; document.activeElement.blur()")
        time.sleep(0.5)  # until scrollbars and transitions are still
        path = ASSETS / f"{name}.png"
        self.driver.save_screenshot(str(path))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
        assert path.stat().st_size <= LARGEST


def answer(studio):
    """An answer with a formula, a table and code."""
    studio.begin(DESKTOP, "light")
    studio.ask("Who wrote A Tale of Two Cities?", "Charles Dickens wrote it, in 1859.")
    studio.page.find("#new").click()
    studio.ask(EQUATION, ANSWER)
    studio.take("page-answer")


def dark(studio):
    """The same in the dark, as the second version of an answer."""
    studio.begin(DESKTOP, "dark")
    studio.ask(EQUATION, "By the *quadratic formula*.")
    studio.write(ANSWER, lambda: studio.page.click("Again"))
    studio.take("page-dark", "1e6")


def settings(studio):
    """The settings, with all samplers."""
    studio.begin(DESKTOP, "light")
    studio.page.find("#open-settings").click()
    studio.page.find("#samplers summary").click()
    studio.page.until(lambda: studio.page.find("[name=top_k]").get_attribute("placeholder"))
    studio.take("page-settings")


def phone(studio):
    """A phone."""
    studio.begin(PHONE, "light")
    studio.ask(EQUATION, ANSWER)
    studio.take("page-phone")


def chunks(studio):
    """A pass key in a long text, and the chunks that were read for it; the embedded model answers itself."""
    studio.begin(DESKTOP | {"height": 1020}, "light", max_tokens="5")
    with TemporaryDirectory() as folder:
        studio.page.add(write_haystack(Path(folder)))
        studio.page.ask(QUESTION)
    studio.page.until(lambda: studio.page.all(".map"))
    studio.take("page")


PICTURES = {"answer": answer, "dark": dark, "settings": settings, "phone": phone}
EMBEDDED = {"chunks": chunks}


def main():
    """Take the pictures that are named, or all."""
    known = {**PICTURES, **EMBEDDED}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (the embedded model)")
    parser.add_argument("names", nargs="*", help=f"which pictures, of {', '.join(known)} (all)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        parser.error(f"there is no picture {', '.join(unknown)}; there are {', '.join(known)}")
    alias = Path(args.model).stem.lower() if args.model else "embedded"
    chat = {"path": args.model, "n_ctx": 4096, "settings": {"alias": alias}}
    long = {"n_ctx": 8192, "n_ubatch": 256, "chat_format": TEMPLATE}
    for pictures, options in ((PICTURES, chat), (EMBEDDED, long)):
        with running(method="longheads", **options) as server, browsing() as driver:
            for name in [name for name in pictures if not args.names or name in args.names]:
                pictures[name](Studio(server, driver))


if __name__ == "__main__":
    main()
