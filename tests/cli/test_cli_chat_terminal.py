"""pylongctx chat in a terminal: lines that are edited, Ctrl-C, what is drawn, and conversations that continue."""

import re

import pytest
from chat_templates import THINKING
from terminal import CTRL_C, CTRL_D, PASTE, TAB, UP, Terminal, run
from test_cli_chat import ENDLESS, TURN, YES


def test_a_conversation_in_a_terminal():
    with Terminal("chat", *YES, "-sys", "Be brief.") as terminal:
        assert "512 tokens of context; /help" in terminal.until("> ")
        assert re.search(r"\n(yes|no)\r\n", terminal.ask("Hello?"))
        assert TURN.search(terminal.ask(UP))  # the line before, from the history
        terminal.type("left\x7f\x7f\x7f\x7fright\\\n")
        terminal.until(". ")
        assert TURN.search(terminal.ask("and more"))
        assert "/glob PATTERN" in terminal.ask("/help")
        assert "7 messages" in terminal.ask("/stats")
        terminal.type("/exit\n")
        assert terminal.end() == 0


def test_ctrl_c_stops_the_answer():
    with Terminal("chat", *ENDLESS, "-c", "32000", "--method", "longheads") as terminal:
        terminal.until("> ")
        terminal.type("Hello?\n")
        terminal.until("\n")
        terminal.until(" ")  # a word of the answer
        terminal.type(CTRL_C)
        shown = terminal.until("\n> ")
        assert "stopped; /regen" in shown
        n = int(TURN.search(shown)[2])
        assert 0 < n < 31000
        assert "2 messages" in terminal.ask("/stats")
        terminal.type("And?\n")
        terminal.until("\n")
        terminal.until(" ")
        terminal.type(CTRL_C)
        assert int(TURN.search(terminal.until("\n> "))[1]) < 60


def test_ctrl_c_stops_the_prompt(tmp_path):
    (tmp_path / "long").write_text("word " * 20000)
    with Terminal("chat", *YES, "-c", "30000", "--method", "longheads", "-b", "16") as terminal:
        terminal.until("> ")
        terminal.ask("Hello?")
        terminal.ask(f"/read {tmp_path}/long")
        terminal.type("What?\n")
        terminal.until("reading")
        terminal.until("t/s")
        terminal.type(CTRL_C)
        assert "the unanswered message is not part of the conversation" in terminal.until("\n> ")
        assert "2 messages" in terminal.ask("/stats")
        terminal.ask("/clear")
        assert re.search(r"(yes|no)\r\n", terminal.ask("And now?"))


def test_ctrl_c_stops_another_method(tmp_path):
    (tmp_path / "long").write_text("word " * 5000)
    with Terminal("chat", *YES, "-c", "8000", "--method", "longheads", "-b", "16") as terminal:
        terminal.until("> ")
        terminal.ask(f"/read {tmp_path}/long")
        terminal.ask("Who?")
        terminal.type("/method selfextend\n")
        terminal.until("reading")
        terminal.type(CTRL_C)
        assert "stopped" in terminal.until("\n> ")
        assert "longheads" in terminal.ask("/method")
        assert "2 messages" in terminal.ask("/stats")
        assert int(TURN.search(terminal.ask("And who else?"))[1]) > 5000


def test_ctrl_c_at_the_prompt():
    with Terminal("chat", *YES) as terminal:
        terminal.until("> ")
        terminal.type("half a mess")
        terminal.until("half a mess")
        terminal.interrupt_prompt()
        assert "to exit" not in terminal.until("\n> ")
        terminal.interrupt_prompt()
        assert "press Ctrl-C again or Ctrl-D to exit" in terminal.until("\n> ")
        terminal.ask("Hello?")
        terminal.interrupt_prompt()
        terminal.until("\n> ")
        terminal.interrupt_prompt()
        assert terminal.end() == 0


def test_ctrl_d_leaves():
    with Terminal("chat", *YES) as terminal:
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


@pytest.mark.parametrize("color", ["on", "off"])
def test_thoughts_are_dimmed(tmp_path, color):
    template = tmp_path / "template"
    template.write_text(THINKING)
    grammar = 'root ::= "<think>\\nHm, two.\\n</think>\\n\\nIt is 2."'
    with Terminal("chat", "--chat-template-file", str(template), "--grammar", grammar, "--color", color) as terminal:
        terminal.until("> ")
        shown = terminal.ask("1 + 1?")
        plain = re.sub(r"\x1b\[\d*m", "", shown)
        assert re.search(r"Hm, two\.\s+It is 2\.", plain)
        assert ("\x1b[2m" in shown) == (color == "on")
        assert not re.search(r"\x1b\[2m[^\x1b]*It is", shown)


