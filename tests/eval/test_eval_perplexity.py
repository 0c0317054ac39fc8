"""Perplexity and KL divergence: llama.cpp's definitions, sliding windows against a slow reference, curves."""

import math

import numpy as np
import pytest
from llamas import TEXT, new

from pylongctx.eval import perplexity as kld
from pylongctx.eval.haystack import synthetic_text
from pylongctx.eval.perplexity import Perplexity, chunks, curve, passages, read_text, token_nll, windows
from pylongctx.eval.runner import Cell, run
from pylongctx.eval.task import ModelVocabulary

N = 96
STRIDE = 20
ROUNDED = 1e-3  # activations are rounded to 8 bits, now and then to the other side when batches differ


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    file = tmp_path_factory.mktemp("books") / "book.txt"
    words = "time wisdom epoch belief season light spring hope winter despair".split()
    lines = [f"It was the {words[i % 10]} of {words[i * 7 % 9]}, it was chapter {i}." for i in range(30)]
    file.write_text(TEXT.decode() + " ".join(lines) + "\n")
    return str(file)


@pytest.fixture(scope="module")
def llm(embedded_model):
    with new(embedded_model, logits_all=True) as llm:
        yield llm


@pytest.fixture
def vocabulary(llm):
    return ModelVocabulary(llm)


def nll_after(llm, context, token):
    """Evaluate a context from nothing and return the negative log-likelihood of one token."""
    llm.reset()
    llm.eval(context)
    x = np.asarray(llm.scores[len(context) - 1], np.float64)
    return -(x[token] - x.max() - math.log(np.exp(x - x.max()).sum()))


def all_records(model, task, length, method="full", **fields):
    return list(run(Cell(str(model), method, task, length, **fields)))


def test_token_nll_is_that_of_each_token_alone(embedded_f32):
    with new(embedded_f32, logits_all=True) as llm:
        tokens = llm.tokenize(TEXT)[:12]
        expected = [nll_after(llm, tokens[:i], tokens[i]) for i in range(4, 12)]
        np.testing.assert_allclose(token_nll(llm, tokens, 3), expected, atol=1e-3)


# ---- pieces ----


def test_chunks_begin_with_bos_and_leave_the_rest_out(vocabulary, book):
    text = read_text(book)
    tokens = [*vocabulary.bos, *vocabulary.tokenize(text)]
    found = chunks(vocabulary, text, N)
    assert len(found) == len(tokens) // N
    for i, chunk in enumerate(found):
        assert chunk.tolist() == [*vocabulary.bos, *tokens[i * N + 1 : (i + 1) * N]]
    with pytest.raises(ValueError, match=f"the text has 5 tokens; a context of {N} needs at least {2 * N}"):
        chunks(vocabulary, vocabulary.detokenize(tokens[1:5]), N)


def test_windows_advance_by_the_stride():
    found = windows(np.arange(100, dtype=np.int32), 40, 25)
    assert [(w[0], w[-1]) for w in found] == [(0, 39), (25, 64), (50, 89)]


def test_passages_share_their_starts_or_their_ends():
    tokens = np.arange(1000, dtype=np.int32)
    starts = [[p[0] for p in passages(tokens, n, 4, False)] for n in (50, 200)]
    ends = [[p[-1] for p in passages(tokens, n, 4, True)] for n in (50, 200)]
    assert starts == [[0, 250, 500, 750]] * 2
    assert ends == [[249, 499, 749, 999]] * 2
    assert [len(p) for p in passages(tokens, 900, 2, True)] == [900, 900]


@pytest.mark.parametrize("task", [Perplexity, kld.Divergence], ids=lambda task: task.__name__)
def test_several_texts_have_pieces_of_their_own(vocabulary, book, tmp_path, task):
    other = tmp_path / "other.txt"
    other.write_text(synthetic_text(4000, 0))
    both = task((book, str(other)), chunks=2).samples(vocabulary, N, 0)
    alone = [task(file, chunks=2).samples(vocabulary, N, 0) for file in (book, str(other))]
    assert [sample.prompt.tolist() for sample in both] == [s.prompt.tolist() for part in alone for s in part]
    assert [(s.facts["text"], s.facts["index"]) for s in both] == [
        (n, i) for n in ("book.txt", "other.txt") for i in (0, 1)
    ]
    assert len({sample.id for sample in both}) == 4
    assert alone[0][0].id == alone[1][0].id  # of one text, whatever its name is


