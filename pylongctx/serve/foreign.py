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
    "reasoning_format": ("auto", "deepseek"),
    "rep_pen_slope": (0, 1),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}

NOT_STORED = "the server stores nothing, send the whole conversation"
# fields that would change the answer, and why they are refused
REFUSED = {
    "background": "responses are generated while the client waits",
    "best_of": "request n answers and choose one",
    "conversation": NOT_STORED,
    "image_data": "images are not supported",
    "lora": "adapters are chosen when the server starts, with --lora",
    "mcp_servers": "clients call tools, not the server",
    "modalities": "answers are text",
    "n_keep": "only /completion has it",
    "post_sampling_probs": "only /completion has it",
    "previous_response_id": NOT_STORED,
}
