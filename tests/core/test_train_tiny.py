"""Tiny models: what they are trained on, that training can be repeated, that llama.cpp computes what torch does."""

import importlib
import json
import sys
from dataclasses import replace
from random import Random

import gguf
import numpy as np
import pytest
from needs import need

torch = need("train", "sentencepiece", "google.protobuf", "torch")

import train_tiny  # noqa: E402
from random_model import Shape  # noqa: E402
from tiny.data import ANSWER_WEIGHT, STAGES, copy_row, draw_batch, load_corpus, quiz_row, stage_at  # noqa: E402
from tiny.export import export  # noqa: E402
from tiny.gguf_files import read_tokenizer  # noqa: E402
from tiny.model import Model, rotate  # noqa: E402
from tiny.start import PASSED, SCORE  # noqa: E402
from tiny.tasks import QUIZZES, Source, pass_key  # noqa: E402
from tiny.tokenizer import Tokenizer  # noqa: E402
from tiny.train import Settings, Trainer, rate  # noqa: E402

from pylongctx import Llama  # noqa: E402
from pylongctx.eval.haystack import synthetic_text  # noqa: E402
from pylongctx.eval.passkey import ASKED, INTRO  # noqa: E402

SHAPE = Shape(n_vocab=448, n_embd=48, n_layer=2, n_head=4, n_head_kv=2, n_ff=64, n_ctx_train=256, key_length=16)
SQUARE = replace(SHAPE, n_embd=64)
SETTINGS = Settings(shape=SHAPE, steps=8, batch_tokens=256, bf16=False)
VARIANTS = {
    "llama": ("llama", SHAPE),
    "llama-mha": ("llama", replace(SHAPE, n_head_kv=4)),
    "qwen2": ("qwen2", SQUARE),
    "qwen2-mha": ("qwen2", replace(SQUARE, n_head_kv=4)),
}
TEXT = "It was \u00e9t\u00e9, and  two spaces;\nanother line: 1234 567.\n\n\tThe pass key is 98765."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    (path / "below").mkdir()
    for i, name in enumerate(["one.txt", "below/two.txt"]):
        (path / name).write_text(synthetic_text(90_000, i) + " Zo\u00eb.\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory):
    return load_corpus(folder, None, tmp_path_factory.mktemp("run") / "tokenizer.model", SHAPE.n_vocab)


def weights_of(trainer):
    return {name: values.clone() for name, values in trainer.model.state_dict().items()}


def train(corpus, run, until=99, settings=SETTINGS):
    run.mkdir(exist_ok=True)
    trainer = Trainer(settings, corpus, run)
    return trainer, list(trainer.train(until, 1, 4))


# ---- the file ----


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_cpp_computes_the_logits_of_torch(corpus, tmp_path, variant):
    torch.manual_seed(1)
    model = Model(*VARIANTS[variant])
    for values in model.parameters():  # zeros would hide what they multiply
        torch.nn.init.normal_(values, 1.0 if values.ndim == 1 else 0.0, 0.3)
    tokens = np.random.default_rng(0).integers(3, SHAPE.n_vocab, 201)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None])[0].numpy()
    path = export(tmp_path / "a.gguf", model, corpus.tokenizer, "f32")
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    assert ("blk.1.attn_k.bias" in names) == variant.startswith("qwen2")
    with Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, type_k="f32", type_v="f32", verbose=False) as llm:
        llm.eval(tokens.tolist())
        scores = np.array(llm.scores)
    assert scores.shape == expected.shape
    assert np.abs(scores - expected).max() < 1e-3 * np.abs(expected).max()


def test_llama_cpp_tokenizes_as_sentencepiece_does(corpus, tmp_path):
    path = export(tmp_path / "a.gguf", Model("llama", SQUARE), corpus.tokenizer, "q8_0")
    with Llama(str(path), vocab_only=True, verbose=False) as llm:
        for text in (TEXT, corpus.held_out[:3000], "x", ""):
            assert llm.tokenize(text.encode()) == corpus.encode(text)
        assert llm.detokenize(llm.tokenize(TEXT.encode(), add_bos=False)).decode().removeprefix(" ") == TEXT
        assert llm.metadata["general.name"] == "pylongctx-tiny"
        assert llm.metadata["llama.context_length"] == "256"
        assert "tokenizer.chat_template" not in llm.metadata


