"""Conversations as rows hold them: the OpenAI and the ShareGPT form."""

from typing import Any

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
}
Message = dict[str, str]
"""{"role": system | user | assistant, "content": text}."""


def normalize_conversation(row: dict) -> list[Message]:
    """Turns of a row (see ``read_turns``) that has something to supervise.

    Raises:
        ValueError: as ``read_turns``, or there is no assistant turn.
    """
    messages = read_turns(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant turn")
    return messages


def read_turns(row: dict) -> list[Message]:
    """Read one row as a list of {"role": system | user | assistant, "content": text}.

    Accepted: ``messages`` or ``conversations``, a list of {role, content} or of {from, value}.

    Raises:
        ValueError: a short reason without data from the row, so that reasons can be counted.
    """
    if not isinstance(row, dict):
        raise ValueError("row is not an object")
    turns = _first(row, "messages", "conversations")
    if turns is None:
        raise ValueError("no messages or conversations field")
    if not isinstance(turns, list):
        raise ValueError("messages are not a list")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError("turn is not an object")
        role = _first(turn, "role", "from")
        content = _first(turn, "content", "value")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("role or content is not a string")
        if role not in ROLES:
            raise ValueError("unknown role")
        if not content.strip():
            raise ValueError("empty content")
        messages.append({"role": ROLES[role], "content": content})
    return messages


def _first(row: dict, name: str, other: str) -> Any:
    """Column formats fill the fields of the other form with null, so null counts as absent."""
    return row.get(other) if row.get(name) is None else row[name]
