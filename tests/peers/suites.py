"""Run the test suites of llama.cpp's server and of llama-cpp-python against pylongctx.

    python tests/peers/suites.py llama_cpp_python-VERSION.tar.gz MODELS [--only WORD] [--out FILE.md]

The source package of llama-cpp-python has both suites; the build of pylongctx keeps it. MODELS is a folder with GGUF
files: ``test-model-stories260K.gguf`` is the one that most tests of the server need. Assertions are unchanged. A test
that fails must have its reason in ``reasons.toml``, and a test with a reason must fail: else this program returns 1.
It needs ``pip install pytest requests wget openai prometheus-client aiohttp scipy huggingface_hub``.
"""

import argparse
import fnmatch
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from llama_server import NO_MODEL, NO_OPTION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
SERVER = "vendor/llama.cpp/tools/server/tests"
MODULES = {  # of llama.cpp's server: what a server of one text model can be asked
    SERVER: "basic chat_completion compat_anthropic compat_oai_responses completion ctx_shift embedding ignore_eos "
    "infill kv_keep_only_active security slot_save speculative template tokenize tool_call".split(),
    ".": "llama llama_chat_format llama_grammar llama_speculative".split(),
}
NOT_OFFERED = "an option of llama-server that pylongctx serve does not offer"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    module: str
    name: str
    status: str
    message: str

    @property
    def id(self) -> str:
        """The name that reasons.toml knows."""
        return f"{self.module}::{self.name}"


def unpack(package: Path, folder: Path) -> Path:
    """Return the folder of the package's files that the tests need."""
    wanted = ("/tests/", "/vendor/llama.cpp/tools/server/tests/", "/vendor/llama.cpp/models/")
    with tarfile.open(package) as tar:
        members = [m for m in tar.getmembers() if any(part in m.name for part in wanted)]
        tar.extractall(folder, members, filter="data")
    return next(folder.iterdir())


def run_module(root: Path, suite: str, module: str, models: Path) -> list[Outcome]:
    """Run one file of tests in a process of its own."""
    report = root / f"{module}.xml"
    is_server = suite == SERVER
    file = f"{'unit' if is_server else 'tests'}/test_{module}.py"
    path = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {} if is_server else {"LCTX_PEER_COMPAT": "1"}
    env = os.environ | more | {
        "PYTHONPATH": os.pathsep.join(path),
        "LCTX_PEER_MODELS": str(models),
        "LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"),
        "LCTX_PEER_PYTHON": sys.executable,
    }  # fmt: skip
    options = ["-q", "-p", "local_models", "-p", "no:cacheprovider", "-m", "not slow", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", file]
    subprocess.run(command, cwd=root / suite, env=env, check=False)
    return [outcome(module, case) for case in ElementTree.parse(report).iter("testcase")]


def outcome(module: str, case: ElementTree.Element) -> Outcome:
    """Read a test case of a JUnit file."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            message = child.get("message", "")
            lacks = child.tag == "skipped" or message.endswith(f"return code {NO_MODEL}")
            return Outcome(module, case.get("name", ""), SKIPPED if lacks else FAILED, message)
    return Outcome(module, case.get("name", ""), PASSED, "")


def reason_of(reasons: dict[str, str], found: Outcome) -> str:
    """Return why a test need not pass, "" when it must."""
    known = (why for pattern, why in reasons.items() if fnmatch.fnmatchcase(found.id, pattern))
    return next(known, NOT_OFFERED if found.message.endswith(f"return code {NO_OPTION}") else "")


def table(found: list[Outcome], reasons: dict[str, str]) -> list[str]:
    """Return a Markdown table: a row for each module, and one for each reason."""
    lines = ["| tests | passed | not offered | no local model |", "|---|---|---|---|"]
    for module in dict.fromkeys(o.module for o in found):
        count = Counter(o.status for o in found if o.module == module)
        lines.append(f"| `{module}` | {count[PASSED]} | {count[FAILED]} | {count[SKIPPED]} |")
    lines += ["", "| not offered | tests |", "|---|---|"]
    why = Counter(reason_of(reasons, o) for o in found if o.status == FAILED)
    return lines + [f"| {text or 'no reason is known'} | {n} |" for text, n in sorted(why.items())]


def main() -> int:
    """Run, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", default="", help="modules whose name holds this word")
    parser.add_argument("--out", type=Path, help="Markdown")
    args = parser.parse_args()
    reasons = tomllib.loads((HERE / "reasons.toml").read_text(encoding="ascii"))
    with tempfile.TemporaryDirectory() as folder:
        root = unpack(args.package.resolve(), Path(folder))
        chosen = [(suite, m) for suite, modules in MODULES.items() for m in modules if args.only in m]
        found = [o for suite, m in chosen for o in run_module(root, suite, m, args.models.resolve())]
    text = "\n".join(table(found, reasons))
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="ascii")
    unknown = [o for o in found if o.status == FAILED and not reason_of(reasons, o)]
    stale = [o for o in found if o.status == PASSED and reason_of(reasons, o)]
    for o in unknown:
        print(f"fails without a reason: {o.id}: {o.message[:200]}")
    for o in stale:
        print(f"passes, but has a reason not to: {o.id}")
    return 1 if unknown or stale else 0


if __name__ == "__main__":
    sys.exit(main())
