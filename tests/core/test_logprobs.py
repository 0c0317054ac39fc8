"""Log-probabilities against a log-softmax of all logits, for models with and without a BOS token."""

import gguf
import numpy as np
import pytest
import tiny_gguf
from llamas import METHODS, TEXT, new, script, texts

from pylongctx import Llama
from pylongctx.completions.results import TokenEntry

N_TOP = 3
# Q8_0 weights: ggml rounds activations to 8 bits, and in other steps llama.cpp's own answers differ by 0.15
STEP = 0.1


@pytest.fixture(scope="module")
def without_bos(tmp_path_factory):
    """A tiny model whose file says that no BOS token is added."""
    path = tmp_path_factory.mktemp("models") / "no-bos.gguf"
    with pytest.MonkeyPatch.context() as patch:
        add = gguf.GGUFWriter.add_add_bos_token
        patch.setattr(gguf.GGUFWriter, "add_add_bos_token", lambda writer, value: add(writer, False))
        return tiny_gguf.make_model(path, tiny_gguf.Shape(n_ctx_train=512))


@pytest.fixture(scope="module", params=["embedded", "without_bos"])
def path(request, embedded_model, without_bos):
    return embedded_model if request.param == "embedded" else without_bos


def expected(path, tokens, method):
    """Return log-probabilities float32 [n, n_vocab]: row i is what the model says after token i."""
    with new(path, logits_all=True, method=method) as llm:
        llm.eval(tokens)
        return Llama.logits_to_logprobs(llm.scores)