def test_a_terminal_does_not_obey_what_a_model_writes():
    with Terminal("chat", "--grammar", 'root ::= "a\\x1b]0;title\\x07b\\tc"') as terminal:
        terminal.until("> ")
        shown = terminal.ask("Hello?")
        assert "\x1b]0" not in shown
        assert "a\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}b" in shown


@pytest.mark.parametrize(("option", "shown"), [("--markdown", "two words"), ("--no-markdown", "**two** words")])
def test_markdown_is_rendered(option, shown):
    with Terminal("chat", "--grammar", 'root ::= "**two** words"', option) as terminal:
        terminal.until("> ")
        last = terminal.ask("Hello?").rpartition("\x1b[J")[2]
        assert shown in re.sub(r"\x1b\[[\d;]*m", "", last)


# ---- typing ----


def test_pasted_lines_are_one_message(tmp_path):
    with Terminal("chat", *YES, "-c", "512") as terminal:
        terminal.until("> ")
        terminal.type(PASTE.format("one\ntwo\nthree"))
        shown = terminal.ask("")
        assert len(TURN.findall(shown)) == 1
        history = re.sub(r"\x1b\[\d+m", "", terminal.ask("/history"))
        assert "user: one\r\ntwo\r\nthree" in history and history.count("user:") == 1
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_lines_of_an_earlier_session_and_tab(tmp_path):
    cache = {"LCTX_CACHE": str(tmp_path / "cache")}
    with Terminal("chat", *YES, "-c", "512", **cache) as terminal:
        terminal.until("> ")
        terminal.ask("Is it raining?")
        terminal.type("/bye\n")
        assert terminal.end() == 0
    (tmp_path / "notes of May.txt").write_text("rain")
    with Terminal("chat", *YES, "-c", "512", **cache) as terminal:
        terminal.until("> ")
        terminal.type(UP + UP)
        assert "Is it raining?" in terminal.ask("")
        terminal.type("/rea" + TAB + str(tmp_path) + "/no" + TAB)
        assert "notes of May.txt: " in terminal.ask("")
        terminal.type(CTRL_D)
        terminal.end()


def test_a_conversation_continues(tmp_path):
    cache = {"LCTX_CACHE": str(tmp_path / "cache")}
    with Terminal("chat", *YES, "-c", "512", **cache) as terminal:
        terminal.until("> ")
        terminal.ask("Is it raining?")
        terminal.type(CTRL_D)
        terminal.end()
    (file,) = (tmp_path / "cache" / "chats").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    with Terminal("chat", *YES, "-c", "512", "--continue", **cache) as terminal:
        assert "user: Is it raining?" in terminal.until("> ")
        assert "2 messages" in terminal.ask("/stats")
        terminal.ask("And now?")
        terminal.type(CTRL_D)
        terminal.end()
    assert list((tmp_path / "cache" / "chats").glob("*.json")) == [file]
    done = run("chat", *YES, "--continue", input="", LCTX_CACHE=str(tmp_path / "none"))
    assert done.returncode == 1 and "no conversation to continue" in done.stderr


def test_commands_that_change_the_conversation(tmp_path):
    (tmp_path / "my book.txt").write_text("It was the best of times.")
    book = '"' + str(tmp_path / "my book.txt") + '"'
    lines = [
        *("One?", "/undo", "/stats", "/undo", "/system Be brief.", "/system", "/set temperature 0.5", "/set"),
        *("/set top_p much", "/set nothing 1", "/set temperature default", f"/read {book}", "/stats", "/drop", "/drop"),
        *("Two?", "/history", "/?", "/nothing"),
    ]
    done = run("chat", *YES, "-c", "512", input="\n".join(lines) + "\n")
    said = done.stderr
    assert done.returncode == 1 and len(done.stdout.split()) == 2
    for text in (
        *("0 messages are left", "0 messages; KV", "there is nothing to undo", "Be brief.", "temperature 0.5"),
        *("top_p must be a number, not 'much'", "usage: /set NAME VALUE", "temperature default"),
        *("my book.txt: ", "files for the next message: ", "dropped: ", "there are no files to drop"),
        *("system: Be brief.", "user: Two?", "/regen", "there is no command /nothing"),
    ):
        assert text in said, text
    assert "user: One?" not in said
