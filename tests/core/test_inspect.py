"""Which chunks were read: the numbers of table 3 on hand-made traces, the map of figure 5."""

import math
import sys

import numpy as np
import pytest
from needs import need

from pylongctx.attention import Trace, chunkmap, chunks_of, cover_rate, findings, hit_rate, uniformity

# One query in chunk 6 of 0..6; chunks 0, 5, 6 are forced. Reads of 1, 2, 3, 4 by choice: 1, 3, 1, 1.
HEADS = [[0, 2, 3, 5, 6], [0, 2, 4, 5, 6], [0, 1, 2, 5, 6]]


def one_query(heads=HEADS, position=100, n_recent=1) -> Trace:
    return Trace([position], [[heads]], 16, n_recent)


def random_trace(n_chunks: int, n_layer: int, n_head: int, n_read: int = 8) -> Trace:
    """One query in the last chunk whose heads read the forced chunks and random others."""
    random, own = np.random.default_rng(0), n_chunks - 1
    free = random.permuted(np.tile(np.arange(1, own - 1), (n_layer * n_head, 1)), axis=1)[:, : n_read - 3]
    forced = np.tile([0, own - 1, own], (n_layer * n_head, 1))
    chunks = np.sort(np.concatenate([free, forced], axis=1))
    return Trace([own * 16], chunks.reshape(1, n_layer, n_head, n_read), 16)


# ---- the numbers ----


def test_chunks_of_a_span():
    assert list(chunks_of(16, 32, 16)) == [1]
    assert list(chunks_of(15, 17, 16)) == [0, 1]
    assert list(chunks_of(40, 41, 16)) == [2]
    for span in ((3, 3), (-1, 4)):
        with pytest.raises(ValueError, match="no tokens from"):
            chunks_of(*span, 16)


def test_counts_and_what_is_forced():
    trace = one_query()
    assert trace.n_chunks == 7
    np.testing.assert_array_equal(trace.counts(), [[3, 1, 3, 1, 1, 3, 3]])
    np.testing.assert_array_equal(np.flatnonzero(trace.forced()), [0, 5, 6])
    np.testing.assert_array_equal(np.flatnonzero(one_query(n_recent=0).forced()), [0, 6])
    np.testing.assert_array_equal(np.flatnonzero(one_query([[0, 1]], 20, n_recent=5).forced()), [0, 1])


def test_reads_of_heads_add_up_to_those_of_chunks():
    trace = Trace([16, 100], [[[[0, 1, -1], [1, -1, -1]]], [[[0, 1, 6], [4, 5, 6]]]], 16)
    np.testing.assert_array_equal(trace.reads(), [[[2, 2, 0, 0, 0, 0, 1], [0, 1, 0, 0, 1, 1, 1]]])
    np.testing.assert_array_equal(trace.reads().sum(axis=(0, 1)), trace.counts().sum(axis=0))


def test_cover_rate():
    assert cover_rate(one_query()) == 1.0
    assert cover_rate(one_query(HEADS[:2])) == 6 / 7
    two = Trace([16, 100], [[[[0, 1, -1]]], [[[0, 5, 6]]]], 16)
    assert cover_rate(two) == 4 / 7


def test_uniformity():
    assert uniformity(one_query()) == pytest.approx(0.25)
    assert uniformity(one_query(), forced=True) == pytest.approx(24 / 105)
    assert uniformity(one_query([[0, 1, 5, 6], [0, 2, 5, 6], [0, 3, 5, 6], [0, 4, 5, 6]])) == 0
    assert uniformity(one_query([[0, 4, 5, 6]] * 9)) == pytest.approx(3 / 4)  # one chunk of four
    assert uniformity(one_query([[0, 5, 6]])) == 0
    assert uniformity(one_query([[0]], position=3)) == 0


def test_uniformity_of_reads_is_the_definition():
    trace = random_trace(40, 3, 5)
    for forced, kept in ((False, slice(1, -2)), (True, slice(None))):
        reads = trace.counts().sum(axis=0)[kept].astype(float)
        expected = np.abs(reads[:, None] - reads).sum() / (2 * len(reads) * reads.sum())
        assert uniformity(trace, forced) == pytest.approx(expected)