@pytest.mark.parametrize("options", [[], ["--mha"], ["--arch", "qwen2"], ["--arch", "qwen2", "--mha"]])
def test_the_file_stays_below_6_mb(options):
    settings = train_tiny.settings_of(train_tiny.arguments(["texts", "run", *options]))
    model = Model(settings.arch, settings.shape)
    n_bytes = sum(p.numel() * (34 / 32 if p.ndim == 2 else 4) for p in model.parameters())
    assert n_bytes + 32 * settings.shape.n_vocab < 6e6  # a token: its text, its length, score and type


def test_queries_of_a_qwen2_are_as_wide_as_its_embedding():
    with pytest.raises(ValueError, match=r"qwen2: 4 heads of 16 are not as wide as the embedding, 48"):
        Model("qwen2", SHAPE)


# ---- what is learned ----


@pytest.mark.parametrize("make", QUIZZES)
def test_answers_stand_in_the_text_before(corpus, make):
    random = Random(3)
    for _ in range(20):
        quiz = make(Source(random, corpus.words, 3))
        tokens, weights = quiz_row(corpus, random, quiz, 700)
        assert len(tokens) == len(weights) == 700
        text, at = corpus.tokenizer.decode(tokens), 0
        for question, answer in quiz.questions:
            at = text.index(question, at)
            assert answer in text[:at]
            assert text[at + len(question) :].startswith(answer)
        wanted = sum(len(corpus.tokenizer.encode(answer[1:])) for _, answer in quiz.questions)
        assert weights.count(ANSWER_WEIGHT) == wanted


def test_keys_lie_at_any_depth(corpus):
    random = Random(4)
    quizzes = [pass_key(Source(random, corpus.words, 1)) for _ in range(60)]
    texts = [corpus.tokenizer.decode(quiz_row(corpus, random, quiz, 512, fill=1.0)[0]) for quiz in quizzes]
    depths = [(text.index("The pass key is") - len(INTRO)) / (text.index(ASKED) - len(INTRO)) for text in texts]
    assert np.percentile(depths, 10) < 0.2 < 0.7 < np.percentile(depths, 90)


def test_copies_count_where_they_repeat(corpus):
    for seed in range(20):
        tokens, weights = copy_row(corpus, Random(seed), 129)
        period = weights.index(1.0) - 1
        assert weights == [0.0] * (period + 1) + [1.0] * (128 - period)
        assert tokens[1 + period :] == tokens[1 : 129 - period]


def test_rows_grow_to_the_whole_context(corpus):
    lengths = [draw_batch(corpus, 0, 0, stage, 512, 256)[0].shape for stage in STAGES]
    assert lengths == [(8, 17), (4, 33), (4, 65), (4, 129), (2, 257), (2, 257)]
    assert stage_at(0.0) is STAGES[0]
    assert stage_at(STAGES[-2].until) is stage_at(1.0) is STAGES[-1]


