"""A row on its way to the target's own answers: what is asked next, and what is kept of an answer.

No model and no network: the servers' and the local path share it.
"""

import json
import re
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

from pipedraft.data_recipes.chat import read_turns

Messages = list[dict[str, str]]

THINK, END_THINK = "<think>", "</think>"
THINKING_BLOCK = re.compile(f"{THINK}.*?{END_THINK}", re.DOTALL)
TURNS = ("messages", "conversations")


class RowFailed(Exception):
    """One row gets no answer; the reason is kept with the row, and the run goes on."""


class TargetLost(Exception):
    """No further row can be answered; the message is one line that says why."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn and what is kept of them."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024
    seed: int = 0
    greedy_share: float = 0.5
    thinking: Literal["keep", "strip"] = "keep"

    def is_greedy(self, row: int) -> bool:
        """Spread evenly: among rows 0 to n - 1 there are int(n * greedy_share) greedy ones."""
        return int(row * self.greedy_share) < int((row + 1) * self.greedy_share)

    def seed_of(self, row: int, turn: int, attempt: int = 0) -> int:
        """Below 2**31, which every server takes."""
        return zlib.crc32(f"{self.seed} {row} {turn} {attempt}".encode()) & 0x7FFFFFFF


@dataclass(frozen=True)
class Answer:
    """What is kept of one answer of the target."""

    content: str
    is_cut: bool
    """It stopped at --max-tokens."""


@dataclass
class Dialogue:
    """A conversation whose assistant turns are being replaced, from the first on."""

    row: int
    """Place in the input, from 0."""
    text: str
    """The input row as read."""
    fields: dict[str, Any]
    """What else the input row holds; copied to the output."""
    prompts: list[Messages]
    """What is said before each answer since the one before it; the last message is the user's."""
    history: Messages = field(default_factory=list)
    """Prompts and answers so far."""
    num_answers: int = 0
    num_cut: int = 0

    @classmethod
    def read(cls, row: int, text: str) -> "Dialogue":
        """From {"prompt": text}, ``messages`` or ``conversations`` as JSON.

        A conversation that ends with the user's turn gets an answer to that as well.

        Raises:
            RowFailed: the row is none of these, or an assistant turn does not follow a user's.
        """
        try:
            value = json.loads(text)
            if isinstance(value, dict) and "prompt" in value and not any(map(value.get, TURNS)):
                value = {**value, "messages": [{"role": "user", "content": value["prompt"]}]}
            turns = read_turns(value)
            text.encode()
            for turn in turns:
                turn["content"].encode()
        except UnicodeEncodeError as error:
            raise RowFailed("half a surrogate pair: not text") from error
        except (ValueError, RecursionError) as error:
            is_json = not isinstance(error, json.JSONDecodeError | RecursionError)
            raise RowFailed(str(error) if is_json else "not JSON") from error
        fields = {name: value[name] for name in value if name not in (*TURNS, "prompt")}
        return cls(row, text, fields, split_prompts(turns))

    @property
    def is_complete(self) -> bool:
        return self.num_answers == len(self.prompts)

    def question(self) -> Messages:
        """All that the target reads before its next answer."""
        return [*self.history, *self.prompts[self.num_answers]]

    def add(self, answer: Answer) -> None:
        self.history = [*self.question(), {"role": "assistant", "content": answer.content}]
        self.num_answers += 1
        self.num_cut += answer.is_cut

    def to_row(self, *, is_greedy: bool) -> dict[str, Any]:
        """The input row with the answered conversation in OpenAI's form."""
        return {
            **self.fields,
            "messages": self.history,
            "greedy_answers": is_greedy,
            "cut_answers": self.num_cut,
        }


def split_prompts(turns: Messages) -> list[Messages]:
    """The turns between answers: [system, user, assistant, user] -> [[system, user], [user]]."""
    if not turns:
        raise RowFailed("no turns")
    prompts: list[Messages] = []
    prompt: Messages = []
    for turn in turns:
        if turn["role"] != "assistant":
            prompt.append(turn)
            continue
        if not prompt or prompt[-1]["role"] != "user":
            raise RowFailed("an assistant turn does not follow a user turn")
        prompts.append(prompt)
        prompt = []
    if prompt:
        if prompt[-1]["role"] != "user":
            raise RowFailed("the last turn is neither the user's nor the assistant's")
        prompts.append(prompt)
    return prompts


def kept_text(content: str, reasoning: str, *, thinking: Literal["keep", "strip"]) -> str:
    """The text of an answer that goes into the row, the thinking in <think> marks or left out.

    Templates may open the block in the prompt, so that the answer holds the closing mark alone.

    Args:
        reasoning: thinking that a server returned in a field of its own.

    Raises:
        RowFailed: nothing is said, or the thinking does not end.
    """
    content = content.strip()
    before, mark, _ = content.partition(END_THINK)
    if mark and THINK not in before:
        content = f"{THINK}\n{content}"
    spoken = THINKING_BLOCK.sub("", content).strip()
    if spoken.startswith(THINK):
        raise RowFailed("the thinking does not end; raise --max-tokens")
    if not spoken:
        raise RowFailed(
            "thinking without an answer; raise --max-tokens"
            if content or reasoning.strip()
            else "empty answer"
        )
    if thinking == "strip":
        return spoken
    return f"{THINK}\n{reasoning.strip()}\n{END_THINK}\n\n{content}" if reasoning else content
