"""Everything that llama_cpp.Llama has, with the same arguments: read from its source."""

import ast
import importlib.util
import inspect
import typing
from pathlib import Path

import pytest
from needs import lacks

import pylongctx
from pylongctx import Llama
from pylongctx._lib import ffi, lib
from pylongctx.completions.request import AnswerOptions, ChatOptions, CompletionOptions, SamplingOptions
from pylongctx.engine.sampling.params import KEYWORDS, NUMBERS, SamplingParams

# (method, parameter): why its default is another one
OTHER_DEFAULTS = {
    ("__init__", "n_ctx"): "0, the trained context or 4 times as much: a window of 512 is no long context",
}
# parameters that are ours, after llama_cpp's
OURS = {
    "__init__": [
        "method",
        "draft",
        "overflow",
        "cache_reuse",
        "kv_limit",
        "kv_store",
        "kv_store_limit",
        "kv_store_words",
        "kv_offload",
        "kv_offload_mib",
        "kv_offload_path",
        "rpc_servers",
        "progress_callback",
        "n_parallel",
        "preflight",
        "deterministic",
        "override_tensor",
    ],
    "create_chat_completion": [
        "stopping_criteria",
        "stream_options",
        "parallel_tool_calls",
        "enable_thinking",
        "reasoning_budget",
        "chat_template_kwargs",
        "parse_special",
    ],
}
# what Llama of llama_cpp has and ours has not
ABSENT = {
    "ctx": "a pointer for the ctypes functions of llama_cpp",
    "model": "a pointer for the ctypes functions of llama_cpp",
}
# names that programs import from llama_cpp, by file, and ours has not
ABSENT_NAMES = {
    "BaseLlamaTokenizer": "only the tokenizer of the GGUF file is used: tokenizer= is refused",
    "LlamaHFTokenizer": "only the tokenizer of the GGUF file is used: tokenizer= is refused",
    "QuantizedLayerOverride": "quantizing files is no part of this package",
}
NAMES = ["llama", "llama_cache", "llama_grammar", "llama_speculative", "llama_tokenizer"]


def source(name: str) -> ast.Module:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        lacks("stock", "llama_cpp is not installed")
    return ast.parse((Path(spec.submodule_search_locations[0]) / f"{name}.py").read_text(encoding="utf-8"))


def constants() -> dict[str, object]:
    """Return the plain constants of llama_cpp.py."""
    found = {}
    for node in source("llama_cpp").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def methods() -> dict[str, ast.FunctionDef]:
    cls = next(node for node in source("llama").body if isinstance(node, ast.ClassDef) and node.name == "Llama")
    special = ("__init__", "__call__", "__getstate__", "__setstate__")
    functions = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in functions if not node.name.startswith("_") or node.name in special}


def parameters(node: ast.FunctionDef) -> dict[str, object]:
    """Return names and defaults in order; a name without default has inspect.Parameter.empty."""
    known = constants()

    def value(default: ast.expr | None) -> object:
        if default is None:
            return inspect.Parameter.empty
        return known[default.attr] if isinstance(default, ast.Attribute) else ast.literal_eval(default)

    args = node.args
    none = [None] * (len(args.args) - len(args.defaults))
    found = dict(zip((arg.arg for arg in args.args), map(value, [*none, *args.defaults]), strict=True))
    found |= {arg.arg: value(default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    return {name: default for name, default in found.items() if name not in ("self", "cls")}


def ours(name: str) -> dict[str, object]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(getattr(Llama, name)).parameters
    return {p.name: p.default for p in found.values() if p.kind not in kinds and p.name != "self"}


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list)


def test_the_source_was_understood():
    found = methods()
    assert len(found) > 30
    assert parameters(found["tokenize"]) == {"text": inspect.Parameter.empty, "add_bos": True, "special": False}
    assert parameters(found["__init__"])["split_mode"] == 1


def test_nothing_is_missing():
    missing = {name for name in methods() if not hasattr(Llama, name)}
    assert missing == set(ABSENT)


def test_signatures_are_those_of_llama_cpp():
    wrong = {}
    for name, node in methods().items():
        if name in ABSENT or is_property(node):
            continue
        theirs, own = parameters(node), ours(name)
        others = {parameter for method, parameter in OTHER_DEFAULTS if method == name}
        same_defaults = all(own.get(p) == default for p, default in theirs.items() if p not in others)
        if list(own) != [*theirs, *OURS.get(name, [])] or not same_defaults:
            wrong[name] = (own, theirs)
    assert wrong == {}


@pytest.mark.parametrize("name", ["create_completion", "create_chat_completion"])
def test_the_types_of_options_name_every_argument(name):
    options = {"create_completion": CompletionOptions, "create_chat_completion": ChatOptions}[name]
    named = ours(name).keys() | AnswerOptions.__annotations__.keys()
    assert options.__annotations__.keys() == named - {"prompt", "messages", "stream"}


def test_signatures_and_types_follow_the_table_of_sampling_parameters():
    table = {one.keyword: one for one in NUMBERS if one.keyword in KEYWORDS}
    for method in ("create_completion", "create_chat_completion", "sample", "generate"):
        given = {{"temp": "temperature"}.get(name, name): default for name, default in ours(method).items()}
        defaults = {name: given[name] for name in given.keys() & table.keys()}
        if method == "create_chat_completion":
            assert defaults.pop("temperature") == 0.2  # llama_cpp's
        assert len(defaults) >= 10
        assert defaults == {name: getattr(SamplingParams(seed=0), table[name].name) for name in defaults}
    types = typing.get_type_hints(SamplingOptions)
    assert {name: types[name] for name in table} == {name: one.kind for name, one in table.items()}


def test_defaults_of_the_library_follow_the_table_of_sampling_parameters():
    native = ffi.new("lctx_sampler_params *")
    lib.lctx_sampler_params_default(native)
    table = SamplingParams(seed=native.seed).settings()
    assert {name: getattr(native, name) for name in table} == pytest.approx(table, rel=1e-6)


def test_the_exceptions_are_real():
    found = methods()
    for method, parameter in OTHER_DEFAULTS:
        assert ours(method)[parameter] != parameters(found[method])[parameter]


def test_properties_are_properties():
    for name, node in methods().items():
        if name not in ABSENT:
            assert isinstance(inspect.getattr_static(Llama, name), property) == is_property(node), name


def test_names_that_programs_import():
    found = set()
    for file in NAMES:
        for node in source(file).body:
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
            elif file in ("llama", "llama_cache") and isinstance(node, ast.Assign):  # aliases
                found |= {t.id for t in node.targets if isinstance(t, ast.Name) and t.id[0].isupper()}
    found -= {"BuiltinRule", "SchemaConverter"}  # how llama_cpp makes a grammar of a schema
    missing = {name for name in found if not hasattr(pylongctx, name) and not name.isupper()}
    assert missing == set(ABSENT_NAMES) & found
    assert {"LlamaGrammar", "LlamaRAMCache", "LogitsProcessorList", "Llama"} <= found
