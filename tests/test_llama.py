"""What Llama does, on the embedded model: state, sampling, completion."""

import ast
import importlib.util
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pylongctx import Full, Llama, SelfExtend, Window
from pylongctx.errors import Aborted, ContextFull
from pylongctx.sampling import LogitsProcessorList, MinTokensLogitsProcessor, StoppingCriteriaList

METHODS = ["full", "window,n_sink=4,window=128", "selfextend,group_size=4,neighbor_window=128"]
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


@pytest.fixture(scope="module", params=METHODS)
def each(request, embedded_model):
    """One Llama per method, n_ctx 512, small ubatches."""
    with Llama(str(embedded_model), n_ctx=512, n_ubatch=64, method=request.param, verbose=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared(embedded_model):
    with Llama(str(embedded_model), n_ctx=512, n_ubatch=64, verbose=False) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    shared.reset()
    shared.set_seed(-1)
    return shared


@pytest.fixture
def prompt(llm):
    return llm.tokenize(TEXT)


def new(embedded_model, **kwargs):
    return Llama(str(embedded_model), **{"n_ctx": 512, "n_ubatch": 64, "verbose": False} | kwargs)


def greedy(llm, tokens, n=8):
    return list(islice(llm.generate(tokens, temp=0.0), n))


def script(llm, text: str):
    """Return a logits processor that makes the model say ``text``, which begins with a space, and then end."""
    wanted = [*llm.tokenize(text[1:].encode(), add_bos=False), llm.token_eos()]
    start: list[int] = []

    def force(input_ids, logits):
        start.append(len(input_ids))
        forced = np.full_like(logits, -np.inf)
        forced[wanted[len(input_ids) - start[0]]] = 0
        return forced

    return force


def texts(chunks):
    return [chunk["choices"][0]["text"] for chunk in chunks]


# ---- signatures ----


def peer_file() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llama_cpp is not installed")
    return Path(spec.submodule_search_locations[0]) / "llama.py"


def peer_parameters(name: str) -> list[str]:
    tree = ast.parse(peer_file().read_text(encoding="utf-8"))
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Llama")
    args = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name).args
    return [arg.arg for arg in [*args.args, *args.kwonlyargs]]


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "__call__",
        "create_completion",
        "tokenize",
        "detokenize",
        "eval",
        "sample",
        "generate",
        "reset",
        "set_seed",
    ],
)
def test_parameters_are_those_of_llama_cpp(name):
    ours = [p for p in inspect.signature(getattr(Llama, name)).parameters if p != "kwargs"]
    theirs = peer_parameters(name)
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == (["method", "progress_callback"] if name == "__init__" else [])


PEER = """
import json, sys
from itertools import islice
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, verbose=False)
out = llm(sys.argv[2], max_tokens=24, temperature=0.0, repeat_penalty=1.1)
stream = list(llm(sys.argv[2], max_tokens=4, temperature=0.0, stream=True))
tokens = llm.tokenize(sys.argv[2].encode(), special=True)
print(json.dumps([out, stream, tokens, llm.detokenize(tokens).decode(), llm.metadata]))
"""


@pytest.fixture(scope="module")
def peer(embedded_model):
    """What llama_cpp makes of TEXT, in a process of its own."""
    peer_file()
    usable = subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True, check=False)
    if usable.returncode != 0:
        pytest.skip("llama_cpp is installed without its library")
    command = [sys.executable, "-c", PEER, str(embedded_model), TEXT.decode()]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_completion_equals_llama_cpp(llm, peer):
    theirs, _, tokens, text, metadata = peer
    ours = llm(TEXT.decode(), max_tokens=24, temperature=0.0, repeat_penalty=1.1)
    assert ours["choices"] == theirs["choices"]
    assert ours["usage"] == theirs["usage"]
    assert ours["model"] == theirs["model"]
    assert list(ours) == list(theirs)
    assert llm.tokenize(TEXT, special=True) == tokens
    assert llm.detokenize(tokens).decode() == text
    assert llm.metadata == metadata


def test_stream_chunks_have_the_keys_of_llama_cpp(llm, peer):
    ours = list(llm(TEXT.decode(), max_tokens=4, temperature=0.0, stream=True))
    theirs = peer[1]
    assert [c["choices"] for c in ours] == [c["choices"] for c in theirs]
    assert all(list(chunk) == list(theirs[0]) for chunk in ours[:-1])
    assert ours[-1].pop("usage")["completion_tokens"] == 4
    assert list(ours[-1]) == list(theirs[-1])


# ---- state ----


