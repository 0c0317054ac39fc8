"""Fields of other servers' APIs that are not supported: values without effect, and reasons."""

from typing import Any

Known = dict[str, tuple[tuple[Any, ...], str]]

# fields that request nothing: clients send them for their own records
LABELS = frozenset(
    """
    model user metadata cache_control safety_identifier prompt_cache_key client_metadata prompt_cache_retention
    api_type api_server include_reasoning request_id session_id chat_id
    speculative.n_min speculative.p_min
    """.split()
)

NOT_STORED = "the server stores nothing, send the whole conversation"
# (values that request the existing behavior, reason) of fields that would change the answer
REFUSED: Known = {
    "background": ((False,), "responses are generated while the client waits"),
    "best_of": ((1,), "request n answers and choose one"),
    "conversation": ((), NOT_STORED),
    "image_data": (([],), "images are not supported"),
    "lora": (([],), "adapters are chosen when the server starts, with --lora"),
    "mcp_servers": (([],), "clients call tools, not the server"),
    "modalities": ((["text"],), "answers are text"),
    "n_keep": ((0,), "only /completion has it"),
    "post_sampling_probs": ((False,), "only /completion has it"),
    "previous_response_id": ((), NOT_STORED),
}

NO_SAMPLER = "llama.cpp has no such sampler"
ONE_MODEL = "the server was started with its context; --ctx-size sets it"
SPEED = "it changes the speed, not the answer"
# (values that request the existing behavior, reason) of fields that are reported and have no effect
WITHOUT_EFFECT: Known = {
    # OpenAI, Anthropic
    "context_management": (([], {}, {"edits": []}), "messages are used unchanged"),
    "include": (([],), "responses always include everything"),
    "service_tier": (("auto", "default", "standard_only"), ""),
    "speed": (("standard",), ""),
    "store": ((False,), "nothing is stored here"),
    "truncation": (("disabled",), "--overflow sets what is evicted from a full context"),
    "verbosity": (("medium",), "the prompt does not contain it"),
    "web_search_options": (({},), "the server does not search"),
    # llama-server
    "backend_sampling": ((False,), SPEED),
    "n_discard": ((0,), ""),
    "n_indent": ((0,), ""),
    "parse_tool_calls": ((True,), ""),
    "penalize_nl": ((False, True), ""),  # llama.cpp removed it
    "reasoning_format": (("auto", "deepseek"), "--reasoning-format sets it"),
    "speculative.n_max": ((0,), SPEED),
    "t_max_predict_ms": ((0, -1), "max_tokens ends an answer"),
    "t_max_prompt_ms": ((0, -1), ""),
    # vLLM
    "add_special_tokens": ((True,), ""),
    "chat_template": ((), "--chat-template-file sets it"),
    "detokenize": ((True,), ""),
    "include_stop_str_in_output": ((False,), ""),
    "length_penalty": ((1,), "there is no beam search"),
    "priority": ((0,), "requests are processed in order"),
    "skip_special_tokens": ((True,), "special tokens are not part of the text"),
    "spaces_between_special_tokens": ((True,), ""),
    "use_beam_search": ((False,), "there is no beam search"),
    # Ollama
    "keep_alive": ((), "the model stays loaded while the server runs"),
    "num_ctx": ((), ONE_MODEL),
    "options": (({},), "these are fields of /api/chat and /api/generate"),
    # text-generation-webui, KoboldCpp and the clients that write for all of them
    "add_bos_token": ((True,), ""),
    "banned_strings": (([],), ""),
    "banned_tokens": (([], ""), "logit_bias forbids tokens"),
    "custom_token_bans": (([], ""), "logit_bias forbids tokens"),
    "do_sample": ((True,), "temperature 0 is greedy"),
    "dynamic_temperature": ((False, True), ""),  # dynatemp_range has the numbers
    "dynatemp_high": ((), "dynatemp_range is served"),
    "dynatemp_low": ((), "dynatemp_range is served"),
    "early_stopping": ((False,), "there is no beam search"),
    "encoder_repetition_penalty": ((1,), NO_SAMPLER),
    "epsilon_cutoff": ((0,), NO_SAMPLER),
    "eta_cutoff": ((0,), NO_SAMPLER),
    "grammar_string": (("",), "grammar is served"),
    "guidance_scale": ((1,), NO_SAMPLER),
    "json_schema_allow_empty": ((False, True), ""),
    "max_context_length": ((), ONE_MODEL),
    "max_tokens_second": ((0,), ""),
    "memory": (("",), "send it at the beginning of the prompt"),
    "negative_prompt": (("",), NO_SAMPLER),
    "no_repeat_ngram_size": ((0,), NO_SAMPLER),
    "num_beams": ((1,), "there is no beam search"),
    "penalty_alpha": ((0,), NO_SAMPLER),
    "quiet": ((False, True), ""),
    "rep_pen_slope": ((0, 1), NO_SAMPLER),
    "repetition_decay": ((0,), NO_SAMPLER),
    "sampler_order": ((), "samplers is served, by llama.cpp's names"),
    "sampler_priority": ((), "samplers is served, by llama.cpp's names"),
    "singleline": ((False,), "stop ends an answer at a line break"),
    "skew": ((0,), NO_SAMPLER),
    "smoothing_curve": ((1,), NO_SAMPLER),
    "smoothing_factor": ((0,), NO_SAMPLER),
    "speculative_ngram": ((False,), SPEED),
    "temperature_last": ((False,), "samplers is served, by llama.cpp's names"),
    "tfs": ((1,), "llama.cpp removed it"),
    "tfs_z": ((1,), "llama.cpp removed it"),
    "top_a": ((0,), NO_SAMPLER),
    "trim_stop": ((True,), "stop strings are never part of an answer"),
    "truncation_length": ((), ONE_MODEL),
    "use_default_badwordsids": ((False,), "logit_bias forbids tokens"),
}
