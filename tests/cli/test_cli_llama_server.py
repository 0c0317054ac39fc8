"""Every option of llama-server: it works, or is refused, as unknown or with its reason."""

import argparse
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import make_model
from upstream import option_source

from pylongctx import Llama, catalog
from pylongctx.cli import main, make_parser
from pylongctx.cli import parse as parse_words
from pylongctx.cli.arguments import unread_variables
from pylongctx.cli.options import add_llama_options, llama_arguments, model_path, open_llama

LIST = Path(__file__).with_name("llama_server_options.txt")  # of llama-server --help: names | a value | variable
ROWS = [[part.strip() for part in line.split("|")] for line in LIST.read_text(encoding="utf-8").splitlines()]
OPTIONS = [(names.split(), value, *more) for names, value, *more in ROWS]
NAMES = [(name, value) for names, value, *_ in OPTIONS for name in names]
VARIABLES = [(variable, value) for _, value, *more in OPTIONS for variable in more]
# which must work
WANTED = """
--cache-prompt --no-cache-prompt --cache-ram --reasoning-budget --reasoning-format --spec-type -md
--spec-draft-n-max --spec-ngram-simple-size-n -td -ctkd -cmoe -ncmoe -ncffn -ot --override-kv --path --api-prefix
--ssl-cert-file --ssl-key-file --timeout --sse-ping-interval -lv --offline -fit --op-offload --no-op-offload
--reuse-port --escape --no-prefill-assistant --reasoning-effort --kv-offload -dt --version --usage --rerank --spm-infill
""".split()


@pytest.fixture(scope="module")
def made():
    return make_parser("serve")


def outcome(made, capsys, *words):
    """Return the reason of a refusal, or the empty string."""
    try:
        parse_words(made, ["serve", *words])
    except SystemExit as ended:
        said = capsys.readouterr()
        if ended.code == 0:
            assert said.out
            return ""
        assert "unrecognized" not in said.err and "expected" not in said.err, said.err
        name = words[0] if words else ""
        found = re.search(rf"not supported: .+|there is no option {re.escape(name)}\b", said.err)
        return found[0]
    return ""


@pytest.fixture
def value_of(tmp_path):
    (tmp_path / "file").write_text("{}", encoding="utf-8")
    return lambda text: str(tmp_path / "file") if text == "FILE" else text


@pytest.mark.parametrize(("name", "value"), NAMES, ids=[name for name, _ in NAMES])
def test_an_option_works_or_is_refused(made, capsys, value_of, name, value):
    reason = outcome(made, capsys, name, *([value_of(value)] if value else []))
    assert reason == "" or len(reason) > 10
    assert name not in WANTED or reason == ""


@pytest.mark.parametrize(("variable", "value"), VARIABLES, ids=[name for name, _ in VARIABLES])
def test_a_variable_works_or_is_refused_or_warned_about(monkeypatch, capsys, value_of, variable, value):
    monkeypatch.setenv(variable, value_of(value) or "on")
    made = make_parser("serve")
    if outcome(made, capsys) == "":
        capsys.readouterr()
        args = parse_words(made, ["serve"])
        read = variable not in unread_variables(args)
        assert read == (variable in args.variables or not variable.startswith("LLAMA_ARG_"))


def test_the_list_is_that_of_the_source():
    """Options of the server, and those of all programs but where the server is left out."""
    listed, found = {name for name, _ in NAMES}, set()
    for block in option_source().split("add_opt(common_arg(")[1:]:
        head, rest = block[: block.find("[](")], block[block.find("[](") :]
        examples = re.search(r"set_examples\(\{([^}]*)\}", rest)
        left_out = re.search(r"set_excludes\(\{([^}]*)\}", rest)
        of_server = examples is None or re.search("LLAMA_EXAMPLE_(SERVER|COMMON)", examples[1])
        if of_server and not (left_out and "LLAMA_EXAMPLE_SERVER" in left_out[1]):
            found |= set(re.findall(r'"(--?[a-zA-Z][\w.-]*)"', head.split("string_format")[0].split('\n        "')[0]))
    assert len(found) > 300
    assert listed - found == set()
    missing = {name for name in found - listed if name.startswith("-")}
    assert missing == set(), missing


