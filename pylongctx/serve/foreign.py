"""Fields of other servers' APIs that are not supported: which values ask for nothing, and which fields are refused."""

from typing import Any

# fields that request nothing with any value: clients send them for their own records, or other fields have the numbers
LABELS = frozenset(
    """
    model user metadata cache_control safety_identifier prompt_cache_key client_metadata prompt_cache_retention
    api_type api_server include_reasoning request_id session_id chat_id
    speculative.n_min speculative.p_min dynamic_temperature json_schema_allow_empty penalize_nl quiet
    """.split()
)

SWITCHES = """
    add_bos_token add_special_tokens detokenize do_sample parse_tool_calls skip_special_tokens
    spaces_between_special_tokens trim_stop
    """.split()
FACTORS = """
    best_of encoder_repetition_penalty guidance_scale length_penalty num_beams smoothing_curve tfs tfs_z
    """.split()
# values that request the existing behavior; of other fields, these are the false, zero and empty ones
USUAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SWITCHES, (True,)),
    **dict.fromkeys(FACTORS, (1,)),
    "context_management": ([], {}, {"edits": []}),
    "modalities": (["text"],),
    "reasoning_budget_tokens": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "rep_pen_slope": (0, 1),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "thinking_budget_tokens": (-1,),
    "thinking_token_budget": (-1,),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}

NOT_STORED = "the server stores nothing, send the whole conversation"
ONLY_CHATS = "only conversations have it"
ONLY_COMPLETION = "only /completion has it"
BANNED = "forbid tokens with logit_bias, a list of [token or text, false]"
# fields that would change the answer, and why they are refused where a body does not have them
REFUSED = {
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), ONLY_CHATS),
    **dict.fromkeys(("functions", "function_call"), "only /v1/chat/completions has it, send tools"),
    **dict.fromkeys(("reasoning_effort", "enable_thinking", "chat_template_kwargs", "parse_special"), ONLY_CHATS),
    **dict.fromkeys(("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"), ONLY_CHATS),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "messages"), ONLY_CHATS),
    **dict.fromkeys(("banned_strings", "banned_tokens", "bad_words", "custom_token_bans"), BANNED),
    **dict.fromkeys(("allowed_token_ids", "logits_processors"), "constrain answers with a grammar or a schema"),
    **dict.fromkeys(("num_beams", "use_beam_search"), "answers are sampled, without beam search"),
    "guidance_scale": "there is no classifier-free guidance",
    "echo": "only /v1/completions has it",
    "suffix": "only /v1/completions and /api/generate have it, and /infill as input_suffix",
    "background": "responses are generated while the client waits",
    "best_of": "request n answers and choose one",
    "conversation": NOT_STORED,
    "image_data": "images are not supported",
    "lora": "adapters are chosen when the server starts, with --lora",
    "mcp_servers": "clients call tools, not the server",
    "modalities": "answers are text",
    "n_keep": ONLY_COMPLETION,
    "post_sampling_probs": ONLY_COMPLETION,
    "previous_response_id": NOT_STORED,
}
