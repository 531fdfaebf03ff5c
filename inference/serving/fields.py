"""Sort out unparsed request fields, and refuse the unsupported ones."""

import difflib
from collections.abc import Collection, Mapping

from .errors import Json, RequestError

HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "request_id"),
    *("priority", "cache_salt", "include_reasoning", "separate_reasoning"),
    *("guided_decoding_backend", "spaces_between_special_tokens"),
}
"""OpenAI, vLLM and SGLang fields without influence on the answer."""
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("prompt_logprobs", "top_logprobs", "mirostat", "dry_multiplier"), (0,)),
    **dict.fromkeys(("xtc_probability", "dynatemp_range", "top_a"), (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("best_of", "num_beams", "beam_width", "tfs_z"), (1,)),
    **dict.fromkeys(("tools", "functions", "documents", "stop_sequences"), ([],)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("logit_bias", "structured_outputs"), ({},)),
    **dict.fromkeys(("echo", "use_beam_search", "early_stopping"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("do_sample", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("structural_tag", "grammar", "format", "negative_prompt"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "lora_path", "chat_template"), ()),
    **dict.fromkeys(("audio", "web_search_options", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("enable_thinking", "thinking", "think", "thinking_budget", "system"), ()),
    **dict.fromkeys(("options", "extra_body", "num_predict", "n_predict"), ()),
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
    "enable_thinking": "give it in chat_template_kwargs",
    "max_completion_tokens": "give max_tokens",
    "max_new_tokens": "give max_tokens",
    "system": "give a message of that role",
}
OF_MESSAGES = {"role", "content", "name", "reasoning_content", "reasoning"}
CHANGES_MESSAGES = {"tool_calls", "function_call", "tool_call_id", "prefix", "images", "audio"}
"""Unsupported message fields the model would see."""
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
    for name in fields.keys() & CHANGES_MESSAGES:
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