@pytest.mark.parametrize(
    "words",
    [
        *("--cache-reuse 0", "--spec-type none", "--lazy-mode auto", "--log-colors off", "--keep 0"),
        *("--reasoning-budget -1", "--sleep-idle-seconds -1", "--embd-normalize 2", "--poll 0", "--no-warmup"),
    ],
)
def test_a_value_that_asks_for_what_is_done_anyway(made, capsys, words):
    assert outcome(made, capsys, *words.split()) == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--kv-unified", "--kv-limit bounds their sum"),
        ("--tools all", "clients send tools in requests"),
        ("--device CUDA0", "CUDA_VISIBLE_DEVICES"),
        ("--poll 50", "0 is what pylongctx does"),
    ],
)
def test_reasons_have_a_way_out(made, capsys, words, reason):
    assert reason in outcome(made, capsys, *words.split())


@pytest.mark.parametrize("word", ["-ag", "-hft", "-mu", "-sps", "--threads-http"])
def test_an_unknown_option_is_not_read_as_a_shorter_one(made, capsys, word):
    assert outcome(made, capsys, word, "1") == f"there is no option {word}"


def test_a_value_may_follow_its_short_option(made):
    assert parse_words(made, ["serve", "-c512"]).ctx_size == 512


def test_numbers_with_a_value_for_no_limit(made, capsys):
    wanted = {"2": 2 << 20, "0": 0, "-1": sys.maxsize}
    assert {n: parse_words(made, ["serve", "-cram", n]).cache_ram for n in wanted} == wanted
    with pytest.raises(SystemExit):
        parse_words(made, ["serve", "--cache-ram", "-2"])
    assert "-2 MiB: the number must be 0 or more, or -1 for no limit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_words(made, ["serve", "--reasoning-budget", "-2"])
    assert "-2 tokens: the number must be 0 or more, or -1 for no limit" in capsys.readouterr().err


def test_a_variable_without_an_option_is_warned_about(monkeypatch, caplog):
    monkeypatch.setenv("LLAMA_ARG_THREADS_HTTP", "4")
    with pytest.raises(SystemExit):
        main(["serve", "--port", "none"])
    monkeypatch.setenv("LLAMA_ARG_PORT", "0")
    assert main(["serve", "--port", "-1"]) == 1
    assert "LLAMA_ARG_THREADS_HTTP has no effect" in caplog.text and "LLAMA_ARG_PORT" not in caplog.text


# ---- what they do ----