def test_texts_of_the_same_name_are_refused(vocabulary, book, tmp_path):
    for files in ((book, book), ()):
        with pytest.raises(ValueError, match="files with different names"):
            Perplexity(files).samples(vocabulary, N, 0)


# ---- numbers ----


def test_llama_cpp_scores_the_second_half_of_each_chunk(llm, vocabulary, book, embedded_model):
    task = Perplexity(book, chunks=2)
    records = all_records(embedded_model, task, N)
    values = [token_nll(llm, chunk, N // 2) for chunk in chunks(vocabulary, read_text(book), N)[:2]]
    assert [record["n_scored"] for record in records] == [N - N // 2 - 1] * 2
    joined = np.concatenate(values)
    summary = task.summary(records)
    assert summary["perplexity"] == pytest.approx(math.exp(joined.mean()), rel=ROUNDED)
    error = joined.std() / math.sqrt(len(joined) - 1) * math.exp(joined.mean())
    assert summary["error"] == pytest.approx(error, rel=ROUNDED)


def test_llama_cpp_mode_equals_llama_perplexity(model_path, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(synthetic_text(2000, 0))
    task = Perplexity(str(file), chunks=4)
    summary = task.summary(all_records(model_path("llama"), task, 64))
    # llama-perplexity -m tiny.gguf -f text.txt -c 64 -b 64 --chunks 4, of llama-cpp-python 0.3.36
    assert summary["perplexity"] == pytest.approx(506.8250, rel=1e-4)
    assert summary["error"] == pytest.approx(43.97408, rel=1e-4)


def test_sliding_windows_equal_a_slow_reference(llm, vocabulary, book, embedded_model):
    task = Perplexity(book, "sliding", chunks=3, stride=STRIDE)
    records = all_records(embedded_model, task, N)
    tokens = vocabulary.tokenize(read_text(book))
    slow = []
    for start in (STRIDE, 2 * STRIDE):
        window = tokens[start : start + N]
        slow.append(sum(nll_after(llm, window[:i], window[i]) for i in range(N - STRIDE, N)))
    assert [record["n_scored"] for record in records] == [N - 1, STRIDE, STRIDE]
    slow.insert(0, token_nll(llm, tokens[:N], 0).sum())
    np.testing.assert_allclose([record["nll"] for record in records], slow, rtol=ROUNDED)


def test_an_incremental_pass_has_a_curve(book, embedded_model):
    task = Perplexity(book, "incremental", stride=64)
    records = all_records(embedded_model, task, 200)
    assert [n for _, n in records[0]["curve"]] == [64, 64, 64, 7]
    assert sum(nll for nll, _ in records[0]["curve"]) == pytest.approx(records[0]["nll"])
    positions, values = curve(records, 64)
    assert positions == [32, 96, 160, 224]
    assert math.log(values[1]) == pytest.approx(records[0]["curve"][1][0] / 64)


def test_the_last_tokens_of_passages_are_the_same_for_every_length(vocabulary, book):
    task = Perplexity(book, "last", chunks=2, stride=STRIDE)
    short, long = (task.samples(vocabulary, n, 0) for n in (60, N))
    for a, b in zip(short, long, strict=True):
        assert a.prompt[-STRIDE:].tolist() == b.prompt[-STRIDE:].tolist()
        assert [a.prompt[0], b.prompt[0]] == vocabulary.bos * 2
    assert task.first(long[1]) == N - STRIDE - 1


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"mode": "guess"}, N, "unknown mode 'guess'; available: llama.cpp, sliding"),
        ({"stride": 0}, N, "at least 1"),
        ({"mode": "sliding", "stride": 96}, N, "too short for mode sliding with a stride of 96"),
        ({"mode": "last", "stride": 9}, 10**6, "a passage has 1000000"),
        ({"file": "nothing.txt"}, N, "no text file 'nothing.txt'"),
    ],
)
def test_errors(vocabulary, book, fields, length, message):
    with pytest.raises(ValueError, match=message):
        Perplexity(**{"file": book} | fields).samples(vocabulary, length, 0)


