"""Models that have a name, from a stand-in for huggingface_hub."""

import os
import sys
import types

import pytest
from package_index import FILE, NAME, sha256

from pylongctx.catalog import CATALOG, resolve
from pylongctx.catalog.huggingface import HubEntry
from pylongctx.cli import main


@pytest.fixture
def data(embedded_model) -> bytes:
    return embedded_model.read_bytes()


@pytest.fixture
def hub(monkeypatch, tmp_path, embedded_model):
    """Stand in for huggingface_hub; ``data`` is what the site has, ``reason`` why it cannot be reached."""
    snapshot, blob = tmp_path / "snapshot.gguf", tmp_path / "blob"
    module = types.ModuleType("huggingface_hub")
    module.data, module.reason, module.asked = embedded_model.read_bytes(), None, []

    def hf_hub_download(repo_id, filename, *, revision):
        if module.reason:
            raise module.reason
        module.asked.append((repo_id, filename, revision))
        blob.write_bytes(module.data)
        snapshot.symlink_to(blob)
        return str(snapshot)

    def try_to_load_from_cache(repo_id, filename, *, revision):
        return str(snapshot) if snapshot.exists() else None

    module.hf_hub_download, module.try_to_load_from_cache = hf_hub_download, try_to_load_from_cache
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    module.files = [snapshot, blob]
    return module


@pytest.fixture
def repository(monkeypatch, data):
    facts = {"name": NAME, "file": FILE, "size": len(data), "sha256": sha256(data), "n_ctx_train": 512}
    entry = HubEntry(**facts, license="Gemma", repo_id="some/model", revision="f" * 40)
    monkeypatch.setitem(CATALOG, NAME, entry)
    return entry


def test_a_file_of_the_hub(hub, repository, capsys):
    assert main(["get", NAME]) == 0
    assert capsys.readouterr() == (f"{hub.files[0]}\n", f"downloading {repository.about}\n")
    assert repository.about.endswith("(https://ai.google.dev/gemma/terms), from some/model at fffffff on Hugging Face")
    assert resolve(NAME) == str(hub.files[0])
    assert hub.asked == [("some/model", FILE, "f" * 40)]


def test_another_file_of_the_hub_is_taken_away(hub, repository):
    hub.data = b"GGUF but another"
    with pytest.raises(ValueError, match="does not match the catalogue"):
        resolve(NAME)
    assert [os.path.lexists(path) for path in hub.files] == [False, False]


@pytest.mark.parametrize("reason", [FileNotFoundError("no route to host"), RuntimeError("no route to host")])
def test_the_hub_without_a_network(hub, repository, reason):
    hub.reason = reason
    with pytest.raises(ConnectionError, match=r"tiny: some/model cannot.*no route to host.*use the embedded model"):
        resolve(NAME)


def test_the_hub_without_its_package(repository, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert repository.path() is None
    assert main(["get", NAME]) == 1
    assert "pip install huggingface-hub" in capsys.readouterr().err
