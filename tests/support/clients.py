"""What known clients send by default, written from their public sources and reports: (path, body, what is unserved)."""

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
OPEN = {"type": "function", "name": "open_file", "description": "Opens a file", "strict": False, "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "open_file", "description": "Opens a file", "parameters": SCHEMA}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "patch" /[a-z]+/'}
CODE = "def add(a, b):\n    return "


def _text(text, kind="input_text"):
    return {"type": kind, "text": text}


def _cached(text):
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


# github.com/openai/codex, codex-rs: a turn after a thought, a call of each kind and a search
CODEX = {
    "model": "any",
    "instructions": "You write code.",
    "input": [
        {"type": "message", "role": "developer", "content": [_text("Sandbox: read-only.")]},
        {"type": "message", "role": "user", "content": [_text("Fix the bug.")]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAAB..."},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "bug"}},
        {"type": "function_call", "name": "open_file", "arguments": '{"path":"a.py"}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "x = 1"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": "patch a"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [_text("done")]},
        {"type": "message", "role": "user", "content": [_text("Thanks. And now?")]},
    ],
    "tools": [
        OPEN,
        {"type": "custom", "name": "apply_patch", "description": "Changes files.", "format": GRAMMAR},
        {"type": "namespace", "name": "notes", "description": "Notes", "tools": [OPEN | {"name": "add_note"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "client_metadata": {"x": "y"},
}
CODEX_UNSERVED = {
    "include",
    "truncation",
    "tools[1].format",
    "tools[3]",
    "input[2].encrypted_content",
    "input[3]",
    "text.verbosity",
    "reasoning_effort",
}

# Claude Code, from its public reports
CLAUDE_CODE = {
    "model": "any",
    "max_tokens": 8,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch=a112b;"},
        _cached("You are a coding agent."),
        _cached("Be brief."),
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>none</reminder>"}, _cached("Fix it.")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "sig"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "bug"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s1",
                    "content": [
                        {"type": "web_search_result", "url": "http://a", "title": "A", "encrypted_content": "e"}
                    ],
                },
                {"type": "text", "text": "Found."},
                {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "edit"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "tool_reference", "tool_name": "Edit"}],
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ],
    "tools": [
        {"name": "Edit", "description": "Edits", "input_schema": SCHEMA, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CLAUDE_CODE_UNSERVED = {
    "system[0]",
    "thinking.display",
    "context_management",
    "messages[1].redacted_thinking",
    "tools[1]",
    "reasoning_effort",
}

# SillyTavern, public/scripts/textgen-settings.js: text completion with its neutral presets
SILLYTAVERN = {
    "prompt": "Alice: Hello\nBob:",
    "model": "any",
    "max_new_tokens": 8,
    "max_tokens": 8,
    "n_predict": 8,
    "num_predict": 8,
    "num_ctx": 4096,
    "temperature": 0.7,
    "top_p": 0.9,
    "typical_p": 1,
    "typical": 1,
    "sampler_seed": 3,
    "seed": 3,
    "min_p": 0,
    "repetition_penalty": 1.1,
    "repeat_penalty": 1.1,
    "rep_pen": 1.1,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "repeat_last_n": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 0,
    "skew": 0,
    "min_tokens": 0,
    "min_length": 0,
    "min_keep": 0,
    "num_beams": 1,
    "length_penalty": 1,
    "early_stopping": False,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "samplers": [
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "tfs_z",
        "typical_p",
        "top_p",
        "min_p",
        "adaptive_p",
        "xtc",
        "temperature",
    ],
    "stopping_strings": ["\nAlice:"],
    "stop": ["\nAlice:"],
    "truncation_length": 4096,
    "ban_eos_token": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "tfs_z": 1,
    "mirostat_mode": 0,
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "llamacpp",
    "api_server": "http://127.0.0.1:8080/",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "guidance_scale": 1,
    "negative_prompt": "",
    "penalty_alpha": 0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "do_sample": True,
    "temperature_last": False,
    "speculative_ngram": False,
    "grammar": "",
    "json_schema": None,
    "logit_bias": [],
    "n_probs": 10,
    "cache_prompt": True,
    "stream": True,
}

# ggml-org/llama.vim, autoload/llama.vim: a completion of code
LLAMA_VIM_UNSERVED = {"n_indent", "t_max_prompt_ms", "t_max_predict_ms", "samplers", "input_extra.time"}
LLAMA_VIM = {
    "id_slot": 0,
    "input_prefix": "import os\n",
    "input_suffix": "\nprint(add(1, 2))\n",
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": CODE,
    "n_predict": 8,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "tokens_cached", "truncated"],
}

# continuedev/continue, core/llm: its provider for llama.cpp, and the one for OpenAI
CONTINUE = {
    "prompt": CODE,
    "stream": True,
    "n_predict": 8,
    "temperature": 0.01,
    "top_p": None,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "min_p": None,
    "mirostat": None,
    "stop": ["\n\n"],
    "top_k": None,
}
CONTINUE_CHAT = {
    "model": "any",
    "messages": [{"role": "system", "content": "You write code."}, {"role": "user", "content": [_text("hi", "text")]}],
    "max_tokens": 8,
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [CHAT_TOOL],
    "parallel_tool_calls": False,
    "reasoning_effort": None,
}

OPEN_WEBUI = {
    "model": "any",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.8,
    "num_ctx": 8192,
    "keep_alive": "5m",
    "max_tokens": 8,
    "metadata": {"chat_id": "c"},
    "chat_id": "c",
    "session_id": "s",
}

LIBRECHAT = {
    "model": "any",
    "user": "u1",
    "stream": True,
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "max_tokens": 8,
}

# clients of KoboldCpp that are pointed at /v1/completions, with the fields that its API documents
KOBOLD = {
    "prompt": "Once",
    "max_context_length": 4096,
    "max_length": 8,
    "rep_pen": 1.07,
    "rep_pen_range": 360,
    "rep_pen_slope": 0.7,
    "temperature": 0.75,
    "tfs": 1,
    "top_a": 0,
    "top_k": 100,
    "top_p": 0.92,
    "typical": 1,
    "min_p": 0,
    "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "memory": "",
    "trim_stop": True,
    "quiet": True,
    "use_default_badwordsids": False,
    "singleline": False,
    "stop_sequence": ["\n\n"],
}

KOBOLD_UNSERVED = {"max_context_length", "rep_pen_slope", "sampler_order"}

# vLLM's documented extra parameters
VLLM = {
    "model": "any",
    "messages": [{"role": "user", "content": "hi"}],
    "max_completion_tokens": 8,
    "top_k": 20,
    "min_p": 0.0,
    "repetition_penalty": 1.05,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "stop_token_ids": [2],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 2,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "priority": 0,
    "request_id": "r1",
    "chat_template_kwargs": {"enable_thinking": False},
}

# github.com/langchain-ai/langchain, partners/ollama: a turn after a call, with all its options set
LANGCHAIN_OLLAMA = {
    "model": "any",
    "messages": [
        {"role": "user", "content": "Open a.py.", "images": []},
        {
            "role": "assistant",
            "content": "",
            "images": [],
            "tool_calls": [
                {"type": "function", "id": "t1", "function": {"name": "open_file", "arguments": {"path": "a.py"}}}
            ],
        },
        {"role": "tool", "content": "x = 1", "images": [], "tool_call_id": "t1"},
    ],
    "tools": [CHAT_TOOL],
    "options": {"num_ctx": 4096, "num_gpu": 1, "num_predict": 8, "temperature": 0.2, "tfs_z": 0.9, "stop": ["END"]},
    "keep_alive": "5m",
    "think": False,
    "format": "",
    "stream": True,
}
# github.com/continuedev/continue, core/llm/llms/Ollama.ts: what is missing between two texts
CONTINUE_OLLAMA = {
    "model": "any",
    "prompt": CODE,
    "suffix": "\n",
    "raw": True,
    "options": {"temperature": 0.01, "num_predict": 8, "stop": ["\n\n"], "num_ctx": 4096, "num_thread": 4},
    "keep_alive": 1800,
    "stream": True,
}
# github.com/open-webui/open-webui, utils/payload.py: parameters of a chat that Ollama answers
OPEN_WEBUI_OLLAMA = {
    "model": "any",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "stream": True,
    "options": {"temperature": 0.7, "num_predict": 8, "num_batch": 512, "use_mmap": True, "new_topic_penalty": 0.1},
}

TUNING = {"options.num_batch", "options.use_mmap", "options.new_topic_penalty"}
CLIENTS = {
    "codex": ("/v1/responses", CODEX, CODEX_UNSERVED),
    "claude-code": ("/v1/messages", CLAUDE_CODE, CLAUDE_CODE_UNSERVED),
    "sillytavern": ("/completion", SILLYTAVERN, {"num_ctx", "truncation_length", "samplers"}),
    "sillytavern-openai": ("/v1/completions", SILLYTAVERN, {"num_ctx", "truncation_length", "samplers", "n_probs"}),
    "llama.vim": ("/infill", LLAMA_VIM, LLAMA_VIM_UNSERVED),
    "continue": ("/completion", CONTINUE, set()),
    "continue-chat": ("/v1/chat/completions", CONTINUE_CHAT, set()),
    "open-webui": ("/v1/chat/completions", OPEN_WEBUI, {"num_ctx", "keep_alive"}),
    "open-webui-ollama": ("/api/chat", OPEN_WEBUI_OLLAMA, TUNING),
    "langchain-ollama": (
        "/api/chat",
        LANGCHAIN_OLLAMA,
        {"options.num_ctx", "options.num_gpu", "options.tfs_z", "keep_alive"},
    ),
    "continue-ollama": ("/api/generate", CONTINUE_OLLAMA, {"options.num_ctx", "options.num_thread", "keep_alive"}),
    "librechat": ("/v1/chat/completions", LIBRECHAT, set()),
    "kobold": ("/v1/completions", KOBOLD, KOBOLD_UNSERVED),
    "vllm": ("/v1/chat/completions", VLLM, {"add_special_tokens"}),
}
