"""What Llama does, on the embedded model: state, settings, life, vocabulary."""

import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from llamas import EXACT, F32, METHODS, TEXT, greedy, new
from session import assert_same

from pylongctx import Full, Llama, SelfExtend, Window
from pylongctx.errors import Aborted, InvalidInput


@pytest.fixture(params=METHODS)
def each(request, embedded_f32):
    """One Llama per method, in f32: with rounded weights the products of one token differ from those of many."""
    with new(embedded_f32, method=request.param, **F32) as llm:
        yield llm


@pytest.fixture
def exact(embedded_f32):
    """Return a Llama in f32 that keeps all rows."""
    with new(embedded_f32, **F32) as llm:
        yield llm


# ---- state ----


def test_reused_prefix_changes_nothing(each):
    first, second = each.tokenize(TEXT * 3), each.tokenize(TEXT * 2 + b"The grass is green.")
    fresh = greedy(each, second)
    fresh_logits = each.scores[-1].copy()
    each.reset()
    greedy(each, first)
    assert greedy(each, second) == fresh
    assert_same(each.scores[-1], fresh_logits, EXACT)


def test_only_what_is_new_is_evaluated(llm, prompt, embedded_model):
    steps = []
    with new(embedded_model, progress_callback=lambda done, total: steps.append((done, total))) as llm:
        llm.eval(prompt)
        steps.clear()
        greedy(llm, [*prompt, 300, 301, 302], n=1)
        assert steps == [(len(prompt) + 3, len(prompt) + 3)]


def test_a_known_prompt_is_not_evaluated_again(llm, prompt):
    llm.eval(prompt)
    llm.session.eval = None  # calling it would raise
    try:
        first = greedy(llm, prompt, n=1)
    finally:
        del llm.session.eval
    llm.reset()
    assert greedy(llm, prompt, n=1) == first


def test_a_refused_rollback_evaluates_again(llm, prompt, monkeypatch):
    expected = greedy(llm, prompt)
    greedy(llm, [*prompt[:20], 300, 301])
    monkeypatch.setattr(llm.session.context, "truncate", lambda n, seq: "refused for the test")
    monkeypatch.setattr(llm.session.context, "restorable", lambda n, seq: 0)
    assert greedy(llm, prompt) == expected
    assert llm.eval_tokens[len(prompt)] == expected[0]
    llm.n_tokens = len(prompt)
    llm.eval([300])
    assert list(llm.eval_tokens) == [*prompt, 300]


