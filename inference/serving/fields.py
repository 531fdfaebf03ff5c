"""Sort out unparsed request fields, and refuse the unsupported ones."""

import difflib
from collections.abc import Collection, Mapping

from .errors import Json, RequestError

HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "request_id"),
    *("priority", "cache_salt", "include_reasoning", "separate_reasoning"),
    *("guided_decoding_backend", "spaces_between_special_tokens"),
    # Names, traces, routing and caches of servers and gateways.
    *("rid", "session_id", "custom_labels", "extra_key", "cache_control", "trace", "debug"),
    *("provider", "route", "routed_dp_rank", "data_parallel_rank"),
    # How the answer is sent, or what its usage has.
    *("usage", "stream_interval", "stream_reasoning", "return_flat_raw_top_logprobs_b64"),
    *("return_cached_tokens_details", "return_spec_tokens_details"),
    # Details of fields and message parts that are refused themselves.
    *("truncation_side", "routed_experts_prompt_start", "routed_experts_start_len"),
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
    *("images_config", "image_config", "video_config", "use_audio_in_video"),
    *("min_dynamic_patch", "max_dynamic_patch", "stop_server_tools_when"),
}
"""Fields of OpenAI, vLLM, SGLang, OpenRouter and Moonshot without influence on the answer."""
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("prompt_logprobs", "top_logprobs", "mirostat", "dry_multiplier"), (0,)),
    **dict.fromkeys(("xtc_probability", "dynatemp_range", "top_a"), (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("best_of", "num_beams", "beam_width", "tfs_z"), (1,)),
    **dict.fromkeys(("tools", "functions", "documents", "stop_sequences"), ([],)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("logit_bias", "structured_outputs"), ({}, False)),
    **dict.fromkeys(("echo", "use_beam_search", "early_stopping"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids",), (False,)),
    **dict.fromkeys(("do_sample", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("structural_tag", "grammar", "format", "negative_prompt"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "lora_path", "chat_template"), ()),
    **dict.fromkeys(("audio", "web_search_options", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("enable_thinking", "thinking", "think", "thinking_budget", "system"), ()),
    **dict.fromkeys(("options", "extra_body", "num_predict", "n_predict"), ()),
    **dict.fromkeys(("watermarking", "no_stop_trim", "return_hidden_states"), (False,)),
    **dict.fromkeys(("return_routed_experts", "return_prompt_text"), (False,)),
    **dict.fromkeys(("return_token_offsets", "return_prompt_token_ids"), (False,)),
    **dict.fromkeys(("return_input_ids_in_sglext", "return_output_ids_in_sglext"), (False,)),
    **dict.fromkeys(("return_meta_info", "return_sampling_mask", "use_search"), (False,)),
    **dict.fromkeys(("return_flat_raw_output_top_logprobs",), (False,)),
    **dict.fromkeys(("logprob_token_ids", "transforms", "plugins", "models"), ([],)),
    **dict.fromkeys(("vllm_xargs", "custom_params", "session_params"), ({},)),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), ({},)),
    **dict.fromkeys(("thinking_token_budget", "reasoning", "task", "preset"), ()),
    **dict.fromkeys(("prompt_embeds", "input_ids", "sampling_logprobs_mode"), ()),
    **dict.fromkeys(("repetition_detection", "custom_logit_processor", "deferred_tools"), ()),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), ()),
    "disagg_prefill_dp_rank": (),
    "stop_regex": ("", []),
    "watermark": ({"enabled": False}, {}),
    # Known fields are looked up first, so chats still accept max_completion_tokens.
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), ()),
    "add_special_tokens": (False,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": ("medium",),
}
"""Unsupported fields with influence on the answer, each with its harmless values."""
INSTEAD = {
    **dict.fromkeys(
        ("enable_thinking", "thinking", "reasoning", "reasoning_effort"),
        "give the template's variable in chat_template_kwargs",
    ),
    "models": "give the name of one in model",
    "max_completion_tokens": "give max_tokens",
    "max_new_tokens": "give max_tokens",
    "system": "give a message of that role",
}
OF_MESSAGES = {"role", "content", "name", "reasoning_content", "reasoning"}
CHANGES_MESSAGES = {
    *("tool_calls", "function_call", "tool_call_id", "images", "audio"),
    *("prefix", "partial"),  # DeepSeek's and Moonshot's names: the answer continues this message
    *("tools", "task", "phase", "reasoning_details"),
}
"""Unsupported message fields the model would see, or that change what it continues."""
TEXT_PARTS = ("text", "input_text", "output_text")
TYPO = 0.8
"""Minimum similarity to a known field for refusing an unknown name as a typo."""


def split_fields(content: Json, known: Collection[str]) -> tuple[Json, list[str]]:
    """Return the parsed fields, and the names of ignored unknown ones.

    Raises:
        RequestError: an unsupported field would change the answer.
    """
    kept, ignored = dict[str, object](), list[str]()
    for name, value in content.items():
        # Clients send null for what they leave unset.
        if value is None or name in HARMLESS:
            continue
        if name in known:
            kept[name] = value
        elif name in WITHOUT_EFFECT:
            # In Python True equals 1 and False 0, so compare the types as well.
            given = value, isinstance(value, bool)
            if given not in [(one, isinstance(one, bool)) for one in WITHOUT_EFFECT[name]]:
                raise _unsupported(name)
        # A misspelled field would have no effect, unnoticed. Cut: long names compare slowly.
        elif near := difflib.get_close_matches(name[:64], known, 1, TYPO):
            said = f"{name[:64]}: unknown field; did you mean {near[0]}?"
            raise RequestError(said, code="unknown_parameter")
        else:
            ignored.append(name)
    return kept, ignored


def _unsupported(name: str) -> RequestError:
    said = f"{name}: not supported; {INSTEAD.get(name, 'leave it out')}"
    return RequestError(said, code="unsupported_parameter")


def plain_message(turn: object, ignored: list[str]) -> object:
    """Return the fields read from a message, with text parts in one format.

    Names of unknown fields are added to ``ignored``. Unsupported fields are refused if the model
    would see them.
    """
    if not isinstance(turn, dict):
        return turn
    # Clients send back fields from answers: null, or no calls.
    fields = {name: value for name, value in turn.items() if value not in (None, [])}
    for name in sorted(fields.keys() & CHANGES_MESSAGES):
        if fields.pop(name) is not False:
            raise _unsupported(f"messages.{name}")
    ignored += [f"messages.{x}" for x in fields.keys() - OF_MESSAGES - {"cache_control"}]
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = [_plain_part(part, ignored) for part in content]
    return {name: value for name, value in fields.items() if name in OF_MESSAGES}


def _plain_part(part: object, ignored: list[str]) -> object:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        return part
    fields = {name: value for name, value in part.items() if value is not None}
    if fields.get("type", "text") not in TEXT_PARTS:
        return {"type": fields["type"]}  # its type will be refused
    unknown = fields.keys() - {"type", "text", "cache_control", "annotations"}
    ignored += [f"messages.content.{name}" for name in unknown]
    return {"type": "text"} | ({"text": fields["text"]} if "text" in fields else {})
