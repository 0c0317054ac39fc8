"""The limit on the tokens of reasoning, as a logits processor."""

import numpy as np
import pytest

from pylongctx.chat.budget import ReasoningBudget
from pylongctx.engine.model import Model

TAGS = ("<think>", "</think>")


@pytest.fixture(scope="module")
def model(embedded_model):
    model = Model(str(embedded_model), {"vocab_only": True})
    yield model
    model.close()


def answer(model, budget, wanted):
    """Return the text of a model that says tokens of ``wanted`` where it may choose."""
    tokens, wanted = model.tokenize(b"It was", False, False), list(wanted)
    n = len(tokens)
    while wanted:
        scores = budget(np.array(tokens, np.int32), np.zeros(model.info.n_vocab, np.float32))
        free = np.isfinite(scores).all()
        tokens.append(wanted.pop(0) if free else int(np.argmax(scores)))
    return b"".join(model.piece(token, True) for token in tokens[n:]).decode().replace(" <", "<")


def spelled(model, text):
    return model.tokenize(text.encode(), False, True)


@pytest.mark.parametrize("begun", ["assistant\n", "assistant\n<think>\n"])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_the_end_tag_comes_after_so_many_tokens(model, begun, n):
    word = spelled(model, "It was the")[-1]
    opening = [] if "<think>" in begun else spelled(model, "<think>")
    said = answer(model, ReasoningBudget(model, n, TAGS, begun), [*opening, *[word] * 30])
    assert said == ("<think>" if opening else "") + n * " the" + "</think>" + (30 - n) * " the"


def test_reasoning_within_the_budget_is_left_alone(model):
    text = "<think> so</think> yes"
    assert answer(model, ReasoningBudget(model, 50, TAGS, ""), spelled(model, text)) == text


def test_an_answer_without_reasoning_is_left_alone(model):
    begun = "assistant\n<think>\n\n</think>\n\n"
    assert answer(model, ReasoningBudget(model, 0, TAGS, begun), spelled(model, "so so")).strip() == "so so"


def test_blocks_of_reasoning_are_counted_together(model):
    word, block = spelled(model, "It was the")[-1], spelled(model, "<think>")
    ended = spelled(model, "</think>")
    wanted = [*block, word, word, *ended, word, *block, *[word] * 9]
    said = answer(model, ReasoningBudget(model, 2 + len(ended) + 3, TAGS, ""), wanted)
    assert said == "<think> the the</think> the<think> the the the</think>" + 6 * " the"