@pytest.fixture
def by_eight(exact, monkeypatch):
    """Return a Llama whose cache can be cut at multiples of 8 only."""
    context = exact.session.context
    truncate = context.truncate
    monkeypatch.setattr(context, "truncate", lambda n, seq: "in a chunk" if n % 8 else truncate(n, seq))
    monkeypatch.setattr(context, "restorable", lambda n, seq: n // 8 * 8)
    return exact


def test_a_refused_rollback_keeps_what_it_can(by_eight, prompt, monkeypatch):
    expected, decode = greedy(by_eight, prompt, n=2), by_eight.session.context.decode
    greedy(by_eight, [*prompt[:21], 300, 301], n=2)
    places = []
    monkeypatch.setattr(
        by_eight.session.context, "decode", lambda part, pos, *rest: places.append(pos[0]) or decode(part, pos, *rest)
    )
    assert greedy(by_eight, prompt, n=2) == expected
    assert places[0] == 16
    assert list(by_eight.eval_tokens)[: len(prompt)] == prompt
    by_eight.n_tokens = 13
    by_eight.eval(prompt[13:])
    assert places[-1] == 8
    assert list(by_eight.eval_tokens) == prompt
    by_eight.n_tokens = 5
    by_eight.eval(prompt[5:])
    assert places[-1] == 0


def test_eval_rows_after_a_refused_rollback_are_those_of_the_new_tokens(by_eight, prompt):
    rows = np.concatenate([part.copy() for part in by_eight.eval_rows(prompt)])
    by_eight.n_tokens = 13
    again = np.concatenate([part.copy() for part in by_eight.eval_rows(prompt[13:])])
    assert_same(again, rows[13:], EXACT)


def test_logits_of_a_failed_step_are_not_used(llm, prompt, monkeypatch):
    llm.eval(prompt)
    known = llm.scores.copy()

    def fail(tokens, positions, seqs, wanted, logits):
        logits[:] = 7
        raise Aborted("for the test", 2)

    with monkeypatch.context() as patch:
        patch.setattr(llm.session.context, "decode", fail)
        with pytest.raises(Aborted, match="for the test"):
            llm.eval([300])
    assert list(llm.eval_tokens) == prompt
    np.testing.assert_array_equal(llm.scores, known)


def test_setting_n_tokens_goes_back(exact, prompt):
    exact.eval(prompt)
    expected = exact.scores[-1].copy()
    exact.eval([300, 301, 302])
    exact.n_tokens = len(prompt) - 1
    assert len(exact.scores) == 0
    exact.eval(prompt[-1:])
    assert list(exact._input_ids) == prompt
    assert_same(exact.scores[-1], expected, EXACT)


def test_tokens_and_ids_agree(llm, prompt):
    llm.eval(prompt)
    assert llm.n_tokens == len(prompt)
    assert llm.input_ids.shape == (llm.n_ctx(),)
    assert list(llm.eval_tokens) == list(llm._input_ids) == list(llm.input_ids[: len(prompt)]) == prompt
    llm.reset()
    assert (llm.n_tokens, len(llm.scores), list(llm.eval_tokens)) == (0, 0, [])


def test_scores_hold_the_last_row_only(llm, prompt):
    llm.eval(prompt)
    assert llm.scores.shape == (1, llm.n_vocab())
    assert llm.scores.dtype == np.float32
    assert len(llm.eval_logits) == 1


def test_logits_all_grows_as_used(embedded_f32, prompt):
    tokens = (prompt * 9)[:200]
    with new(embedded_f32, n_ctx=2048, method="selfextend", logits_all=True, **F32) as every:
        every.eval(tokens[:10])
        assert every.scores.shape == (10, every.n_vocab())
        first = every.scores.copy()
        assert every.scores.base.nbytes < every.n_ctx() * every.n_vocab()
        every.eval(tokens[10:])
        assert every.scores.shape == (200, every.n_vocab())
        assert len(every.scores.base) <= 400
        np.testing.assert_array_equal(every.scores[:10], first)
        every.reset()
        every.eval(tokens)
        assert_same(every.scores[:10], first, EXACT)
        assert every.sample(temp=0.0, idx=5) == int(every.scores[5].argmax())


def test_logits_all_and_last_row_agree(embedded_model, llm, prompt):
    llm.eval(prompt)
    with new(embedded_model, logits_all=True) as every:
        every.eval(prompt)
        np.testing.assert_allclose(every.scores[-1], llm.scores[-1], atol=1e-3)


@pytest.mark.parametrize("logits_all", [False, True])
def test_eval_rows_equal_scores(embedded_model, prompt, logits_all):
    with new(embedded_model, n_ubatch=16, logits_all=logits_all) as llm:
        rows = np.concatenate([part.copy() for part in llm.eval_rows(prompt)])
        assert list(llm.eval_tokens) == prompt
    with new(embedded_model, n_ubatch=16, logits_all=True) as every:
        every.eval(prompt)
        np.testing.assert_allclose(rows, every.scores, atol=1e-4)


def test_kv_usage(llm, prompt):
    assert llm.kv_usage().bytes == 0
    llm.eval(prompt)
    usage = llm.kv_usage()
    assert usage.rows.shape == (4, 4)
    assert usage.rows.dtype == np.int32
    assert (usage.rows == len(prompt)).all()
    assert 0 < usage.bytes <= usage.peak_bytes
    assert 0 < usage.full_bytes <= usage.bytes
    llm.reset()
    assert llm.kv_usage().bytes == 0
    assert llm.kv_usage().peak_bytes == usage.peak_bytes


def test_method_is_resolved(embedded_model):
    with new(embedded_model, method=SelfExtend(), n_ctx=2048) as llm:
        assert isinstance(llm.method, SelfExtend)
        assert llm.method.group_size > 1
        assert 0 < llm.method.neighbor_window < 512
    with new(embedded_model, method=Window(window=100)) as llm:
        assert llm.method == Window(n_sink=4, window=100)
    with new(embedded_model) as llm:
        assert llm.method == Full()
    with new(embedded_model, method=None) as llm:
        assert llm.method is None
        assert len(greedy(llm, llm.tokenize(TEXT), n=2)) == 2


def test_n_ctx_zero_is_the_trained_context_or_more(embedded_model):
    with new(embedded_model, n_ctx=0) as llm:
        assert llm.n_ctx() == 512
    with new(embedded_model, n_ctx=0, method="selfextend") as llm:
        assert llm.n_ctx() == 4 * 512


@pytest.mark.parametrize(
    "method",
    ["selfextend,group_size=2,neighbor_window=128", "selfextend,group_size=3"],
)
def test_n_ctx_zero_is_at_most_what_the_method_reaches(embedded_model, method):
    with pytest.raises(InvalidInput, match="n_ctx up to") as reason:
        new(embedded_model, n_ctx=2048, method=method)
    with new(embedded_model, n_ctx=0, method=method) as llm:
        assert llm.n_ctx() == int(re.search(r"n_ctx up to (\d+)", str(reason.value))[1]) > 512


def test_n_ctx_zero_is_the_trained_context_when_the_method_reaches_no_further(embedded_model):
    with new(embedded_model, n_ctx=0, method="selfextend,neighbor_window=300") as llm:
        assert llm.n_ctx() == 512


def test_quantized_cache_by_name_and_number(embedded_model, prompt):
    def first_logits(**types):
        with new(embedded_model, **types) as llm:
            llm.eval(prompt)
            return llm.scores[-1].copy(), llm.kv_usage().bytes

    named, small = first_logits(type_k="q8_0", type_v="q8_0")
    numbered, _ = first_logits(type_k=8, type_v=8)
    exact, large = first_logits(type_k="f32", type_v="f32")
    np.testing.assert_array_equal(named, numbered)
    assert not np.array_equal(named, exact)
    assert small < large / 3


def test_rope_settings_reach_the_model(embedded_model, prompt):
    linear = {"rope_freq_scale": 0.25}
    yarn = linear | {"rope_scaling_type": 2, "yarn_orig_ctx": 128}
    rows = []
    for settings in ({}, {"rope_freq_base": 1e6}, linear, yarn, yarn | {"yarn_ext_factor": 0.5}):
        with new(embedded_model, **settings) as llm:
            llm.eval(prompt)
            rows.append(llm.scores[-1].copy())
    for i, row in enumerate(rows):
        assert all(np.abs(row - other).max() > 0.1 for other in rows[:i])


def test_why_is_logged_only_when_verbose(embedded_model, caplog):
    with new(embedded_model, method="selfextend", n_ctx=2048):
        assert caplog.messages == []
    with new(embedded_model, method="selfextend", n_ctx=2048, verbose=True) as llm:
        assert caplog.messages == [llm.session.context.why]


def test_vocab_only_tokenizes(embedded_model, llm, prompt):
    with new(embedded_model, vocab_only=True) as vocabulary:
        assert vocabulary.tokenize(TEXT) == prompt
        with pytest.raises(RuntimeError, match="vocab_only"):
            vocabulary.eval(prompt)


def test_pickle_loads_the_model_again(embedded_model, prompt):
    with new(embedded_model, method="window") as llm, pickle.loads(pickle.dumps(llm)) as copy:
        assert copy.method == llm.method
        assert greedy(copy, prompt, 3) == greedy(llm, prompt, 3)


# ---- life ----


def test_close_twice_then_clear_errors(embedded_model, prompt):
    llm = new(embedded_model)
    stream = llm.generate(prompt)
    next(stream)
    llm.close()
    llm.close()
    for call in (lambda: llm.eval(prompt), llm.reset, lambda: next(stream), lambda: llm.tokenize(b"a"), llm.kv_usage):
        with pytest.raises(RuntimeError, match="this Llama is closed"):
            call()


def test_with_closes(embedded_model):
    with new(embedded_model) as llm:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        llm.n_ctx()


def test_exit_without_close_is_silent(embedded_model):
    code = "import sys, pylongctx; a = pylongctx.Llama(sys.argv[1], verbose=False); a.eval([1, 2]); a.me = a"
    done = subprocess.run([sys.executable, "-c", code, str(embedded_model)], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_package_needs_no_llama_cpp():
    code = "import sys, pylongctx; pylongctx.Llama; assert 'llama_cpp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


# ---- vocabulary ----


def test_tokenize_and_back(llm):
    for text in ("Hello, world! 12345", " leading", "na\u00efve \u65e5\u672c \U0001f642", "\n\n"):
        tokens = llm.tokenize(text.encode())
        assert tokens[0] == llm.token_bos()
        assert llm.detokenize(tokens).decode() == text
        assert llm.detokenize(tokens[1:]).decode() == " " + text
        assert llm.tokenize(text.encode(), add_bos=False) == tokens[1:]
        assert llm.tokenizer().decode(llm.tokenizer().encode(text)) == text


def test_special_tokens(llm):
    assert llm.tokenize(b"</s>", add_bos=False, special=True)[-1] == llm.token_eos()
    assert llm.token_eos() not in llm.tokenize(b"</s>", add_bos=False)
    assert llm.detokenize([llm.token_eos()]) == b""
    assert llm.detokenize([llm.token_eos()], special=True) == b"</s>"


def test_facts(llm):
    assert (llm.n_vocab(), llm.n_embd(), llm.token_bos(), llm.token_eos()) == (2048, 256, 1, 2)
    assert llm.detokenize([llm.token_nl()]) == b"\n"
    assert llm.metadata["general.architecture"] == "llama"


def test_logits_to_logprobs():
    logits = np.array([[0.0, np.log(3.0)], [-np.inf, 1000.0]], np.float32)
    expected = np.log([[0.25, 0.75], [0.0, 1.0]], where=[[True, True], [False, True]], out=np.full((2, 2), -np.inf))
    np.testing.assert_allclose(Llama.logits_to_logprobs(logits), expected, rtol=1e-6)
    assert Llama.logits_to_logprobs(logits).dtype == np.float32


def test_longest_token_prefix():
    assert Llama.longest_token_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert Llama.longest_token_prefix([], [1]) == 0
    assert Llama.longest_token_prefix(np.array([1, 2]), [1, 2, 3]) == 2
