"""Which models a server of several offers, and what their cards say."""

import json
import shutil

import pytest
from conftest import BASE
from test_serve_router import folder  # noqa: F401
from tiny_gguf import make_model

pytestmark = pytest.mark.check


def test_a_shelf_has_folders_files_and_names(folder, embedded_model, tmp_path):  # noqa: F811
    from pylongctx.serve.children import Shelf

    for i in (1, 2):
        shutil.copy(folder / "three.gguf", tmp_path / f"big-0000{i}-of-00002.gguf")
    found = Shelf([str(folder), str(tmp_path), "smollm2-135m"]).sources()
    assert list(found) == ["one", "three", "two", "big", "smollm2-135m"]
    assert found["big"].word == str(tmp_path / "big-00001-of-00002.gguf")
    assert found["one"].path == found["one"].word == str(folder / "one.gguf")
    assert found["one"].size == (folder / "one.gguf").stat().st_size
    assert found["smollm2-135m"].size > 1 << 20
    for words, reason in (
        ([str(folder), str(folder / "one.gguf")], "two models are called 'one'"),
        ([str(tmp_path / "none")], "neither a folder, a .gguf file"),
        ([str(tmp_path / "none.gguf")], "no .gguf file in"),
    ):
        with pytest.raises(ValueError, match=reason):
            Shelf(words)


def test_cards_know_what_a_file_can(embedded_model, tmp_path):
    import gguf

    from pylongctx.serve.cards import card_of

    path = make_model(tmp_path / "b.gguf", BASE, arch="bert")
    assert card_of(str(path)).capabilities == ["embedding"]
    reader = gguf.GGUFReader(str(embedded_model))
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "llama")
    writer.add_chat_template("{% if tools %}{% endif %}{% if enable_thinking %}{% endif %}")
    tokens = [f"<|fim_{name}|>" for name in ("prefix", "suffix", "middle")]
    writer.add_token_list(tokens)
    writer.add_tensor(reader.tensors[0].name, reader.tensors[0].data, raw_dtype=reader.tensors[0].tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = card_of(str(tmp_path / "c.gguf"))
    assert card.capabilities == ["completion", "tools", "thinking", "insert"]
    assert card.details["quantization_level"] == "unknown"
    assert json.dumps(card.info)