def test_reused_prefix_changes_nothing(each):
    first, second = each.tokenize(TEXT * 3), each.tokenize(TEXT * 2 + b"The grass is green.")
    each.reset()
    fresh = greedy(each, second)
    fresh_logits = each.scores[-1].copy()
    each.reset()
    greedy(each, first)
    assert greedy(each, second) == fresh
    np.testing.assert_allclose(each.scores[-1], fresh_logits, atol=0.05)


def test_only_what_is_new_is_evaluated(llm, prompt, embedded_model):
    steps = []
    with new(embedded_model, progress_callback=lambda done, total: steps.append((done, total))) as llm:
        llm.eval(prompt)
        steps.clear()
        greedy(llm, [*prompt, 300, 301, 302], n=1)
        assert steps == [(len(prompt) + 3, len(prompt) + 3)]


def test_a_known_prompt_is_not_evaluated_again(llm, prompt):
    llm.eval(prompt)
    llm._session.eval = None  # calling it would raise
    try:
        first = greedy(llm, prompt, n=1)
    finally:
        del llm._session.eval
    llm.reset()
    assert greedy(llm, prompt, n=1) == first


def test_a_refused_rollback_evaluates_again(llm, prompt, monkeypatch):
    expected = greedy(llm, prompt)
    greedy(llm, [*prompt[:20], 300, 301])
    monkeypatch.setattr(llm._session.context, "truncate", lambda n: "refused for the test")
    assert greedy(llm, prompt) == expected
    assert llm.eval_tokens[len(prompt)] == expected[0]
    llm.n_tokens = len(prompt)
    llm.eval([300])
    assert list(llm.eval_tokens) == [*prompt, 300]


def test_logits_of_a_failed_step_are_not_used(llm, prompt, monkeypatch):
    llm.eval(prompt)

    def fail(tokens, pos, logits, every):
        logits[:] = 7
        raise Aborted("for the test", 2)

    with monkeypatch.context() as patch:
        patch.setattr(llm._session.context, "decode", fail)
        with pytest.raises(Aborted, match="for the test"):
            llm.eval([300])
    assert list(llm.eval_tokens) == prompt
    assert len(llm.scores) == 0
    with pytest.raises(RuntimeError, match="no logits"):
        llm.sample()


def test_setting_n_tokens_goes_back(llm, prompt):
    llm.eval(prompt)
    expected = llm.scores[-1].copy()
    llm.eval([300, 301, 302])
    llm.n_tokens = len(prompt) - 1
    assert len(llm.scores) == 0
    llm.eval(prompt[-1:])
    assert list(llm._input_ids) == prompt
    np.testing.assert_allclose(llm.scores[-1], expected, atol=0.05)


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


def test_logits_all_grows_as_used(embedded_model, llm, prompt):
    tokens = (prompt * 9)[:200]
    with new(embedded_model, n_ctx=2048, method="selfextend", logits_all=True) as every:
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
        np.testing.assert_allclose(every.scores[:10], first, atol=0.05)
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


def test_why_is_printed_only_when_verbose(embedded_model, capfd):
    with new(embedded_model, method="selfextend", n_ctx=2048):
        assert "pylongctx:" not in capfd.readouterr().err
    with new(embedded_model, method="selfextend", n_ctx=2048, verbose=True) as llm:
        shown = capfd.readouterr().err
        assert shown.count("pylongctx:") == 1
        assert llm._session.context.why in shown


def test_vocab_only_tokenizes(embedded_model, llm, prompt):
    with new(embedded_model, vocab_only=True) as vocabulary:
        assert vocabulary.tokenize(TEXT) == prompt
        with pytest.raises(RuntimeError, match="vocab_only"):
            vocabulary.eval(prompt)


def test_pickle_loads_the_model_again(embedded_model, prompt):
    with new(embedded_model, method="window") as llm, pickle.loads(pickle.dumps(llm)) as copy:
        assert copy.method == llm.method
        assert greedy(copy, prompt, 3) == greedy(llm, prompt, 3)


# ---- interrupts ----


