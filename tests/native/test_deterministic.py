"""deterministic=True: a token has the same bits, whatever else is in its batch and however its text was divided."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from cases import LONGHEADS
from geometries import WEIGHTS
from llamas import TEXT, new
from needs import need
from random_model import LLAMA, Shape, write_model
from serving import ALIAS, running
from test_devices import server as rpc_server
from test_lora import factors, write_adapter
from test_models import make

from pylongctx import Llama
from pylongctx.drafts.speculative import LlamaPromptLookupDecoding
from pylongctx.engine.context import Context
from pylongctx.engine.model import Model
from pylongctx.errors import InvalidInput

N = 700  # tokens: what is merged at fixed rows is more than one piece
CUTS = [*range(1, 18), 64, 300, *range(17, 0, -1)]  # tokens of a batch
PROMPT = TEXT.decode() * 15  # tokens of two blocks of a store
SPECS = {
    "full": "full",
    "window": "window,n_sink=3,window=130",
    "selfextend": "selfextend,group_size=4,neighbor_window=90",
    "dca": "dca,chunk_size=90,local_window=30",
    "string": "string",
    **{name: method.text() for name, method in LONGHEADS.items()},
}
WAYS = {  # of dividing the tokens, and of computing them
    "another time": {},
    "one thread": {"n_threads_batch": 1, "n_threads": 1},
    "eight threads": {"n_threads_batch": 8, "n_threads": 8},
    "ubatches": {"n_ubatch": 37},
    "cuts": {"cuts": CUTS, "n_threads": 3},
    "token by token at the end": {"cuts": [N - 30, *[1] * 30]},
}
SHAPE = Shape(n_vocab=288, n_embd=256, n_layer=2, n_head=8, n_head_kv=2, n_ff=512, n_ctx_train=1024, key_length=32)
DEFAULTS = {"n_ctx": 768, "n_ubatch": 256, "n_threads": 2, "n_threads_batch": 2, "deterministic": True}


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(3, 288, N).tolist()


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    """Return a function from a type of weights to a model that has them."""
    folder = tmp_path_factory.mktemp("weighted")

    def get(name):
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_model(path, LLAMA, SHAPE, qtype=WEIGHTS[name])

    return get


def logits(path, ids, cuts=(), **given):
    """Return the logits of all tokens, evaluated in batches of these sizes, and what is left in one."""
    with new(path, **DEFAULTS | {"logits_all": True} | given) as llm:
        for n in cuts:
            first = llm.n_tokens
            if ids[first : first + n]:
                llm.eval(ids[first : first + n])
        if llm.n_tokens < len(ids):
            llm.eval(ids[llm.n_tokens :])
        return llm.scores[: len(ids)].copy()


def assert_one_result(path, ids, ways=WAYS, **given):
    want = logits(path, ids, **given)
    for name, way in ways.items():
        np.testing.assert_array_equal(logits(path, ids, **given | way), want, err_msg=name)


# ---- models ----


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("weights", ["q4_k_m", "q8_0", "q4_1", "f16"])
def test_logits_do_not_depend_on_batches_or_threads(weighted, ids, weights, kv):
    assert_one_result(weighted(weights), ids, type_k=kv, type_v=kv)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("method", SPECS)
def test_methods(embedded_model, ids, method, kv):
    """Of LongHeads all tokens but the first ones choose."""
    assert_one_result(embedded_model, ids, type_k=kv, type_v=kv, method=SPECS[method])


def test_rows_in_a_file(embedded_model, ids, tmp_path):
    """More is wanted than lies close."""
    file = {"kv_offload": "disk", "kv_offload_mib": 1, "kv_offload_path": tmp_path}
    want = logits(embedded_model, ids, method=SPECS["longheads-keys"])
    for name, way in WAYS.items():
        got = logits(embedded_model, ids, method=SPECS["longheads-keys"], **file | way)
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_without_it_results_do_depend(embedded_model, ids):
    """Or nothing is tested here."""
    want = logits(embedded_model, ids, deterministic=False)
    assert (logits(embedded_model, ids, deterministic=False, **WAYS["cuts"]) != want).any()
    np.testing.assert_allclose(logits(embedded_model, ids), want, atol=0.1 * abs(want).max())


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mixtral", "deepseek2", "phi2", "olmo2"])
def test_architectures(tmp_path, ids, name):
    """Sliding windows, sinks, experts, latent attention, biases."""
    assert_one_result(make(tmp_path, name), ids[:300], n_ctx=512)


def test_an_adapter(model_path, tmp_path, ids):
    path = model_path("llama")
    adapter = write_adapter(tmp_path / "adapter.gguf", factors(gguf.GGUFReader(path), 0))
    assert_one_result(path, ids[:60], {"cuts": {"cuts": CUTS}}, lora_path=str(adapter), n_ctx=256)


@pytest.mark.parametrize("method", ["full", SPECS["longheads-keys"]])
def test_a_server_of_another_process(embedded_model, ids, method):
    want = logits(embedded_model, ids, method=method)
    with rpc_server() as (endpoint, _):
        there = {"rpc_servers": endpoint, "n_gpu_layers": -1, "cuts": CUTS}
        np.testing.assert_array_equal(logits(embedded_model, ids, method=method, **there), want)


# ---- completions ----


def answer(llm, prompt, n=40):
    choice = llm(prompt, max_tokens=n, temperature=0.0, logprobs=1)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("method", ["full", "longheads,chunk_size=16,window=128", SPECS["dca"]])
def test_answers_after_a_cached_prefix(embedded_model, tmp_path, method):
    """In the context, and in a store of an earlier process; drafts change nothing either."""
    given = {"n_ctx": 1024, "method": method, "deterministic": True}
    with new(embedded_model, **given) as llm:
        want = answer(llm, PROMPT)
        assert answer(llm, PROMPT) == want
        llm(PROMPT[:1000], max_tokens=3)
        assert answer(llm, PROMPT) == want
    for _ in range(2):
        with new(embedded_model, **given, kv_store=tmp_path / "kv") as llm:
            assert answer(llm, PROMPT) == want
            found = llm.kv_store_usage().tokens
    assert found > 0
    with new(embedded_model, **given, draft_model=LlamaPromptLookupDecoding()) as llm:
        assert answer(llm, PROMPT) == want


def test_a_store_keeps_rows_of_both_apart(embedded_model, tmp_path):
    with new(embedded_model, n_ctx=1024, kv_store=tmp_path / "kv") as llm:
        answer(llm, PROMPT)
    for deterministic in (True, False):
        with new(embedded_model, n_ctx=1024, kv_store=tmp_path / "kv", deterministic=deterministic) as llm:
            answer(llm, PROMPT)
            assert bool(llm.kv_store_usage().tokens) != deterministic


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_answers_next_to_others(embedded_model, kv):
    """As those of the sequence when it is alone."""
    need("server", "fastapi", "uvicorn", "prometheus_client", "httpx", "openai")
    given = {"n_ctx": 512, "type_k": kv, "type_v": kv, "deterministic": True}
    prompts = [TEXT.decode() * n + "It was the " * (n % 2) for n in (1, 2, 3, 2)]
    asked = {"max_tokens": 30, "temperature": 0, "logprobs": 1}
    with new(embedded_model, **given) as llm:
        alone = [answer(llm, prompt, 30) for prompt in prompts]

    def ask(server, prompt):
        choice = server.client.completions.create(model=ALIAS, prompt=prompt, **asked).choices[0]
        return choice.text, choice.logprobs.token_logprobs

    with running(n_seq=4, **given) as server, ThreadPoolExecutor(4) as pool:
        with server.held():
            jobs = [pool.submit(ask, server, prompt) for prompt in prompts]
            server.wait_for(lambda: server.engine.n_waiting == 4)
        assert [job.result(60) for job in jobs] == alone
        assert server.engine.counters.steps < 4 * 30  # they ran together


# ---- what cannot be promised ----


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": None}, "llama.cpp's own KV cache does not promise that; use method=full"),
        ({"method": "corm"}, "what a rule evicts depends on where batches end; use a method without a rule"),
        ({"method": "longheads+h2o"}, "what a rule evicts depends on where batches end"),
        ({"embedding": True}, "a vector depends on the texts that are embedded with it"),
        ({"method": "longheads", "kv_offload": "host"}, "kv_offload='host' is for GPUs"),
    ],
)
def test_refusals(embedded_model, given, reason):
    with pytest.raises(InvalidInput, match=f"deterministic: .*{reason}"):
        Llama(str(embedded_model), verbose=False, deterministic=True, **given)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("qwen3next", {}, "recurrent layers"),
        ("gemma3", {"type_v": "q8_0"}, "sliding windows, whose V cannot be quantized then; use type_v=f16"),
        ("gemma3", {"swa_full": False}, "sliding windows keep all rows then; leave swa_full out"),
    ],
)
def test_models_that_are_refused(tmp_path, name, given, reason):
    with pytest.raises(InvalidInput, match=f"deterministic: .*{reason}"):
        new(make(tmp_path, name), n_ctx=256, deterministic=True, **given)


def test_a_model_that_was_loaded_without_it(embedded_model):
    """Weights may be repacked then: no argument of Llama leads there."""
    model = Model(str(embedded_model), {})
    with pytest.raises(InvalidInput, match="deterministic: the model was loaded without it"):
        Context(model, {"n_ctx": 256, "deterministic": True}, "full")
    model.close()


@pytest.mark.usefixtures("emulated")
def test_kernels_of_gpus_are_not_used(embedded_model, ids):
    assert_one_result(embedded_model, ids[:200], {"cuts": WAYS["cuts"]})
