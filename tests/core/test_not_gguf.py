"""What is not a GGUF file is named as what it is, with a way out."""

import pytest

from pylongctx import Llama
from pylongctx.errors import ModelRefused
from pylongctx.model_files.gguf import why_not_gguf

pytestmark = pytest.mark.check

FILES = {
    "it is empty": b"",
    "it is a safetensors file; convert it": b'\x10\0\0\0\0\0\0\0{"a": {"dtype": "F16"}}',
    "it is a PyTorch checkpoint; convert it": b"PK\3\4rest",
    "format older than GGUF": b"tjgg\3\0\0\0",
    "it is a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "it is an HTML page": b"\n<!DOCTYPE html>",
    "it begins with b'hell', not with GGUF": b"hello",
}


@pytest.mark.parametrize("message", FILES)
def test_a_file_of_another_kind(tmp_path, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(FILES[message])
    with pytest.raises(ModelRefused, match="is not a GGUF file: ") as caught:
        Llama(str(path), verbose=False)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_names_its_models(tmp_path, embedded_model):
    assert why_not_gguf(str(embedded_model)) == ""
    assert why_not_gguf(str(tmp_path)) == "it is a folder; give a .gguf file"
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelRefused, match=r"it is a folder; give one of a\.gguf, b\.gguf"):
        Llama(str(tmp_path), verbose=False)


def test_a_file_that_is_cut_off(tmp_path, embedded_model):
    path = tmp_path / "model.gguf"
    path.write_bytes(embedded_model.read_bytes()[:1_000_000])
    with pytest.raises(ModelRefused, match=r"model\.gguf is damaged or incomplete: .* has 1000000 bytes") as caught:
        Llama(str(path), verbose=False)
    assert "\n" not in str(caught.value)
