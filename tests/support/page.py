"""The web page of the server as its user sees it, in a headless Chromium."""

import json
import shutil
from contextlib import contextmanager

from needs import lacks, need

webdriver = need("page", "selenium.webdriver")
exceptions = need("page", "selenium.common.exceptions")
wait = need("page", "selenium.webdriver.support.wait")
CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and CHROMEDRIVER):
    lacks("page", "chromium or chromedriver is not installed")

Keys = webdriver.Keys
PATIENCE = 60  # seconds; what is waited for comes within one
RECORD = """
window.seen = {};
const note = (name, text) => {
  const list = window.seen[name] ??= [];
  if (text && list.at(-1) !== text) list.push(text);
};
new MutationObserver(() => {
  note("answer", [...document.querySelectorAll(".answer > .text")].at(-1)?.textContent);
  note("progress", [...document.querySelectorAll(".progress > span")].at(-1)?.textContent);
}).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
"""
# the embedded model continues a text: it was not trained to chat
TEMPLATE = "{% for message in messages %}{{ message.content | replace('\\n\\n', ' ') }} {% endfor %}"
COUNT = " ".join(map(str, range(1000)))  # a long answer that does not repeat itself
KEY = "48213"
SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
QUESTION = "What is the pass key? The pass key is"
DROP = """
const transfer = new DataTransfer();
transfer.items.add(new File([arguments[1]], arguments[0], { type: "text/plain" }));
for (const type of ["dragover", "drop"]) {
  document.body.dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: transfer }));
}
"""
FORGET = """
const [settings, done] = arguments;
document.getElementById("text").value = ""; // or it is kept as a draft
localStorage.clear();
sessionStorage.clear();
localStorage["pylongctx:settings"] = settings;
const request = indexedDB.deleteDatabase("pylongctx");
request.onsuccess = request.onerror = () => done();
"""
# for each chunk and head, whether the middle of its cell has another color than a cell that was not read
CELLS = """
const canvas = document.querySelector(".map canvas"), [rows, columns] = arguments;
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const start = 53 * devicePixelRatio; // below the bars
const color = (row, column) => {
  const x = Math.floor((column + 0.5) * canvas.width / columns);
  const y = start + Math.floor((row + 0.5) * (canvas.height - start) / rows);
  return pixels.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 3).join();
};
const sunken = getComputedStyle(document.documentElement).getPropertyValue("--sunken");
const empty = [1, 3, 5].map((at) => parseInt(sunken.slice(at, at + 2), 16)).join();
const isRead = (row) => Array.from({ length: columns }, (_, column) => color(row, column) !== empty);
return Array.from({ length: rows }, (_, row) => isRead(row));
"""


class Page:
    """The page as a user sees it."""

    def __init__(self, driver, url):
        self.driver, self.url = driver, url
        self._requests = []

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        return self.find(selector).text

    def until(self, condition, message=""):
        # IndexError: the last of elements of which none is there yet
        changes = (exceptions.NoSuchElementException, exceptions.StaleElementReferenceException, IndexError)
        waiting = wait.WebDriverWait(self.driver, PATIENCE, 0.02, ignored_exceptions=changes)
        try:
            return waiting.until(lambda _: condition(), message)
        except exceptions.TimeoutException:
            seen = self.run("return document.body.innerText").strip()[-1000:]
            raise AssertionError(f"waited in vain for {message or 'a change'}; the page shows: {seen}") from None

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def open(self, **settings):
        self.driver.get(self.url)
        self.driver.execute_async_script(FORGET, json.dumps(settings))
        self.reload()

    def reload(self):
        self.driver.get(self.url)
        self.until(lambda: self.text("#sizes"), "the server's sizes")
        self.run(RECORD)

    def send(self, text):
        self.find("#text").send_keys(text, Keys.ENTER)

    def answered(self, n=1):
        """Wait for ``n`` answers; returns the text of the last one."""
        self.until(lambda: len(self.all(".answer:not(.running)")) == n, f"{n} answers")
        self.until(lambda: not self.all("[aria-busy=true]"), "the last rendering")
        return self.answer()

    def answer(self):
        return self.all(".answer > .text")[-1].get_property("textContent")

    def ask(self, text, n=1):
        self.send(text)
        return self.answered(n)

    def add(self, path):
        self.find("#file").send_keys(str(path))
        self.until(lambda: "tokens" in self.text("#files"), "the number of tokens")
        return self.text("#files .chip")

    def questions(self):
        return [element.text for element in self.all(".user .text")]

    def click(self, name):
        """Click the first button of this text or label."""
        self.find("body").find_element("xpath", f"//button[text()='{name}' or @aria-label='{name}']").click()

    def version(self, where=".answer"):
        """Return which version of the last message is shown, "" for the only one."""
        return "".join(self.all(f"{where} .versions")[-1].text.split("\n")[1:2])

    def requests(self):
        """Return what the browser has asked for since the page was made."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._requests.append(message["params"])
        return self._requests

    def sent(self):
        """Return the bodies of the requests for answers, the first one first."""
        asked = [request["request"] for request in self.requests()]
        return [json.loads(request["postData"]) for request in asked if request["url"].endswith("completions")]

    def run_module(self, name, script, *arguments):
        """Run a script with a module of the page and an empty element."""
        start = f"const args = [...arguments], done = args.pop(); import('./{name}')"
        body = f"const box = document.createElement('div'); {script}"
        return self.driver.execute_async_script(
            f"{start}.then((module) => {{ {body} }}).catch(String).then(done)", *arguments
        )


def write_haystack(folder):
    """Return the path of a new file with a pass key in the middle."""
    path = folder / "haystack.txt"
    hidden = f"The pass key is {KEY}. Remember it. {KEY} is the pass key."
    path.write_text(f"{INTRO} {SENTENCES * 130}{hidden} {SENTENCES * 139}")
    return path


@contextmanager
def opened(driver, server, **settings):
    """Open the page, empty, while the block runs; at the end it has said nothing on the console, and asked one host."""
    driver.get_log("performance")  # of the test before
    server.erase()
    page = Page(driver, f"{server.url}/")
    page.open(**{"temperature": "0", "max_tokens": "24"} | settings)
    yield page
    # refusals that a test provokes are logged as of the network
    assert [entry for entry in driver.get_log("browser") if entry["source"] != "network"] == []
    asked = {request["request"]["url"] for request in page.requests()}
    assert [other for other in asked if not other.startswith((page.url, "data:", "blob:"))] == []


@contextmanager
def browsing():
    """Return a driver of a browser, which is closed at the end."""
    driver = open_browser()
    try:
        yield driver
    finally:
        driver.quit()


def open_browser():
    """Return a driver of a browser that writes down what it is asked for."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # a window without a screen draws as others do
    draws = ("--disable-backgrounding-occluded-windows", "--disable-renderer-backgrounding")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000", *draws):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(CHROMEDRIVER))
