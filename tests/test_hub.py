"""Models from huggingface.co, which a stand-in for its package plays."""

import sys
import types

import pytest

from pylongctx import Llama

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
        ("away/model", "*q8_0.gguf", ConnectionError, "away/model cannot be loaded.*no route to host.*path of a file"),
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
