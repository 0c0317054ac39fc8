"""What devices hold of a model when that is left to the library; a server with a given free memory is the device."""

import re

import pytest
from llamas import new
from random_model import Shape
from test_devices import reserved_port, server
from tiny_gguf import make_model

from pylongctx import planning
from pylongctx.cli import make_parser
from pylongctx.cli.options import _constructor
from pylongctx.errors import InvalidInput
from pylongctx.model_files.overrides import EXPERTS, first_layers
from pylongctx.planning import Plan, place

MIB = 2**20
SETTINGS = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "kv_limit": 0}
SHAPE = Shape(n_vocab=288, n_embd=128, n_head=2, n_head_kv=1, n_layer=7, n_ff=1024, n_ctx_train=65536)
EVERY = 2**31 - 1


@pytest.fixture(scope="module")
def endpoint():
    with server() as (endpoint, _):
        yield endpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {arch: str(make_model(folder / f"{arch}.gguf", SHAPE, arch=arch)) for arch in ("llama", "mixtral")}


@pytest.fixture
def placed(endpoint, models, monkeypatch):
    """Return a function from the free memory of the device to what ``place`` returns, and the plan of that."""

    def placed(free, arch="llama", method="full", **settings):
        monkeypatch.setattr(planning, "device_free", lambda sizes: free)
        where = {"rpc_servers": endpoint, "n_gpu_layers": EVERY, "override_tensor": {}}
        return place(models[arch], where, SETTINGS | settings, method)

    return placed


def on_device(models, where, arch="llama", **settings) -> int:
    with Plan(models[arch], where, SETTINGS | settings, "full") as plan:
        return plan.sizes()[1].total


def test_everything_that_fits_is_there(placed):
    where, line = placed(2**33)
    assert (where["n_gpu_layers"], where["override_tensor"]) == (EVERY, {})
    assert re.match(r"all 8 layers are on RPC\d", line)
    assert "8.00 GiB free" in line


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_else_as_many_layers_as_fit(placed, models, part):
    every, _ = placed(2**33)
    free = int(part * on_device(models, every))
    where, line = placed(free)
    n = where["n_gpu_layers"]
    assert 0 < n < 8
    assert line.startswith(f"{n} of 8 layers are on ")
    assert on_device(models, where) <= free * 7 / 8 < on_device(models, where | {"n_gpu_layers": n + 1})


def test_a_device_without_room_holds_nothing(placed):
    where, line = placed(1)
    assert where["n_gpu_layers"] == 0
    assert line.startswith("0 of 8 layers are on ")


@pytest.mark.parametrize("part", [0.6, 0.9])
def test_experts_make_room_before_layers_do(placed, models, part):
    every, _ = placed(2**33, "mixtral")
    free = int(part * on_device(models, every, "mixtral"))
    where, line = placed(free, "mixtral")
    n = int(re.search(r"^all 8 layers are on RPC\d+ .*; the experts of (\d) of them are on the CPU$", line)[1])
    assert where["override_tensor"] == {first_layers(n, EXPERTS): "CPU"}
    assert where["n_gpu_layers"] == EVERY
    assert on_device(models, where, "mixtral") <= free * 7 / 8


def test_a_context_of_any_length_leaves_room_for_4096_tokens(placed, models):
    whole, _ = placed(2**33, n_ctx=0)
    needed = on_device(models, whole, n_ctx=4096)
    assert needed < on_device(models, whole, n_ctx=65536)
    assert placed(needed * 8 // 7 + MIB // 8, n_ctx=0)[0]["n_gpu_layers"] == EVERY
    assert placed(needed, n_ctx=0)[0]["n_gpu_layers"] < EVERY


def test_without_devices_nothing_is_placed(models):
    where, line = place(models["llama"], {"n_gpu_layers": EVERY, "override_tensor": {}}, SETTINGS, "full")
    assert (where["n_gpu_layers"], line) == (0, "")


def test_what_devices_cannot_compute_stays_on_the_cpu(placed, monkeypatch):
    class Refusing(Plan):
        def sizes(self, **changes):
            if self.model_settings["n_gpu_layers"]:
                raise InvalidInput("heads are too wide for it", -1)
            return super().sizes(**changes)

    monkeypatch.setattr(planning, "Plan", Refusing)
    where, line = placed(2**33)
    assert (where["n_gpu_layers"], line) == (0, "no layers are on devices: heads are too wide for it")
    with pytest.raises(InvalidInput, match="window must be"):
        placed(2**33, method="window,n_sink=4,window=0")


def test_a_server_that_is_not_there_is_an_error(models):
    with reserved_port() as port, pytest.raises(InvalidInput, match="no connection"):
        new(models["llama"], rpc_servers=f"127.0.0.1:{port}", n_gpu_layers="auto")


def test_a_model_is_opened_where_it_fits(placed, models, endpoint, caplog):
    """The device has room for some layers, and the logits are those of the CPU."""
    caplog.set_level("INFO", "pylongctx")
    every, _ = placed(2**33)
    placed(on_device(models, every) // 2)
    logits = []
    for where in ({}, {"rpc_servers": endpoint, "n_gpu_layers": "auto"}):
        with new(models["llama"], method="full", n_ctx=512, **where) as llm:
            llm.eval([1, 5, 9, 13])
            logits.append(llm.session.last_logits.copy())
    assert re.search(r"of 8 layers are on RPC\d", caplog.text)
    assert abs(logits[0] - logits[1]).max() < 0.05 * abs(logits[0]).max()


def test_another_word_is_refused(models):
    with pytest.raises(ValueError, match="n_gpu_layers must be a number of layers, -1 for all, or 'auto', not 'some'"):
        new(models["llama"], n_gpu_layers="some")


@pytest.mark.parametrize(("words", "layers"), [((), "auto"), (("-ngl", "3"), 3), (("-ngl", "all"), -1)])
@pytest.mark.parametrize("command", ["chat", "serve", "ask"])
def test_commands_that_answer_leave_it_to_the_library(command, words, layers):
    rest = ["text", "Why?"] if command == "ask" else []
    args = make_parser().parse_args([command, *words, *rest])
    assert _constructor(args)["n_gpu_layers"] == layers