def test_a_forced_chunk_counts_for_the_queries_that_chose_it():
    # chunk 2 is recent for the query in chunk 3, and a choice of the one in chunk 6
    trace = Trace([48, 100], [[[[0, 1, 2, 3]]], [[[0, 2, 5, 6]]]], 16)
    assert uniformity(trace) == pytest.approx(0.5)  # reads of 1, 2, 3, 4 by choice: 1, 1, 0, 0


@pytest.mark.parametrize(
    ("answer", "top", "expected"),
    [([2], 1, 1), ([3], 1, 0), ([3], 3, 1), ([4], 3, 0), ([4], 4, 1), ([4, 5], 4, 1), ([3, 4], 1, 0), ([1], 99, 1)],
)
def test_hit_rate(answer, top, expected):
    assert hit_rate(one_query(), answer, top) == expected


def test_hit_rate_is_an_average_over_queries_with_a_choice():
    chunks = [[[[0, 2, 5, 6]]], [[[0, 3, 5, 6]]], [[[0, 2, 6, 7]]], [[[0, 1, 2, -1]]]]
    trace = Trace([40, 100, 101, 115], np.array(chunks)[[3, 0, 1, 2]], 16)
    assert hit_rate(trace, [2], 1) == pytest.approx(2 / 3)
    assert math.isnan(hit_rate(one_query(), [0], 1))
    assert math.isnan(hit_rate(one_query(), [5, 6], 5))


def test_findings_are_of_the_first_query_and_of_all():
    found = findings(Trace([50, 100], [[[[0, 1, 2, 3]]], [[[0, 1, 5, 6]]]], 16), [1])
    usual = {"chunk_size": 16, "n_chunks": 7, "answer_chunks": [1], "positions": [50, 100]}
    assert {name: found[name] for name in usual} == usual
    assert found["first"] == {"cover_rate": 1.0, "gini": 0.0, "hit_rate_top1": 1.0, "hit_rate_top5": 1.0}
    assert found["all"]["cover_rate"] == 6 / 7


def test_findings_without_a_choice_have_no_hit_rate():
    numbers = findings(one_query(), [0])["all"]
    assert (numbers["hit_rate_top1"], numbers["hit_rate_top5"]) == (None, None)


def test_a_chunk_that_no_head_reads_is_not_a_hit():
    assert hit_rate(one_query([[0, 2, 5, 6]]), [1], 4) == 0


@pytest.mark.parametrize(("answer", "top"), [([2], 0), ([], 1), ([7], 1), ([-1], 1)])
def test_hit_rate_refuses(answer, top):
    with pytest.raises(ValueError, match=r"top must be|answer_chunks must be"):
        hit_rate(one_query(), answer, top)


def test_an_empty_trace_says_what_to_do():
    empty = Trace([], np.empty((0, 2, 3, 4)), 16)
    for call in (cover_rate, uniformity, lambda trace: hit_rate(trace, [0], 1)):
        with pytest.raises(ValueError, match=r"inside the block of llm\.trace"):
            call(empty)
    with pytest.raises(ValueError, match="nothing to draw"):
        chunkmap.draw(empty)


# ---- the record ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], np.zeros((2, 1, 1, 1)), 16), r"not \[1\] and \[2, 1, 1, 1\]"),
        (([1], np.zeros((1, 1, 1)), 16), "a trace needs positions"),
        (([20], np.full((1, 1, 1, 1), 2), 16), "begins after it"),
        (([1], np.zeros((1, 1, 1, 1)), 0), "chunk_size=0"),
        (([1], np.zeros((1, 1, 1, 1)), 16, -1), "n_recent=-1"),
    ],
)
def test_trace_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Trace(*arguments)


