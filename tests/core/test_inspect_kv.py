"""What the KV heads keep: maps, bytes and sparsity from real runs, the pictures, ``pylongctx inspect``."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from llamas import TEXT, new
from needs import need

from pylongctx import Llama
from pylongctx.attention import Compression, column_shares, compression, held_map, kvmap, observer, sparsity
from pylongctx.cli import main
from pylongctx.methods import Corm, DualChunk, Full, LongHeads, SelfExtend, parse

CORM = "corm,window=16,recent=16,evict_every=16"
CHUNKED = f"longheads,chunk_size=16,window=128+{CORM}"


@pytest.fixture(scope="module")
def text(shared) -> list[int]:
    """Return 200 tokens of ordinary text."""
    return shared.tokenize(TEXT * 10)[:200]


# ---- kept keys ----


def test_held_map_is_what_the_heads_hold(embedded_model, text):
    with new(embedded_model, method=CORM) as llm:
        llm.eval(text)
        held = held_map(llm)
        rows = llm.kv_usage().rows
        assert held.shape == (*rows.shape, len(text))
        np.testing.assert_array_equal(held.sum(axis=-1), rows)
        for layer, head in np.ndindex(rows.shape):
            np.testing.assert_array_equal(np.flatnonzero(held[layer, head]), llm.held_rows(layer, head)[0])
    assert not held.all()
    assert held[..., len(text) // 16 * 16 - 16 :].all()


@pytest.mark.parametrize("method", ["full", "window", "longheads"])
def test_held_map_refuses_methods_that_evict_nothing(embedded_model, method):
    with (
        new(embedded_model, method=method) as llm,
        pytest.raises(ValueError, match=f"method '{method}.*nothing to show; use corm, h2o, kvzip, scissorhands"),
    ):
        held_map(llm)


def test_held_map_of_layers_with_fewer_heads():
    rows = np.array([[2, 0], [1, 3]], np.int32)
    tokens = {(0, 0): [0, 2], (1, 0): [2], (1, 1): [0, 1, 2]}
    llm = SimpleNamespace(
        method=Corm(),
        n_tokens=3,
        kv_usage=lambda: SimpleNamespace(rows=rows),
        held_rows=lambda layer, head: (np.array(tokens[layer, head]), None),
    )
    np.testing.assert_array_equal(held_map(llm), [[[1, 0, 1], [0, 0, 0]], [[0, 0, 1], [1, 1, 1]]])


def test_column_shares():
    held = np.array([[True, False, True, True, False], [False] * 5])
    np.testing.assert_array_equal(column_shares(held, 1), held)
    np.testing.assert_array_equal(column_shares(held, 2), [[0.5, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(column_shares(held, 3), [[2 / 3, 0.5], [0, 0]])
    np.testing.assert_array_equal(column_shares(held, 9), [[0.6], [0]])


# ---- compression ----


MAX_TIES = 3  # heads for which the rounding of another batch decides a vote


@pytest.mark.parametrize("method", [CORM, "h2o,budget=64,evict_every=16", CHUNKED, "window,n_sink=4,window=16", "full"])
def test_compression_in_one_run_is_that_of_one_run_per_length(embedded_model, text, method):
    lengths = [1, 64, 100, 200]
    with new(embedded_model, method=method) as llm:
        run = compression(llm, text, lengths)
    for i, length in enumerate(lengths):
        with new(embedded_model, method=method) as llm:
            llm.eval(text[:length])
            usage = llm.kv_usage()
        differs = run.rows[i] != usage.rows
        assert differs.sum() <= MAX_TIES * ("corm" in method)
        assert run.bytes[i] == (usage.bytes if not differs.any() else pytest.approx(usage.bytes, rel=0.1))
        assert run.full_bytes[i] == usage.full_bytes
        assert run.ratio[i] == run.bytes[i] / usage.full_bytes
    assert (run.peak_bytes >= run.bytes).all()
    assert (np.diff(run.peak_bytes) >= 0).all()
    assert (run.row_share[-1] < 1) == ("evict_every" in method)


def test_row_share_counts_heads_that_exist():
    rows = np.array([[[4, 0], [2, 4]], [[4, 0], [2, 6]]], np.int32)
    sizes = np.array([100, 200])
    run = Compression(np.array([4, 8]), sizes // 2, sizes // 2 + 10, sizes, rows)
    np.testing.assert_allclose(run.row_share, [10 / 12, 12 / 24])
    np.testing.assert_allclose(run.ratio, [0.5, 0.5])
    np.testing.assert_allclose(run.peak_ratio, [0.6, 0.55])


@pytest.mark.parametrize("lengths", [[], [0, 3], [3, 3], [5, 4], [201], [[1, 2]]])
def test_compression_refuses_lengths(llm, text, lengths):
    with pytest.raises(ValueError, match="lengths must ascend from 1 at least to 200"):
        compression(llm, text, lengths)


# ---- sparsity ----


def test_observer():
    assert str(observer(Full(), 99)) == "corm,window=100,recent=99,evict_every=99"
    assert str(observer(SelfExtend(group_size=2), 9)).endswith("+corm,window=10,recent=9,evict_every=9")


def test_sparsity_is_the_share_of_weights_above_average(model_path):
    """With one query head per KV head, h2o's sums of weights tell each query's weights by their growth."""
    tokens = np.random.default_rng(1).integers(3, 100, 48).tolist()
    path, positions = str(model_path("llama-mha")), [0, 1, 30, 47]
    options = {"n_ctx": 64, "verbose": False, "type_k": "f32", "type_v": "f32"}
    with Llama(path, method=observer(Full(), 64), **options) as llm:
        shares = sparsity(llm, tokens, positions)
        assert (llm.kv_usage().rows == 48).all()
    with Llama(path, method="h2o,budget=64,evict_every=64", **options) as llm:
        sums = np.zeros((*shares.shape[1:], 49, 48))
        for p, token in enumerate(tokens):
            llm.eval([token])
            for layer, head in np.ndindex(shares.shape[1:]):
                sums[layer, head, p + 1, : p + 1] = llm.held_rows(layer, head)[1].view(np.float32)
    for p, share in zip(positions, shares, strict=True):
        weights = (np.diff(sums, axis=2)[:, :, p, : p + 1]) * (p + 1)
        np.testing.assert_allclose(weights.sum(axis=-1), p + 1, rtol=1e-3)
        low, high = (weights >= 1.001).mean(axis=-1), (weights >= 0.999).mean(axis=-1)
        assert (low <= share).all()
        assert (share <= high).all()
    assert (shares[0] == 1).all()
    assert (shares[2:] < 1).all()


@pytest.mark.parametrize("base", [SelfExtend(4, 64), DualChunk(37, 19)], ids=["selfextend", "dca"])
def test_sparsity_keeps_everything(embedded_model, text, base):
    with new(embedded_model, method=observer(base, 512)) as llm:
        shares = sparsity(llm, text, [100, 199])
        rows = llm.kv_usage().rows
        assert (rows == 200).all()
    assert shares.shape == (2, *rows.shape)
    assert (shares > 0).all()
    assert (shares < 1).all()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("full", "method 'full' may evict"),
        ("h2o,budget=512", "may evict"),
        (CORM, r"use method=observer\(Full\(\), n_ctx\), which is 'corm,window=201,recent=200,evict_every=200'"),
        ("corm,window=513,recent=199,evict_every=512", "may evict keys or drop votes"),
        ("corm,window=512,recent=512,evict_every=512", "may evict keys or drop votes"),
        (
            str(observer(LongHeads(chunk_size=16, window=128), 512)),
            "reads every key: dca, full, selfextend or string",
        ),
    ],
)
def test_sparsity_refuses_what_would_not_show_every_key(embedded_model, text, method, message):
    with new(embedded_model, method=method) as llm, pytest.raises(ValueError, match=message):
        sparsity(llm, text, [199])


# ---- pictures ----


def random_held(n_layer: int, n_head: int, n_tokens: int) -> np.ndarray:
    held = np.random.default_rng(0).random((n_layer, n_head, n_tokens)) < 0.4
    held[..., -1] = True
    return held


def kept_pixels(tmp_path, figure) -> np.ndarray:
    """Return the rendered picture, row 0 at the bottom, as 0 (white) to 1 by channel."""
    image = need("plot", "matplotlib.image")
    figure.savefig(tmp_path / "map.png")
    return image.imread(tmp_path / "map.png")[::-1, :, :3]


@pytest.mark.parametrize(("n_tokens", "width"), [(300, 1), (512, 1), (513, 2), (4095, 8)])
def test_every_kept_token_is_painted_at_its_position(tmp_path, n_tokens, width):
    need("plot", "matplotlib")
    held = random_held(3, 4, n_tokens)
    held[1, 3] = False  # a head that its layer does not have
    figure = kvmap.draw_kept(held)
    pixels, shares = kept_pixels(tmp_path, figure), column_shares(held, width).reshape(12, -1)
    colors = [np.array([int(name[i : i + 2], 16) for i in (1, 3, 5)]) / 255 for name in (kvmap.EVICTED, kvmap.KEPT)]
    rows, columns = np.indices(shares.shape)
    centers = np.stack([columns.ravel() * width + (width - 1) / 2, rows.ravel()], axis=1)
    x, y = figure.axes[0].transData.transform(centers).astype(int).T
    expected = colors[0] + shares.ravel()[:, None] * (colors[1] - colors[0])
    expected[rows.ravel() == 7] = 1
    edge = (columns.ravel() == 0) | (columns.ravel() == columns.max())  # under the line around the map
    np.testing.assert_allclose(pixels[y, x][~edge], expected[~edge], atol=0.01)


def test_the_pass_key_is_framed(tmp_path):
    need("plot", "matplotlib")
    held = random_held(2, 4, 1000)
    figure = kvmap.draw_kept(held, (300, 340), "model\ncorm,window=3")
    axes = figure.axes[0]
    (box,) = (patch.get_bbox() for patch in axes.patches)
    pixel = 1 / axes.transData.get_matrix()[0, 0]  # in tokens
    assert box.x0 == pytest.approx(299.5 - pixel)
    assert box.x1 == pytest.approx(339.5 + pixel)
    assert box.y0 < -0.5
    assert box.y1 > 7.5
    assert [entry.get_text() for entry in figure.legends[0].get_texts()] == [
        "kept all 2",
        "evicted all 2",
        "the pass key",
    ]
    assert figure.get_suptitle() == "model\ncorm, window=3"
    assert not kvmap.draw_kept(held).axes[0].patches


def test_nothing_held_is_nothing_to_draw():
    with pytest.raises(ValueError, match="no head holds a token"):
        kvmap.draw_kept(np.zeros((2, 2, 5), bool))


def test_plot_of_compression():
    need("plot", "matplotlib")
    rows = np.ones((2, 1, 1), np.int32)
    sizes = np.array([100, 200])
    run = Compression(np.array([4, 8]), sizes // 2, sizes - 40, sizes, rows)
    figure = kvmap.draw_compression({CORM: run, "h2o": run})
    held, peak = figure.axes[0].lines[:2]
    np.testing.assert_array_equal(held.get_xydata(), [[4, 0.5], [8, 0.5]])
    np.testing.assert_allclose(peak.get_ydata(), [0.6, 0.8])
    names = [entry.get_text() for entry in figure.legends[0].get_texts()]
    assert names[:2] == [CORM.replace(",", ", "), "h2o"]


def test_plot_of_sparsity():
    need("plot", "matplotlib")
    shares = np.array([[0.5, 0.1], [0.2, np.nan]])
    by_layer, by_head, _ = kvmap.draw_sparsity(shares).axes
    np.testing.assert_array_equal(by_layer.lines[1].get_ydata(), [30, 20])
    np.testing.assert_array_equal(by_layer.lines[0].get_xdata(), [0, 0, 1, 1])
    assert [text.get_text() for text in by_head.texts] == ["50.0", "10.0", "20.0"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: kvmap.draw_kept(np.ones((1, 1, 4), bool)),
        lambda: kvmap.draw_compression({}),
        lambda: kvmap.draw_sparsity(np.ones((1, 1))),
    ],
)
def test_without_matplotlib_pictures_say_how_to_install(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'pylongctx\[plot\]'"):
        draw()


# ---- the command ----


@pytest.fixture
def inspect(tmp_path, capsys, monkeypatch):
    """Return a function that runs the command and returns what it printed, its JSON and its pictures."""
    monkeypatch.delenv("LCTX_METHOD", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args: str):
        numbers = tmp_path / "numbers.json"
        status = main(["inspect", "--out", str(tmp_path), "--json", str(numbers), *args])
        shown = capsys.readouterr()
        assert status == 0, shown.err
        return shown.out, json.loads(numbers.read_text()), sorted(path.name for path in tmp_path.glob("*.*g"))

    return run


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_bytes(TEXT * 40)
    return str(tmp_path / "book.txt")


def test_inspect_shows_the_kept_keys_of_a_question(inspect):
    out, facts, pictures = inspect("--method", CORM, "--length", "300")
    rows = np.array(facts["rows"])
    assert (facts["method"], facts["n_evaluated"]) == (CORM, facts["n_tokens"] - 1)
    for layer in facts["rows"]:
        assert " ".join(map(str, layer)) in " ".join(out.split())
    assert facts["row_share"] == pytest.approx(rows.sum() / rows.size / facts["n_evaluated"])
    assert facts["ratio"] == facts["bytes"] / facts["full_bytes"]
    assert f"{facts['ratio']:.2f}" in out
    assert 0 < facts["needle"][0] < facts["needle"][1] < 300
    assert f"{100 * facts['needle_held']:.0f} %, all of it by" in out
    assert ("right" if facts["strict"] else f"wrong, not {facts['key']}") in out
    need("plot", "matplotlib")
    assert pictures == [f"kept-pylongctx-tiny-q8_0-300-0.{suffix}" for suffix in ("png", "svg")]


def test_inspect_of_a_composition_shows_chunks_and_keys_of_one_run(inspect):
    out, facts, pictures = inspect("--method", CHUNKED, "--length", "300")
    assert {"cover_rate", "gini"} <= set(facts["first"])
    assert {"rows", "ratio", "needle_held"} <= set(facts)
    assert "cover rate" in out
    assert "KV entries per head" in out
    need("plot", "matplotlib")
    assert [name.split("-")[0] for name in pictures] == ["chunks"] * 2 + ["kept"] * 2
    _, facts, _ = inspect("--method", CHUNKED, "--length", "300", "--what", "chunks")
    assert "rows" not in facts


def test_inspect_of_a_text_asks_nothing(inspect, book):
    out, facts, pictures = inspect("--method", CHUNKED, "--length", "300", "--text", book)
    assert facts["n_evaluated"] == 300
    assert "needle" not in facts
    assert "cover rate" not in out
    need("plot", "matplotlib")
    assert pictures == [f"kept-pylongctx-tiny-q8_0-300.{suffix}" for suffix in ("png", "svg")]


def test_inspect_compression(inspect, book):
    methods = ("--method", CORM, "--method", "window,n_sink=4,window=64")
    out, facts, pictures = inspect(
        "--what", "compression", *methods, "--length", "300", "--samples", "4", "--text", book
    )
    assert list(facts) == [CORM, "window,n_sink=4,window=64"]
    for run in facts.values():
        assert run["lengths"] == [75, 150, 225, 300]
        assert f"{run['ratio'][-1]:.2f}" in out
    assert facts[CORM]["row_share"][-1] < facts[CORM]["row_share"][0] <= 1
    need("plot", "matplotlib")
    assert [name.split("-")[0] for name in pictures] == ["compression"] * 2


def test_inspect_sparsity(inspect, book):
    out, facts, pictures = inspect("--what", "sparsity", "--length", "300", "--samples", "3", "--text", book)
    assert facts["positions"] == [150, 224, 299]
    important = np.array(facts["important"])
    assert (important > 0).all()
    assert (important < 1).all()
    for mean in 100 * important.mean(axis=1):
        assert f"{mean:.1f}" in out
    need("plot", "matplotlib")
    assert [name.split("-")[0] for name in pictures] == ["sparsity"] * 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--what", "kept", "--method", "full"], "method 'full' every head keeps the same keys"),
        (["--what", "kept", "--method", "window"], "there is nothing to show; use corm, h2o"),
        (["--what", "chunks", "--method", CORM], "does not read chunks, so there is nothing to trace"),
        (["--what", "sparsity", "--method", CORM], "sparsity needs a method that reads every key"),
        (["--what", "sparsity", "--method", "longheads"], "sparsity needs a method that reads every key"),
        (["--what", "chunks", "--text", __file__], "chunks are shown for a question"),
        (["--method", "longheads", "--text", __file__], "every head keeps the same keys"),
        (["--method", CORM, "--method", "tova"], "only --what compression takes several methods"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--text", "missing.txt"], "there is no file 'missing.txt'"),
        (["--method", CORM, "--text", __file__, "--length", "999999"], "--length must be from 1 to"),
    ],
)
def test_inspect_errors_are_one_line(capsys, args, message):
    assert main(["inspect", "--length", "200", *args]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_methods_of_the_help_exist():
    from pylongctx.cli.inspect import WHAT

    assert [parse(method).name for method in WHAT.values()] == ["longheads", "corm", "corm", "full"]
