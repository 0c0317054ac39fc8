"""The examples of docstrings run, on the embedded model.

An example finds ``llm``, an empty Llama with LongHeads and 2048 tokens, ``tokens`` of a long text, ``path`` of a model,
and the files ``model.gguf`` and ``book.txt`` in the current folder. It may use the names of its module.
"""

import doctest
import inspect
import io
import re
from importlib import import_module

import pytest
from needs import need

import pylongctx

TEXT = "It was the best of times, it was the worst of times. " * 60
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Pages of the reference show all public names of these.
DOCUMENTED = [
    "pylongctx.attention.chunkmap",
    "pylongctx.attention.kept",
    "pylongctx.attention.kvmap",
    "pylongctx.attention.stats",
    "pylongctx.attention.trace",
    "pylongctx.catalog.huggingface",
    "pylongctx.chat.conversation",
    "pylongctx.chat.formats",
    "pylongctx.compat",
    "pylongctx.completer",
    "pylongctx.completions.grammar",
    "pylongctx.drafts.model",
    "pylongctx.drafts.ngrams",
    "pylongctx.drafts.speculative",
    "pylongctx.engine.documents",
    "pylongctx.engine.prefix",
    "pylongctx.engine.sampling.params",
    "pylongctx.engine.session",
    "pylongctx.llama",
    "pylongctx.methods.base",
    "pylongctx.methods.longheads",
    "pylongctx.methods.positions",
    "pylongctx.methods.rules",
    *(f"pylongctx.eval.{name}" for name in ("fitting", "haystack", "matrix", "needle", "passkey", "retrieval")),
    *(f"pylongctx.eval.{name}" for name in ("babilong", "bamboo", "files", "intervals", "leval", "locomo")),
    *(f"pylongctx.eval.{name}" for name in ("perplexity", "recall", "runner", "scorers")),
    *("pylongctx.eval.task", "pylongctx.methods", "pylongctx.completions.results", "pylongctx.lm_eval"),
]
NEEDED = {"pylongctx.lm_eval": ("peers", "lm_eval")}  # to import a module: group of needs.py, packages
PACKAGES = {  # to run an example
    "chunkmap.draw": ("plot", "matplotlib"),
    "draw_cells": ("plot", "matplotlib"),
    "draw_compression": ("plot", "matplotlib"),
    "draw_kept": ("plot", "matplotlib"),
    "draw_sparsity": ("plot", "matplotlib"),
    "rouge_l_zh": ("eval", "jieba", "rouge"),
    "qa_f1_zh": ("eval", "jieba"),
    "rouge_l": ("eval", "rouge"),
    "stem_f1": ("eval", "nltk"),
    "many_f1": ("eval", "nltk"),
    "code_similarity": ("eval", "rapidfuzz"),
}


def load(name: str):
    if name in NEEDED:
        need(*NEEDED[name])
    return import_module(name)


def examples(name: str) -> list[doctest.DocTest]:
    module = load(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(module, name, module, extraglobs={})
    return [test for test in found if test.examples]


def named() -> list[tuple[str, str]]:
    """Return the module and the name of every docstring with an example, without importing what may be missing."""
    return [(name, test.name) for name in DOCUMENTED if name not in NEEDED for test in examples(name)]


@pytest.fixture(scope="module")
def model(embedded_model):
    from pylongctx import Llama

    with Llama(str(embedded_model), method="longheads", n_ctx=2048, n_threads=1, verbose=False, seed=1) as llm:
        yield llm


@pytest.fixture
def given(model, embedded_model, tmp_path, monkeypatch):
    """Enter a folder with the files that examples name; returns the names that they find."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(embedded_model)
    (tmp_path / "book.txt").write_text(TEXT)
    model.reset()
    return {"llm": model, "path": "model.gguf", "tokens": model.tokenize(TEXT.encode())}


def check(test: doctest.DocTest, given: dict) -> None:
    report = io.StringIO()
    test.globs.update(given)
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write)
    assert not result.failed, report.getvalue()


@pytest.mark.parametrize(("module", "name"), named())
def test_an_example_prints_what_it_says(module, name, given):
    for ending, packages in PACKAGES.items():
        if name.endswith(ending):
            need(*packages)
    (test,) = [test for test in examples(module) if test.name == name]
    check(test, given)


@pytest.mark.parametrize("module", NEEDED)
def test_examples_of_modules_that_need_a_package(module, given):
    found = examples(module)
    assert found
    for test in found:
        check(test, given)


def test_parameters_that_share_an_entry_have_the_same_default():
    """The reference shows one default for such an entry: that of the first."""
    found = inspect.signature(pylongctx.Llama.__init__).parameters
    entries = re.findall(r"^(\w+(?:, \w+)+) : ", inspect.getdoc(pylongctx.Llama), re.MULTILINE)
    assert entries
    for names in entries:
        assert len({found[name].default for name in names.split(", ")}) == 1, names
