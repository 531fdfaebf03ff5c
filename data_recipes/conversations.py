"""Read conversations in the OpenAI or the ShareGPT form from rows, with tools and thinking."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..chats import REASONING
from ..files import Values

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
Message = Values
"""{"role": system | user | assistant | tool, "content": text}, optionally with
``reasoning_content``, ``tool_calls``, ``tool_call_id``, ``name``, and ``train``: False on an
assistant turn without loss."""

SYSTEM_FIELDS = ("system", "system_prompt")
WEIGHTS = ("weight", "train", "loss")
"""Data set field names for a turn's loss switch: 0 or false leaves it out of the loss."""
OTHER_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
TEXT_PARTS = ("text", "input_text", "output_text")
TURN_FIELDS = {
    *("role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name"),
    *REASONING,
    *WEIGHTS,
}
ROW_FIELDS = {
    *("messages", "conversations", "tools", "chat_template_kwargs"),
    *SYSTEM_FIELDS,
    *OTHER_MEDIA,
}
"""Row fields to read: the conversation."""
NO_TURNS = "no messages or conversations field"
ALPACA = ("instruction", "input", "output")
"""Fields of rows in Alpaca's form."""
NO_TEXT = {"id", "license", "source", "input_row", "greedy_answers", "cut_answers"}
"""Row fields outside the conversation; the report leaves them out."""


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form that chat templates accept."""

    messages: list[Message]
    tools: list[Values] | None = None
    variables: Values = field(default_factory=dict)
    """The row's own ``chat_template_kwargs``."""
    left_out: tuple[str, ...] = ()
    """Ignored row fields (turn.NAME: turn fields)."""
    num_cut: int = 0
    """Answers that were cut at a token limit, as far as the row tells."""


def in_messages(row: Any) -> Any:
    """Return a row in Alpaca's form with ``messages`` instead, and every other row as it is.

    Such a row has the fields instruction, output, and often input, which follows the instruction
    after an empty line. Without a text in output, the user's turn is the last.
    """
    is_alpaca = isinstance(row, dict) and isinstance(row.get("instruction"), str)
    if not is_alpaca or _first(row, "messages", "conversations") is not None:
        return row
    if not isinstance(row.get("input"), str | None) or not isinstance(
        row.get("output"), str | None
    ):
        return row
    parts = [part for part in (row["instruction"], row.get("input")) if part and part.strip()]
    turns = [{"role": "user", "content": "\n\n".join(parts)}]
    if (row.get("output") or "").strip():
        turns.append({"role": "assistant", "content": row["output"]})
    return {name: x for name, x in row.items() if name not in ALPACA} | {"messages": turns}


def read_conversation(row: Any) -> Conversation:
    """Read a row with ``read_row``. Also raise ValueError if there is no assistant turn."""
    conversation = read_row(row)
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise ValueError("no assistant turn")
    return conversation


def read_row(row: Any, *, needs_answers: bool = True) -> Conversation:
    """Read turns, system prompt, tools and template variables from one row.

    ``messages`` or ``conversations`` is a list of {role, content} or of {from, value}. Rows in
    Alpaca's form are read, too.
    Content is a text or a list of text parts. The row's ``system`` or ``system_prompt`` becomes the
    first turn.

    Args:
        needs_answers: refuse an assistant turn without content.

    Raises:
        ValueError: the message is a short reason without row data, so that reasons can be counted.
    """
    if not isinstance(row, dict):
        raise ValueError("row is not an object")
    row = in_messages(row)
    turns = _first(row, "messages", "conversations")
    if turns is None:
        raise ValueError(NO_TURNS)
    if not isinstance(turns, list):
        raise ValueError("messages are not a list")
    for name in OTHER_MEDIA:
        if row.get(name):
            raise ValueError(f"{name}: no text")
    messages = _with_system([_read_turn(turn, needs_answers) for turn in turns], row)
    variables = row.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise ValueError("chat_template_kwargs is not an object")
    unused = [name for name in row if _is_given(row[name]) and name not in ROW_FIELDS | NO_TEXT]
    for turn in turns:
        unused += [f"turn.{x}" for x in turn if _is_given(turn[x]) and x not in TURN_FIELDS]
    known = {name: x for name, x in (variables or {}).items() if x is not None}
    left_out, num_cut = tuple(dict.fromkeys(unused)), _count_cut(row, turns)
    return Conversation(messages, read_tools(row.get("tools")), known, left_out, num_cut)


def _count_cut(row: Values, turns: list[Values]) -> int:
    """Count cut answers by ``cut_answers``, or by a row's or its turns' ``finish_reason``."""
    count = row.get("cut_answers")
    if count is None:
        return sum(one.get("finish_reason") == "length" for one in (row, *turns))
    if not isinstance(count, int):
        raise ValueError("cut_answers is not a number")
    return count