@pytest.fixture
def interruptible():
    """Python's own SIGINT handler: a test run in the background of a shell inherits an ignored signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_a_usable_object(embedded_model, llm, prompt):
    expected = greedy(llm, prompt)

    def interrupt(done, total):
        if done == 32:
            signal.raise_signal(signal.SIGINT)

    with new(embedded_model, n_ubatch=16, progress_callback=interrupt) as other:
        with pytest.raises(KeyboardInterrupt):
            other.eval(prompt)
        assert list(other.eval_tokens) == prompt[:32]
        other._session.progress = None
        assert greedy(other, prompt) == expected


def test_abort_from_another_thread(embedded_model, llm, prompt):
    expected = greedy(llm, prompt)

    def abort(done, total):
        if done == 32:
            thread = threading.Thread(target=other.abort)
            thread.start()
            thread.join()

    with new(embedded_model, n_ubatch=16, progress_callback=abort) as other:
        with pytest.raises(Aborted):
            other.eval(prompt)
        assert list(other.eval_tokens) == prompt[:32]
        assert len(other.scores) == 0
        other._session.progress = None
        assert greedy(other, prompt) == expected


def test_an_early_abort_is_forgotten(llm, prompt):
    llm.abort()
    llm.eval(prompt)
    assert llm.n_tokens == len(prompt)


def test_a_stream_can_be_dropped(llm):
    chunks = llm(TEXT.decode(), stream=True, max_tokens=20, temperature=0.0)
    next(chunks)
    chunks.close()
    assert llm(TEXT.decode(), max_tokens=4, temperature=0.0)["usage"]["completion_tokens"] == 4


def test_two_objects_run_in_parallel(embedded_model, llm, prompt):
    expected, results = greedy(llm, prompt), {}

    def work(i):
        with new(embedded_model, n_threads=1, n_threads_batch=1) as own:
            results[i] = greedy(own, prompt)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: expected, 1: expected}


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


# ---- sampling ----


def test_seeds(llm):
    def run(**kwargs):
        return llm(TEXT.decode(), max_tokens=32, temperature=2.0, min_p=0.0, top_k=0, top_p=1.0, **kwargs)["choices"]

    assert run(seed=0) == run(seed=0)
    assert run(seed=0) != run(seed=1)
    assert run() != run()
    llm.set_seed(0)
    first, second = run(), run()
    assert first == run(seed=0) != second
    llm.set_seed(0)
    assert [run(), run()] == [first, second]


def test_a_call_seed_does_not_seed_the_object(llm):
    def run(**kwargs):
        return llm(TEXT.decode(), max_tokens=32, temperature=2.0, min_p=0.0, top_k=0, top_p=1.0, **kwargs)["choices"]

    run(seed=5)
    first = run()
    run(seed=5)
    assert run() != first


def test_greedy_is_the_argmax(llm, prompt):
    llm.eval(prompt)
    assert llm.sample(temp=0.0) == int(llm.scores[-1].argmax())
    assert llm.sample(top_k=1, temp=1.0) == int(llm.scores[-1].argmax())


def test_repeat_penalty_counts_generated_tokens(llm, prompt):
    repeated = list(islice(llm.generate(prompt, temp=0.0, repeat_penalty=1e6), 30))
    assert len(set(repeated)) == 30


@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_runs(llm, prompt, mode):
    assert len(list(islice(llm.generate(prompt, mirostat_mode=mode), 5))) == 5


def test_logit_bias_and_processor_both_work(llm):
    banned, wanted = llm.tokenize(b"the", add_bos=False)[0], llm.tokenize(b"of", add_bos=False)[0]

    def ban(input_ids, logits):
        logits[banned] = -np.inf
        return logits

    def first_token(**kwargs):
        return llm("It was", max_tokens=1, temperature=0.0, **kwargs)["choices"][0]["text"]

    assert first_token(logit_bias={banned: 1e4, wanted: 1e3}) == " the"
    assert first_token(logit_bias={banned: 1e4, wanted: 1e3}, logits_processor=LogitsProcessorList([ban])) == " of"
    assert first_token(logit_bias={str(wanted): 1e3}, logits_processor=ban) == " of"


def test_processors_do_not_change_scores(llm, prompt):
    def spoil(input_ids, logits):
        assert list(input_ids) == prompt
        logits[:] = 0
        return logits

    llm.eval(prompt)
    before = llm.scores.copy()
    next(llm.generate(prompt, logits_processor=LogitsProcessorList([spoil])))
    np.testing.assert_array_equal(llm.scores, before)


def test_min_tokens_processor(llm):
    minimum = MinTokensLogitsProcessor(3, llm.token_eos())
    done = llm("It was", max_tokens=9, temperature=0.0, logit_bias={llm.token_eos(): 1e6}, logits_processor=[minimum])
    assert done["usage"]["completion_tokens"] == 3
    assert done["choices"][0]["finish_reason"] == "stop"


def test_stopping_criteria_see_real_logits(llm, prompt):
    seen = []

    def stop(input_ids, logits):
        seen.append((len(input_ids), int(logits.argmax()), logits.shape))
        return len(input_ids) == len(prompt) + 2

    done = llm(prompt, max_tokens=9, temperature=0.0, stopping_criteria=StoppingCriteriaList([stop]))
    llm.reset()
    expected = greedy(llm, prompt, 3)
    assert seen == [(len(prompt) + i, token, (llm.n_vocab(),)) for i, token in enumerate(expected)]
    assert done["usage"]["completion_tokens"] == 2
    assert done["choices"][0]["finish_reason"] == "stop"


def test_send_injects_tokens(llm, prompt):
    tokens = llm.generate(prompt, temp=0.0)
    first = next(tokens)
    tokens.send([300, 301])
    assert list(llm.eval_tokens) == [*prompt, first, 300, 301]


def test_generate_without_reset_continues(llm, prompt):
    llm.eval(prompt[:10])
    rest = list(islice(llm.generate(prompt[10:], temp=0.0, reset=False), 5))
    llm.reset()
    assert rest == greedy(llm, prompt, 5)


# ---- completion ----


def test_stream_equals_the_whole(llm):
    for kwargs in ({}, {"echo": True}, {"stop": ["the", "\n"]}, {"stop": "was"}):
        whole = llm("It was", max_tokens=40, seed=3, **kwargs)
        chunks = list(llm("It was", max_tokens=40, seed=3, stream=True, **kwargs))
        assert "".join(texts(chunks)) == whole["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert chunks[-1]["usage"] == whole["usage"]
        assert all("usage" not in chunk and chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1


def test_echo(llm):
    done = llm("It was", max_tokens=3, temperature=0.0, echo=True)
    plain = llm("It was", max_tokens=3, temperature=0.0)
    assert done["choices"][0]["text"] == "It was" + plain["choices"][0]["text"]
    ids = llm.tokenize(b"It was")
    assert llm(ids, max_tokens=3, temperature=0.0, echo=True)["choices"][0]["text"].strip().startswith("It was")


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        (" one two three four", ["o th"], " one tw"),  # across tokens
        (" one two three four", ["four", "two"], " one "),  # the first in the text, not in the list
        (" the", ["e", "h"], " t"),  # two in one token
        (" one two three", ["threat"], " one two three"),  # only the beginning of a stop
        (" one two three", ["three"], " one two "),  # the last token
        (" aab aaab", ["aaab"], " aab "),  # a beginning within a beginning
        (" one two", ["", "x"], " one two"),  # an empty stop stops nothing
    ],
)
def test_stop_strings(llm, said, stop, shown):
    chunks = list(llm("It was", max_tokens=60, stop=stop, stream=True, logits_processor=script(llm, said)))
    assert "".join(texts(chunks)) == shown
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_characters_are_streamed_whole(llm):
    said = " na\u00efve \u20ac5 \U0001f642\U0001f44d \u65e5\u672c."
    chunks = list(llm("It was", max_tokens=99, stream=True, logits_processor=script(llm, said)))
    assert "".join(texts(chunks)) == said
    assert len(chunks) > 10
    assert "\U0001f642" in texts(chunks)


def test_a_cut_character_is_left_out(llm):
    done = llm("It was", max_tokens=3, logits_processor=script(llm, " \U0001f642"))
    assert "\ufffd" not in done["choices"][0]["text"]
    assert done["choices"][0]["text"].strip() == ""
    assert done["choices"][0]["finish_reason"] == "length"


def test_finish_reasons_and_usage(llm):
    done = llm("It was", max_tokens=5, temperature=0.0, logit_bias={llm.token_eos(): -1e9})
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    done = llm("It was", max_tokens=50, logits_processor=script(llm, " it"))
    assert done["choices"][0]["finish_reason"] == "stop"
    assert done["usage"]["completion_tokens"] == 1
    assert (done["object"], done["model"]) == ("text_completion", llm.model_path)
    assert llm("It was", max_tokens=1, model="mine")["model"] == "mine"


@pytest.mark.parametrize("max_tokens", [None, 0, -1, 10**6])
def test_unlimited_fills_the_context(llm, prompt, max_tokens):
    tokens = (prompt * 20)[: llm.n_ctx() - 10]
    done = llm(tokens, max_tokens=max_tokens, temperature=0.0, logit_bias={llm.token_eos(): -1e9})
    assert done["usage"]["total_tokens"] == llm.n_ctx()
    assert done["choices"][0]["finish_reason"] == "length"


def test_the_empty_prompt_starts_at_bos(llm):
    done = llm("", max_tokens=4, temperature=0.0)
    assert done["usage"]["prompt_tokens"] == 1
    assert not done["choices"][0]["text"].startswith(" ")


def test_too_long_a_prompt_says_what_to_do(llm, prompt):
    tokens = (prompt * 20)[: llm.n_ctx()]
    message = r"Requested tokens \(512\) exceed context window of 512.*n_ctx_train=512"
    with pytest.raises(ValueError, match=message) as caught:
        llm(tokens)
    assert isinstance(caught.value, ContextFull)


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