def test_texts_end_where_the_held_out_ones_begin(corpus, folder):
    wholes = [(folder / name).read_text(encoding="utf-8").strip() for name in ("below/two.txt", "one.txt")]
    ends = [whole[len(text) :] for whole, text in zip(wholes, corpus.texts, strict=True)]
    assert "\n".join(ends) == corpus.held_out
    assert [whole.startswith(text) for whole, text in zip(wholes, corpus.texts, strict=True)] == [True, True]
    assert [len(whole) // 50 for whole in wholes] == [len(end) for end in ends]


# ---- the weights to begin with ----


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_begin_by_looking_one_token_back(variant):
    arch, shape = VARIANTS[variant]
    model = Model(arch, shape)
    block, seen = model.blk[0], []
    block.attn_q.register_forward_hook(lambda _, inputs, q: seen.append(q))
    block.attn_k.register_forward_hook(lambda _, inputs, k: seen.append(k))
    with torch.no_grad():
        model(torch.randint(300, shape.n_vocab, (1, 33)))
    q, k = (x.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for x in seen)
    cos, sin = model.angles[:, :33]
    q, k = (rotate(heads, cos, sin, block.interleaved) for heads in (q, k))
    scores = q @ k.repeat_interleave(shape.n_head // shape.n_head_kv, 1).transpose(-1, -2)
    looking = scores[0, : shape.n_head // 2]
    by_distance = [looking.diagonal(-n, 1, 2).mean() for n in range(8)]
    assert by_distance[1] == max(by_distance) > 0.6 * SCORE


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_begin_by_passing_on_what_they_read(variant):
    arch, shape = VARIANTS[variant]
    passed = shape.n_head // shape.n_head_kv * PASSED
    for block in Model(arch, shape).blk:
        through = block.attn_output.weight @ block.attn_v.weight.unflatten(0, (shape.n_head_kv, -1)).repeat_interleave(
            shape.n_head // shape.n_head_kv, 0
        ).flatten(0, 1)
        found = torch.linalg.eigvalsh(through).detach()
        assert found[-min(shape.n_embd, shape.n_embd_kv) :].numpy() == pytest.approx(passed, abs=1e-4)


# ---- training ----


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_training_lowers_the_loss(corpus, tmp_path, arch):
    settings = Settings(arch=arch, shape=SQUARE, steps=30, batch_tokens=512)
    _, records = train(corpus, tmp_path / "run", settings=settings)
    losses = [record["loss"] for record in records]
    assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:3])
    checks = [record["perplexity"] for record in records if "perplexity" in record]
    assert checks[-1] < 0.5 * checks[0]


def test_a_run_that_continues_equals_one_that_did_not_stop(corpus, tmp_path):
    whole, records = train(corpus, tmp_path / "whole")
    train(corpus, tmp_path / "parts", until=3)
    resumed, more = train(corpus, tmp_path / "parts")
    assert [record["step"] for record in more] == [4, 5, 6, 7, 8]
    assert [record["loss"] for record in more] == [record["loss"] for record in records[3:]]
    for name, values in weights_of(whole).items():
        assert torch.equal(values, resumed.model.state_dict()[name]), name
    log = (tmp_path / "parts" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_seed_decides(corpus, tmp_path):
    first, again, other = (
        weights_of(train(corpus, tmp_path / name, 3, replace(SETTINGS, seed=seed))[0])
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert all(torch.equal(values, again[name]) for name, values in first.items())
    assert not any(torch.equal(values, other[name]) for name, values in first.items() if values.ndim == 2)


def test_a_run_keeps_its_settings(corpus, tmp_path):
    train(corpus, tmp_path, 1)
    with pytest.raises(ValueError, match=r"made with other settings \(steps, schedule\); take those"):
        Trainer(replace(SETTINGS, steps=9, schedule="cosine"), corpus, tmp_path)


def test_a_run_keeps_its_texts(corpus, folder, tmp_path):
    train(corpus, tmp_path, 1)
    other = replace(corpus, texts=corpus.texts[:1])
    with pytest.raises(ValueError, match=r"made with other settings \(texts\)"):
        Trainer(SETTINGS, other, tmp_path)


def test_a_tokenizer_of_another_size_is_refused(corpus, tmp_path):
    settings = replace(SETTINGS, shape=replace(SHAPE, n_vocab=500))
    with pytest.raises(ValueError, match=r"tokenizer.model has 448 tokens, not 500; remove it, or take another folder"):
        Trainer(settings, corpus, tmp_path)


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory):
    """Return a model of random weights and its file."""
    model = Model("llama", SHAPE)
    return model, export(tmp_path_factory.mktemp("made") / "f32.gguf", model, corpus.tokenizer, "f32")


def test_a_vocabulary_is_read_back(corpus, made):
    read = Tokenizer(model_proto=read_tokenizer(made[1]))
    assert read.encode(TEXT + corpus.held_out) == corpus.tokenizer.encode(TEXT + corpus.held_out)


def test_a_run_begins_with_a_model(corpus, made, tmp_path):
    """At the last stage, with rates that warm up from there; and it can be resumed like any other run."""
    model, path = made
    settings = replace(SETTINGS, steps=300)
    trainer = Trainer(settings, corpus, tmp_path, init=path)
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in weights_of(trainer).items())
    first = trainer.step
    assert first == round(STAGES[-2].until * 300)
    assert [rate(settings, step, first) / rate(settings, step) for step in (first, first + 6)] == [1 / 6, 1]
    list(trainer.train(first + 2, 1, 2))
    assert Trainer(settings, corpus, tmp_path, init=path).step == first + 2
    with pytest.raises(ValueError, match=r"made with other settings \(init\)"):
        Trainer(settings, corpus, tmp_path)


def test_a_model_of_other_sizes_is_refused(corpus, made, tmp_path):
    settings = replace(SETTINGS, shape=replace(SHAPE, n_ff=80))
    with pytest.raises(ValueError, match=r"(?s)f32.gguf does not fit the settings of this run: .*ffn_up"):
        Trainer(settings, corpus, tmp_path, init=made[1])


def test_a_vocabulary_of_another_kind_is_refused(corpus, made, tmp_path, monkeypatch):
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_tokenizer_model", lambda writer, _: writer.add_string("tokenizer.ggml.model", "gpt2")
    )
    path = export(tmp_path / "other.gguf", made[0], corpus.tokenizer, "f32")
    with pytest.raises(ValueError, match="vocabulary of the kind 'gpt2'; runs go on from 'llama' only"):
        read_tokenizer(path)