# ---- divergence ----


def test_a_method_does_not_diverge_from_itself(book, embedded_model):
    task = kld.Divergence(book, chunks=2)
    records = all_records(embedded_model, task, N)
    summary = task.summary(records)
    assert len(records[0]["kld"]) == N - N // 2 - 1
    assert summary["Mean KLD"] == summary["Maximum KLD"] == summary["RMS \u0394p"] == 0
    assert summary["Same top p"] == 100
    assert summary["Mean PPL(Q)"] == pytest.approx(
        Perplexity(book).summary(all_records(embedded_model, Perplexity(book, chunks=2), N))["perplexity"], rel=1e-6
    )


def test_a_window_diverges_and_its_numbers_are_those_of_the_definition(vocabulary, book, embedded_f32):
    method = "window,n_sink=4,window=12"
    record = all_records(embedded_f32, kld.Divergence(book, chunks=1), N, method)[0]
    tokens = chunks(vocabulary, read_text(book), N)[0]
    rows = {}
    for name, chosen in (("base", "full"), ("other", method)):
        with new(embedded_f32, method=chosen, logits_all=True) as model:
            model.eval(tokens.tolist())
            x = np.asarray(model.scores[N // 2 : N - 1], np.float64)
            rows[name] = (
                x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
            )
    p, q = rows["base"], rows["other"]
    np.testing.assert_allclose(record["kld"], (np.exp(p) * (p - q)).sum(-1), atol=2e-3)
    np.testing.assert_allclose(record["nll"], -q[np.arange(len(q)), tokens[N // 2 + 1 :]], atol=1e-3)
    np.testing.assert_array_equal(record["same_top"], p.argmax(-1) == q.argmax(-1))
    assert np.mean(record["kld"]) > 0.01
    assert record["method"] != record["base"]


def test_parts_of_different_sizes_are_compared_row_by_row():
    def parts(*sizes):
        rows = iter(np.arange(2 * sum(sizes), dtype=np.float32).reshape(-1, 2))
        for size in sizes:
            part = np.array([next(rows) for _ in range(size)])
            yield part, part[:, 0].astype(np.int32)

    pairs = list(kld.side_by_side(parts(3, 1, 4), parts(2, 5, 1)))
    assert [len(following) for *_, following in pairs] == [2, 1, 1, 3, 1]
    for a, b, following in pairs:
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[:, 0], following)


def test_statistics_are_llama_cpps():
    random = np.random.default_rng(0)
    nll, base = random.exponential(3, 500), random.exponential(3, 500)
    divergences, same = random.exponential(0.1, 500), (random.random(500) < 0.9).astype(float)
    found = kld.statistics(nll, base, divergences, same)
    change = np.exp(-nll) - np.exp(-base)
    assert found["Mean PPL(base)"] == pytest.approx(math.exp(base.mean()))
    assert found["Mean KLD error"] == pytest.approx(divergences.std() / math.sqrt(499))
    assert found["90.0% KLD"] == pytest.approx(
        np.sort(divergences)[449] * 0.9 + np.sort(divergences)[450] * 0.1, rel=1e-3
    )
    assert found["Minimum \u0394p"] == pytest.approx(100 * change.min())
    assert found["RMS \u0394p"] == pytest.approx(100 * math.sqrt((change**2).mean()))
    assert found["Mean ln(PPL(Q)/PPL(base)) error"] == pytest.approx((nll - base).std() / math.sqrt(499))
    assert found["Same top p"] == pytest.approx(100 * same.mean())
    assert kld.statistics(nll[:5], base[:5], divergences[:5], same[:5])["Mean KLD error"] == 0


def test_improbable_tokens_of_the_base_do_not_count():
    base = np.log(np.array([[1 - 1e-8, 1e-8]], np.float32))
    other = np.array([[0.0, -100.0]], np.float32)
    assert kld.divergence(base, other)[0] == pytest.approx(0, abs=1e-7)
