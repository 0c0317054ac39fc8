"""Ctrl-C, abort, dropped streams, threads and forks: the object stays usable."""

import signal
import subprocess
import sys
import threading

import pytest
from llamas import METHODS, TEXT, greedy, new
from thinning import thin

from pylongctx.errors import Aborted


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
        other.session.progress = None
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
        other.session.progress = None
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


@thin
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["ctrl-c", "abort"])
def test_every_step_of_a_prompt_may_be_interrupted(embedded_model, how, method):
    raised = KeyboardInterrupt if how == "ctrl-c" else Aborted
    with new(embedded_model, n_ubatch=16, method=method, n_threads=1, n_threads_batch=1) as llm:
        tokens = (llm.tokenize(TEXT) * 5)[:100]
        expected = greedy(llm, tokens, 4)
        for step in range(1, 7):
            llm.reset()

            def stop(done, total, step=step):
                if done == 16 * step:
                    signal.raise_signal(signal.SIGINT) if how == "ctrl-c" else llm.abort()

            llm.session.progress = stop
            with pytest.raises(raised):
                llm.eval(tokens)
            assert list(llm.eval_tokens) == tokens[: 16 * step]
            llm.session.progress = None
            assert greedy(llm, tokens, 4) == expected


# ---- several threads on one object ----


def in_threads(n, work):
    """Run ``work(i)`` in n threads; returns the results and the exceptions."""
    results, failures = {}, []

    def one(i):
        try:
            results[i] = work(i)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, failures


def test_calls_from_eight_threads_wait_for_each_other(llm):
    prompts = [
        f"{word} was the best of times, it was" for word in ["It", "He", "She", "This", "That", "What", "There", "Who"]
    ]
    expected = {i: llm(p, max_tokens=6, temperature=0.0)["choices"][0]["text"] for i, p in enumerate(prompts)}

    def work(i):
        return [llm(prompts[i], max_tokens=6, temperature=0.0)["choices"][0]["text"] for _ in range(3)]

    results, failures = in_threads(8, work)
    assert failures == []
    assert results == {i: [text] * 3 for i, text in expected.items()}


def test_a_stream_that_another_call_interrupts_is_an_error(llm):
    first = llm(TEXT.decode(), stream=True, max_tokens=20, temperature=0.0)
    next(first)
    whole = llm("It was", max_tokens=4, temperature=0.0)
    assert whole["usage"]["completion_tokens"] == 4
    with pytest.raises(RuntimeError, match="another call used this Llama"):
        list(first)
    llm.reset()
    assert llm("It was", max_tokens=4, temperature=0.0)["choices"] == whole["choices"]


def test_any_mixture_of_calls_is_harmless(llm, prompt):
    calls = [
        lambda: llm.eval(prompt[:20]),
        lambda: llm("It was", max_tokens=3),
        lambda: list(llm("It was", max_tokens=3, stream=True)),
        lambda: llm.load_state(llm.save_state()),
        llm.reset,
        llm.kv_usage,
        lambda: [rows.sum() for rows in llm.eval_rows(prompt)],
        lambda: llm.detokenize(llm.tokenize(TEXT)),
    ]
    _, failures = in_threads(8, lambda i: [calls[(i + k) % len(calls)]() for k in range(8)])
    assert all(isinstance(failure, (RuntimeError, ValueError)) for failure in failures)
    llm.reset()
    assert len(greedy(llm, prompt, 3)) == 3


def test_closing_while_another_thread_works(embedded_model):
    other = new(embedded_model)

    def work(i):
        if i == 0:
            other.close()
        else:
            other(TEXT.decode(), max_tokens=30)

    _, failures = in_threads(2, work)
    assert all("this Llama is closed" in str(failure) for failure in failures)


# ---- fork ----

FORK = """
import os, sys
from pylongctx import Llama
llm = Llama(sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, verbose=False)
before = llm("It was", max_tokens=4, temperature=0.0)["choices"]
stream = llm("It was", stream=True)
next(stream)
child = os.fork()
if child == 0:
    calls = [lambda: llm("It was"), lambda: llm.eval([1]), lambda: next(stream), llm.kv_usage, llm.reset]
    for call in calls:
        try:
            call()
        except RuntimeError as reason:
            assert "belongs to the process that opened it" in str(reason), reason
        else:
            sys.exit(7)
    llm.close()
    own = Llama(sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, verbose=False)
    sys.exit(0 if own("It was", max_tokens=4, temperature=0.0)["choices"] == before and own.n_threads == 2 else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert llm("It was", max_tokens=4, temperature=0.0)["choices"] == before
"""


def test_a_forked_child_uses_an_object_of_its_own(embedded_model):
    command = [sys.executable, "-c", FORK, str(embedded_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
