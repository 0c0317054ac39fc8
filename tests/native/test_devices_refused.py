"""Layers on other devices from Python: what is refused, and servers that are not what they should be."""

import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_devices import EVICTION, endpoints, reserved_port, server  # noqa: F401

from pylongctx import Llama
from pylongctx.errors import InvalidInput


def test_llama_on_two_servers(embedded_model, endpoints):  # noqa: F811
    prompt = b"The grass is green. The sky is blue. " * 4
    outputs = []
    for where in ({}, {"rpc_servers": ",".join(endpoints), "n_gpu_layers": -1, "tensor_split": [1, 3]}):
        with Llama(str(embedded_model), n_ctx=512, n_threads=1, verbose=False, method=EVICTION, **where) as llm:
            llm.eval(llm.tokenize(prompt))
            outputs.append((llm.session.context.kv_usage().bytes, llm.sample(temp=0.0)))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("where", "message"), [
    ({"rpc_servers": "localhost"}, "servers are given as host:port"),
    ({"rpc_servers": "localhost:99999"}, "servers are given as host:port"),
    ({"rpc_servers": "localhost:1,"}, "servers are given as host:port"),
    ({"rpc_servers": "nobody.invalid:50052"}, "the host is not known"),
    ({"tensor_split": [1.0] * 17}, "tensor_split has 17 fractions, at most 16"),
    ({"tensor_split": [-1.0]}, "fractions are 0 or more"),
])  # fmt: skip
def test_what_cannot_be_is_refused(embedded_model, where, message):
    with pytest.raises(InvalidInput, match=message):
        Llama(str(embedded_model), verbose=False, n_gpu_layers=int("rpc_servers" in where), **where)


def test_tensors_lie_where_a_pattern_says(embedded_model, endpoints):  # noqa: F811
    """The buffer type of a server has a name of its own, which the refusal of another one lists."""
    given = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    elsewhere = given | {"rpc_servers": endpoints[0], "n_gpu_layers": -1}
    with pytest.raises(ValueError, match="there is no buffer type nowhere; known are CPU, RPC") as caught:
        Llama(str(embedded_model), override_tensor={"ffn": "nowhere"}, **elsewhere)
    name = re.search(r"RPC\S+", str(caught.value))[0]
    logits = []
    for where in (given, elsewhere | {"override_tensor": {r"blk\.0\.": "CPU", "ffn": name}}):
        with Llama(str(embedded_model), **where) as llm:
            llm.eval([1, 5, 9, 13])
            logits.append(llm.scores[-1].copy())
    np.testing.assert_allclose(logits[1], logits[0], atol=0.1 * np.abs(logits[0]).max())


def test_a_server_that_is_not_there(embedded_model):
    with reserved_port() as port, pytest.raises(InvalidInput, match=r"no connection .*pylongctx rpc-server"):
        Llama(str(embedded_model), rpc_servers=f"127.0.0.1:{port}", n_gpu_layers=1, verbose=False)


GREETING = bytes([14, 24, 0, 0, 0, 0, 0, 0, 0]) + bytes(24)  # command, size, abilities
ANSWER = bytes([28, 0, 0, 0, 0, 0, 0, 0])  # size; then version and abilities


def greet(endpoint: str) -> bytes:
    """Return what a server answers to a client's first message."""
    host, port = endpoint.split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(GREETING)
        return s.recv(36, socket.MSG_WAITALL)


def ask_a_server_that_answers(answer: bytes, model) -> None:
    def talk(listener):
        with listener.accept()[0] as client:
            client.recv(len(GREETING))
            client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(talk, listener)
        try:
            where = {"rpc_servers": f"127.0.0.1:{listener.getsockname()[1]}", "n_gpu_layers": 1}
            Llama(str(model), verbose=False, method="full", **where)  # asks once: no method to fall back to
        finally:
            done.result()


@pytest.mark.parametrize(("answer", "message"), [
    (b"", "it hung up: it is not an RPC server"),
    (ANSWER + bytes([6, 1, 2]) + bytes(25), r"it speaks version 6\.1\.2"),
], ids=["nothing", "version"])  # fmt: skip
def test_a_server_of_something_else(embedded_model, answer, message):
    with pytest.raises(InvalidInput, match=message):
        ask_a_server_that_answers(answer, embedded_model)


@pytest.mark.parametrize("patch", [0, 127, "other"])
def test_a_server_of_other_ops(embedded_model, endpoints, patch):  # noqa: F811
    """Upstream's patch numbers are small; ours says which ops a server runs, so one that differs is refused."""
    answer = greet(endpoints[0])
    assert answer.startswith(ANSWER)
    assert 128 <= answer[10] < 255
    other = answer[10] ^ 1 if patch == "other" else patch
    version = rf"{answer[8]}\.{answer[9]}\.{other}, this is {answer[8]}\.{answer[9]}\.{answer[10]};"
    with pytest.raises(InvalidInput, match=f"it speaks version {version} start pylongctx rpc-server"):
        ask_a_server_that_answers(answer[:10] + bytes([other]) + answer[11:], embedded_model)


def test_servers_without_layers_warn(embedded_model, endpoints):  # noqa: F811
    with pytest.warns(UserWarning, match="no effect with n_gpu_layers=0"):
        Llama(str(embedded_model), rpc_servers=endpoints[0], verbose=False).close()


GONE = """
import sys
from pylongctx import Llama
from pylongctx.errors import DeviceLost
llm = Llama(sys.argv[1], rpc_servers=sys.argv[2], n_gpu_layers=-1, n_ctx=64, verbose=False)
llm.eval([5, 6, 7])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2):
    try:
        llm.eval([8])
    except DeviceLost as reason:
        print("lost:", reason, flush=True)
llm.close()
again = Llama(sys.argv[1], rpc_servers=sys.argv[3], n_gpu_layers=-1, n_ctx=64, verbose=False)
again.eval([5, 6, 7])
print("again", flush=True)
"""


def test_a_server_that_goes_away_is_an_exception(embedded_model):
    """It names the server, the process continues, and the model can be opened again."""
    with server() as (endpoint, process), server() as (other, _):
        command = [sys.executable, "-c", GONE, str(embedded_model), f"{endpoint},{other}", other]
        client = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert client.stdout.readline() == "ready\n"
        process.kill()
        process.wait()
        said, errors = client.communicate("\n")
    assert client.returncode == 0, errors
    first, second, last = said.splitlines()
    assert (
        first
        == second
        == f"lost: RPC server {endpoint} ended, or the connection to it broke; "
        + ("close this model, and open it again")
    )
    assert last == "again"
    assert "GGML_ASSERT" not in errors and "ggml-rpc.cpp" not in errors


SET_TENSOR = 6


@pytest.mark.parametrize("size", [2**64 - 1, 2**62, 2**36])
def test_a_server_does_not_make_room_for_what_is_only_announced(size):
    with server() as (endpoint, process):
        host, port = endpoint.split(":")
        with socket.create_connection((host, int(port))) as s:
            s.sendall(GREETING)
            assert s.recv(36, socket.MSG_WAITALL)
            s.sendall(bytes([SET_TENSOR]) + size.to_bytes(8, "little") + bytes(100))
        assert greet(endpoint).startswith(ANSWER)
        used = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in used.splitlines() if line.startswith("VmHWM"))
    assert peak < 1 << 20  # KiB
