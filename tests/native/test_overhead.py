"""The work around the kernels is counted: none of it grows with the tokens before."""

import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice
from random import Random

import numpy as np
import pytest
from cases import LONGHEADS, SPECS
from llamas import new
from needs import need

UBATCH = 64
N_CTX = 1024
PERIOD = 128  # tokens: pages of 64, chunks of 16, and borders of every rule but those that evict each token
BORDERS = {
    "corm": "corm,window=16,recent=16,evict_every=64",
    "corm-each-token": "corm,window=16,recent=16,evict_every=1",
    "h2o": "h2o,budget=96,recent=32,evict_every=64",
    "scissorhands": "scissorhands,budget=96,window=16,recent=16,evict_every=64",
    "tova": "tova,budget=96,evict_every=64",
    "tova-adaptive": "tova,budget=96,heads=adaptive,evict_every=64",
}
PLAIN = {name: spec for name, spec in SPECS.items() if name != "longheads-minmax"} | {
    "selfextend": "selfextend,group_size=64,neighbor_window=21",
}
COMPOSED = {
    f"{base}+corm": f"{spec}+{BORDERS['corm']}" for base, spec in PLAIN.items() if base not in ("full", "window")
}
METHODS = PLAIN | BORDERS | COMPOSED
many_tokens_a_graph = pytest.mark.parametrize("spec", [METHODS[name] for name in METHODS if name != "corm-each-token"])


class Work:
    """What the host did between two looks."""

    def __init__(self, session):
        self.session = session
        self._seen = self._read()

    def _read(self) -> Counter:
        ffi, lib = self.session.ffi, self.session.lib
        work = ffi.new("lctx_work *")
        assert lib.lctx_context_work(self.session.ctx, work) == lib.LCTX_OK
        return Counter({name: getattr(work, name) for name, _ in ffi.typeof("lctx_work").fields})

    def since(self) -> dict[str, int]:
        """Return the counts since the last call."""
        before, self._seen = self._seen, self._read()
        return {name: self._seen[name] - before[name] for name in before}


@pytest.fixture(params=METHODS)
def spec(request) -> str:
    return METHODS[request.param]


@pytest.fixture
def numbers() -> list[int]:
    """Return random ordinary tokens, more than a context holds."""
    return np.random.default_rng(1).integers(3, 200, N_CTX + UBATCH).tolist()


@pytest.fixture
def session(open_session, spec):
    return open_session("llama", spec, n_ctx=N_CTX, n_batch=4 * UBATCH, n_ubatch=UBATCH)


def test_one_graph_serves_one_token_after_another(session, numbers):
    session.decode(numbers[:100])
    session.decode(numbers[100:101])
    work = Work(session)
    session.decode(numbers[101 : 101 + PERIOD], step=1)
    done = work.since()
    assert (done["n_graph"], done["n_built"]) == (PERIOD, 0)


@many_tokens_a_graph
def test_one_graph_serves_the_equal_parts_of_a_prompt(session, spec, numbers):
    """Where heads choose chunks of a base, there is another one for parts in which all of them are read."""
    work = Work(session)
    session.decode(numbers[: 8 * UBATCH], step=4 * UBATCH)
    done = work.since()
    assert (done["n_graph"], done["n_built"]) == (8, 2 if "longheads" in spec and "packed" not in spec else 1)


@many_tokens_a_graph
def test_a_graph_is_built_when_the_number_of_tokens_changes(session, numbers):
    session.decode(numbers[:8], step=1)
    work = Work(session)
    session.decode(numbers[8:11])
    assert work.since()["n_built"] > 0


@pytest.mark.parametrize("name", BORDERS)
def test_evictions_run_once_per_border(open_session, numbers, name):
    session = open_session("llama", BORDERS[name], n_ctx=N_CTX, n_batch=4 * UBATCH, n_ubatch=UBATCH)
    every = int(BORDERS[name].rpartition("=")[2])
    work = Work(session)
    session.decode(numbers[: 2 * UBATCH], step=UBATCH)
    session.decode(numbers[2 * UBATCH : 4 * UBATCH + 1], step=1)
    assert work.since()["n_evict"] == 4 * UBATCH // every


