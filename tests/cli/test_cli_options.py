"""The options that commands share: llama.cpp's names, its variables, and what becomes of them."""

import argparse
import re

import pytest
from upstream import option_source

from pylongctx import Corm, LongHeads, SelfExtend
from pylongctx.cli import main
from pylongctx.cli.generation import (
    add_sampling_options,
    add_template_options,
    sampling_arguments,
    template_arguments,
    wanted_grammar,
)
from pylongctx.cli.options import add_llama_options, chosen_method, llama_arguments, model_path, open_llama
from pylongctx.models import embedded_model


def parser():
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_llama_options(made)
    add_sampling_options(made)
    add_template_options(made)
    return made


def parse(*words):
    return parser().parse_args(words)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("LCTX_METHOD", "LLAMA_ARG_MODEL", "LLAMA_ARG_CTX_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_not_given_is_left_to_llama():
    args = parse()
    assert llama_arguments(args) == {"verbose": False, "n_threads_batch": None}
    assert sampling_arguments(args) == {"max_tokens": None}
    assert template_arguments(args) == {}
    assert model_path(args) == str(embedded_model())


def test_options_become_arguments():
    store = ("--kv-store", "folder", "--kv-store-limit", "5", "--no-kv-store-words")
    words = "-c 700 -b 64 -ub 32 -t 1 -ctk q8_0 -ctv q5_0 -ngl 0 -nkvo --yarn-beta-fast 16 --rope-scaling yarn -sm row"
    store += ("--deterministic",)
    found = llama_arguments(parse(*words.split(), "--kv-limit", "3", "-ts", "3/1", "--kv-offload", "7", *store))
    assert found == {
        "n_ctx": 700,
        "n_batch": 64,
        "n_ubatch": 32,
        "n_threads": 1,
        "n_threads_batch": 1,
        "type_k": "q8_0",
        "type_v": "q5_0",
        "n_gpu_layers": 0,
        "offload_kqv": False,
        "yarn_beta_fast": 16.0,
        "rope_scaling_type": 2,
        "split_mode": 2,
        "kv_limit": 3 << 20,
        "deterministic": True,
        "kv_store": "folder",
        "kv_store_limit": 5 << 20,
        "kv_store_words": False,
        "tensor_split": [3.0, 1.0],
        "kv_offload": "host",
        "kv_offload_mib": 7,
        "verbose": False,
    }


def test_sampling_options_become_arguments():
    words = "-n 5 --temp 0 --top-k 3 --top-p 0.5 --min-p 0.1 --typical 0.9 --repeat-penalty 1.1 --presence-penalty 0.2"
    more = "--frequency-penalty 0.3 --mirostat 2 --mirostat-lr 0.2 --mirostat-ent 4 -l 7+1.5 -l 8-2 -r A -r B"
    assert sampling_arguments(parse(*words.split(), *more.split())) == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "mirostat_mode": 2,
        "mirostat_eta": 0.2,
        "mirostat_tau": 4.0,
        "logit_bias": {7: 1.5, 8: -2.0},
        "stop": ["A", "B"],
    }


def test_samplers_of_llama_cpp_become_arguments():
    words = "--top-n-sigma 1.5 --xtc-probability 0.2 --xtc-threshold 0.15 --dynatemp-range 0.4 --dynatemp-exp 1.2"
    more = "--adaptive-target 0.5 --adaptive-decay 0.8 --dry-multiplier 0.8 --dry-base 1.6 --dry-allowed-length 3"
    last = "--dry-penalty-last-n 99 --dry-sequence-breaker none --dry-sequence-breaker \\n --samplers Top-K;temp"
    assert sampling_arguments(parse(*words.split(), *more.split(), *last.split())) == {
        "max_tokens": None,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.2,
        "xtc_threshold": 0.15,
        "dynatemp_range": 0.4,
        "dynatemp_exponent": 1.2,
        "adaptive_target": 0.5,
        "adaptive_decay": 0.8,
        "dry_multiplier": 0.8,
        "dry_base": 1.6,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 99,
        "dry_sequence_breakers": ["\n"],
        "samplers": ("top_k", "temperature"),
    }
    assert sampling_arguments(parse("--sampler-seq", "kt"))["samplers"] == ("top_k", "temperature")
    assert sampling_arguments(parse("--dry-sequence-breaker", "none"))["dry_sequence_breakers"] == []
    with pytest.raises(ValueError, match="give one of --samplers and --sampler-seq"):
        sampling_arguments(parse("--samplers", "top_k", "--sampler-seq", "k"))


@pytest.mark.parametrize(("word", "layers"), [("all", -1), ("-1", -1), ("3", 3), ("auto", "auto")])
def test_layers(word, layers):
    assert llama_arguments(parse("-ngl", word))["n_gpu_layers"] == layers


