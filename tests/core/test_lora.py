"""LoRA adapters against the model whose weights they were merged into."""

import pickle
from pathlib import Path

import gguf
import numpy as np
import pytest

from pylongctx import Llama
from pylongctx.errors import InvalidInput

METHODS = [None, "full", "window,n_sink=4,window=24", "selfextend,group_size=8,neighbor_window=16"]
RANK, ALPHA = 4, 8.0
TENSORS = ("blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.1.ffn_down.weight")


def factors(reader: gguf.GGUFReader, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return a and b of the tensors: the weights [out, in] become w + alpha / rank * b a."""
    random = np.random.default_rng(seed)
    shapes = {t.name: tuple(int(n) for n in t.shape) for t in reader.tensors}  # in, out
    return {
        name: (
            random.normal(0, 0.1, (RANK, shapes[name][0])).astype(np.float32),
            random.normal(0, 0.1, (shapes[name][1], RANK)).astype(np.float32),
        )
        for name in TENSORS
    }


def write_adapter(path, pairs, arch="llama", kind="lora", alpha=ALPHA):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    if isinstance(alpha, str):
        writer.add_string("adapter.lora.alpha", alpha)
    else:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(model_path):
    return model_path("llama")


@pytest.fixture(scope="module")
def pairs(model):
    return factors(gguf.GGUFReader(model), 0)


@pytest.fixture(scope="module")
def adapter(pairs, tmp_path_factory):
    return str(write_adapter(tmp_path_factory.mktemp("lora") / "one.gguf", pairs))


@pytest.fixture(scope="module")
def merged(model, pairs, tmp_path_factory):
    """Return a function from a scale to the model with the adapter merged into its weights."""

    def merge(scale):
        path = tmp_path_factory.mktemp("merged") / "model.gguf"
        path.write_bytes(model.read_bytes())
        for tensor in gguf.GGUFReader(path, "r+").tensors:
            if tensor.name in pairs:
                assert tensor.data.dtype == np.float32
                a, b = pairs[tensor.name]
                tensor.data[:] += scale * ALPHA / RANK * (b @ a)
        return path

    return merge


def logits(llm, tokens):
    llm.reset()
    llm.eval(tokens)
    return llm.scores[-1].copy()


def open_model(path, **kwargs):
    return Llama(str(path), **{"n_ctx": 256, "verbose": False} | kwargs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_an_adapter_is_the_merged_model(model, adapter, merged, tokens, method, scale):
    with open_model(model, lora_path=adapter, lora_scale=scale, method=method) as llm:
        assert llm.loras == {adapter: scale}
        found = logits(llm, tokens[:50])
        llm.remove_lora(adapter)
        plain = logits(llm, tokens[:50])
    with open_model(merged(scale), method=method) as other:
        expected = logits(other, tokens[:50])
    with open_model(model, method=method) as other:
        np.testing.assert_array_equal(plain, logits(other, tokens[:50]))
    span = np.abs(expected).max()
    assert np.abs(found - expected).max() < 1e-3 * span
    assert np.abs(plain - expected).max() > 1e-2 * span


def test_two_adapters_add_up_and_scales_change(model, adapter, pairs, tokens, tmp_path):
    half = {name: (a, b / 2) for name, (a, b) in pairs.items()}
    second = str(write_adapter(tmp_path / "half.gguf", half))
    with open_model(model, lora_path=adapter) as llm:
        one = logits(llm, tokens[:30])
        llm.add_lora(adapter, 0.5)
        llm.add_lora(second)
        assert llm.loras == {adapter: 0.5, second: 1.0}
        np.testing.assert_allclose(logits(llm, tokens[:30]), one, atol=1e-3)
        with pytest.raises(KeyError):
            llm.remove_lora("other.gguf")


def test_one_file_counts_once_however_its_path_is_spelled(model, pairs, tokens, tmp_path, monkeypatch):
    path = write_adapter(tmp_path / "one.gguf", pairs)
    (tmp_path / "folder").mkdir()
    (tmp_path / "symbolic.gguf").symlink_to(path)
    (tmp_path / "hard.gguf").hardlink_to(path)
    monkeypatch.chdir(tmp_path / "folder")
    spellings = ["../one.gguf", str(path), path, f"{tmp_path}/folder/..//one.gguf", *tmp_path.glob("*.gguf")]
    assert len(spellings) == 7
    with open_model(model, lora_path=str(path), lora_scale=0.5) as llm:
        once, state = logits(llm, tokens[:30]), llm.save_state()
        for spelling in spellings:
            llm.add_lora(spelling, 0.25)
            llm.add_lora(spelling, 0.5)
            assert llm.loras == {str(path): 0.5}
            np.testing.assert_array_equal(logits(llm, tokens[:30]), once)
        llm.load_state(state)
        copy = tmp_path / "copy.gguf"
        copy.write_bytes(path.read_bytes())
        llm.add_lora(copy, 0.5)  # another file
        assert len(llm.loras) == 2
        llm.remove_lora(copy)
        path.rename(tmp_path / "moved.gguf")
        llm.remove_lora("../one.gguf")
        assert llm.loras == {}


@pytest.mark.parametrize("scale", [1e30, -1e30, 10001.0, float("nan"), float("inf")])
def test_scales_that_overflow_are_refused(model, adapter, tokens, scale):
    with open_model(model, lora_path=adapter, lora_scale=0.5) as llm:
        before = logits(llm, tokens[:20])
        with pytest.raises(ValueError, match=r"the scale of a LoRA adapter must be from -10000 to 10000, not"):
            llm.add_lora(adapter, scale)
        assert llm.loras == {adapter: 0.5}
        np.testing.assert_array_equal(logits(llm, tokens[:20]), before)
    with pytest.raises(ValueError, match="the scale of a LoRA adapter must be"):
        open_model(model, lora_path=adapter, lora_scale=scale)


def test_a_change_forgets_the_tokens(model, adapter, tokens):
    with open_model(model) as llm:
        llm.eval(tokens[:20])
        llm.add_lora(adapter)
        assert llm.n_tokens == 0


def test_a_state_belongs_to_its_adapters(model, adapter, tokens):
    with open_model(model) as llm:
        llm.eval(tokens[:20])
        plain = llm.save_state()
        llm.add_lora(adapter, 0.5)
        with pytest.raises(InvalidInput, match="lora"):
            llm.load_state(plain)
        llm.eval(tokens[:20])
        state = llm.save_state()
        llm.add_lora(adapter, 0.25)
        with pytest.raises(InvalidInput, match=r"lora=.*0\.5"):
            llm.load_state(state)
        llm.add_lora(adapter, 0.5)
        llm.load_state(state)
        llm.remove_lora(adapter)
        llm.load_state(plain)
        assert llm.n_tokens == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "qwen2"}, "arch mismatch"),
        ({"kind": "other"}, "adapter.type"),
        ({"alpha": "8"}, "adapter.lora.alpha has the wrong type"),
        ({"alpha": 1e30}, "adapter.lora.alpha must be from -1e.06 to 1e.06, not 1e.30"),
        ({"alpha": float("nan")}, "adapter.lora.alpha must be from -1e.06 to 1e.06, not nan"),
    ],
)
def test_files_that_are_not_adapters_of_this_model(model, pairs, tmp_path, change, message, tokens):
    path = write_adapter(tmp_path / "bad.gguf", pairs, **change)
    with pytest.raises(InvalidInput, match=message):
        open_model(model, lora_path=str(path))
    with open_model(model) as llm:
        before = logits(llm, tokens[:20])
        with pytest.raises(InvalidInput, match=message):
            llm.add_lora(path)
        assert llm.loras == {}
        np.testing.assert_array_equal(logits(llm, tokens[:20]), before)


def test_wrong_shapes_and_damaged_files(model, pairs, adapter, tmp_path):
    name = TENSORS[0]
    a, b = pairs[name]
    wrong = write_adapter(tmp_path / "shape.gguf", {name: (a[:, :-2].copy(), b)})
    short = tmp_path / "short.gguf"
    short.write_bytes(Path(adapter).read_bytes()[:-100])
    text = tmp_path / "text.gguf"
    text.write_text("no adapter")
    with open_model(model) as llm:
        for path in (wrong, short, text, model):
            with pytest.raises(InvalidInput, match="cannot be used as a LoRA adapter"):
                llm.add_lora(path)
        with pytest.raises(ValueError, match="LoRA path does not exist"):
            llm.add_lora(tmp_path / "none.gguf")
        with pytest.raises(InvalidInput, match="must be from -10000 to 10000, not nan"):
            llm.add_lora(adapter, float("nan"))
        assert llm.loras == {}


def test_lora_base_is_refused(model, adapter):
    with pytest.raises(NotImplementedError, match=r"lora_base=.*model_path"):
        open_model(model, lora_path=adapter, lora_base=str(model))


def test_an_object_with_an_adapter_can_be_pickled(model, adapter):
    with open_model(model, lora_path=adapter, lora_scale=0.5) as llm, pickle.loads(pickle.dumps(llm)) as again:
        assert again.loras == {adapter: 0.5}
