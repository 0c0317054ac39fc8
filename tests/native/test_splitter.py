"""Words of a text for BPE: as std::regex finds them, without its recursion, for every expression of the pin."""

import random
import re
import subprocess
import sys

import numpy as np
import pytest
from llamas import new
from op import call, ffi, lib
from upstream import vocab_source, vocabularies

# upstream's classes of characters: the byte that stands for other characters of the class, and those below 128
CLASSES = {
    "N": ("\xd1", "0-9"),
    "L": ("\xd2", "A-Za-z"),
    "P": ("\xd3", r"!-#%-*,-/:-;?-@\[-\]_\{\}"),
    "M": ("\xd4", ""),
    "S": ("\xd5", r"\$\+<->^`\|\~"),
}
NARROW = "aaAbBZz sStTrRvVeElLmMdD0123456789''  \t\n\r\n\n.,-!?/_$+<~[]{}\xd0\xd1\xd2\xd2\xd3\xd4\xd5\x0b"
WIDE = "aAbZ019 \t\n\r.,!?-_()|\u4e00\u9fa5\u3042\xb5\uac00\u2018\uff0c\x0b\u0e01"
RUN = 40_000  # std::regex ends the process here


def expressions():
    """Return the expressions of all vocabularies, without those that upstream splits by hand."""
    found = set()
    for block in re.findall(r"regex_exprs = \{(.*?)\n\s*\};", vocab_source(), re.DOTALL):
        lines = [line.strip() for line in block.splitlines()]
        literals = [re.match(r'"((?:[^"\\]|\\.)*)"', line) for line in lines]
        found |= {re.sub(r"\\(.)", _unescaped, literal[1]) for literal in literals if literal}
    return sorted(one for one in found if not re.search(r"AFMoE|Han", one))


def _unescaped(found):
    return {"n": "\n", "r": "\r", "t": "\t"}.get(found[1], found[1])


def collapsed(expression):
    """Return an expression of bytes, with upstream's classes in the place of Unicode's."""
    found, inside, at = "", False, 0
    while at < len(expression):
        unescaped = at == 0 or expression[at - 1] != "\\"
        if category := re.match(r"\\p\{([NLPMS])[a-z]?\}", expression[at:]):
            one = "".join(CLASSES[category[1]])
            found += one if inside else f"[{one}]"
            at += len(category[0])
            continue
        if unescaped and expression[at] in "[]":
            inside = expression[at] == "["
        found += expression[at]
        at += 1
    return found


def is_wide(expression):
    return "\\p{" not in expression


def words(expression, text, by_std_regex):
    """Return the lengths of the words of a text."""
    wide = is_wide(expression)
    wanted, points = (
        np.array([ord(c) for c in some], np.uint32) for some in (expression if wide else collapsed(expression), text)
    )
    lengths = np.zeros(2 * len(text) + 2, np.int32)
    args = ffi.new("lctx_split_args *")
    args.expression, args.n_expression = ffi.from_buffer("uint32_t[]", wanted), len(wanted)
    args.text, args.n_text = ffi.from_buffer("uint32_t[]", points, require_writable=False), len(points)
    args.lengths = ffi.from_buffer("int32_t[]", lengths)
    args.is_wide, args.by_std_regex = wide, by_std_regex
    call(lib.lctx_split_run, args)
    return lengths[: args.n_length].tolist()


def random_text(random, letters):
    n, text = random.randrange(40), ""
    while len(text) < n:
        text += random.choice(letters) * (random.randrange(1, 10) if random.random() < 0.25 else 1)
    return text


@pytest.mark.parametrize("expression", expressions())
def test_words_are_those_of_std_regex(expression):
    letters, chosen = WIDE if is_wide(expression) else NARROW, random.Random(expression)
    for _ in range(60):
        text = random_text(chosen, letters)
        assert words(expression, text, False) == words(expression, text, True), text


@pytest.mark.parametrize("expression", expressions())
def test_a_long_run_is_split(expression):
    for letter in dict.fromkeys(WIDE if is_wide(expression) else NARROW):
        assert sum(words(expression, letter * RUN, False)) == RUN


@pytest.mark.parametrize(
    "expression", ["(a", "a)", "[a", "a**", "*a", "(a?)*", "a{2", "a{3,2}", "a{1001}", "\\1", "[b-a]", "a+?", "\\q"]
)
def test_other_expressions_are_refused(expression):
    with pytest.raises(ValueError, match="expression that is not known"):
        words(expression, "aaa", False)


def test_tokens_are_upstreams_own(tmp_path):
    compared = 0
    for path in vocabularies(tmp_path):
        texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        lines = path.with_name(f"{path.name}.out").read_text().splitlines()
        with new(path, vocab_only=True, method=None) as llm:
            for text, line in zip(texts, lines, strict=False):
                assert llm.tokenize(text.encode(), add_bos=False, special=False) == [int(one) for one in line.split()]
                compared += 1
    assert compared > 500


LONG_RUNS = f"""
import sys
from pylongctx import Llama
from pylongctx.errors import ModelRefused

path, *names = sys.argv[1:]
for name in names:
    try:
        llm = Llama(path, vocab_only=True, method=None, kv_overrides={{"tokenizer.ggml.pre": name}}, verbose=False)
    except ModelRefused:  # its vocabulary has another form
        continue
    with llm:
        for letter in "a -\\n\\u4e2d\\U0001f600":
            llm.tokenize((letter * {RUN}).encode(), add_bos=False)
    print(name)
"""


def test_no_text_ends_the_process(tmp_path):
    """One name of every kind of vocabulary, in a process of its own."""
    kinds = re.findall(r'tokenizer_pre == "([^"]+)"[^{]*\{\s*pre_type = (\w+)', vocab_source())
    names = list({kind: name for name, kind in kinds}.values())
    vocabulary = next(path for path in vocabularies(tmp_path) if path.name == "ggml-vocab-gpt-2.gguf")
    done = subprocess.run([sys.executable, "-c", LONG_RUNS, str(vocabulary), *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) > 0.9 * len(names) > 30
