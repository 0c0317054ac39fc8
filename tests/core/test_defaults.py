"""What is left to us opens every model that llama.cpp runs; what is asked for by name is refused with the reason."""

import pytest
from llamas import new

from pylongctx import Full, Llama
from pylongctx.engine.context import Context
from pylongctx.errors import InvalidInput

REFUSED = ["gpt2", "mamba"]  # no rotary positions, recurrent


@pytest.mark.parametrize("name", REFUSED)
def test_a_default_falls_back_to_llama_cpp(name, model_path, caplog):
    with Llama(str(model_path(name)), n_threads=1, verbose=False) as llm:
        assert llm.method is None
        (message,) = [record for record in caplog.records if record.name == "pylongctx"]
        assert message.levelname == "WARNING"
        assert "without a method" in message.getMessage()
        llm.eval([1, 5, 7])
        assert llm.scores.shape == (1, llm.n_vocab())


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("method", ["full", Full(), "longheads"])
def test_a_method_that_was_asked_for_is_refused(name, method, model_path):
    with pytest.raises(InvalidInput, match=r"\w"):
        new(model_path(name), method=method)


def test_a_model_that_is_served_has_a_method(embedded_model, caplog):
    with new(embedded_model) as llm:
        assert llm.method == Full()
    assert caplog.messages == []


def test_a_setting_that_is_refused_is_not_a_reason_to_fall_back(embedded_model, caplog):
    with pytest.raises(InvalidInput, match="offload"):
        new(embedded_model, kv_offload="host")
    assert caplog.messages == []


def test_compat_opens_such_a_model(model_path):
    from pylongctx.compat.llama import Llama as Compatible

    with Compatible(str(model_path("gpt2")), n_threads=1, verbose=False) as llm:
        assert llm.method is None
        assert llm([1, 5, 7], max_tokens=2)["usage"]["completion_tokens"] == 2


def test_what_is_open_is_closed_when_there_is_no_memory_for_the_rest(embedded_model, monkeypatch):
    closed = []
    close = Context.close
    monkeypatch.setattr(Context, "close", lambda self: closed.append(self) or close(self))

    def fail(*args):
        raise MemoryError("no room for a sequence")

    monkeypatch.setattr("pylongctx.loading.Session", fail)
    with pytest.raises(MemoryError, match="no room"):
        new(embedded_model)
    assert len(closed) == 1