# ---- variables ----


def test_the_command_line_comes_before_variables(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "300")
    monkeypatch.setenv("LLAMA_ARG_MODEL", "other.gguf")
    assert llama_arguments(parse())["n_ctx"] == 300
    assert model_path(parse()) == "other.gguf"
    args = parse("-c", "400", "mine.gguf")
    assert llama_arguments(args)["n_ctx"] == 400
    assert model_path(args) == "mine.gguf"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LLAMA_ARG_CTX_SIZE", "many", "argument -c/--ctx-size: 'many' is not an integer (from LLAMA_ARG_CTX_SIZE)"),
        ("LLAMA_ARG_FLASH_ATTN", "off", "cannot be turned off (from LLAMA_ARG_FLASH_ATTN)"),
        ("LLAMA_ARG_CONTEXT_SHIFT", "perhaps", "is neither on nor off (from LLAMA_ARG_CONTEXT_SHIFT)"),
        ("LLAMA_ARG_MMPROJ", "file", "not supported: only text input"),
        (
            "LLAMA_ARG_N_PREDICT",
            "0",
            "must be at least 1, or -1 for no limit, not 0 (from LLAMA_ARG_N_PREDICT",
        ),
    ],
)
def test_a_bad_variable_is_named(monkeypatch, capsys, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit):
        parse()
    assert message in capsys.readouterr().err


def test_a_replaced_variable_is_not_named(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "q9_9")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "300")
    with pytest.raises(
        ValueError, match=r"unknown type_k 'q9_9'.*\(from the environment: LLAMA_ARG_CACHE_TYPE_K=q9_9\)"
    ):
        open_llama(parse("-c", "200"))


def test_switches_have_a_negative_variable(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_NO_KV_OFFLOAD", "")
    assert llama_arguments(parse())["offload_kqv"] is False
    assert llama_arguments(parse("-kvo"))["offload_kqv"] is True
    monkeypatch.setenv("LLAMA_ARG_KV_UNIFIED", "off")
    parse()


def test_names_and_variables_are_those_of_llama_cpp():
    source, known = option_source(), {}
    for block in source.split("add_opt(common_arg(")[1:]:
        head, env = block[: block.find("[](")], re.findall(r'set_env\("(\w+)"\)', block)
        for name in re.findall(r'"(--?[a-zA-Z][\w.-]*)"', head):
            known.setdefault(name, set()).add(env[0] if env else None)
    ours = {
        "--method",
        "--chunk-size",
        "--attn-window",
        "--kv-limit",
        "--kv-store",
        "--kv-store-limit",
        "--kv-store-words",
        "--no-kv-store-words",
        "--kv-offload",
        "--kv-offload-path",
        "--help",
        "-h",
    }
    ours |= {"--preflight", "--no-preflight", "--overflow", "--deterministic"}
    ours |= {"--mmap", "--no-mmap", "--mlock"}  # of earlier versions; now --load-mode
    for action in parser()._actions:
        for name in set(action.option_strings) - ours:
            assert name in known, f"llama.cpp has no {name}"
            shown = re.search(r"\[(LLAMA_ARG_\w+)\]", action.help or "")
            if action.help != argparse.SUPPRESS:
                assert (shown[1] if shown else None) in known[name], name


# ---- methods ----


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("-gan 8 -gaw 128", SelfExtend(8, 128)),
        ("-gan 8 --method selfextend", SelfExtend(8)),
        ("-gan 8 --method selfextend+corm,window=64", SelfExtend(8) + Corm(window=64)),
        ("--chunk-size 32 --attn-window 256", LongHeads(32, 256)),
    ],
)
def test_sizes_of_methods(words, method):
    assert chosen_method(parse(*words.split())) == method


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-gan 8 --method longheads", "--grp-attn-n belong to selfextend, not to method longheads"),
        ("-gan 8 --method none", "not to method none"),
        ("-gan 8 --chunk-size 16", "belong to different methods, longheads and selfextend"),
        ("-gan 8 --method selfextend,group_size=4", "group_size of selfextend is given twice: 4 and 8"),
        ("--method nonsense", "unknown method 'nonsense'"),
    ],
)
def test_sizes_that_belong_elsewhere(words, message):
    with pytest.raises(ValueError, match=message):
        chosen_method(parse(*words.split()))


def test_no_method_is_llama_cpp_s_own_cache():
    assert chosen_method(parse("--method", "none")) is None
    assert chosen_method(parse()) == "auto"


