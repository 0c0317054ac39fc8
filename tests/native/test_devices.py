"""Layers on other devices: RPC servers of our own on this machine, whose kernels are those of the CPU."""

import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import test_memory
from cases import LONGHEADS, SPECS
from session import assert_same
from thinning import thin

SIZES = {"n_ctx": 256, "n_seq_max": 3, "n_batch": 48, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
EVICTION = "corm,window=8,recent=16,evict_every=16"
METHODS = {
    **{name: SPECS[name] for name in ("full", "window", "selfextend", "dca", "longheads-minmax")},
    **{name: SPECS[name] for name in ("longheads-attention", "longheads-keys", "longheads-selfextend")},
    "corm": EVICTION,
    "longheads+corm": f"{LONGHEADS['longheads-attention'].text()}+{EVICTION}",
    "selfextend+h2o": f"{SPECS['selfextend']}+h2o,budget=70,recent=12,evict_every=8",
}
ALL, LAST = 99, 2  # of the two layers of the tiny model: both, or the second; and the output
TOLERANCE = 1e-6  # the same kernels


@contextmanager
def reserved_port():
    """Hold a port without listening on it: the system gives it only to a process that asks for it by number."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that does the same may listen
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


@contextmanager
def worker(port: int, *options: str):
    """Run an RPC server on a port that is reserved; yields its process."""
    command = [sys.executable, "-m", "pylongctx", "rpc-server", "-p", str(port), "-t", "1", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    continue
            assert process.poll() is None, process.stderr.read()
            yield process
        finally:
            process.kill()


@contextmanager
def server(*options: str):
    """Run an RPC server; yields its endpoint and its process."""
    with reserved_port() as port, worker(port, *options) as process:
        yield f"127.0.0.1:{port}", process


@pytest.fixture(scope="module")
def endpoints():
    with ExitStack() as stack:
        yield [stack.enter_context(server())[0] for _ in range(2)]


@pytest.fixture(scope="module")
def places(endpoints):
    """Return where layers are, by name."""
    one, both = endpoints[0], ",".join(endpoints)
    return {
        "cpu": {},
        "all": {"rpc_servers": one, "n_gpu_layers": ALL},
        "half": {"rpc_servers": one, "n_gpu_layers": LAST},
        "two": {"rpc_servers": both, "n_gpu_layers": ALL},
    }


@pytest.fixture
def start(open_session, places):
    """Return a function that opens a session somewhere."""

    def start(spec, place="all", **params):
        return open_session("llama", spec, where=places[place], **SIZES | params)

    return start


@pytest.fixture(params=METHODS)
def spec(request) -> str:
    return METHODS[request.param]


def play(session, tokens: list[int]) -> list[np.ndarray]:
    """Grow, copy, mix, cut back, save and restore; return all logits and what is held on the way."""

    def grow(seq: int, n: int, step: int) -> np.ndarray:
        part = tokens[session.length(seq) :][:n]
        steps = [part[i : i + step] for i in range(0, n, step)]
        return np.concatenate([session.decode_mixed([(seq, t) for t in some]) for some in steps])

    out = [grow(0, 130, 37), grow(1, 21, 5)]
    assert session.copy(0, 1, session.restorable(120))
    out.append(session.decode_mixed([(seq, t) for t in tokens[30:50] for seq in (0, 1)]))
    out.append(np.array([session.kv_bytes]))
    session.cut_back(session.length(0) - 3, 0)
    out.append(grow(0, 9, 1))
    session.cut_back(session.length(0) - 1, 0)
    out.append(grow(0, 20, 7))
    assert session.restore(session.save(0), 2)
    session.keep(2)
    out += [grow(2, 11, 3), np.array([session.kv_bytes])]
    assert session.remove_tail(0, 2)
    return [*out, grow(2, 40, 16), np.array([session.kv_bytes])]


@thin
@pytest.mark.parametrize("place", ["all", "half", "two"])
def test_layers_elsewhere_are_the_same(start, spec, tokens, place):
    for here, there in zip(play(start(spec, "cpu"), tokens), play(start(spec, place), tokens), strict=True):
        assert_same(there, here, TOLERANCE)


@thin
@pytest.mark.parametrize(("src", "dst"), [("cpu", "all"), ("half", "cpu"), ("two", "half")])
def test_a_state_moves(start, spec, tokens, src, dst):
    """Half of a text, the state, and the rest elsewhere."""
    session, other, reference = start(spec, src), start(spec, dst), start(spec, "cpu")
    session.decode(tokens[:125], 41)
    assert other.restore(session.save(0), 0), other.error
    reference.decode(tokens[:125], 41)
    assert_same(other.decode(tokens[125:], 13), reference.decode(tokens[125:], 13), TOLERANCE)


@thin
@pytest.mark.parametrize("place", ["half", "two"])
@pytest.mark.parametrize("name", ["window", "longheads-selfextend", "longheads-keys", "corm", "longheads+corm"])
def test_any_order_of_operations(start, tokens, name, place):
    def start_there(spec, n_seq_max=3, **params):
        return start(spec, place if n_seq_max > 1 else "cpu", n_seq_max=n_seq_max, n_ctx=test_memory.N_CTX, **params)

    test_memory.test_any_order_of_operations(start_there, METHODS[name], tokens)


def test_rows_and_scores_of_a_head(start, ffi, lib, tokens):
    """What a head holds can be asked for wherever it is."""
    held = {}
    for place in ("cpu", "half", "two"):
        session = start(EVICTION, place)
        session.decode(tokens[:160], 48)
        lists = [(ffi.new("int32_t[256]"), ffi.new("int32_t[256]")) for _ in range(4)]
        n = [lib.lctx_seq_held(session.ctx, 0, i // 2, i % 2, *lists[i], 256) for i in range(4)]
        held[place] = [(list(rows)[:k], list(scores)[:k]) for k, (rows, scores) in zip(n, lists, strict=True)]
    assert held["cpu"] == held["half"] == held["two"]
    assert any(len(rows) < 160 for rows, _ in held["cpu"])


def test_attention_can_stay(start, tokens):
    """offload_kqv=False keeps K, V and attention here; only weights are there."""
    for spec in (METHODS["longheads+corm"], SPECS["selfextend"]):
        session = start(spec, "all", offload_kqv=0)
        assert_same(session.decode(tokens, 48), start(spec, "cpu").decode(tokens, 48), TOLERANCE)


def test_one_graph_serves_all_tokens(start, lib, ffi, tokens):
    session = start(METHODS["longheads+corm"], "half")
    session.decode(tokens[:100], 1)
    work = ffi.new("lctx_work *")
    assert lib.lctx_context_work(session.ctx, work) == lib.LCTX_OK
    assert work.n_graph == 100
    assert work.n_built == 1


@pytest.fixture
def work(ffi, lib):
    """Return a function from a session to what its host has done."""

    def work(session):
        counts = ffi.new("lctx_work *")
        assert lib.lctx_context_work(session.ctx, counts) == lib.LCTX_OK
        return counts

    return work


@pytest.mark.parametrize("spec", ["full", SPECS["longheads-keys"]])
def test_a_new_page_makes_no_one_wait(start, work, tokens, spec):
    """Its entry goes out between two graphs, in their order."""
    session, here = start(spec, "all"), start(spec, "cpu")
    want = [here.decode(tokens[:60], 30), here.decode(tokens[60:140], 1)]
    got = [session.decode(tokens[:60], 30)]
    before = work(session)
    got.append(session.decode(tokens[60:140], 1))
    after = work(session)
    assert after.n_table > before.n_table
    assert after.n_wait == before.n_wait
    assert_same(np.concatenate(got), np.concatenate(want), TOLERANCE)


def test_the_rows_of_a_state_go_together(start, work, tokens):
    """A hundred pages in one copy, and not one by one."""
    session, other = start("full", "cpu"), start("full", "all")
    session.decode(tokens[:125], 41)
    state = session.save(0)
    sent = []
    for seq in range(3):
        before = work(other).n_sent
        assert other.restore(state, seq), other.error
        other.decode_mixed([(seq, tokens[125])])
        sent.append(work(other).n_sent - before)
    assert sent == [1, 1, 1]
    want = session.decode(tokens[125:140], 15)[1:]
    assert_same(other.decode_mixed([(2, t) for t in tokens[126:140]]), want, TOLERANCE)


def test_contexts_come_and_go(start, tokens):
    """A context continues while others on the same server are created, run and freed."""
    want = start("full", "cpu").decode(tokens[:40], 1)
    session = start("full", "all")
    got = [session.decode(tokens[:10], 1)]
    other = start(EVICTION, "all")
    got.append(session.decode(tokens[10:20], 1))
    other.decode(tokens[:20], 1)
    got.append(session.decode(tokens[20:30], 1))
    other.close()
    got.append(session.decode(tokens[30:40], 1))
    assert_same(np.concatenate(got), want, TOLERANCE)
    session.close()
    assert_same(start("full", "two").decode(tokens[:40], 1), want, TOLERANCE)


# ---- what a device can run ----


@pytest.mark.parametrize(("device", "kv", "head_dim", "can"), [
    ("CPU", "f16", 64, 1), ("CPU", "q4_0", 96, 1), ("CPU", "q4_0", 80, 0), ("CPU", "q6_K", 256, 0),
    ("CPU", "none", 64, 0),
    ("CPU", "f16", 63, 0), ("CPU", "f16", 0, 0), ("CPU", "f16", -64, 0), ("XPU7", "f16", 64, 0),
])  # fmt: skip
def test_a_device_attends_to_what_its_kernels_take(lib, device, kv, head_dim, can):
    assert lib.lctx_device_attends(device.encode(), lib.lctx_type_from_name(kv.encode()), head_dim) == can


# ---- the command ----


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pylongctx", "rpc-server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_devices_are_listed():
    done = run_command("--list-devices")
    assert done.returncode == 0
    assert "CPU" in done.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["-d", "CUDA77"], "there is no device CUDA77, but"),
    (["-H", "192.0.2.1"], "cannot listen on 192.0.2.1:50052"),
    (["-H", "192.0.2.1"], "warning: anyone who reaches 192.0.2.1:50052"),
    (["-H", "nowhere"], "nowhere"),
    (["-p", "99999"], "host:port"),
])  # fmt: skip
def test_a_server_that_cannot_be(arguments, message):
    done = run_command(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
