"""Request fields of four APIs: each is read, refused if it would change the answer, or harmless.

The names are those of vLLM 0.32.0, SGLang 0.5.23, OpenRouter (its TypeScript SDK's ChatRequest and
its request page, November 2026) and Moonshot (kimi-k2.6's OpenAPI description, November 2026).
"""

import json

import pytest
from http_runs import MESSAGES, body

from pipedraft.inference.serving.errors import RequestError
from pipedraft.inference.serving.fields import HARMLESS, WITHOUT_EFFECT
from pipedraft.inference.serving.requests import ChatRequest, CompletionRequest, parse

READ = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
OPENAI = """frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages metadata
    modalities model n parallel_tool_calls presence_penalty response_format seed service_tier stop
    stream stream_options temperature tool_choice tools top_logprobs top_p user"""
VLLM = """add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt
    chat_template chat_template_kwargs continue_final_message documents ec_transfer_params echo
    ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty
    logprob_token_ids media_io_kwargs min_p min_tokens mm_payload mm_processor_kwargs priority
    prompt prompt_embeds prompt_logprobs reasoning_effort repetition_detection repetition_penalty
    request_id return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
    spaces_between_special_tokens stop_token_ids stream_interval structured_outputs suffix
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
    watermarking"""
SGLANG = """best_of bootstrap_host bootstrap_port bootstrap_room cache_salt continue_final_message
    custom_labels custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank
    ebnf echo extra_key ignore_eos images_config input_ids json_schema lora_path max_dynamic_patch
    min_dynamic_patch min_p min_tokens mm_processor_kwargs no_stop_trim priority prompt
    reasoning_effort regex repetition_penalty return_cached_tokens_details
    return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states
    return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext return_prompt_token_ids
    return_routed_experts return_sampling_mask return_spec_tokens_details return_token_ids rid
    routed_dp_rank routed_experts_start_len sampling_logprobs_mode separate_reasoning session_id
    session_params skip_special_tokens stop_regex stop_token_ids stream_reasoning suffix task
    thinking top_k use_audio_in_video video_config watermark"""
OPENROUTER = """cache_control debug deferred_tools image_config include_reasoning min_p models
    plugins prediction preset prompt provider reasoning repetition_penalty route session_id
    stop_server_tools_when structured_outputs top_a top_k trace transforms usage verbosity
    web_search_options"""
MOONSHOT = "prompt_cache_key safety_identifier thinking use_search"


@pytest.mark.parametrize("names", [OPENAI, VLLM, SGLANG, OPENROUTER, MOONSHOT])
def test_every_field_of_an_api_has_one_rule(names):
    for name in names.split():
        rules = [name in READ, name in HARMLESS, name in WITHOUT_EFFECT]
        # The read fields of one path may be refused on the other.
        assert any(rules) and not (rules[1] and (rules[0] or rules[2])), (name, rules)


CHANGES = {
    # vLLM
    "thinking_token_budget": 64,
    "watermarking": True,
    "logprob_token_ids": [1, 2],
    "prompt_embeds": "AAAA",
    "repetition_detection": {"max_pattern_size": 4},
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"do_remote_decode": True},
    "return_token_offsets": True,
    "return_prompt_text": True,
    "truncate_prompt_tokens": 5,
    # SGLang
    "stop_regex": "[0-9]",
    "no_stop_trim": True,
    "custom_logit_processor": "x",
    "custom_params": {"a": 1},
    "session_params": {"id": "a"},
    "input_ids": [1, 2, 3],
    "task": "title",
    "watermark": {"key": "a"},
    "return_hidden_states": "last",
    "return_meta_info": True,
    "sampling_logprobs_mode": "support",
    "bootstrap_room": 1,
    # OpenRouter
    "models": ["a/b", "c/d"],
    "plugins": [{"id": "web"}],
    "transforms": ["middle-out"],
    "reasoning": {"effort": "high"},
    "preset": "mine",
    "structured_outputs": True,
    "top_a": 0.1,
    # Moonshot
    "thinking": {"type": "disabled"},
    "use_search": True,
}
"""Field -> a value that would change the answer."""
SAME = {
    **{"session_id": "a", "stream_interval": 8, "truncation_side": "left", "mm_payload": "refs"},
    **{"routed_experts_prompt_start": 3, "media_io_kwargs": {"video": {"fps": 1}}},
    **{"rid": "a", "extra_key": "k", "custom_labels": {"a": "b"}, "routed_dp_rank": 0},
    **{"return_cached_tokens_details": True, "stream_reasoning": False, "video_config": {"a": 1}},
    **{"provider": {"order": ["x"]}, "route": "fallback", "usage": {"include": True}},
    **{"trace": {"trace_id": "a"}, "debug": {"echo_upstream_body": True}},
    **{"cache_control": {"type": "ephemeral"}, "prompt_cache_key": "a", "safety_identifier": "b"},
    # Values without effect of fields that are refused otherwise.
    **{"watermarking": False, "logprob_token_ids": [], "no_stop_trim": False, "stop_regex": []},
    **{"watermark": {"enabled": False}, "return_hidden_states": False, "vllm_xargs": {}},
    **{"models": [], "plugins": [], "transforms": [], "structured_outputs": False},
    **{"reasoning": None, "thinking": None, "use_search": False, "return_meta_info": False},
}
"""Field -> a value that changes the form of the answer, or nothing."""
ASKED = [({"messages": MESSAGES}, ChatRequest), ({"prompt": "a"}, CompletionRequest)]


@pytest.mark.parametrize(("content", "kind"), ASKED, ids=["chat", "completion"])
def test_fields_that_change_the_answer_are_refused_by_name(content, kind):
    def read(**fields):
        return parse(json.dumps(content | fields).encode(), kind)

    for name, value in CHANGES.items():
        with pytest.raises(RequestError, match=f"^{name}: not supported; ") as found:
            read(**{name: value})
        assert found.value.code == "unsupported_parameter"
    for name, value in SAME.items():
        asked, ignored = read(**{name: value})
        assert asked == read()[0] and not ignored, name


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"partial": True}, "messages.partial"),  # Moonshot: continue this message
        ({"prefix": True}, "messages.prefix"),  # DeepSeek's name for it
        ({"partial": False, "prefix": False}, ""),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "t"}]}, "messages.reasoning"),
        ({"reasoning_details": [], "reasoning": "t"}, ""),
        ({"phase": "commentary"}, "messages.phase"),
        ({"task": "title"}, "messages.task"),
        ({"tools": [{"type": "function"}]}, "messages.tools"),
    ],
)
def test_fields_of_a_message(fields, refused):
    said = [*MESSAGES, {"role": "assistant", "content": "a", **fields}]
    if refused:
        with pytest.raises(RequestError, match=refused):
            parse(body(messages=said), ChatRequest)
    else:
        asked, ignored = parse(body(messages=said), ChatRequest)
        assert len(asked.messages) == 2 and not ignored
