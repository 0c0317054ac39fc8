"""What a program can do that has installed pylongctx without its extras."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.check

WITHOUT = "import sys; sys.modules |= dict.fromkeys({missing!r}); "
EXTRAS = ("rich", "markdown_it", "shtab", "llguidance", "matplotlib", "fastapi", "uvicorn")


def run(missing, code):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing) + code], capture_output=True, text=True, check=False
    )


def test_a_model_answers_without_any_extra(embedded_model):
    code = (
        f"import pylongctx; llm = pylongctx.Llama({str(embedded_model)!r}, n_ctx=64, n_threads=1, verbose=False); "
        "print(llm('The key', max_tokens=2)['usage']['completion_tokens'])"
    )
    done = run(EXTRAS, code)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_a_model_that_does_not_fit_is_explained_without_any_extra(embedded_model):
    code = f"import pylongctx; pylongctx.Llama({str(embedded_model)!r}, n_ctx=10**9, verbose=False)"
    done = run(EXTRAS, code)
    assert done.returncode == 1 and "does not fit into memory" in done.stderr and "Suggestions:" in done.stderr


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        (("rich",), ["chat"], "pylongctx[cli]"),
        (("markdown_it",), ["ask", "book.txt", "Who?"], "pylongctx[cli]"),
        (("shtab",), ["completion", "bash"], "pylongctx[cli]"),
        (("fastapi",), ["serve"], "pylongctx[server]"),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(missing, words, extra):
    done = run(missing, f"from pylongctx.cli import main; sys.exit(main({words}))")
    assert done.returncode == 1 and f"pip install '{extra}'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
