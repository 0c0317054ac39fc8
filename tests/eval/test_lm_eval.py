"""lm-evaluation-harness: the model "pylongctx", and its "local-completions" against ``pylongctx serve``."""

import json
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice

import numpy as np
import pytest
from llamas import TEXT, new
from needs import need
from tiny_gguf import Shape, make_model

from pylongctx import Llama

need("peers", "lm_eval")
pytestmark = pytest.mark.peers

N_TRAIN = 512
METHODS = [
    "full",
    "selfextend,group_size=4,neighbor_window=128",
    "longheads,chunk_size=16,window=128",
    "corm,window=64,recent=64,evict_every=32",
]
LONG = (TEXT.decode() * 6).rstrip()
ENDINGS = [" It was", " It was the season of Light", " the", " It was the season of Darkness"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model with f32 weights, whose numbers do not depend on how many tokens are evaluated together."""
    return make_model(tmp_path_factory.mktemp("models") / "f32.gguf", Shape(n_ctx_train=N_TRAIN))


@pytest.fixture(scope="module")
def open_lm(path):
    """Return a function from arguments to an open PylongctxLM."""
    from pylongctx.lm_eval import PylongctxLM

    with ExitStack() as stack:

        def open_lm(**arguments):
            lm = PylongctxLM(str(path), **{"n_ctx": 2 * N_TRAIN, "n_ubatch": 64} | arguments)
            stack.enter_context(lm.llm)
            return lm

        yield open_lm


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def likelihoods(lm, *pairs):
    return lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


def rolling(lm, *texts):
    return lm.loglikelihood_rolling(requests("loglikelihood_rolling", *[(text,) for text in texts]), disable_tqdm=True)


def generate(lm, *asked):
    return lm.generate_until(requests("generate_until", *asked), disable_tqdm=True)


def expected(path, tokens, n, **arguments):
    """Return the log-probability of the last ``n`` tokens, and whether each is the likeliest, from all logits."""
    with new(path, logits_all=True, **{"n_ctx": 2 * N_TRAIN} | arguments) as llm:
        llm.eval(tokens[:-1])
        rows = Llama.logits_to_logprobs(llm.scores[-n:])
    return rows[range(n), tokens[-n:]].sum(), bool((rows.argmax(-1) == tokens[-n:]).all())


# ---- log-likelihoods ----


@pytest.mark.parametrize("method", METHODS)
def test_loglikelihoods_equal_a_log_softmax_of_all_logits(path, open_lm, method):
    lm = open_lm(method=method)
    pairs = [(context, ending) for context in (LONG, "It was") for ending in ENDINGS]
    for (context, ending), (value, is_greedy) in zip(pairs, likelihoods(lm, *pairs), strict=True):
        start, tokens = lm.tok_encode(context), lm.tok_encode(context + ending)
        want = expected(path, tokens, len(tokens) - len(start), method=method)
        assert value == pytest.approx(want[0], abs=1e-4)
        assert is_greedy == want[1]


def test_the_greedy_continuation_is_distinguished_from_others(open_lm):
    lm = open_lm()
    tokens = lm.tok_encode(LONG[:100])
    greedy = list(islice(lm.llm.generate(tokens, temp=0.0), 4))
    other = [*greedy[:-1], (greedy[-1] + 1) % lm.llm.n_vocab()]
    found = lm._loglikelihood_tokens([(None, tokens, greedy), (None, tokens, other)], disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_a_context_is_evaluated_once_for_all_its_continuations(open_lm):
    lm = open_lm()
    before = lm.llm.session.n_evaluated
    n_context, n_wholes = len(lm.tok_encode(LONG)), [len(lm.tok_encode(LONG + ending)) for ending in ENDINGS]
    likelihoods(lm, *[(context, ending) for ending in ENDINGS for context in (LONG, LONG[:200])])
    short = sum(len(lm.tok_encode(LONG[:200] + ending)) for ending in ENDINGS)
    assert lm.llm.session.n_evaluated - before <= n_context + sum(n - n_context + 1 for n in n_wholes) + short


def test_nothing_but_the_last_row_of_logits_is_kept(open_lm):
    lm = open_lm()
    likelihoods(lm, (LONG, ENDINGS[1]))
    assert lm.llm.scores.shape == (1, lm.llm.n_vocab())


def test_a_text_without_context_follows_bos(path, open_lm):
    lm = open_lm()
    ((value, _),) = likelihoods(lm, ("", "It was"))
    tokens = [lm.llm.token_bos(), *lm.tok_encode("It was", add_special_tokens=False)]
    assert value == pytest.approx(expected(path, tokens, len(tokens) - 1)[0], abs=1e-4)


def test_a_rolling_likelihood_of_a_short_text_is_that_of_the_whole(path, open_lm):
    lm = open_lm()
    tokens = [lm.llm.token_bos(), *lm.tok_encode(LONG[:300], add_special_tokens=False)]
    assert rolling(lm, LONG[:300]) == [pytest.approx(expected(path, tokens, len(tokens) - 1)[0], abs=1e-3)]


def test_a_rolling_likelihood_of_a_long_text_has_windows(path, open_lm):
    """The last window ends with the text and is full; only its new tokens count."""
    n = 128
    lm = open_lm(n_ctx=n)
    tokens = [lm.llm.token_bos(), *lm.tok_encode(LONG[:300], add_special_tokens=False)]
    n_new = len(tokens) - 1 - 2 * n
    assert 0 < n_new < n
    windows = [(tokens[: n + 1], n), (tokens[n : 2 * n + 1], n), (tokens[-n - 1 :], n_new)]
    want = sum(expected(path, window, count)[0] for window, count in windows)
    assert rolling(lm, LONG[:300]) == [pytest.approx(want, abs=1e-3)]


# ---- generation ----


def test_greedy_texts_are_those_of_a_completion(open_lm):
    lm = open_lm()
    contexts = [LONG[:200], LONG[:30], LONG[:120]]
    how = {"until": ["zz"], "max_gen_toks": 12, "do_sample": False}
    found = generate(lm, *[(context, how) for context in contexts])
    want = [lm.llm(context, max_tokens=12, temperature=0.0)["choices"][0]["text"] for context in contexts]
    assert found == want


def test_generation_ends_before_a_stop_string(open_lm):
    lm = open_lm()
    (whole,) = generate(lm, (LONG[:200], {"max_gen_toks": 12}))
    stop = whole[4:6]
    assert generate(lm, (LONG[:200], {"until": stop, "max_gen_toks": 12})) == [whole[: whole.index(stop)]]


def test_the_temperature_and_other_arguments_arrive(open_lm):
    lm = open_lm()
    hot = {"max_gen_toks": 12, "do_sample": True, "temperature": 5.0, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    first, again, other, cold = generate(
        lm, *[(LONG[:100], hot | more) for more in ({}, {}, {"seed": 4}, {"do_sample": False})]
    )
    assert first == again != other
    assert cold == generate(lm, (LONG[:100], {"max_gen_toks": 12}))[0]
    with pytest.raises(TypeError, match="num_beams"):
        generate(lm, (LONG[:100], {"num_beams": 2}))


# ---- what does not fit ----


def test_too_long_a_request_is_refused_before_anything_is_evaluated(open_lm):
    lm = open_lm(n_ctx=100)
    for ask in (
        lambda: likelihoods(lm, ("It was", " the"), (LONG, " the")),
        lambda: generate(lm, ("It was", {"max_gen_toks": 5}), (LONG[:80], {"max_gen_toks": 99})),
    ):
        with pytest.raises(ValueError, match=r"do not fit into n_ctx=100: .*truncate=True"):
            ask()
    assert lm.llm.session.n_evaluated == 0


def test_a_request_of_just_the_context_is_not(path, open_lm):
    lm = open_lm()
    tokens = lm.tok_encode(LONG)[:101]
    small = open_lm(n_ctx=100)
    ((value, _),) = small._loglikelihood_tokens([(None, tokens[:-1], tokens[-1:])], disable_tqdm=True)
    assert value == pytest.approx(expected(path, tokens, 1)[0], abs=1e-4)


def test_truncation_leaves_out_the_beginning_with_a_warning(path, open_lm, caplog):
    lm = open_lm(n_ctx=100, truncate=True)
    tokens = lm.tok_encode(LONG)
    ((value, _),) = lm._loglikelihood_tokens([(None, tokens[:-2], tokens[-2:])], disable_tqdm=True)
    assert "Truncating context" in caplog.text
    assert value == pytest.approx(expected(path, tokens[-101:], 2)[0], abs=1e-4)


# ---- texts ----


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_texts_begin_with_bos_once(open_lm, add_bos_token):
    lm = open_lm(add_bos_token=add_bos_token)
    bos, plain = lm.llm.token_bos(), lm.tok_encode("It was", add_special_tokens=False)
    assert lm.tok_encode("It was", add_special_tokens=True) == [bos, *plain]
    assert lm.tok_encode("It was") == [bos] * (add_bos_token is not False) + plain
    written = lm.llm.detokenize([bos], special=True).decode()
    assert lm.tok_encode(written + "It was")[:2].count(bos) == 1


def test_chats_are_the_templates(open_lm):
    lm = open_lm()
    user = {"role": "user", "content": "Was it the butler?"}
    assert lm.apply_chat_template([user]) == lm.llm.apply_template([user])
    answer = {"role": "assistant", "content": "The answer is"}
    begun = lm.apply_chat_template([user, answer], add_generation_prompt=False)
    assert begun == lm.llm.apply_template([user]) + "The answer is"
    assert "im_start" in lm.chat_template(True)
    with pytest.raises(ValueError, match=r"chat_format=chat_template\.rag"):
        lm.chat_template("rag")
    assert lm.tokenizer_name == "f32.gguf"


# ---- tasks, by both routes ----

ROWS = [
    {"text": "The grass is green. The sky is", "choices": [" blue", " green", " the the"], "label": 0},
    {"text": "It was the best of times, it was the", "choices": [" worst of times", " age"], "label": 1},
]
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "local_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 9, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "local_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tasks for lm_eval, and the rows that they ask about."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | task | data))  # JSON is YAML
    return folder


def evaluate(tasks, route, **model_args):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(route, model_args=model_args, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


def answers(results, task):
    """Return what the model answered to the rows of a task, in their order."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [[answer for answers in sample["resps"] for answer in answers] for sample in samples]


@pytest.fixture(scope="module")
def by_model(path, tasks):
    import pylongctx.lm_eval  # noqa: F401

    return evaluate(tasks, "pylongctx", model=str(path), n_ctx=N_TRAIN, add_bos_token=False)


@pytest.fixture(scope="module")
def by_server(path, tasks):
    need("peers", "fastapi", "openai", "tenacity")
    from serving import ALIAS, running

    with running(path=path, n_ctx=N_TRAIN) as server:
        url = f"{server.url}/v1/completions"
        return evaluate(tasks, "local-completions", model=ALIAS, base_url=url, max_length=N_TRAIN)


def test_a_task_with_choices(path, by_model, open_lm):
    lm = open_lm(add_bos_token=False)
    found = answers(by_model, "local_choice")
    for row, values in zip(ROWS, found, strict=True):
        for choice, (value, _) in zip(row["choices"], values, strict=True):
            n = len(lm.tok_encode(row["text"]))
            tokens = lm.tok_encode(row["text"] + choice)
            assert value == pytest.approx(expected(path, tokens, len(tokens) - n)[0], abs=1e-4)
    right = [np.argmax([value for value, _ in values]) == row["label"] for row, values in zip(ROWS, found, strict=True)]
    assert by_model["results"]["local_choice"]["acc,none"] == np.mean(right)


def test_a_task_with_generated_answers(by_model, open_lm):
    lm = open_lm(add_bos_token=False)
    for row, (said,) in zip(ROWS, answers(by_model, "local_generate"), strict=True):
        want = lm.llm(lm.tok_encode(row["text"]), max_tokens=9, stop=["."], temperature=0.0)
        assert said == want["choices"][0]["text"]


def test_a_task_of_perplexity(by_model, open_lm):
    values = rolling(open_lm(), *[row["text"] for row in ROWS])
    words = sum(len(row["text"].split()) for row in ROWS)
    found = by_model["results"]["local_perplexity"]["word_perplexity,none"]
    assert found == pytest.approx(np.exp(-sum(values) / words), rel=1e-4)


@pytest.mark.parametrize("task", ["local_choice", "local_perplexity"])
def test_a_server_gives_the_same_likelihoods(by_model, by_server, task):
    for served, ours in zip(answers(by_server, task), answers(by_model, task), strict=True):
        np.testing.assert_allclose(np.array(served, float), np.array(ours, float), rtol=0, atol=1e-4)


def test_a_server_generates_the_same(by_model, by_server):
    assert answers(by_server, "local_generate") == answers(by_model, "local_generate")


def test_the_command_is_that_of_lm_eval(path, tasks, tmp_path):
    command = [
        *(sys.executable, "-m", "pylongctx.lm_eval", "--model", "pylongctx", "--tasks", "local_choice"),
        *(
            "--model_args",
            f"model={path},method=longheads,n_ctx=2048",
            "--include_path",
            tasks,
            "--output_path",
            tmp_path,
        ),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|local_choice|" in done.stdout
    (found,) = tmp_path.rglob("results_*.json")
    assert json.loads(found.read_text())["config"]["model"] == "pylongctx"
