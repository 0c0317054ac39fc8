"""Chat formats by name: llama_cpp's templates, and functions that answer chats instead of a template."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pylongctx.errors import InvalidInput

# llama_cpp's protocol: handler(llama=..., messages=..., and the other arguments of create_chat_completion by name)
LlamaChatCompletionHandler = Callable[..., Any]
_HANDLERS: dict[str, LlamaChatCompletionHandler] = {}
LLAMA_3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
# llama.cpp's own formats (llama_chat_builtin_templates) that are not defined above; without tools
OF_LLAMA_CPP = frozenset(
    """
    bailing bailing-think bailing2 chatglm4 command-r deepseek deepseek-ocr deepseek2 deepseek3 exaone-moe exaone3
    exaone4 falcon3 gigachat glmedge gpt-oss granite granite-4.0 granite-4.1 grok-2 hunyuan-dense hunyuan-moe hunyuan-vl
    kimi-k2 llama2 llama2-sys llama2-sys-bos llama2-sys-strip llama3 llama4 megrez minicpm mistral-v1 mistral-v3
    mistral-v3-tekken mistral-v7 mistral-v7-tekken monarch orion pangu-embedded phi3 phi4 rwkv-world seed_oss smolvlm
    solar-open vicuna-orca yandex
    """.split()
)
# handlers of llama_cpp that need a Hugging Face tokenizer
FUNCTIONARY = ("functionary", "functionary-v1", "functionary-v2")


def register_chat_completion_handler(name: str) -> Callable[[LlamaChatCompletionHandler], LlamaChatCompletionHandler]:
    """Return a decorator that registers a function as the handler of ``chat_format=name``.

    Raises
    ------
    ValueError
        When the name is already registered.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> @register_chat_completion_handler("parrot")
    ... def parrot(llama, messages, **kwargs):
    ...     return {"choices": [{"message": {"role": "assistant", "content": messages[-1]["content"]}}]}
    >>> with Llama("model.gguf", chat_format="parrot", n_ctx=512, verbose=False) as talking:
    ...     answer = talking.create_chat_completion([{"role": "user", "content": "Hello"}])
    >>> answer["choices"][0]["message"]["content"]
    'Hello'
    >>> unregister_chat_completion_handler("parrot")
    """

    def register(handler: LlamaChatCompletionHandler) -> LlamaChatCompletionHandler:
        if name in _HANDLERS:
            raise ValueError(f"a chat handler named {name!r} is already registered")
        _HANDLERS[name] = handler
        return handler

    return register


def unregister_chat_completion_handler(name: str) -> None:
    """Remove a handler; KeyError when there is none.

    Examples
    --------
    >>> register = register_chat_completion_handler("parrot")
    >>> handler = register(lambda **arguments: {})
    >>> unregister_chat_completion_handler("parrot")
    """
    del _HANDLERS[name]


def registered_handler(name: str | None) -> LlamaChatCompletionHandler | None:
    """Return the handler of a name."""
    return _HANDLERS.get(name) if name else None


class Format(NamedTuple):
    """A template (Jinja text or a name in llama.cpp), and stop strings for vocabularies without a fitting end token."""

    source: str
    stops: tuple[str, ...] = ()
    with_tools: str = ""
    is_name: bool = False


def _turns(system: str, user: str, assistant: str, start: str, stops: tuple[str, ...] = ()) -> Format:
    """Return a format with a frame per role, where ``%`` is the content; without a system frame, it is merged."""
    branches = []
    for role, frame in (("system", system), ("user", user), ("assistant", assistant)):
        before, _, after = frame.partition("%")
        if frame:
            branches.append(f"message['role'] == {role!r} %}}{{{{ {before!r} + message['content'] + {after!r} }}}}")
    source = "{% for message in messages %}{% if " + "{% elif ".join(branches) + "{% endif %}{% endfor %}"
    return Format(source + f"{{% if add_generation_prompt %}}{{{{ {start!r} }}}}{{% endif %}}", stops)


# with tools in the form of Hermes and Qwen
CHATML = Format(
    """{%- if tools %}
{%- set tail = '\\n\\n# Tools\\n\\nYou may call functions. Their signatures are within <tools></tools>:\\n<tools>' %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + tail }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call return a JSON object within <tool_call></tool_call>:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    ("<|im_end|>",),
)


