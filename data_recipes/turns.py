"""Find what the target writes in a rendered conversation, turn by turn.

A template may render a turn differently in place than as the last turn: with another closing token,
without its thinking, behind another header. So nothing is searched for. Private characters (signs)
at both ends of each text of a turn show where the template puts the turn. Without the signs, the
text must be unchanged, so a wrong place is impossible.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from ..chats import REASONING, ChatRefused
from .conversations import Message

SIGNS = (0xF0000, 0x100000)
"""First code points of two private planes. Signs are from the plane that the text does not use."""
PLANE = 0xFFFE
THINK_MARK = re.compile(r"(</?think>\s*)")
JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages; True appends the beginning of the assistant's next turn."""


@dataclass(frozen=True)
class Turn:
    """Characters that the target writes in one assistant turn: text, then closing tokens."""

    index: int
    """Index of the message."""
    start: int
    closing: int
    """Start of the closing tokens, or ``end`` without any."""
    end: int


@dataclass(frozen=True)
class SignedText:
    """A rendered text without its signs, and the places of each turn's signs."""

    text: str
    places: dict[int, list[int]]
    """Message index -> character positions of the message's signs, ascending."""

    @classmethod
    def read(cls, signed: str, first: int) -> "SignedText":
        """Remove the signs from a text."""
        parts: list[str] = []
        places: dict[int, list[int]] = {}
        names: dict[int, list[int]] = {}
        length = before = 0
        for match in re.finditer(f"[{chr(first)}-{chr(first + PLANE - 1)}]", signed):
            parts.append(signed[before : match.start()])
            length, before = length + len(parts[-1]), match.end()
            index, is_name = divmod(ord(match.group()) - first, 2)
            (names if is_name else places).setdefault(index, []).append(length)
        for index, found in names.items():
            # The header of a tool's result may repeat the name: only before the turn's other signs.
            last = places[index][-1] if index in places else found[0]
            places[index] = sorted([*places.get(index, ()), *(x for x in found if x <= last)])
        return cls("".join([*parts, signed[before:]]), places)

    def last_before(self, index: int) -> dict[int, int]:
        """Return the position of the last sign in each turn before message ``index``."""
        return {i: found[-1] for i, found in self.places.items() if i < index}


