"""Threads that use an object which another one closes, or which the interpreter closes at its end."""

import gc
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pylongctx import Llama

USES = {
    "complete": 'llm("It was the best", max_tokens=50)',
    "stream": '[None for _ in llm("It was", max_tokens=60, stream=True)]',
    "chat": 'llm.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=20)',
    "tokenize": 'llm.tokenize(b"It was the best of times" * 50)',
    "eval": "llm.reset(); llm.eval([1, 5, 6] * 50)",
    "grammar": """llm("x", grammar='root ::= "a"*', max_tokens=3)""",
    "open": 'other = Llama(llm.model_path, n_ctx=256, verbose=False); other("It", max_tokens=2); other.close()',
}
CODE = """
import sys, threading, time
from pylongctx import Llama
from pylongctx.models import embedded_model
llm = Llama(str(embedded_model()), n_ctx=512, chat_format="chatml", verbose=False)
begun = threading.Event()
def use():
    while True:
        {use}
        begun.set()
threading.Thread(target=use, daemon=True).start()
assert begun.wait(60)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("seconds", ["0", "0.05"])
@pytest.mark.parametrize("use", USES)
def test_a_daemon_thread_ends_in_silence_with_the_interpreter(use, seconds):
    """Neither a traceback nor a signal: what the thread uses is freed when it no longer does."""
    command = [sys.executable, "-c", CODE.replace("{use}", USES[use]), seconds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


ENDS = USES | {
    "left early": 'next(llm("It was", max_tokens=60, stream=True))',
    "generate": "next(llm.generate([1, 5, 6]))",
    "prefill": "llm.prefill([1, 5, 6] * 9)",
    "schema": 'llm.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=3, response_format=SCHEMA)',
    "many": 'llm.complete_many(["It was", "It"], max_tokens=3)',
}


@pytest.mark.parametrize("use", ENDS)
def test_close_frees_the_weights(embedded_model, tmp_path, use):
    """At once, though the object is still known, and not when Python collects garbage."""
    model = str(shutil.copy(embedded_model, tmp_path / "model.gguf"))
    llm = Llama(model, n_ctx=512, n_parallel=1 + (use == "many"), chat_format="chatml", verbose=False)
    exec(ENDS[use], {"llm": llm, "Llama": Llama, "SCHEMA": {"type": "json_object", "schema": {"type": "object"}}})
    assert model in Path("/proc/self/maps").read_text()
    gc.disable()
    try:
        llm.close()
        assert model not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.parametrize("use", ["complete", "stream", "tokenize", "grammar"])
def test_another_thread_closes_what_one_uses(embedded_model, use):
    """While the program runs, the thread gets an exception."""
    raised, names = [], {"Llama": Llama}

    def work():
        begun.wait()
        try:
            while True:
                exec(USES[use], names)
        except RuntimeError as reason:
            raised.append(str(reason))

    for _ in range(10):
        names["llm"] = llm = Llama(str(embedded_model), n_ctx=256, verbose=False)
        begun = threading.Event()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        begun.set()
        llm("It", max_tokens=2)
        llm.close()
        thread.join(60)
        assert not thread.is_alive()
    left = {"another call used this Llama while this generation waited; use one object for each"}
    assert set(raised) - (left if use == "stream" else set()) == {"this Llama is closed"} and len(raised) == 10
