"""pylongctx complete: text and JSON for scripts, as a script runs it."""

import json
import signal
import subprocess
import sys

import pytest
from terminal import CTRL_C, DEADLINE, Terminal, environment, run

from pylongctx import Llama
from pylongctx.models import embedded_model

PROMPT = "It was the best of times, it was"
GREEDY = ("--temp", "0", "-n", "8")
ENDLESS = ("--temp", "0", "-l", "2-1000", "-c", "60000", "--method", "longheads")  # without the end token


@pytest.fixture(scope="module")
def expected():
    with Llama(str(embedded_model()), verbose=False, n_threads=1, n_threads_batch=1) as llm:
        return llm(PROMPT, max_tokens=8, temperature=0.0, logprobs=2)


@pytest.mark.parametrize("how", ["-p", "-f", "stdin"])
def test_a_text_from_anywhere(tmp_path, expected, how):
    file = tmp_path / "prompt"
    file.write_text(PROMPT + "\n")
    args = {"-p": ("-p", PROMPT), "-f": ("-f", str(file)), "stdin": ()}[how]
    done = run("complete", *GREEDY, *args, input=PROMPT + "\n" if how == "stdin" else "")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected["choices"][0]["text"] + "\n"


def test_echo_is_off_unless_asked_for(expected):
    text = expected["choices"][0]["text"] + "\n"
    for option, shown in (("--echo", PROMPT), ("--display-prompt", PROMPT), ("--no-display-prompt", "")):
        assert run("complete", *GREEDY, "-p", PROMPT, option).stdout == shown + text


def test_json_has_openai_s_fields_and_more(expected):
    done = run("complete", *GREEDY, "-p", PROMPT, "--json", "--logprobs", "2", "-a", "tiny", "--method", "corm")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["object"] == "text_completion"
    assert found["model"] == "tiny"
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["choices"][0]["logprobs"]["tokens"] == expected["choices"][0]["logprobs"]["tokens"]
    assert all(len(top) in (2, 3) for top in found["choices"][0]["logprobs"]["top_logprobs"])
    assert found["usage"] == expected["usage"]
    assert found["timings"]["prompt_n"] == expected["usage"]["prompt_tokens"]
    assert found["timings"]["predicted_n"] == 8
    assert found["timings"]["predicted_per_second"] > 0
    assert found["method"].startswith("corm,")
    assert found["kv"]["bytes"] > 0


def test_json_without_a_method(expected):
    found = json.loads(run("complete", *GREEDY, "-p", PROMPT, "--json", "--method", "none").stdout)
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    assert (found["method"], found["kv"]) == ("none", None)


def test_escapes_in_options_only(tmp_path):
    (tmp_path / "prompt").write_text("a\\nb")
    echoed = [
        run("complete", "-n", "1", "--echo", *args).stdout
        for args in (["-p", "a\\nb\\x41\\q"], ["-p", "a\\nb", "--no-escape"], ["-f", str(tmp_path / "prompt")])
    ]
    assert [text[: len(start)] for text, start in zip(echoed, ("a\nbA\\q", "a\\nb", "a\\nb"), strict=True)] == [
        "a\nbA\\q",
        "a\\nb",
        "a\\nb",
    ]


def test_what_ends_and_holds_an_answer():
    assert run("complete", "-p", "x", "--grammar", 'root ::= "one two three"', "--stop", "two").stdout == "one \n"
    assert run("complete", "-p", "x", "--grammar", 'root ::= "a\\nb"', "-r", "\\n").stdout == "a\n"
    schema = json.dumps({"type": "object", "properties": {"guilty": {"type": "boolean"}}, "required": ["guilty"]})
    assert json.loads(run("complete", "-p", "x", "-j", schema).stdout)["guilty"] in (True, False)


def test_the_same_seed_says_the_same():
    texts = [run("complete", "-n", "12", "--temp", "1.5", "-p", PROMPT, "-s", seed).stdout for seed in "778"]
    assert texts[0] == texts[1] != texts[2]


def test_bytes_that_are_not_text():
    done = run("complete", "-n", "2", "--echo", input=b"caf\xe9 au lait")
    assert done.returncode == 0
    assert done.stdout.startswith("caf\u00e9 au lait")
    assert "standard input: read as Windows-1252, as it is not UTF-8" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "word " * 600], "exceed context window of 512"),
        ([b"-p", b"caf\xe9"], "--prompt is not UTF-8: use a file"),
        (["-p", "x", "--logprobs", "1"], "--logprobs needs --json"),
        (["-p", "x", "-f", __file__], "give one of --prompt and --file"),
        (["-p", "x", "--grammar", "root ::= nothing"], "nothing"),
        (["-p", "x", "-j", "{bad"], "--json-schema: the JSON schema cannot be used: it is not JSON"),
        (["-p", "x", "-m", "missing.gguf"], "Model path does not exist: missing.gguf"),
        (["-p", "x", "--kv-limit", "0"], "kv_limit must be a number of bytes"),
    ],
)
def test_errors_are_one_line(args, message):
    done = run("complete", *args)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") <= 2
    assert "Traceback" not in done.stderr


def test_wrong_usage_is_status_2():
    done = run("complete", "-p", "x", "-n", "0")
    assert done.returncode == 2
    assert "at least 1, or -1 for no limit" in done.stderr


def start(*args, **kwargs):
    command = [sys.executable, "-m", "pylongctx", "complete", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), **kwargs)


def test_a_reader_that_has_enough_is_not_an_error():
    with start("-p", PROMPT, *ENDLESS) as process:
        assert process.stdout.read(10)
        process.stdout.close()
        assert process.wait(DEADLINE) == 1
        assert process.stderr.read() == b""


def test_an_interrupt_is_status_130():
    with start("-p", PROMPT, *ENDLESS, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(DEADLINE) == 130
        assert process.stderr.read() == b""


def test_a_terminal_shows_progress_and_is_asked_for_nothing(tmp_path):
    (tmp_path / "long").write_text("word " * 4000)
    with Terminal(
        "complete", "-f", str(tmp_path / "long"), "-c", "8000", "--method", "longheads", "-b", "16"
    ) as terminal:
        terminal.until("reading")
        terminal.until("t/s")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
    with Terminal("complete") as terminal:
        assert "give -p TEXT or -f FILE, or pipe it in" in terminal.until("pipe it in")
        assert terminal.end() == 1