def test_save_and_load(tmp_path):
    trace = Trace([99, 100], [[HEADS], [HEADS]], 16, 1)
    trace.save(tmp_path / "trace.npz")
    loaded = Trace.load(tmp_path / "trace.npz")
    assert (loaded.chunk_size, loaded.n_recent) == (16, 1)
    for name in ("positions", "chunks"):
        assert getattr(loaded, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))
    np.testing.assert_array_equal(trace.query(1).positions, [100])


def test_load_refuses_other_files(tmp_path):
    np.savez(tmp_path / "other.npz", a=[1])
    np.save(tmp_path / "array.npy", [1])
    (tmp_path / "text.npz").write_text("not a trace")
    (tmp_path / "zip.npz").write_bytes(b"PK\x03\x04 and nothing more")
    (tmp_path / "empty.npz").touch()
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(ValueError, match=f"{path.name} is not a trace"):
            Trace.load(path)


# ---- the map ----


def test_chunk_map():
    cells = chunkmap.chunk_map(one_query())
    np.testing.assert_array_equal(cells, [[1, 0, 2, 2, 0, 1, 1], [1, 0, 2, 0, 2, 1, 1], [1, 2, 2, 0, 0, 1, 1]])


def test_chunk_map_of_several_queries_shows_choices_over_duties():
    trace = Trace([48, 100], [[[[0, 1, 2, 3]]], [[[0, 2, 5, 6]]]], 16)
    np.testing.assert_array_equal(chunkmap.chunk_map(trace), [[1, 2, 2, 1, 0, 1, 1]])


def test_map_files(tmp_path):
    need("plot", "matplotlib")
    figure = chunkmap.draw(one_query(), [2], "model, 101 tokens\nlongheads,chunk_size=16")
    paths = chunkmap.save(figure, tmp_path / "new" / "map")
    assert [path.name for path in paths] == ["map.png", "map.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
    assert "longheads, chunk_size=16" in figure.get_suptitle()


@pytest.mark.parametrize("shape", [(40, 4, 4), (1024, 4, 32)])
def test_every_cell_is_visible(tmp_path, shape):
    image = need("plot", "matplotlib.image")
    trace = random_trace(*shape)
    figure = chunkmap.draw(trace)
    png, _ = chunkmap.save(figure, tmp_path / "map")
    pixels = image.imread(png)[::-1, :, :3]
    rows, columns = np.nonzero(chunkmap.chunk_map(trace) == chunkmap.CHOSEN)
    x, y = figure.axes[0].transData.transform(np.stack([columns, rows], axis=1)).astype(int).T
    # a line between two layers may lie over a cell of few pixels
    blue = np.isclose(pixels[y, x], [0x1D / 255, 0x4F / 255, 0x9C / 255], atol=0.01).all(axis=1)
    inside = (rows % shape[2] != 0) & (rows % shape[2] != shape[2] - 1)
    assert blue[inside].all()
    assert inside.sum() > len(inside) / 3


@pytest.mark.parametrize(
    ("answer", "frames"), [([7], [(7, 8)]), ([7, 8], [(7, 9)]), ([3, 9], [(3, 4), (9, 10)]), ([], [])]
)
def test_the_answer_is_framed(tmp_path, answer, frames):
    image = need("plot", "matplotlib.image")
    trace = random_trace(20, 2, 4)
    figure = chunkmap.draw(trace, answer)
    axes = figure.axes[0]
    boxes = [patch.get_bbox() for patch in axes.patches]
    assert [(round(box.x0 + 0.5), round(box.x1 + 0.5)) for box in boxes] == frames
    assert all(box.y0 < -0.5 and box.y1 > 7.5 for box in boxes)
    pixels = image.imread(chunkmap.save(figure, tmp_path / "map")[0])[::-1, :, :3]
    red = np.isclose(pixels, [0xD6 / 255, 0x27 / 255, 0x28 / 255], atol=0.1).all(axis=2)
    assert red.any() == bool(frames)
    for box in boxes:
        left, middle = axes.transData.transform((box.x0, 3.5)).astype(int)
        assert red[middle, left - 1 : left + 2].any()


def test_without_matplotlib_the_map_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'pylongctx\[plot\]'"):
        chunkmap.draw(one_query())