LLAMA_2 = Format(
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


MISTRAL = Format(
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


FORMATS = {
    "chatml": CHATML,
    "qwen": CHATML,
    "llama-2": LLAMA_2,
    "llama-3": _turns(
        LLAMA_3.format("system") + "%<|eot_id|>",
        LLAMA_3.format("user") + "%<|eot_id|>",
        LLAMA_3.format("assistant") + "%<|eot_id|>",
        LLAMA_3.format("assistant"),
        ("<|eot_id|>",),
    ),
    "mistral-instruct": MISTRAL,
    "zephyr": _turns(
        "<|system|>\n%</s>\n", "<|user|>\n%</s>\n", "<|assistant|>\n%</s>\n", "<|assistant|>\n", ("</s>",)
    ),
    "gemma": _turns(
        "",
        "<start_of_turn>user\n%<end_of_turn>\n",
        "<start_of_turn>model\n%<end_of_turn>\n",
        "<start_of_turn>model\n",
        ("<end_of_turn>",),
    ),
    "oasst_llama": _turns(
        "[INST] <<SYS>>\n%\n<</SYS>>\n\n", "<|prompter|>%</s>", "<|assistant|>%</s>", "<|assistant|>", ("</s>",)
    ),
    "baichuan": _turns("%", "<reserved_102>%", "<reserved_103>%", "<reserved_103>", ("<reserved_102>",)),
    "baichuan-2": _turns("%", "<reserved_106>%", "<reserved_107>%", "<reserved_107>", ("<reserved_106>",)),
    "openbuddy": _turns("%\n\n", "User: %\n", "Assistant: %\n", "Assistant:", ("User:",)),
    "redpajama-incite": _turns("%\n", "<human>: %\n", "<bot>: %\n", "<bot>:", ("<human>",)),
    "snoozy": _turns("### Instruction:\n%\n", "### Prompt: %\n", "### Response: %\n", "### Response:", ("###",)),
    "phind": _turns(
        "### System Prompt\n%\n\n",
        "### User Message: %\n\n",
        "### Assistant: %\n\n",
        "### Assistant:",
        ("### User Message",),
    ),
    "intel": _turns("### System:\n%\n", "### User:\n%\n", "### Assistant:\n%\n", "### Assistant:\n", ("### User:",)),
    "open-orca": _turns(
        "%<|end_of_turn|>\n",
        "User: %<|end_of_turn|>\n",
        "Assistant: %<|end_of_turn|>\n",
        "Assistant: ",
        ("<|end_of_turn|>",),
    ),
    "mistrallite": _turns("<|system|>%</s>", "<|prompter|>%</s>", "<|assistant|>%</s>", "<|assistant|>", ("</s>",)),
    "pygmalion": _turns("<|system|>%", "<|user|>%", "<|model|>%", "<|model|>", ("<|user|>",)),
    "chatglm3": _turns("<|system|>\n %", "<|user|>\n %", "<|assistant|>\n %", "<|assistant|>", ("<|user|>",)),
    "saiga": _turns("<s>system\n%</s>", "<s>user\n%</s>", "<s>bot\n%</s>", "<s>bot\n", ("</s>",)),
    "chatml-function-calling": CHATML,
    "vicuna": _turns("% ", "USER: % ", "ASSISTANT: %</s>", "ASSISTANT:", ("</s>",)),
    "alpaca": _turns(
        "%\n\n",
        "### Instruction:\n%\n\n",
        "### Response:\n%\n\n",
        "### Response:\n",
        ("### Instruction:",),
    ),
    "openchat": _turns(
        "%<|end_of_turn|>",
        "GPT4 Correct User: %<|end_of_turn|>",
        "GPT4 Correct Assistant: %<|end_of_turn|>",
        "GPT4 Correct Assistant:",
        ("<|end_of_turn|>",),
    ),
}


def find(name: str) -> Format:
    """Return a named format, or Jinja text unchanged; InvalidInput for an unknown name."""
    if name in FORMATS:
        return FORMATS[name]
    if name in OF_LLAMA_CPP:
        return Format(name, is_name=True)
    if "{{" in name or "{%" in name:
        return Format(name)
    if name in FUNCTIONARY:
        raise InvalidInput(
            f"chat_format {name!r} is not supported: functionary models have their own template, which is used "
            "without chat_format",
            -1,
        )
    raise InvalidInput(
        f"unknown chat_format {name!r}. Known are {', '.join(sorted(FORMATS.keys() | OF_LLAMA_CPP))}; others can be "
        "given as Jinja text, and without chat_format the model's own template is used",
        -1,
    )