def test_what_came_after_the_checkpoint_is_logged_once(corpus, tmp_path):
    trainer = Trainer(SETTINGS, corpus, tmp_path)
    for record in trainer.train(99, 1, 2):
        if record["step"] == 3:  # killed after a report, before the next checkpoint
            break
    train(corpus, tmp_path, 4)
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize(("schedule", "middle"), [("trapezoid", 1.0), ("cosine", 0.5)])
def test_schedules_warm_up_and_end_near_nothing(schedule, middle):
    settings = Settings(steps=1000, schedule=schedule)
    rates = [rate(settings, step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.05)
    assert rates[500] == pytest.approx(middle)
    assert 0 < rates[-1] < 0.01


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"neither a text file nor a folder with \.txt files"):
        load_corpus(tmp_path, None, tmp_path / "tokenizer.model", 300)


def test_a_vocabulary_that_the_texts_have_not_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("One line. " * 200)
    with pytest.raises(ValueError, match="no vocabulary of 60000 tokens can be made of these texts: "):
        load_corpus(tmp_path, None, tmp_path / "tokenizer.model", 60000)


def test_the_command_trains_and_exports(folder, tmp_path, capsys):
    sizes = "--vocabulary 448 --width 128 --layers 1 --feed-forward 64 --context 256 --steps 4 --batch-tokens 256"
    command = [str(folder), str(tmp_path / "run"), *sizes.split(), "--threads", "1", "--arch", "qwen2", "--mha"]
    with pytest.raises(ValueError, match=r"no model to measure: .*holds no checkpoint\.pt, and --init names"):
        train_tiny.main([*command, "--examine", "8"])
    train_tiny.main([*command, "--until", "2"])
    train_tiny.main(command)
    out = capsys.readouterr().out
    assert "step 2, loss" in out
    assert "step 4, loss" in out
    assert "named" in out
    train_tiny.main([*command, "--examine", "8"])  # as many as while it trains: the same numbers
    measured = capsys.readouterr().out.splitlines()[1]
    assert measured.startswith("perplexity ")
    assert measured in out
    with pytest.raises(ValueError, match="0 texts: an evaluation needs at least one"):
        train_tiny.main([*command, "--examine", "0"])
    train_tiny.main(
        [*command[:1], str(tmp_path / "more"), *command[2:], "--init", str(tmp_path / "run" / "model-q8_0.gguf")]
    )
    assert "step 4, loss" in capsys.readouterr().out
    with Llama(str(tmp_path / "run" / "model-q8_0.gguf"), n_ctx=256, verbose=False) as llm:
        assert llm.metadata["general.architecture"] == "qwen2"
        assert llm.metadata["qwen2.attention.head_count_kv"] == "2"
        assert llm.create_completion("The pass key is", max_tokens=4)["usage"]["completion_tokens"] > 0


def test_training_without_torch_says_how_to_get_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "train_tiny")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"training needs torch: pip install pylongctx\[train\]"):
        importlib.import_module("train_tiny")
