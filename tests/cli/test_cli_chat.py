"""pylongctx chat: answers and commands of a script."""

import re

import pytest
from terminal import run

from pylongctx.chat.template import NO_TEMPLATE

CORM = "corm,window=64,recent=64"
ENDLESS = ("--grammar", "root ::= [a-z ] root", "--temp", "0")
YES = ("--grammar", 'root ::= "yes" | "no"', "--temp", "0")
TURN = re.compile(
    r"prompt (\d+) tokens(?:, [\d.]+ t/s)?; answer (\d+) tokens(?:, [\d.]+ t/s)?; "
    r"KV ([\d.]+ [KM]iB); context (\d+)/(\d+)"
)


# ---- with pipes ----


def test_a_script_gets_answers_on_stdout():
    done = run("chat", *YES, "-sys", "Be brief.", input="First?\n\n  \nSecond\\\nline?\n/regen\n/stats\n")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"((yes|no)\n){3}", done.stdout)
    turns = TURN.findall(done.stderr)
    assert len(turns) == 3
    assert [int(turn[1]) > 0 for turn in turns] == [True] * 3
    assert "messages" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    assert "> " not in done.stdout


@pytest.mark.parametrize("method", ["longheads", CORM])
def test_the_line_after_each_of_forty_turns_adds_up(method):
    lines = "".join(f"And what happened on day {i}?\n" for i in range(40))
    done = run("chat", "-c", "4096", "--temp", "0", "-n", "9", "--method", method, input=lines)
    assert done.returncode == 0, done.stderr
    turns = [tuple(map(int, (turn[0], turn[1], turn[3]))) for turn in TURN.findall(done.stderr)]
    assert len(turns) == 40
    used = 0
    for n_prompt, n_answer, context in turns:
        n_again = used + n_prompt + n_answer - context  # an answer whose text has other tokens
        assert -1 <= n_again < n_prompt  # the last token is read later
        assert n_prompt < 80
        used = context


def test_blocks_of_lines_are_one_message():
    done = run("chat", *YES, "--no-show-timings", input='"""one\ntwo\n"""\n"""three"""\nlast\\')
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1 and NO_TEMPLATE in done.stderr
    assert len(done.stdout.split()) == 3


def test_a_single_turn_and_escapes():
    prompt = "a\\nb"
    escaped, plain = (run("chat", *YES, "-st", "-p", prompt, *more, input="x\n") for more in ([], ["--no-escape"]))
    assert len(escaped.stdout.split()) == len(plain.stdout.split()) == 1
    assert TURN.search(escaped.stderr)[1] != TURN.search(plain.stderr)[1]


def test_bytes_that_are_not_text_and_long_lines():
    done = run("chat", *YES, "-c", "9000", "--method", "longheads", input=b"caf\xe9?\n" + b"long " * 4000 + b"\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the message is not UTF-8") == 1
    assert len(done.stdout.split()) == 2
    assert int(TURN.findall(done.stderr)[1][0]) > 4000


def test_what_does_not_fit_is_an_error_and_the_rest_is_answered():
    done = run("chat", *YES, "-c", "256", input="long " * 400 + "\nHello?\n/nonsense\n")
    assert done.returncode == 1
    assert re.search(r"\d+ tokens do not fit into the context of 256; try /clear, .*-c .*/method", done.stderr)
    assert "there is no command /nonsense" in done.stderr
    assert done.stdout.strip() in ("yes", "no")
    assert "Traceback" not in done.stderr


def test_an_answer_that_fills_the_context_says_so():
    done = run("chat", *ENDLESS, "-c", "128", "--no-loop-stop", input="Hello?\n")
    assert done.returncode == 0, done.stderr
    assert "the answer was cut off: the context is full" in done.stderr
    assert "context 127/128" in done.stderr


