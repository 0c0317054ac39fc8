"""The chat templates of real models, rendered by llama.cpp, against jinja2 as Hugging Face sets it up."""

import ctypes
import json
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from chat_templates import TOOLS
from needs import need
from thinning import thin
from upstream import files

from pylongctx import Llama
from pylongctx._lib import library_path
from pylongctx.chat.answer import AnswerParser
from pylongctx.chat.formats import FORMATS, FUNCTIONARY, OF_LLAMA_CPP, find
from pylongctx.chat.template import NO_TEMPLATE, ChatTemplate
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.errors import InvalidInput

jinja2 = need("stock", "jinja2.sandbox")
TemplateError = need("stock", "jinja2").TemplateError

CONVERSATION = [
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2+2?"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


# those that render without tools and without a date
TEMPLATES = """
Apertus-8B-Instruct ByteDance-Seed-OSS GLM-4.6 HuggingFaceTB-SmolLM3-3B Kimi-K2-Instruct LFM2-8B-A1B MiniMax-M2
Mistral-Small-3.2-24B-Instruct-2506 NVIDIA-Nemotron-Nano-v2 NousResearch-Hermes-3-Llama-3.1-8B-tool_use
Qwen-QwQ-32B Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Qwen3-Coder deepseek-ai-DeepSeek-R1-Distill-Llama-8B
deepseek-ai-DeepSeek-V3.1 google-gemma-2-2b-it ibm-granite-granite-3.3-2B-Instruct llama-cpp-deepseek-r1
meetkai-functionary-medium-v3.1 meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct
meta-llama-Llama-3.3-70B-Instruct microsoft-Phi-3.5-mini-instruct mistralai-Mistral-Nemo-Instruct-2407
openai-gpt-oss-120b unsloth-Apriel-1.5 upstage-Solar-Open-100B
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return files(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def environment():
    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise ValueError(message)

    found = jinja2.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = tojson
    found.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return found


def render(environment, llm, source, messages, **variables):
    """Return what Jinja2ChatFormatter of llama_cpp returns, without the BOS token that is added to the tokens."""
    bos, eos = (llm._model.piece(t, True).decode() if t >= 0 else "" for t in (llm.token_bos(), llm.token_eos()))
    given = {"messages": messages, "bos_token": bos, "eos_token": eos, "add_generation_prompt": True} | variables
    given["date_string"] = datetime.now().strftime("%d %b %Y")  # which llama.cpp gives to every template
    text = environment.from_string(source).render(given)
    return text.removeprefix(bos) if llm._model.info.add_bos else text


@thin
@pytest.mark.parametrize("vocabulary", ["llama-bpe", "qwen2"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("with_system", [False, True])
def test_templates_equal_jinja2(folder, environment, name, vocabulary, with_system):
    source = (folder / f"{name}.jinja").read_text()
    messages = [*(SYSTEM if with_system else []), *CONVERSATION]
    with Llama(
        str(folder / f"ggml-vocab-{vocabulary}.gguf"), vocab_only=True, chat_format=source, verbose=False
    ) as llm:
        try:
            expected = render(environment, llm, source, messages, enable_thinking=True)
        except (ValueError, TypeError, TemplateError) as reason:
            pytest.skip(f"jinja2 does not render it: {reason}")
        assert llm.apply_template(messages) == expected


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder"])
def test_tools_equal_jinja2(folder, environment, name):
    source = (folder / f"{name}.jinja").read_text()
    with Llama(str(folder / "ggml-vocab-qwen2.gguf"), vocab_only=True, chat_format=source, verbose=False) as llm:
        expected = render(environment, llm, source, CONVERSATION, enable_thinking=True, tools=[TOOL])
        assert llm.apply_template(CONVERSATION, tools=[TOOL]) == expected
        assert "Add two numbers" in expected


def test_every_template_of_the_package_can_be_used(folder):
    """All of them, the ones that jinja2 cannot render included; what is refused says why."""
    refused, found = {}, sorted(folder.glob("*.jinja"))
    assert len(found) > 60
    request = {"messages": CONVERSATION, "tools": [TOOL]}
    with Llama(str(folder / "ggml-vocab-qwen2.gguf"), vocab_only=True, verbose=False) as llm:
        for path in found:
            try:
                rendered = ChatTemplate(llm._model, path.read_text()).render(request)
            except ValueError as reason:
                refused[path.stem] = str(reason)
            else:
                assert "And 2+2?" in rendered.prompt
                AnswerParser(rendered.syntax).feed("Four.")
    assert refused == {}


# ---- named formats ----

CHATML_EXPECTED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1+1?<|im_end|>\n"
    "<|im_start|>assistant\nIt is 2.<|im_end|>\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n"
)
EXPECTED = {
    "chatml": CHATML_EXPECTED,
    "llama-2": "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is 1+1? [/INST] It is 2. </s><s>[INST] And 2+2? [/INST]",
    "llama-3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 1+1?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 2.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-instruct": "[INST] Be brief.\nWhat is 1+1? [/INST]It is 2.</s>[INST] And 2+2? [/INST]",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nWhat is 1+1?</s>\n<|assistant|>\nIt is 2.</s>\n"
    "<|user|>\nAnd 2+2?</s>\n<|assistant|>\n",
    "gemma": "<start_of_turn>user\nBe brief.\nWhat is 1+1?<end_of_turn>\n<start_of_turn>model\nIt is 2.<end_of_turn>\n"
    "<start_of_turn>user\nAnd 2+2?<end_of_turn>\n<start_of_turn>model\n",
    "vicuna": "Be brief. USER: What is 1+1? ASSISTANT: It is 2.</s>USER: And 2+2? ASSISTANT:",
    "alpaca": "Be brief.\n\n### Instruction:\nWhat is 1+1?\n\n### Response:\nIt is 2.\n\n"
    "### Instruction:\nAnd 2+2?\n\n### Response:\n",
    "openchat": "Be brief.<|end_of_turn|>GPT4 Correct User: What is 1+1?<|end_of_turn|>"
    "GPT4 Correct Assistant: It is 2.<|end_of_turn|>GPT4 Correct User: And 2+2?<|end_of_turn|>GPT4 Correct Assistant:",
    "oasst_llama": "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n<|prompter|>What is 1+1?</s><|assistant|>It is 2.</s>"
    "<|prompter|>And 2+2?</s><|assistant|>",
    "baichuan": "Be brief.<reserved_102>What is 1+1?<reserved_103>It is 2.<reserved_102>And 2+2?<reserved_103>",
    "baichuan-2": "Be brief.<reserved_106>What is 1+1?<reserved_107>It is 2.<reserved_106>And 2+2?<reserved_107>",
    "openbuddy": "Be brief.\n\nUser: What is 1+1?\nAssistant: It is 2.\nUser: And 2+2?\nAssistant:",
    "redpajama-incite": "Be brief.\n<human>: What is 1+1?\n<bot>: It is 2.\n<human>: And 2+2?\n<bot>:",
    "snoozy": "### Instruction:\nBe brief.\n### Prompt: What is 1+1?\n### Response: It is 2.\n### Prompt: And 2+2?\n"
    "### Response:",
    "phind": "### System Prompt\nBe brief.\n\n### User Message: What is 1+1?\n\n### Assistant: It is 2.\n\n### "
    "User Message: And 2+2?\n\n### Assistant:",
    "intel": "### System:\nBe brief.\n### User:\nWhat is 1+1?\n### Assistant:\nIt is 2.\n### User:\nAnd 2+2?\n### "
    "Assistant:\n",
    "open-orca": "Be brief.<|end_of_turn|>\nUser: What is 1+1?<|end_of_turn|>\nAssistant: It is 2.<|end_of_turn|>\n"
    "User: And 2+2?<|end_of_turn|>\nAssistant: ",
    "mistrallite": "<|system|>Be brief.</s><|prompter|>What is 1+1?</s><|assistant|>It is 2.</s><|prompter|>"
    "And 2+2?</s><|assistant|>",
    "pygmalion": "<|system|>Be brief.<|user|>What is 1+1?<|model|>It is 2.<|user|>And 2+2?<|model|>",
    "chatglm3": "<|system|>\n Be brief.<|user|>\n What is 1+1?<|assistant|>\n It is 2.<|user|>\n And 2+2?<|assistant|>",
    "saiga": "system\nBe brief.</s><s>user\nWhat is 1+1?</s><s>bot\nIt is 2.</s><s>user\nAnd 2+2?</s><s>bot\n",
    "chatml-function-calling": CHATML_EXPECTED,
}


def test_all_formats_are_tested():
    assert set(FORMATS) == {*EXPECTED, "qwen"}


def test_every_name_of_llama_cpp_python_is_known():
    """Its registry, by name: the module needs its library."""
    import ast

    need("stock", "llama_cpp")
    source = Path(find_spec("llama_cpp").submodule_search_locations[0], "llama_chat_format.py").read_text()
    decorators = [d for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) for d in f.decorator_list]
    wanted = {"register_chat_format", "register_chat_completion_handler"}
    names = {d.args[0].value for d in decorators if isinstance(d, ast.Call) and d.func.id in wanted}
    assert len(names) >= 27
    assert names == {*FORMATS, *FUNCTIONARY}
    for name in FUNCTIONARY:
        with pytest.raises(InvalidInput, match="have their own template"):
            find(name)


def test_every_name_of_llama_cpp_is_known():
    own = ctypes.CDLL(str(library_path()))
    names = (ctypes.c_char_p * 256)()
    n = own.llama_chat_builtin_templates(names, 256)
    assert n > 50
    assert {name.decode() for name in names[:n]} - FORMATS.keys() == OF_LLAMA_CPP


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", EXPECTED["llama-3"]),
        ("phi3", "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is 1+1?<|end|>\n<|assistant|>\nIt is 2.<|end|>\n"
         "<|user|>\nAnd 2+2?<|end|>\n<|assistant|>\n"),
        ("mistral-v7-tekken", "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]What is 1+1?[/INST]It is 2.</s>"
         "[INST]And 2+2?[/INST]"),
    ],
)  # fmt: skip
def test_formats_of_llama_cpp(embedded_model, name, expected):
    with Llama(str(embedded_model), vocab_only=True, chat_format=name, verbose=False) as llm:
        assert llm.apply_template([*SYSTEM, *CONVERSATION]) == expected


@pytest.mark.parametrize("name", ["nonsense", "chat_template.nonsense", "functionary"])
def test_an_unknown_format_fails_at_the_start(embedded_model, name):
    with pytest.raises(ValueError, match=name):
        Llama(str(embedded_model), vocab_only=True, chat_format=name, verbose=False)


def test_a_model_without_a_template_says_so_once(embedded_model, caplog):
    with Llama(str(embedded_model), vocab_only=True, verbose=False) as llm:
        llm.apply_template(CONVERSATION)
        llm.apply_template(CONVERSATION)
    assert [record.getMessage() for record in caplog.records] == [NO_TEMPLATE]


def test_a_required_call_is_the_whole_answer(folder):
    """Of every template that knows tools: llama.cpp's grammar, without the text in front of the call."""
    with Llama(str(folder / "ggml-vocab-qwen2.gguf"), vocab_only=True, verbose=False) as llm:
        checked = 0
        for path in sorted(folder.glob("*.jinja")):
            template = ChatTemplate(llm._model, path.read_text())
            rendered = template.render({"messages": CONVERSATION, "tools": [TOOL], "tool_choice": "required"})
            if rendered.constraint is not None:
                Sampler(llm._model, SamplingParams(seed=0), rendered.constraint)  # no rule is missing
                checked += 1
        assert checked > 30


def test_a_token_may_end_a_schema_and_continue(folder):
    """Or begin before one: the tokens are those that a model writes, whatever borders they cross."""
    said = b'<tool_call>\n{"name": "f", "arguments": {"a": ["x"], "b": "y"}}\n</tool_call>'
    parameters = {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "string"}}}
    request = {"messages": CONVERSATION, "tool_choice": "required"}
    with Llama(str(folder / "ggml-vocab-qwen2.gguf"), vocab_only=True, verbose=False) as llm:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        rendered = ChatTemplate(llm._model, TOOLS).render({**request, "tools": tools})
        sampler = Sampler(llm._model, SamplingParams(seed=0, temp=0.0), rendered.constraint)
        tokens = [*llm.tokenize(said, add_bos=False, special=True), llm.token_eos()]
        pieces = [llm._model.piece(token) for token in tokens]
        assert b' {"' in pieces and b'"}}\n' in pieces
        for token in tokens:
            row = np.zeros(llm.n_vocab(), np.float32)
            row[token] = 1.0
            assert sampler.sample(row) == token


@pytest.mark.parametrize("name", EXPECTED)
def test_named_formats(embedded_model, name):
    with Llama(str(embedded_model), vocab_only=True, chat_format=name, verbose=False) as llm:
        assert llm.apply_template([*SYSTEM, *CONVERSATION]) == EXPECTED[name]