def parse(*words):
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_llama_options(made)
    return made.parse_args(words)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("--kv-offload", {"offload_kqv": True}),
        ("--kv-offload 5", {"kv_offload": "host", "kv_offload_mib": 5}),
        ("--kv-offload auto", {"kv_offload": "host", "kv_offload_mib": None}),
        ("--kv-offload disk", {"kv_offload": "disk", "kv_offload_mib": None}),
        ("--kv-offload disk,9", {"kv_offload": "disk", "kv_offload_mib": 9}),
        ("--kv-offload-path d", {"kv_offload_path": "d"}),
        ("-nkvo", {"offload_kqv": False}),
        ("--no-op-offload", {"op_offload": False}),
        ("-fit off", {"preflight": False}),
        ("-fit on", {"preflight": True}),
        ("-fit off --preflight", {"preflight": True}),
        ("-lv 4", {"verbose": True}),
        ("-lv 3", {}),
        ("-cmoe", {"override_tensor": {r"\.ffn_(up|down|gate|gate_up)_(ch)?exps": "CPU"}}),
        ("-ncmoe 2", {"override_tensor": {r"^blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch)?exps": "CPU"}}),
        ("-ncffn 1", {"override_tensor": {r"^blk\.(0)\.ffn_(up|down|gate)\.": "CPU"}}),
        ("-ncmoe 0", {}),
        ("-ot a=CPU,b[=]c=CPU -ot d=CPU", {"override_tensor": {"a": "CPU", "b[=]c": "CPU", "d": "CPU"}}),
        ("--override-kv a=int:5,b=float:0.5 --override-kv c=bool:true,d=str:x:y=z",
         {"kv_overrides": {"a": 5, "b": 0.5, "c": True, "d": "x:y=z"}}),
        ('--override-kv "a=str:b,c",d=bool:false', {"kv_overrides": {"a": "b,c", "d": False}}),
    ],
)  # fmt: skip
def test_options_become_arguments(words, arguments):
    found = llama_arguments(parse(*words.split()))
    assert found == {"verbose": False, "n_threads_batch": None} | arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--override-kv a=5", "'a=5' is not KEY=TYPE:VALUE, where TYPE is int, float, bool, str"),
        ("--override-kv a=int:x", "'x', the value of a, is not a valid int"),
        ("--override-kv a=bool:1", "'1', the value of a, is not a valid bool"),
        ("--override-kv a=u32:1", "is not KEY=TYPE:VALUE"),
        ("-ot CPU", "'CPU' is not PATTERN=TYPE"),
        ("-ncmoe -1", "-1 layers: the number must be from 0 to 512"),
        ("-fit maybe", "'maybe' is neither on nor off"),
    ],
)
def test_values_that_make_no_sense(capsys, words, message):
    with pytest.raises(SystemExit):
        parse(*words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["--no-mmap", "--mlock", "--mmap --mlock", "-cmoe", "-ncmoe 1", "-ncffn 1", "-ot .=CPU"]
)
def test_a_model_opens_with_them(tmp_path, words):
    path = make_model(tmp_path / "experts.gguf", arch="mixtral")
    with Llama(str(path), n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False) as llm:
        llm.eval([5, 6, 7])
        expected = llm.scores[-1].copy()
    with open_llama(parse(str(path), "-c", "64", "-t", "1", *words.split())) as llm:
        llm.eval([5, 6, 7])
        np.testing.assert_allclose(llm.scores[-1], expected, rtol=1e-4, atol=1e-5)


def test_overrides_of_the_command_line(tmp_path):
    path = make_model(tmp_path / "model.gguf")
    words = ("--override-kv", "tokenizer.ggml.add_bos_token=bool:false,general.name=str:another")
    with open_llama(parse(str(path), "-c", "64", *words)) as llm:
        assert llm.token_bos() not in llm.tokenize(b"a") and llm.metadata["general.name"] == "another"
    for words, message in (
        (("-ot", "ffn=CUDA9"), "there is no buffer type CUDA9; known are CPU"),
        (("--override-kv", "llama.rope.freq_base=int:5"), "is a float in the file"),
        (("--load-mode", "none", "--mmap"), "give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            open_llama(parse(str(path), "-c", "64", *words))


def test_buffers_come_from_the_variable(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_OVERRIDE_TENSOR", "a=CPU,b=CPU")
    assert llama_arguments(parse())["override_tensor"] == {"a": "CPU", "b": "CPU"}
    assert llama_arguments(parse("-ot", "c=CPU"))["override_tensor"] == {"c": "CPU"}
    monkeypatch.setenv("LLAMA_ARG_OVERRIDE_TENSOR", "nonsense")
    with pytest.raises(ValueError, match="'nonsense' is not PATTERN=TYPE"):
        llama_arguments(parse())


def test_offline_fetches_nothing(monkeypatch):
    name = next(iter(catalog.CATALOG))
    monkeypatch.setattr(type(catalog.CATALOG[name]), "path", lambda entry: None)
    with pytest.raises(ValueError, match=f"--offline: {name} is not downloaded; run pylongctx get {name}"):
        model_path(parse(name, "--offline"))
