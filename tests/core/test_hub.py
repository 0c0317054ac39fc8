"""Models from huggingface.co, which a stand-in for its package plays."""

import re
import sys
import types

import pytest

from pylongctx import Llama
from pylongctx.catalog.huggingface import by_quant
from pylongctx.cli import main

FILES = ["README.md", "model-q4_k_m.gguf", "model-q8_0.gguf", "split/model-00001-of-00002.gguf", "notes/model.txt"]


@pytest.fixture
def hub(monkeypatch, embedded_model):
    """Return what was downloaded: (repository, name, folder)."""
    fetched = []

    class TimeoutException(Exception):  # noqa: N818 - as in httpx
        pass

    class HfApi:
        def list_repo_files(self, repo_id):
            if repo_id == "away/model":
                raise OSError("no route to host")
            if repo_id == "offline/model":
                raise TimeoutException("name not known")
            return FILES

    def hf_hub_download(repo_id, filename, *, subfolder, local_dir, cache_dir):
        fetched.append((repo_id, filename, subfolder, local_dir, cache_dir))
        return str(embedded_model)

    module = types.ModuleType("huggingface_hub")
    module.HfApi, module.hf_hub_download = HfApi, hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return fetched


def test_a_pattern_finds_one_file(hub, embedded_model):
    with Llama.from_pretrained("some/model", "*q8_0.gguf", cache_dir="here", n_ctx=128, verbose=False) as llm:
        assert llm.model_path == str(embedded_model)
        assert llm.n_ctx() == 128
    assert hub == [("some/model", "model-q8_0.gguf", None, None, "here")]


def test_more_files_and_folders(hub):
    Llama.from_pretrained("some/model", "split/*1-of*", ["notes/*"], local_dir="there", verbose=False).close()
    assert [call[1:4] for call in hub] == [
        ("model-00001-of-00002.gguf", "split", "there"),
        ("model.txt", "notes", "there"),
    ]


@pytest.mark.parametrize(
    ("repo", "name", "error", "message"),
    [
        ("some/model", "*.bin", ValueError, r"0 files match '\*.bin'"),
        ("some/model", "*.gguf", ValueError, r"3 files match"),
        ("some/model", None, ValueError, "needs the name of a GGUF file"),
        ("away/model", "*q8_0.gguf", ConnectionError, "away/model cannot .*no route to host.*path of a file"),
        ("offline/model", "*q8_0.gguf", ConnectionError, "offline/model cannot .*name not known.*path of a file"),
    ],
)
def test_what_cannot_be_loaded(hub, repo, name, error, message):
    with pytest.raises(error, match=message):
        Llama.from_pretrained(repo, name)
    assert hub == []


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface-hub"):
        Llama.from_pretrained("some/model", "*.gguf")


QUANTS = [*FILES, "mmproj-model-f16.gguf", "big-Q6_K-00001-of-00002.gguf", "big-Q6_K-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("repo", "file", "names"),
    [
        ("some/model", None, ["model-q4_k_m.gguf"]),
        ("some/model:q8_0", None, ["model-q8_0.gguf"]),
        ("some/model:Q6_K", None, ["big-Q6_K-00001-of-00002.gguf", "big-Q6_K-00002-of-00002.gguf"]),
        ("some/model", "split/model-00001-of-00002.gguf", ["model-00001-of-00002.gguf"]),
    ],
)
def test_a_model_by_its_quantization(hub, monkeypatch, embedded_model, repo, file, names):
    monkeypatch.setattr("test_hub.FILES", QUANTS)
    assert by_quant(repo, file) == str(embedded_model)
    assert [call[1] for call in hub] == names


@pytest.mark.parametrize(
    ("repo", "file", "message"),
    [
        ("model", None, "user/name or user/name:quant"),
        ("some/model:Q2_K", None, "no single file of Q2_K; choose one of model-q4_k_m.gguf"),
        ("some/model", "other.gguf", "has no file other.gguf"),
        ("some/model:q8_0", "model-q8_0.gguf", "leave out one of them"),
    ],
)
def test_a_model_that_the_repository_does_not_have(hub, repo, file, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        by_quant(repo, file)


def test_commands_take_a_repository(hub, capfd):
    assert main(["complete", "-hf", "some/model:q8_0", "-p", "It was", "-n", "2", "-c", "64"]) == 0
    assert [call[1] for call in hub] == ["model-q8_0.gguf"]
    assert main(["complete", "other.gguf", "-hf", "some/model", "-p", "x"]) == 1
    assert "name two models" in capfd.readouterr().err