def find_turns(
    messages: Sequence[Message], text: str, render: Render, special: Sequence[str]
) -> list[Turn]:
    """Find the assistant turns in a rendered text. Turns that leave no trace are missing.

    Args:
        text: ``messages`` as rendered.
        special: texts of the tokenizer's added tokens, from which closing tokens are read.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    first = next((x for x in SIGNS if not is_used(x, text, messages)), None)
    if first is None or not answers or 2 * len(messages) >= PLANE:
        return []
    for sign in (sign_all, sign_text, sign_end):
        signed = [
            sign(message, chr(first + 2 * i)) if i in answers else message
            for i, message in enumerate(messages)
        ]
        try:
            found = SignedText.read(render(signed, False), first)
        except ChatRefused:
            continue
        if found.text == text:
            finder = _TurnFinder(signed, found, first, render, special)
            return [turn for i in answers if (turn := finder.find(i)) is not None]
    return []


class _TurnFinder:
    """Finds the turns of one conversation, after its signs have been found in the text."""

    def __init__(
        self,
        signed: list[Message],
        found: SignedText,
        first: int,
        render: Render,
        special: Sequence[str],
    ) -> None:
        self.signed, self.found, self.first, self.render = signed, found, first, render
        ordered = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self.special = re.compile(f"(?:{ordered})" if ordered else r"(?!)")
        self.ending = re.compile(rf"((?:{ordered})+)(?:\s|{ordered})*\Z" if ordered else r"(?!)")

    def find(self, index: int) -> Turn | None:
        """Return what the target writes in message ``index``, or None without any trace."""
        places = self.found.places.get(index)
        if not places:
            return None
        closing, end = self._end(index, places[-1])
        return Turn(index, min(self._start(index, places[0]), places[0]), closing, end)

    def _prefix(self, num_messages: int, *, prompt: bool) -> SignedText | None:
        """Render only the first messages. Return None if the template refuses them."""
        if num_messages == len(self.signed) and not prompt:
            return self.found
        try:
            rendered = self.render(self.signed[:num_messages], prompt)
        except ChatRefused:
            return None
        return SignedText.read(rendered, self.first)

    def _start(self, index: int, place: int) -> int:
        """Return where the target begins to write: where the text leaves the turn's prompt.

        The prompt may open the thinking, and an earlier turn's text may lack it.
        """
        prompt = self._prefix(index, prompt=True) if index else None
        if prompt is None:
            return place
        known, read = self.found.last_before(index), prompt.last_before(index)
        last = max(known.keys() & read.keys(), default=None)
        begin, prompt_begin = (0, 0) if last is None else (known[last], read[last])
        gap, asked = self.found.text[begin:place], prompt.text[prompt_begin:]
        without = self._prefix(index, prompt=False)
        # A text without prompt may end otherwise, for example with an end-of-text token.
        same = len(commonprefix([without.text, prompt.text])) if without is not None else 0
        header = asked[max(0, same - prompt_begin) :] if without is not None else ""
        common = len(commonprefix([gap, asked]))
        opening = self.special.match(header)
        least = len(header) // 2 + 1 if opening is None else opening.end()
        if common == len(asked):
            return begin + common
        # A mark such as <think> is the prompt's as a whole or not at all.
        if (mark := asked.rfind("<", 0, common)) > asked.rfind(">", 0, common):
            common = mark
        if header and common >= len(asked) - len(header) + least:
            return begin + common
        # An earlier turn ends otherwise than in the prompt: find the header before this turn.
        for size in range(len(header), least - 1, -1):
            at = gap.rfind(header[:size])
            if at >= 0:
                return begin + at + size
        return place

    def _end(self, index: int, place: int) -> tuple[int, int]:
        """Return the start and the end of the closing tokens behind the turn's last sign.

        As the last turn, a turn ends with what the target itself writes. In place, another token
        may close it.
        """
        text = self.found.text
        alone = self._prefix(index + 1, prompt=False)
        if alone is None or index not in alone.places:
            return place, place
        tail = alone.text[alone.places[index][-1] :]
        match = self.ending.search(tail)
        if match is None:
            # No token closes the last turn, so a token in place begins another turn.
            rest = tail.rstrip()
            end = place + len(rest) * text.startswith(rest, place)
            return end, end
        if text.startswith(tail[: match.end(1)], place):
            return place + match.start(1), place + match.end(1)
        closing = place + len(commonprefix([tail[: match.start(1)], text[place:]]))
        other = re.compile(rf"\s*{self.special.pattern}").match(text, closing)
        if closing - place < len(tail[: match.start(1)].rstrip()) or other is None:
            return closing, closing
        # A token between a turn and the next turn's content is a header, not an end.
        following = (
            self.signed[index + 1]["content"].strip() if index + 1 < len(self.signed) else ""
        )
        if following and text[other.end() :].lstrip().startswith(following):
            return closing, closing
        return closing, other.end()


# -- signs -----------------------------------------------------------------------------------


def is_used(first: int, text: str, messages: Sequence[Message]) -> bool:
    """Return True if a text or its messages contain characters from a private plane."""
    pattern = f"[{chr(first)}-{chr(first + PLANE - 1)}]"
    return re.search(pattern, text) is not None or (
        re.search(pattern, json.dumps(messages, ensure_ascii=False)) is not None
    )


def sign_all(message: Message, sign: str) -> Message:
    """Sign texts, thinking, and each tool call's name, keys and values."""
    found = sign_text(message, sign)
    if not message.get("tool_calls"):
        return found
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        name = chr(ord(sign) + 1) + function["name"]
        arguments = signed_arguments(function["arguments"], sign)
        calls.append({**call, "function": {**function, "name": name, "arguments": arguments}})
    return found | {"tool_calls": calls}


def sign_text(message: Message, sign: str) -> Message:
    """Sign the content and the thinking."""
    own = {name: signed(message[name], sign) for name in _texts(message)}
    return message | own


def sign_end(message: Message, sign: str) -> Message:
    """Sign only the ends, for templates that look at a content's first characters."""
    own = {}
    for name in _texts(message):
        body = message[name].rstrip()
        own[name] = body + sign * bool(body) + message[name][len(body) :]
    return message | own


def _texts(message: Message) -> Iterator[str]:
    return (name for name in ("content", *REASONING) if message.get(name))


def signed(text: str, sign: str) -> str:
    """Put a sign at both ends of a text and behind each <think> mark, inside the whitespace.

    A template strips whitespace, and cuts a content at its <think> marks.
    """
    body = text.strip()
    if not body:
        return text
    before, after = text[: text.index(body)], text[text.index(body) + len(body) :]
    parts = THINK_MARK.split(body)
    inner = "".join(part + sign * (number % 2) for number, part in enumerate(parts))
    first = "" if body.startswith("<think>") else sign
    last = "" if inner.endswith(sign) else sign
    return f"{before}{first}{inner}{last}{after}"


def signed_arguments(arguments: object, sign: str) -> object:
    """Put signs before each key, and at both ends of each string, in a call's arguments."""

    def put(match: re.Match) -> str:
        value, colon = match[1], match[2] or ""
        return f'"{sign}{value}{"" if colon or not value else sign}"{colon}'

    if isinstance(arguments, str):
        return JSON_STRING.sub(put, arguments)
    return json.loads(JSON_STRING.sub(put, json.dumps(arguments, ensure_ascii=False)))