def test_files_go_before_the_message(tmp_path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("The thief is the butler. " * 3)
    (tmp_path / "odd.txt").write_bytes(b"caf\xe9")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    lines = [
        f"/read {tmp_path}/one.txt",
        "Who?",
        f"/glob {tmp_path}/**/*[eo].txt",
        "Who?",
        f"/read {tmp_path}/odd.txt",
        f"/read {tmp_path}/binary.txt",
        f"/glob {tmp_path}/*.pdf",
        "/read",
        "/clear",
        "Who?",
    ]
    done = run("chat", *YES, input="\n".join(lines))
    n = [int(turn[0]) for turn in TURN.findall(done.stderr)]
    assert n[1] > n[0] + 20 > 60
    assert n[2] < 50
    assert re.search(r"one.txt: (\d+) tokens\n(\d+) tokens of files go before the next message", done.stderr)
    assert re.search(r"odd.txt: \d+ tokens \(read as Windows-1252, as it is not UTF-8\)", done.stderr)
    for message in ("binary.txt is not a text file", "no file matches", "usage: /read FILE"):
        assert message in done.stderr


def test_turns_leave_and_the_line_says_so():
    lines = "".join(f"And what happened on day {i}?\n" for i in range(12))
    wanted = ["-c", "256", "--temp", "0", "-n", "9", "--overflow", "evict_middle"]
    done = run("chat", *wanted, "-sys", "Be brief.", input=lines + "/method full,spans=3\nOnce more?\n/method corm\n")
    turns = [int(turn[0]) for turn in TURN.findall(done.stderr)]
    gone = [int(n) for n in re.findall(r"; without the (\d+) oldest turns, \d+ tokens; KV", done.stderr)]
    assert len(turns) == 13 - len(gone)
    assert gone == sorted(gone) and gone[0] == 1 and len(gone) > 5
    prompts = [int(n) for n in re.findall(r"prompt (\d+) tokens", done.stderr)]
    assert max(prompts[:12]) < 80  # what stays is not read again
    assert "needs full attention, not 'corm," in done.stderr
    assert done.returncode == 1


def test_a_file_that_does_not_fit_is_reported_before(tmp_path):
    (tmp_path / "long").write_text("word " * 900)
    done = run("chat", *YES, input=f"/read {tmp_path}/long\n")
    assert re.search(r"(\d+) tokens of files go before the next message; there is room for 512", done.stderr)
    assert "the files do not fit; try" in done.stderr


def test_methods_change_while_talking(tmp_path):
    lines = [
        "Hello?",
        f"/save {tmp_path}/chat",
        "/method",
        "/method nonsense",
        "/method selfextend,group_size=4,neighbor_window=64",
        f"/load {tmp_path}/chat",
        "And then?",
        "/method full",
        f"/load {tmp_path}/chat",
        "And then?",
    ]
    done = run("chat", *YES, "-c", "600", input="\n".join(lines))
    assert done.returncode == 1
    assert re.search(r"saved: \d+ tokens, [\d.]+ [KM]iB\nfull\n", done.stderr)
    assert "unknown method 'nonsense'" in done.stderr
    assert "selfextend,group_size=4,neighbor_window=64; KV" in done.stderr
    assert "it was saved with method='full', this object has method='selfextend" in done.stderr
    assert "loaded: 2 messages" in done.stderr
    first, second, third = (int(turn[0]) for turn in TURN.findall(done.stderr))
    assert second < first + 20  # the conversation is known already
    assert third < first + 20


@pytest.mark.parametrize(("percent", "warns"), [("50%", False), ("2", True)])
def test_a_conversation_is_compressed(percent, warns):
    lines = ["/compress 10", "Tell me a story. " * 40, f"/compress {percent}", "/stats", "And then?"]
    done = run("chat", *YES, "--method", "kvzip", input="\n".join(lines) + "\n")
    assert "there is nothing to compress: there are no messages" in done.stderr
    assert re.search(r"replaying \d+ tokens, about \d+ s; Ctrl-C leaves the KV cache as it is", done.stderr)
    before, after = re.search(r"compressed \d+ tokens from (\S+ \S+) to (\S+ \S+) in \d+ s", done.stderr).groups()
    assert before != after and f"KV {after}" in done.stderr
    assert ("answers may be wrong" in done.stderr) == warns
    assert len(done.stdout.strip()) > 0


@pytest.mark.parametrize(
    ("args", "command", "message"),
    [
        (["--method", "kvzip"], "/compress", "usage: /compress PERCENT"),
        (["--method", "kvzip"], "/compress 120", "more than 0 and at most 100 percent, not 120"),
        (["--method", "kvzip"], "/compress nan", "more than 0 and at most 100 percent, not nan"),
        (["--method", "full"], "/compress 30%", "/compress needs a method that compresses: /method kvzip"),
    ],
)
def test_what_cannot_be_compressed(args, command, message):
    done = run("chat", *YES, *args, input=f"Hello\n{command}\n")
    assert message in done.stderr and done.returncode == 1


def test_without_a_method():
    lines = ["Hello?", "/regen", "/stats", "/method full", "And then?", "/method none", "And then?"]
    done = run("chat", *YES, "--method", "none", input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 4
    assert done.stderr.count("KV of llama.cpp; context") == 5
    assert "2 messages; KV of llama.cpp" in done.stderr


def test_a_method_that_cannot_hold_the_conversation_changes_nothing():
    lines = ["word " * 300, "/method full", "And then?"]
    done = run("chat", *YES, "--method", "longheads", input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    lines = ["word " * 900, "/method full", "/method", "And then?"]
    done = run("chat", *YES, "--method", "longheads", input="\n".join(lines))
    assert "exceed context window of 512" in done.stderr
    assert len(done.stdout.split()) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.gguf"], "Model path does not exist: missing.gguf"),
        (["--grammar", "root ::= nothing"], "grammar"),
        (["-gan", "4", "--method", "corm"], "belong to selfextend, not to method corm"),
    ],
)
def test_errors_are_one_line(args, message):
    done = run("chat", *args, input="Hello?\n")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