def test_the_method_may_come_from_a_variable(monkeypatch):
    monkeypatch.setenv("LCTX_METHOD", "corm")
    assert chosen_method(parse()) == Corm()
    assert chosen_method(parse("--method", "longheads")) == LongHeads()
    with pytest.raises(ValueError, match=r"not to method corm.*from the environment: LCTX_METHOD=corm"):
        open_llama(parse("-gan", "8"))


# ---- refusals and choices ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--keep 4",
            "argument --keep: not supported: use --overflow evict_middle, which keeps the first tokens of a text",
        ),
        ("--device CUDA0", "choose devices with CUDA_VISIBLE_DEVICES"),
        ("--samplers top_k;other", "samplers: there is no 'other'; there are penalties (e), dry (d)"),
        ("--sampler-seq kz", "samplers: there is no 'z'"),
        ("--mmproj file", "only text input is supported"),
        ("-fa off", "cannot be turned off"),
        ("-l 5", "'5' is not a token and a bias"),
        ("--grammar-file missing.gbnf", "No such file"),
        ("--chat-template-kwargs [1]", "'[1]' is not a JSON object"),
    ],
)
def test_refusals_say_why(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        parse(*words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rpc", "--kv-offload"])
def test_bench_says_that_it_measures_this_machine(capsys, option):
    with pytest.raises(SystemExit):
        main(["bench", option, "1"])
    assert f"argument {option}: not supported: bench" in capsys.readouterr().err


def test_a_file_that_is_not_text(tmp_path, capsys, caplog):
    (tmp_path / "odd").write_bytes(b"caf\xe9\r\n")
    assert parse("--grammar-file", str(tmp_path / "odd")).grammar_file == "caf\u00e9"
    assert "odd: read as Windows-1252, as it is not UTF-8" in caplog.text
    (tmp_path / "odd").write_bytes(b"a\0b")
    with pytest.raises(SystemExit):
        parse("--grammar-file", str(tmp_path / "odd"))
    assert "odd is not a text file: it contains NUL bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "words", "policy"),
    [
        (None, "", None),
        (None, "--overflow evict_middle", "evict_middle"),
        (None, "--context-shift", "evict_middle"),
        (None, "--context-shift --no-context-shift", "error"),
        (None, "--no-context-shift --overflow evict_middle", "evict_middle"),
        ("1", "", "evict_middle"),
        ("off", "", "error"),
        ("1", "--overflow error", "error"),
        ("1", "--no-context-shift", "error"),
    ],
)
def test_what_does_not_fit_is_one_option_with_two_names(monkeypatch, variable, words, policy):
    if variable is not None:
        monkeypatch.setenv("LLAMA_ARG_CONTEXT_SHIFT", variable)
    assert llama_arguments(parse(*words.split())).get("overflow") == policy


def test_what_is_done_anyway_is_accepted():
    parse("--no-warmup", "--jinja", "-fa", "on", "-fa", "auto")


def test_one_grammar_only():
    assert wanted_grammar(parse("-j", "{}")) is not None
    assert wanted_grammar(parse("--grammar", 'root ::= "a"'))._grammar == 'root ::= "a"'
    with pytest.raises(ValueError, match="give one of --grammar and --json-schema"):
        wanted_grammar(parse("-j", "{}", "--grammar", "root ::= x"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rope-scale", "2", "--rope-freq-scale", "0.5"], "set the same value: give one"),
        (["--rope-scale", "0"], "--rope-scale must be a number above 0"),
        (["--rope-scale", "inf"], "--rope-scale must be a number above 0, not inf"),
        (["--rope-scale", "nan"], "--rope-scale must be a number above 0, not nan"),
        (["--rope-freq-base", "nan"], "rope_freq_base must be from 1.01 to 1e\\+18, or 0"),
        (["--yarn-attn-factor", "inf"], "yarn_attn_factor must be from 0.001 to 1000"),
        (["-m", "a.gguf", "b.gguf"], "the model is given twice"),
        (["--lora-scaled", "adapter"], "--lora-scaled takes FILE:SCALE"),
        (["--lora", "missing"], "LoRA path does not exist: missing"),
        (["--chat-template", "chatml", "--chat-template-file", __file__], "give one of --chat-template and"),
    ],
)
def test_contradictions(words, message):
    with pytest.raises(ValueError, match=message):
        open_llama(parse("-c", "64", *words))


def test_a_model_opens_as_asked():
    words = "-c 300 -ub 64 --rope-scale 2 -s 7 --repeat-last-n 5 --chat-template zephyr --method corm"
    with open_llama(parse(*words.split())) as llm:
        assert (llm.n_ctx(), llm.last_n_tokens_size, llm.chat_format) == (300, 5, "zephyr")
        assert llm._arguments["rope_freq_scale"] == 0.5
        assert isinstance(llm.method, Corm)
