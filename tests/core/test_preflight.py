"""Whether what a context will take is known before it is opened, and what is said when it does not fit."""

import re
from collections import namedtuple
from contextlib import closing

import pytest
from llamas import TEXT, new
from random_model import Shape
from test_devices import server
from tiny_gguf import make_model, sparse_model

from pylongctx import Llama, _free, planning
from pylongctx._lib import lib
from pylongctx.cli import make_parser
from pylongctx.cli.options import llama_arguments
from pylongctx.errors import ContextFull, InvalidInput
from pylongctx.parallel import Host
from pylongctx.planning import Plan, suggestions

F16, Q8_0 = (lib.lctx_type_from_name(name) for name in (b"f16", b"q8_0"))
SETTINGS = {"n_ctx": 700, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "kv_limit": 0}
CHUNKS = "longheads,chunk_size=16,window=128"
KEPT = [
    "full",
    "window,n_sink=4,window=500",
    "selfextend,group_size=4,neighbor_window=128",
    f"{CHUNKS},representation=minmax",
    f"{CHUNKS},representation=attention",
]
MIB = 2**20
DiskUsage = namedtuple("DiskUsage", ["total", "free"])


@pytest.fixture
def plan(embedded_model):
    """Return a function from a method to its plan on the embedded model."""
    plans = []

    def plan(method: str, where: dict | None = None, **settings) -> Plan:
        plans.append(Plan(str(embedded_model), {"n_gpu_layers": 0} | (where or {}), SETTINGS | settings, method))
        return plans[-1]

    yield plan
    for opened in plans:
        opened.close()


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the free memory of the host."""
    return lambda n_bytes: monkeypatch.setattr(planning, "free_bytes", lambda: n_bytes)


@pytest.fixture
def disk(monkeypatch):
    """Return a function that sets the free bytes of every disk."""
    return lambda n_bytes: monkeypatch.setattr(
        _free.shutil, "disk_usage", lambda _: DiskUsage(total=2**50, free=n_bytes)
    )


def rows(size) -> int:
    """Return what ``kv_usage`` counts."""
    return size.k + size.v + size.chunks + size.near


def fill(path, method: str, **settings) -> Llama:
    """Return a Llama whose context is full."""
    llm = Llama(str(path), method=method, verbose=False, **{k: v for k, v in (SETTINGS | settings).items() if v})
    tokens = llm.tokenize(TEXT) * 100
    llm.eval(tokens[: llm.n_ctx()])
    return llm


# ---- the estimate ----


@pytest.mark.parametrize("kv_type", [F16, Q8_0])
@pytest.mark.parametrize("method", KEPT)
def test_rows_take_what_was_estimated(embedded_model, plan, method, kv_type):
    types = {"type_k": kv_type, "type_v": kv_type}
    (size,) = plan(method, **types).sizes()
    with fill(embedded_model, method, **types) as llm:
        used = llm.kv_usage()
    if method.startswith("window"):  # room for a batch that is taken back
        assert used.peak_bytes <= rows(size) <= used.peak_bytes * 1.5
    else:
        assert used.peak_bytes == rows(size)


@pytest.mark.parametrize("rule", ["h2o,budget=100", "tova,budget=90", "scissorhands,budget=200"])
@pytest.mark.parametrize("positions", ["", "selfextend,group_size=4,neighbor_window=128+"])
def test_a_budget_bounds_the_rows(embedded_model, plan, positions, rule):
    method = positions + rule
    (size,) = plan(method).sizes()
    with fill(embedded_model, method) as llm:
        used = llm.kv_usage()
    assert used.peak_bytes <= size.kv < used.full_bytes + size.near


def test_corm_is_counted_with_what_is_certain(embedded_model, plan):
    method = "corm,window=32,recent=64,evict_every=32"
    (size,) = plan(method).sizes()
    with fill(embedded_model, method) as llm:
        used = llm.kv_usage()
    assert used.full_bytes / 10 < rows(size) <= used.peak_bytes


@pytest.mark.parametrize("method", KEPT)
def test_a_limit_bounds_the_rows(embedded_model, plan, method):
    limit = 2 * MIB
    (size,) = plan(method, kv_limit=limit).sizes()
    assert limit * 0.99 < rows(size) <= limit
    with pytest.raises(ContextFull, match="kv_limit"):
        fill(embedded_model, method, kv_limit=limit)


@pytest.mark.parametrize("method", ["", *KEPT, f"{CHUNKS}+corm"])
def test_graphs_take_what_was_estimated(embedded_model, plan, method, capfd):
    (size,) = plan(method).sizes()
    lib.lctx_log_set_level(3)
    try:
        context = _preflight_free_context(embedded_model, method)
    finally:
        lib.lctx_log_set_level(1)
    context.close()
    mib = float(re.search(r"CPU compute buffer size = +([\d.]+) MiB", capfd.readouterr().err)[1])
    assert size.compute / MIB == pytest.approx(mib, abs=0.01)


def _preflight_free_context(path, method):
    from pylongctx.engine.context import Context
    from pylongctx.engine.model import Model

    model = Model(str(path), {"n_gpu_layers": 0})
    context = Context(model, SETTINGS, method)
    context.close, close = lambda: (close(), model.close()), context.close
    return context


def test_weights_are_those_of_the_file(embedded_model, plan):
    (size,) = plan("full").sizes()
    assert 0.9 * embedded_model.stat().st_size < size.weights <= embedded_model.stat().st_size


def test_llama_cpps_own_cache(plan):
    own, full = (plan(method, n_ctx=512).sizes()[0] for method in ("", "full"))
    assert (own.weights, own.k, own.v) == (full.weights, full.k, full.v)
    narrow = plan("", n_ctx=512, type_v=Q8_0).sizes()[0]
    assert narrow.k == own.k
    assert narrow.v == own.v * 34 // 64


@pytest.mark.parametrize("n_ctx", [70_000, 131_072])
def test_a_long_cache_of_llama_cpp_is_extrapolated(plan, n_ctx):
    own, full = (plan(method, n_ctx=n_ctx).sizes()[0] for method in ("", "full"))
    padded = -(-n_ctx // 256) * 256
    assert own.k == pytest.approx(full.k * padded / n_ctx, rel=1e-3)
    half = plan("", n_ctx=n_ctx // 2).sizes()[0]
    assert half.compute < own.compute < 2 * half.compute


def test_layers_elsewhere_are_counted_there(plan):
    with server() as (endpoint, _):
        everything = {"rpc_servers": endpoint, "n_gpu_layers": 99}
        (here,) = plan("selfextend").sizes()
        with plan("selfextend", everything) as all_there:
            host, there = all_there.sizes()
        assert (host.device, host.k, host.near) == ("CPU", 0, 0)
        assert there.device.startswith("RPC")
        assert (there.k, there.v, there.near) == (here.k, here.v, here.near)
        assert host.weights + there.weights >= here.weights
        with plan("selfextend", everything | {"n_gpu_layers": 3}) as half:
            _, part = half.sizes()
        assert part.k == here.k // 2  # two of four layers, and the output


def test_pages_in_memory_of_the_host(plan):
    near, far = (plan(CHUNKS, n_ctx=6400, kv_offload=size).sizes()[0] for size in (0, lib.LCTX_OFFLOAD_AUTO))
    # the CPU stands for both sides
    assert near.k < far.k < near.k * 1.2


def test_pages_in_a_file(plan, ffi):
    file = {"kv_offload": lib.LCTX_OFFLOAD_AUTO, "kv_offload_folder": ffi.new("char[]", b".")}
    near, far = (plan(CHUNKS, n_ctx=6400, **settings).sizes()[0] for settings in ({}, file))
    assert near.disk == 0
    assert far.disk == near.k + near.v
    assert far.kv < 0.5 * near.kv


def test_without_memory_nothing_runs(ffi, embedded_model, plan):
    dry = plan("full")._model.handle
    params = ffi.new("lctx_context_params *")
    lib.lctx_context_params_default(params)
    context = lib.lctx_context_create(dry, params, b"full")
    assert b"no weights to run" in ffi.string(lib.lctx_context_error(context))
    lib.lctx_context_free(context)
    adapter = lib.lctx_adapter_load(dry, str(embedded_model).encode())
    assert b"no weights to adapt" in ffi.string(lib.lctx_adapter_error(adapter))
    lib.lctx_adapter_free(adapter)


def test_an_estimate_needs_a_dry_model(ffi, embedded_model):
    params, reason = ffi.new("lctx_context_params *"), ffi.new("char[]", 100)
    lib.lctx_context_params_default(params)
    with new(embedded_model) as llm:
        assert (
            lib.lctx_estimate(llm.session.model.handle, params, b"full", ffi.NULL, 0, reason, 100) == lib.LCTX_INVALID
        )
    assert b"loaded dry" in ffi.string(reason)


# ---- what does not fit ----


def test_a_large_model_is_reported_before_it_is_read(tmp_path, free, disk):
    shape = Shape(n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, n_vocab=32000, n_ctx_train=8192)
    path = sparse_model(tmp_path / "8b.gguf", shape)
    assert path.stat().st_blocks * 512 < 4 * MIB
    free(24 * 2**30)
    disk(17 * 2**30)
    with pytest.raises(MemoryError) as reason:
        new(path, n_ctx=131072, method="selfextend")
    for line in (r"weights +13\.49 GiB", r"K +8\.00 GiB", r"V +8\.00 GiB"):
        assert re.search(rf"^{line}$", str(reason.value), re.MULTILINE)
    assert re.search(r"-ctv q8_0\): \d+\.\d\d GiB in all instead of \d+\.\d\d GiB$", str(reason.value), re.MULTILINE)
    assert re.search(r"--kv-offload disk\): \d\.\d\d GiB in memory, 16\.00 GiB in a file$", str(reason.value), re.M)
    free(4 * 2**30)
    with pytest.raises(MemoryError, match=r"the weights alone take 13\.49 GiB"):
        new(path, n_ctx=512)


def test_a_disk_decides_too(embedded_model, free, disk, tmp_path, caplog):
    free(16 * 2**30)
    file = {"method": "longheads", "kv_offload": "disk", "kv_offload_path": tmp_path}
    disk(4 * MIB)
    with new(embedded_model, **file | {"n_ctx": 0}) as llm:
        n = llm.n_ctx()
    assert 512 <= n < 2048 and n % 256 == 0
    assert f"n_ctx is {n}, the largest that fits into memory and the disk" in caplog.text
    with pytest.raises(MemoryError) as reason:
        new(embedded_model, **file | {"n_ctx": 65536})
    assert "does not fit into the free space of the disk" in str(reason.value)
    assert f"- n_ctx={n} (-c {n}): fits" in str(reason.value)
    assert re.search(r"kv_offload_path \(--kv-offload-path\) on a disk with \d+\.\d+ MiB free", str(reason.value))
    assert re.search(r"^free on disk +4\.00 MiB$", str(reason.value), re.MULTILINE)
    disk(2**40)
    with new(embedded_model, **file | {"n_ctx": 65536}) as llm:
        assert llm.n_ctx() == 65536


def test_ten_million_tokens_are_refused_before_anything_is_opened(embedded_model, free, monkeypatch):
    free(16 * 2**30)
    monkeypatch.setattr("pylongctx.loading.Context", None)
    with pytest.raises(MemoryError) as reason:
        new(embedded_model, n_ctx=10_000_000)
    shown = str(reason.value)
    assert shown.startswith("n_ctx 10000000 does not fit into memory:")
    for line in (
        r"weights +4\.52 MiB",
        r"K +19\.07 GiB",
        r"V +19\.07 GiB",
        r"compute +\d+\.\d\d [KM]iB",
        r"free +16\.00 GiB",
    ):
        assert re.search(rf"^{line}$", shown, re.MULTILINE)
    for way in (
        r"\(-ctk q8_0 -ctv q8_0\): 20\.2\d GiB in all instead of 38\.1\d GiB, which alone is not enough",
        r"\(-c 41",
        "kv_limit=17",
    ):
        assert re.search(way, shown)
    assert "preflight=False (--no-preflight)" in shown


@pytest.mark.parametrize("method", ["full", "selfextend", "longheads", None])
def test_the_n_ctx_that_fits_is_the_largest(embedded_model, free, method):
    free(24 * MIB)
    sizes = {"method": method, "n_ubatch": 512}
    with pytest.raises(MemoryError) as reason:
        new(embedded_model, n_ctx=8192, **sizes)
    longest = int(re.search(r"n_ctx=(\d+) \(-c \1\): fits", str(reason.value))[1])
    new(embedded_model, n_ctx=longest, **sizes).close()
    with pytest.raises(MemoryError):
        new(embedded_model, n_ctx=longest + 256, **sizes)


@pytest.mark.parametrize("method", ["full", "selfextend", *KEPT[3:]])
def test_the_limit_that_fits(embedded_model, free, method):
    free(24 * MIB)
    with pytest.raises(MemoryError) as reason:
        new(embedded_model, n_ctx=8192, method=method)
    limit, n = map(int, re.search(r"kv_limit=(\d+) .*about (\d+) tokens", str(reason.value)).groups())
    with new(embedded_model, n_ctx=8192, method=method, kv_limit=limit) as llm:
        tokens = llm.tokenize(TEXT) * 500
        llm.eval(tokens[: int(0.9 * n)])
        with pytest.raises(ContextFull):
            llm.eval(tokens[: int(0.2 * n)])


def test_smaller_types_that_fit(embedded_model, free):
    free(12 * MIB)
    with pytest.raises(MemoryError) as reason:
        new(embedded_model, n_ctx=2048, n_ubatch=64, method="full")
    way = str(reason.value).partition("Suggestions:\n")[2].splitlines()[0]
    assert re.search(r'^- type_k="q8_0".*: \d+\.\d\d MiB in all instead of 1\d\.\d\d MiB$', way)
    new(embedded_model, n_ctx=2048, n_ubatch=64, type_k="q8_0", type_v="q8_0").close()


def test_a_model_that_is_too_large(embedded_model, free):
    free(4 * MIB)
    with pytest.raises(MemoryError, match=r"a smaller model or quantization: .* 4\.52 MiB"):
        new(embedded_model)


def test_what_is_uncertain_is_said(embedded_model, free):
    free(5 * MIB)
    with pytest.raises(MemoryError, match="How much corm keeps depends on the text; the table counts the minimum"):
        new(embedded_model, method="corm")


def test_a_full_device_has_its_own_suggestions(plan, monkeypatch):
    with server() as (endpoint, _), plan("full", {"rpc_servers": endpoint, "n_gpu_layers": 99}, n_ctx=65536) as full:
        monkeypatch.setattr(planning, "device_free", lambda sizes: 60 * MIB)
        assert not full.fits()
        shown = "\n".join(suggestions(full, full.longest()))
        layers = int(re.search(r"n_gpu_layers=(\d) \(-ngl \1\): fits", shown)[1])
        assert 0 < layers < 4
        assert re.search(r"CPU +RPC\d", planning.explain(full, 0))


# ---- ways around it ----


@pytest.fixture(scope="module")
def trained_long(tmp_path_factory):
    """Return a tiny model that was trained on 8192 tokens; its heads are wide enough for q8_0."""
    shape = Shape(n_embd=128, n_head=2, n_head_kv=1, n_layer=3, n_ctx_train=8192)
    return make_model(tmp_path_factory.mktemp("long") / "long.gguf", shape)


def line_of(caplog) -> str:
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pylongctx", "WARNING")
    return record.getMessage()


@pytest.mark.parametrize(
    ("method", "mib", "asked", "wanted"),
    [
        ("full", 5, 8192, "the trained context"),
        (None, 5, 8192, "the trained context"),
        ("selfextend", 5, 32768, "4 times the trained context"),
        ("selfextend", 16, 32768, "4 times the trained context"),
        ("selfextend,group_size=2,neighbor_window=1024", 5, 15360, "1.9 times the trained context"),
        (CHUNKS, 6, 32768, "4 times the trained context"),
    ],
)
def test_n_ctx_that_was_left_to_us_is_what_fits(trained_long, free, caplog, method, mib, asked, wanted):
    """Above the trained context, and below it."""
    free(mib * MIB)
    sizes = {"method": method, "n_ubatch": 512}
    with new(trained_long, n_ctx=0, **sizes) as llm:
        n_ctx = llm.n_ctx()
    line = line_of(caplog)
    assert line.startswith(f"n_ctx is {n_ctx}, the largest that fits into memory, not {asked}, {wanted}; for more: ")
    assert "\n" not in line
    assert 512 <= n_ctx < asked
    assert (n_ctx < 8192) == (mib < 10)
    with pytest.raises(MemoryError, match=f"n_ctx {n_ctx + 256} does not fit"):
        new(trained_long, n_ctx=n_ctx + 256, **sizes)
    smaller = re.search(r'type_k="q8_0" and type_v="q8_0" \(n_ctx (\d+)\)', line)
    with new(trained_long, n_ctx=int(smaller[1]), type_k="q8_0", type_v="q8_0", **sizes) as llm:
        assert n_ctx < llm.n_ctx() <= asked
    assert ("kv_limit" in line) == (method is not None)
    assert ("corm" in line) == (method is not None)


def test_n_ctx_that_fits_is_not_spoken_of(trained_long, free, caplog):
    free(200 * MIB)
    with new(trained_long, n_ctx=0, method="selfextend") as llm:
        assert llm.n_ctx() == 32768
    assert not caplog.records


def test_every_sequence_of_a_server_gets_its_share(trained_long, free, caplog):
    free(7 * MIB)
    with new(trained_long, n_ctx=0, n_ubatch=512) as llm:
        alone = llm.n_ctx()
    caplog.clear()
    with closing(Host(str(trained_long), 4, n_ctx=0, verbose=False)) as host:
        assert 512 <= host.n_ctx < alone < 8192
        assert line_of(caplog).startswith(f"n_ctx is {host.n_ctx} for each of 4 sequences, the largest that fits")


def test_fewer_than_512_tokens_are_not_a_context(trained_long, free, caplog):
    """Without a smaller batch, the graphs would leave no room."""
    at = {"n_ctx": 0, "n_batch": 64, "n_ubatch": 64, "method": "full"}
    with Plan(str(trained_long), {"n_gpu_layers": 0}, SETTINGS | {"n_ctx": 512}, "full") as plan:
        needed = plan.sizes()[0].total
    free(needed)
    with new(trained_long, **at) as llm:
        assert llm.n_ctx() == 512
    assert line_of(caplog)
    free(needed - 1)
    with pytest.raises(MemoryError, match="n_ctx 8192 does not fit into memory") as reason:
        new(trained_long, **at)
    assert "n_ctx=256 (-c 256): fits" in str(reason.value)


def test_a_user_who_knows_better_continues(embedded_model, free):
    free(MIB)
    with new(embedded_model, n_ctx=10_000_000, method="full", preflight=False) as llm:
        llm.eval(llm.tokenize(TEXT))
        assert llm.kv_usage().bytes < MIB


def test_the_option_of_the_command_line(embedded_model):
    args = ["eval", "passkey", str(embedded_model), "--method", "full"]
    assert "preflight" not in llama_arguments(make_parser().parse_args(args))  # Llama's default
    assert llama_arguments(make_parser().parse_args([*args, "--no-preflight"]))["preflight"] is False


def test_only_a_vocabulary_needs_no_room(embedded_model, free):
    free(0)
    new(embedded_model, vocab_only=True).close()


def test_what_the_library_refuses_keeps_its_reason(embedded_model):
    with pytest.raises(InvalidInput, match="unknown method"):
        Plan(str(embedded_model), {}, SETTINGS, "nonsense").sizes()