def test_the_host_does_as_much_for_a_late_token_as_for_an_early_one(session, numbers):
    """Bytes of inputs are equal; entries of block tables too, except for the pages that an eviction gives back."""
    counts = []
    for start in (2 * PERIOD, N_CTX - PERIOD):
        session.decode(numbers[session.n_past : start], step=UBATCH)
        work = Work(session)
        session.decode(numbers[start : start + PERIOD], step=1)
        counts.append(work.since())
    early, late = counts
    assert late["input_bytes"] == early["input_bytes"] > 0
    assert early["n_table"] > 0
    assert abs(late["n_table"] - early["n_table"]) <= 0.05 * early["n_table"]


def test_an_eviction_looks_at_all_pages_only_while_they_may_be_shared(open_session, numbers):
    session = open_session(
        "llama", BORDERS["corm-each-token"], n_ctx=N_CTX, n_seq_max=2, n_batch=4 * UBATCH, n_ubatch=UBATCH
    )
    session.decode(numbers[: N_CTX // 2], step=UBATCH)
    work = Work(session)
    session.decode(numbers[:1])
    alone = work.since()["n_table"]
    assert session.copy(0, 1)
    work.since()
    session.decode(numbers[:1])
    shared = work.since()["n_table"]
    session.decode(numbers[:1])
    again = work.since()["n_table"]
    assert again == alone < shared


# ---- summaries ----


MARK = 1234.0  # no summary has it


def mark_first_summary(session, state: bytes, chunk_size: int, n_summary: int, summary_dim: int, n_open: int) -> bytes:
    """Return the state with a mark in place of the first chunk's representation, which follows the rows."""
    n_chunk = session.n_past // chunk_size
    at = len(state) - 2 * n_summary * n_chunk * summary_dim - 4 * n_open
    mark = np.full(summary_dim, MARK, np.float16).tobytes()
    assert mark not in state
    return state[:at] + mark + state[at + len(mark) :]


@pytest.mark.parametrize("name", ["longheads-attention", "longheads-minmax"])
def test_a_chunk_is_represented_once(open_session, model_path, numbers, name):
    """A representation that is exchanged stays so: nothing is written there again."""
    method = LONGHEADS[name]
    session = open_session("llama", SPECS[name], n_ctx=N_CTX, n_batch=4 * UBATCH, n_ubatch=UBATCH)
    n_layer, n_head, n_head_kv, dim = 2, 4, 2, 16
    is_minmax = method.representation == "minmax"
    n_summary = n_layer * (n_head_kv if is_minmax else n_head)
    n_open = 0 if is_minmax else n_layer * n_head * method.chunk_size * dim  # one half of the ring: one batch
    session.decode(numbers[:UBATCH])
    summary_dim = dim * (2 if is_minmax else 1)
    marked = mark_first_summary(session, session.save(), method.chunk_size, n_summary, summary_dim, n_open)
    mark = np.full(summary_dim, MARK, np.float16).tobytes()
    assert session.restore(marked)
    session.decode(numbers[UBATCH : 3 * UBATCH], step=UBATCH)
    session.decode(numbers[3 * UBATCH : 4 * UBATCH], step=1)
    assert mark in session.save()


# ---- Python ----


def stream(llm, tokens, **options):
    never = {llm.token_eos(): -100.0}
    options |= {"max_tokens": 64, "temperature": 0, "logit_bias": never, "stop": ["qqqq"]}  # a drawn token varies calls
    return llm.create_completion(tokens, stream=True, **options)


def generate(llm, tokens):
    return llm.generate(tokens)


def calls_per_token(steps, n: int = 16) -> float:
    """Return how many functions one token calls, of Python and of C."""
    counts = Counter()
    next(steps)
    sys.setprofile(lambda frame, event, arg: counts.update([event]))
    try:
        taken = len(list(islice(steps, n)))
    finally:
        sys.setprofile(None)
    assert taken == n
    return (counts["call"] + counts["c_call"]) / n


def bytes_per_token(steps, n: int = 16) -> int:
    """Return the most memory that Python and numpy took at once for one token."""
    next(steps)
    most = 0
    tracemalloc.start()
    try:
        for _ in range(n):
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            next(steps)
            most = max(most, tracemalloc.get_traced_memory()[1] - held)
    finally:
        tracemalloc.stop()
    return most


@pytest.fixture(scope="module")
def long_llm(embedded_model):
    with new(embedded_model, method="window,n_sink=4,window=64", n_ctx=16384, n_ubatch=512) as llm:
        yield llm


def scored(llm, tokens):
    return stream(llm, tokens, logprobs=3)


# how tokens are asked for, and the most calls that one may take: with log-probabilities four tokens get names
@pytest.mark.parametrize(("course", "most"), [(generate, 250), (stream, 250), (scored, 350)])
def test_python_does_as_much_for_a_late_token_as_for_an_early_one(long_llm, course, most):
    tokens = np.resize(long_llm.tokenize(b"It was the best of times, it was the worst of times. "), 6000).tolist()
    measured = []
    for n in (100, len(tokens)):
        calls = calls_per_token(course(long_llm, tokens[:n]))
        measured.append((calls, bytes_per_token(course(long_llm, tokens[:n]))))
    (calls, size), (late_calls, late_size) = measured
    assert late_calls <= 1.1 * calls  # a piece that makes no text takes another token
    assert calls < most
    assert late_size <= size + 4096, "a copy of the tokens would take 24000 bytes"


# ---- text ----

LLAMA_CPP = """
import json, sys
import llama_cpp
path, texts = json.load(sys.stdin)
llm = llama_cpp.Llama(path, vocab_only=True, verbose=False)
json.dump([llm.tokenize(text.encode(), add_bos=False, special=True) for text in texts], sys.stdout)
"""


def test_tokens_are_those_of_llama_cpp(long_llm):
    """Special tokens side by side, at the ends, cut in two; characters that the vocabulary lacks."""
    need("stock", "llama_cpp")
    parts = ["<s>", "</s>", "<unk>", "<s", "/s>", "hello", "the quick", " ", "  ", "\n", "\uac00", "\U0001f600"]
    random = Random(0)
    texts = ["".join(random.choices(parts, k=random.randrange(30))) for _ in range(3000)]
    done = subprocess.run(
        [sys.executable, "-c", LLAMA_CPP],
        input=json.dumps([long_llm.model_path, texts]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert [long_llm.tokenize(text.encode(), add_bos=False, special=True) for text in texts] == json.loads(done.stdout)


@pytest.mark.parametrize("unit", ["<s>hello there, my friend</s>", "<s>\uac00\ub098\ub2e4\U0001f600</s>"])
def test_a_long_text_is_the_sum_of_its_parts(long_llm, unit):
    """Of a chat and of unknown characters, on which unpatched llama.cpp takes quadratic time: minutes for this text."""
    n = 4_000_000 // len(unit.encode())
    one, many = (long_llm.tokenize(text.encode(), add_bos=False, special=True) for text in (unit, unit * n))
    assert many == one * n


def test_a_long_text_comes_back(long_llm):
    text = ("<s>hello there, \uac00\ub098\ub2e4 my friend \U0001f600</s>\n" * 20_000).encode()
    tokens = long_llm.tokenize(text, add_bos=False)
    assert long_llm.detokenize(tokens).lstrip(b" ") == text


THREADS = """
import os, sys
from pylongctx import Llama
before = len(os.listdir("/proc/self/task"))
llm = Llama(sys.argv[1], method=sys.argv[2], n_ctx=256, n_threads=2, n_threads_batch=2, verbose=False)
for token in range(40):
    llm.eval([5 + token])
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("method", ["full", "longheads,chunk_size=16,window=128", "corm"])
def test_no_more_threads_than_were_asked_for(embedded_model, method):
    """Those without work would look for it, and take the cores of those that have some."""
    command = [sys.executable, "-c", THREADS, str(embedded_model), method]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(ran.stdout) == 1, "one beside that of Python"