def _read_turn(turn: Any, needs_answers: bool) -> Message:
    if not isinstance(turn, dict):
        raise ValueError("turn is not an object")
    role = _first(turn, "role", "from")
    content = _first(turn, "content", "value")
    if not isinstance(role, str):
        raise ValueError("role or content is not a string")
    if role not in ROLES:
        raise ValueError("unknown role")
    calls = read_calls(turn)
    if role in ("function_call", "tool_call"):
        calls, content = read_calls({"function_call": content}), ""
    is_answer = ROLES[role] == "assistant"
    may_be_empty = calls or ROLES[role] == "tool" or (is_answer and not needs_answers)
    thoughts = [turn[name] for name in REASONING if turn.get(name)]
    if content is None and (may_be_empty or thoughts):
        content = ""
    text, thought = split_parts(content)
    if not text.strip() and not may_be_empty:
        raise ValueError("empty content")
    message: Message = {"role": ROLES[role], "content": text}
    if any(not isinstance(x, str) for x in thoughts):
        raise ValueError("reasoning is not a string")
    if thought := thought or next(iter(thoughts), ""):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if isinstance(turn.get(name), str) and turn[name]:
            message[name] = turn[name]
    if is_answer and not _is_learned(turn):
        message["train"] = False
    return message


def _with_system(messages: list[Message], row: Values) -> list[Message]:
    """Prepend the system prompt from the row's separate field, if any."""
    given = [row[name] for name in SYSTEM_FIELDS if row.get(name)]
    prompts = list(dict.fromkeys(split_parts(x)[0] for x in given))
    if not any(prompt.strip() for prompt in prompts):
        return messages
    if messages and messages[0]["role"] == "system":
        prompts = [prompt for prompt in prompts if prompt != messages[0]["content"]]
        if not prompts:
            return messages
        raise ValueError("a system field and another system turn")
    if len(prompts) > 1:
        raise ValueError("two different system fields")
    return [{"role": "system", "content": prompts[0]}, *messages]


def split_parts(content: Any) -> tuple[str, str]:
    """Split content (a string or a list of parts) into text and thinking, or raise ValueError."""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise ValueError("role or content is not a string")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text"
        if isinstance(part, dict) and kind is None and isinstance(part.get("text"), str):
            kind = "text"
        if kind not in (*TEXT_PARTS, "thinking"):
            raise ValueError(f"content has a part of type {str(kind)[:40]}")
        text = part
        if isinstance(part, dict):
            text = part.get("thinking" if kind == "thinking" else "text")
        if not isinstance(text, str):
            raise ValueError("a content part has no text")
        (thoughts if kind == "thinking" else texts).append(text)
    return "".join(texts), "".join(thoughts)


def read_calls(turn: Mapping[str, Any]) -> list[Values]:
    """Return a turn's tool calls in OpenAI's form. ``function_call`` replaces ``tool_calls``."""
    calls = turn.get("tool_calls") or []
    if turn.get("function_call"):
        calls = [turn["function_call"]]
    if isinstance(calls, str):  # tables of strings store JSON text
        calls = read_json(calls, "tool_calls are not JSON")
    if not isinstance(calls, list):
        raise ValueError("tool_calls are not a list")
    found: list[Values] = []
    for call in calls:
        if isinstance(call, str):
            call = read_json(call, "a tool call is not JSON")
        known = call if isinstance(call, dict) else {}
        function = known.get("function", known)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call names no function")
        if not isinstance(function.get("arguments", {}), str | dict | None):
            raise ValueError("arguments of a tool call are no object")
        arguments = function.get("arguments")
        kept = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        other = {k: v for k, v in known.items() if k == "id" and isinstance(v, str)}
        found.append({**other, "type": "function", "function": kept})
    return found


def read_json(text: str, reason: str = "not valid JSON") -> Any:
    """Parse JSON. Raise ValueError with the same reason for every syntax error, for counting."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(reason) from error


def read_tools(tools: Any) -> list[Values] | None:
    """Return a row's tools from a list of objects or from its JSON text, or None without tools."""
    if isinstance(tools, str) and tools.strip():
        tools = read_json(tools, "tools are not JSON")
    if not tools or isinstance(tools, str):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools are not a list of objects")
    return tools


def _is_learned(turn: Mapping[str, Any]) -> bool:
    given = [turn[name] for name in WEIGHTS if turn.get(name) is not None]
    if any(not isinstance(x, bool | int | float) or x not in (0, 1) for x in given):
        raise ValueError("weight of a turn is neither 0 nor 1")
    return all(given)


def explode(row: Any) -> list[Any]:
    """Return one row per assistant turn, with the conversation up to and including the turn.

    Only this last turn is supervised. An unreadable row stays whole, so its error counts once.
    """
    try:
        read_conversation(row)
    except ValueError:
        return [row]
    name = "messages" if row.get("messages") is not None else "conversations"
    turns = row[name]
    places = [i for i, turn in enumerate(turns) if _read_turn(turn, True)["role"] == "assistant"]
    earlier = [{**turn, "weight": 0} if i in places else turn for i, turn in enumerate(turns)]
    return [{**row, name: [*earlier[:i], turns[i]]} for i in places]


def thinking_of(message: Message) -> tuple[str, str]:
    """Return a turn's thinking and answer. The thinking may be in a field or in <think> marks."""
    if "reasoning_content" in message:
        return message["reasoning_content"].strip(), message["content"]
    before, mark, answer = message["content"].rpartition("</think>")
    if not mark:
        return "", message["content"]
    return before.partition("<think>")[2].strip() or before.strip(), answer.lstrip("\n")


def _is_given(value: Any) -> bool:
    """Return False for [], {} and null. Column formats fill missing fields with null."""
    return value is not None and value != [] and value != {}


def _first(row: dict, name: str, other: str) -> Any:
    """Return the first non-null field. Column formats fill the other form's fields with null."""
    return row.get(other) if row.get(name) is None else row[name]
