"""Render conversations with chat templates, for the whole package."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from .files import Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]
"""One turn: role, content, and other template fields."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""API field names for a turn's thinking outside its content."""
THINK, END_THINK = "<think>", "</think>"
DEFAULTS = "pipedraft_template_variables"
"""Tokenizer attribute with default template variables; a conversation's own take precedence."""
RESERVED_VARIABLES = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
}
"""Names set by the rendering itself, or forbidden to users."""


def check_template_variables(variables: Mapping[str, object] | None, field: str) -> None:
    """Refuse chat_template_kwargs names that are reserved for rendering or are no identifiers.

    Raises:
        ValueError: the message names the variable.
    """
    for name in variables or {}:
        if not name.isidentifier() or name in RESERVED_VARIABLES:
            raise ValueError(
                f"{field}: {name!r} is no variable of a chat template; leave it out (known to many "
                "templates: enable_thinking)"
            )


def read_template_variables(text: str | Values) -> Values:
    """Parse the JSON object of template variables given as --chat-template-kwargs."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{text!r} is no JSON; give {{"enable_thinking": false}}') from error
    if not isinstance(found, dict):
        raise ValueError(f'{text!r} is no JSON object; give {{"enable_thinking": false}}')
    check_template_variables(found, "--chat-template-kwargs")
    return found


def set_template_variables(
    tokenizer: "PreTrainedTokenizerBase", variables: Mapping[str, object] | None
) -> None:
    """Set a tokenizer's default template variables, used where a conversation sets none."""
    setattr(tokenizer, DEFAULTS, dict(variables or {}))


def template_variables(tokenizer: "PreTrainedTokenizerBase") -> Values:
    """Return the variables from ``set_template_variables``, or none."""
    return dict(getattr(tokenizer, DEFAULTS, {}))


class ChatRefused(ValueError):
    """The chat template refused a conversation or has a fault."""


def warn_of_variables(name: str, description: Values, variables: Values | None) -> None:
    """Warn if a draft was trained with other template variables than it will decode with.

    Args:
        description: the checkpoint's description. Its data section stores the variables.
    """
    data = (description.get("training") or {}).get("data") or {}
    trained = data.get("chat_template_kwargs")
    if trained is not None and trained != (variables or {}):
        print(
            f"warning: --chat-template-kwargs: {json.dumps(variables or {})}, but {name} was "
            f"trained with {json.dumps(trained)}; acceptance may suffer",
            file=sys.stderr,
        )


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    prompt: bool = True,
    tools: list[Values] | None = None,
    variables: Mapping[str, object] | None = None,
) -> str:
    """Render a conversation as the model's input text. The template runs in jinja's sandbox.

    Args:
        messages: one dictionary per turn, with "role", "content" and other template fields. A
            turn's ``reasoning_content`` is put where the template reads the thinking.
        prompt: append the beginning of the assistant's next turn.
        tools: functions for the model to call.
        variables: template variables (``chat_template_kwargs``).
    """

    def render(turns: list[Values]) -> str:
        return str(
            tokenizer.apply_chat_template(
                turns,
                tools=tools,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=prompt,
                **(template_variables(tokenizer) | dict(variables or {})),
            )
        )

    if any(turn.get("reasoning_content") for turn in messages):
        template = tokenizer.get_chat_template()
        messages = [with_thinking(turn, template) for turn in messages]
    return render_turns(messages, render)


def with_thinking(turn: Message, template: str) -> Message:
    """Return a turn with its thinking where a template reads it: in a field, or the content."""
    if not turn.get("reasoning_content"):
        return turn
    # As a field: other words, such as enable_thinking, contain a name, too.
    names = [name for name in REASONING if re.search(rf"[.'\"]{name}(?!\w)", template)]
    if names:
        return {**turn, **dict.fromkeys(names, turn["reasoning_content"])}
    return inline_thinking(turn) if END_THINK in template else turn


def inline_thinking(turn: Message) -> Values:
    """Move a turn's thinking into the content, in <think> marks."""
    if "reasoning_content" not in turn:
        return dict(turn)
    rest = {name: x for name, x in turn.items() if name != "reasoning_content"}
    thought = turn["reasoning_content"].strip()
    return rest | {"content": f"{THINK}\n{thought}\n{END_THINK}\n\n{turn['content'].lstrip()}"}


def render_turns(messages: Sequence[Message], render: Callable[[list[Values]], str]) -> str:
    """Render turns with tool-call arguments as objects, which most templates write as JSON.

    If the template fails on objects or writes them in Python syntax, pass the arguments as text.
    """
    turns = [dict(turn) for turn in messages]
    if not any(turn.get("tool_calls") for turn in turns):
        with rendering():
            return render(turns)
    objects = [with_arguments(turn, as_text=False) for turn in turns]
    values = [
        call["function"]["arguments"] for turn in objects for call in turn.get("tool_calls", ())
    ]
    try:
        with rendering():
            text = render(objects)
        if not any(repr(x) in text and repr(x) != json.dumps(x) for x in values):
            return text
    except ChatRefused:
        pass
    with rendering():
        return render([with_arguments(turn, as_text=True) for turn in turns])


def with_arguments(turn: Values, *, as_text: bool) -> Values:
    """Convert a turn's tool-call arguments to text or to objects. Keep invalid JSON as text."""
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        arguments = call["function"]["arguments"]
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return turn | {"tool_calls": calls}


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Return a conversation's token ids, up to the beginning of the assistant's next turn."""
    text = render_chat(tokenizer, messages, variables=variables)
    return tokenizer(text, add_special_tokens=False).input_ids


@contextmanager
def rendering() -> Iterator[None]:
    """Raise every chat template error as ChatRefused."""
    try:
        yield
    except Exception as error:
        raise ChatRefused(f"chat template refused: {error}") from error