def named(piece):
    """Return OpenAI's name of a token: its text, or the bytes of a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" if b > 126 else chr(b) for b in piece)


def run(llm, prompt, **kwargs):
    done = llm(prompt, **{"max_tokens": 5, "temperature": 0.0, "logprobs": N_TOP} | kwargs)["choices"][0]
    return done["text"], done["logprobs"], llm._input_ids.tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_equal_the_definition(path, method, echo):
    prompt = TEXT.decode()[:60]
    with new(path, n_ubatch=16, method=method) as llm:
        text, found, tokens = run(llm, prompt, echo=echo)
        n_prompt = len(llm.tokenize(prompt.encode(), add_bos=tokens[0] == llm.token_bos()))
        pieces = {i: named(llm.session.model.piece(i)) for i in range(llm.n_vocab())}
        begins_with_bos = tokens[0] == llm.token_bos()
    rows = expected(path, tokens, method)
    first = n_prompt if not echo else 1 if begins_with_bos else 0
    assert len(found["tokens"]) in (len(tokens) - first, len(tokens) - first + 1)  # the last one is not evaluated
    assert len({len(values) for values in found.values()}) == 1
    for i, token in enumerate(tokens[first:], first):
        own, top = found["token_logprobs"][i - first], found["top_logprobs"][i - first]
        assert found["tokens"][i - first] == pieces[token]
        if i == 0:
            assert (own, top) == (None, None)
            continue
        assert own == pytest.approx(rows[i - 1][token], abs=STEP)
        for word, value in top.items():  # control tokens share the text ""
            ids = [t for t in pieces if pieces[t] == word or word in (f"token_id:{t}", f"bytes:{pieces[t]}")]
            assert min(abs(value - rows[i - 1][t]) for t in ids) < STEP
        assert max(top.values()) == pytest.approx(rows[i - 1].max(), abs=STEP)
        assert len(top) in (N_TOP, N_TOP + 1) and top[found["tokens"][i - first]] == own
    assert text.startswith(prompt) == echo


def test_token_ids_have_an_entry_each(path):
    """Clients count tokens: the entry of a BOS that they send themselves is there, as that of any first token."""
    with new(path) as llm:
        tokens = [llm.token_bos(), *llm.tokenize(b"It was", add_bos=False)]
        _, found, _ = run(llm, tokens, echo=True, max_tokens=1)
        text = [llm.session.model.piece(token).decode("utf-8", "ignore") for token in tokens]
    assert len(found["tokens"]) == len(tokens) + 1
    assert found["tokens"][:-1] == text
    assert found["token_logprobs"][0] is None
    assert None not in found["token_logprobs"][1:]


def test_values_are_exact_in_the_same_steps(path):
    """Same batches, same numbers: nothing but rounding of the log-softmax is left."""
    with new(path) as llm, new(path, logits_all=True) as every:
        _, found, tokens = run(llm, "It was the", echo=True, max_tokens=1)
        every.eval(tokens)
        rows = Llama.logits_to_logprobs(every.scores)
        skipped = int(tokens[0] == llm.token_bos())
        values = found["token_logprobs"][1 - skipped : len(tokens) - skipped]
        np.testing.assert_allclose(values, [row[t] for row, t in zip(rows, tokens[1:], strict=False)], rtol=1e-5)
        if skipped:  # the other vocabulary has tokens that share a text
            best = sorted(found["top_logprobs"][-1].values())[-N_TOP:]
            np.testing.assert_allclose(best, np.sort(rows[-1])[-N_TOP:], rtol=1e-5)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [[], ["times", "."], ["e"]])
def test_a_stream_has_the_same_entries(path, echo, stop):
    with new(path) as llm:
        text, whole, _ = run(llm, "It was the best", echo=echo, stop=stop, max_tokens=12)
        chunks = list(
            llm("It was the best", max_tokens=12, temperature=0.0, logprobs=N_TOP, echo=echo, stop=stop, stream=True)
        )
    assert "".join(texts(chunks)) == text
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert parts.pop() is None
    for name, values in whole.items():
        joined = [value for part in parts for value in part[name]]
        assert len(joined) == len(values)
        if name in ("tokens", "text_offset"):
            assert joined == values


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_point_into_the_text(embedded_model, echo):
    prompt, said = "It was na\u00efve, \U0001f642 so", " it cost \u20ac5, \u65e5\u672c and more"
    with new(embedded_model) as llm:
        text, found, _ = run(llm, prompt, echo=echo, max_tokens=60, logits_processor=script(llm, said))
    whole = text if echo else prompt + text
    assert whole == prompt + said
    for piece, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
        assert whole[offset:].startswith(piece) or piece.startswith("bytes:\\x")
    assert found["text_offset"] == sorted(found["text_offset"])
    assert found["text_offset"][0] == (0 if echo else len(prompt))


def test_parts_of_characters_have_names_of_their_own(embedded_model):
    """The reproducer of the fault: all of them were the empty string, and one key of five stood for them."""
    with new(embedded_model) as llm:
        done = llm("x", grammar='root ::= "\u65e5\u672c"', max_tokens=20, temperature=0.0, logprobs=300)["choices"][0]
        found, n_vocab = done["logprobs"], llm.n_vocab()
        assert done["text"] == "\u65e5\u672c"
    assert found["tokens"] == [rf"bytes:\x{b:02x}" for b in "\u65e5\u672c".encode()]
    for word, own, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[word] == own and len(top) in (300, 301)
        assert sum(np.exp(list(top.values()))) < 1 + 1e-5
    assert n_vocab > 300
    assert found["text_offset"] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_two_tokens_have_one_key(seed):
    """Whatever the pieces are: texts that repeat, no text, parts of characters, names that look like ours."""
    rng = np.random.default_rng(seed)
    kinds = [b"", b"a", b"\xe6", b"\\xe6", b"bytes:\\xe6", "\u65e5".encode(), b"a\xff", b" ", b"bytes:a", b"\x00"]
    pieces = [kinds[i] for i in rng.integers(len(kinds), size=40)]
    own = int(rng.integers(-1, 40))
    top = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    piece, value = (b"a", -99.0) if own < 0 else top[own]
    entry = TokenEntry(piece, 0, value, top, own, tuple(range(40)))
    assert len(entry.top_texts) == 40 + (own < 0)
    assert list(entry.top_texts.values()) == [value for _, value in top] + [-99.0] * (own < 0)
    assert entry.top_texts[entry.text] == value


def test_tokens_of_a_stop_string_are_left_out(embedded_model):
    with new(embedded_model) as llm:
        said = script(llm, " one two three four")
        text, found, _ = run(llm, "It was", stop="o th", max_tokens=40, logits_processor=said)
    assert text == " one tw"
    assert "".join(found["tokens"]).startswith(" one tw")
    assert len("".join(found["tokens"])) <= len(" one two")


def test_logprobs_are_those_before_sampling_changes_them(embedded_model):
    with new(embedded_model) as llm:
        _, plain, _ = run(llm, "It was", max_tokens=1)
        _, changed, _ = run(llm, "It was", max_tokens=1, logit_bias={300: 50.0}, temperature=1.5)
        assert changed["tokens"] == [llm.session.model.piece(300).decode()]
        for text, value in plain["top_logprobs"][0].items():
            assert changed["top_logprobs"][0][text] == pytest.approx(value, abs=1e-2)


def test_zero_and_many(embedded_model):
    with new(embedded_model) as llm:
        _, found, _ = run(llm, "It was", logprobs=0)
        assert [list(top.values()) for top in found["top_logprobs"]] == [[value] for value in found["token_logprobs"]]
        _, found, _ = run(llm, "It was", logprobs=10**6, max_tokens=1)
        assert sum(np.exp(value) for value in found["top_logprobs"][0].values()) == pytest.approx(1, abs=1e-2)
        _, found, _ = run(llm, "It was", logit_bias={llm.token_eos(): 1e6})
        assert found == {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
        assert llm("It was", max_tokens=1)["choices"][0]["logprobs"] is None


def test_a_known_prompt_is_evaluated_again_for_its_logprobs(embedded_model):
    with new(embedded_model) as llm:
        first = run(llm, TEXT.decode(), echo=True)
        assert run(llm, TEXT.decode(), echo=True) == first


def test_memory_does_not_grow_with_the_prompt(embedded_model):
    with new(embedded_model, n_ubatch=16) as llm:
        run(llm, TEXT.decode() * 4, echo=True)
        assert llm.session._rows.shape == (1, llm.n_vocab())


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_counts(embedded_model, value, error):
    with new(embedded_model) as llm, pytest.raises(error, match="logprobs must be"):
        llm("It was", logprobs=value)
