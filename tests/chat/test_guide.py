"""What may come next in an answer: the grammar around schemas, and the masks of tokens."""

import json

import numpy as np
import pytest

from pylongctx.engine.sampling.guide import Frame, Guide, words_of
from pylongctx.engine.sampling.schema import hold
from pylongctx.errors import InvalidInput

PLACE = "<[1073741824]>"


@pytest.fixture
def model(llm):
    return llm._model


def token_of(model, piece):
    """Return the token that is a text."""
    return next(token for token in range(model.info.n_vocab) if model.piece(token) == piece)


def test_a_schema_has_its_place_in_a_grammar(model):
    frame = Frame(model, {"grammar": f'root ::= "a" ({PLACE} "b" | "c")', "n_schemas": 1})
    assert frame.schema_behind(b"") == -1
    assert frame.schema_behind(b"a") == 0
    assert frame.schema_behind(b"ac") == -1
    frame.accept(token_of(model, b"a"))
    assert frame.schema_behind(b"") == 0
    assert frame.allows(0, b"c") and not frame.allows(0, b"b")
    frame.pass_schema(0)
    assert frame.allows(0, b"b") and not frame.allows(0, b"c")
    frame.accept(token_of(model, b"b"))
    assert [token for token in range(model.info.n_vocab) if frame.mask(model.info.n_vocab)[token]] == words_of(
        model
    ).ends


def test_what_is_not_allowed_changes_nothing(model):
    a, end = token_of(model, b"a"), words_of(model).ends[0]
    frame = Frame(model, {"grammar": f'root ::= "a" {PLACE}', "n_schemas": 1})
    for wrong in (
        lambda: frame.pass_schema(0),
        lambda: frame.accept(end),
        lambda: frame.accept(token_of(model, b"b")),
        lambda: frame.accept(model.info.n_vocab),
    ):
        with pytest.raises(InvalidInput):
            wrong()
    frame.accept(a)
    for schema in (1, -1, 2**30):
        with pytest.raises(InvalidInput, match="may begin here"):
            frame.pass_schema(schema)
    frame.pass_schema(0)
    assert frame.allows(end)


@pytest.mark.parametrize("grammar", [f"root ::= {PLACE}", 'root ::= "a'])
def test_a_frame_that_cannot_be_used(model, grammar):
    with pytest.raises(InvalidInput):
        Frame(model, {"grammar": grammar})


def walk(guide, model, choose):
    """Return the text of tokens chosen from the mask, to the end."""
    said = b""
    for _ in range(300):
        allowed = np.flatnonzero(guide.mask())
        assert len(allowed)
        token = choose([int(token) for token in allowed])
        assert guide.allows(token)
        guide.accept(token)
        if model.ends_generation(token):
            return said
        said += model.piece(token)
    raise AssertionError(said)


def test_masks_and_questions_agree(model):
    """All that a mask has is allowed; what is allowed beyond it goes over the border of a schema."""
    rng = np.random.default_rng(3)
    held = hold({"type": "array", "items": {"enum": ["a", 12]}, "minItems": 1, "maxItems": 2}).grammar
    for constraint in (
        {"schemas": [held]},
        {"schemas": [held], "grammar": f'root ::= "say " {PLACE} "." {PLACE}?'},
    ):
        for _ in range(5):
            guide = Guide(model, constraint)

            def choose(allowed, guide=guide):
                one = allowed[: 2 * len(allowed) : max(len(allowed) // 50, 1)]
                assert all(guide.allows(token) for token in one)
                beyond = set(range(0, model.info.n_vocab, 7)) - set(allowed)
                crossing = [token for token in beyond if guide.allows(token)]
                assert all(len(model.piece(token)) > 1 for token in crossing)
                return int(rng.choice(allowed))

            said = walk(guide, model, choose).decode()
            for part in said.removeprefix("say ").split("."):
                if part:
                    assert set(json.loads(part)) <= {"a", 12}


def test_a_vocabulary_is_prepared_once(model):
    assert words_of(model) is words_of(model)
