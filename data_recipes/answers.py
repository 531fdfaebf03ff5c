"""Rows on their way to the target's own answers, and the file that keeps the answers.

No model and no network: the servers' and the local path share it. The output is in input order, and
resumable after any kind of end:

    answers.sqlite          every row that is settled, committed one by one, and what was asked for
    answers.jsonl           {"input_row": i, ...} for every answered row, i ascending: at the end
    answers.errors.jsonl    {"input_row": i, "reason": ..., "row": ...} for every row without answer

A killed process loses no settled row. The database may be removed when no row is to be asked again.
"""

import json
import re
import sqlite3
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipedraft.chats import read_template_variables
from pipedraft.cli import Failure, Options, option
from pipedraft.data_recipes.conversations import SYSTEM_FIELDS, Message, read_row
from pipedraft.files import Values, publish

WRITTEN = "written"
"""Among the settings: the latest outputs. Options begin with dashes."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS rows (row INTEGER PRIMARY KEY, reason TEXT, line BLOB);
"""


class AnswerFile:
    """Rows in, in any order; lines out, in input order. One process at a time."""

    def __init__(
        self, out: Path, settings: Mapping[str, object], *, num_rows: int, retry_errors: bool
    ) -> None:
        """Open the database beside ``out``, or make it.

        Args:
            settings: option -> value, what the answers depend on; JSON values only.

        Raises:
            ValueError: ``out`` belongs to another input, other settings or a running process.
        """
        if out.suffix != ".jsonl":
            raise ValueError(f"--out: {str(out)!r} does not end in .jsonl; give such a name")
        self.out = out
        self.database_path = out.with_suffix(".sqlite")
        self.errors_path = out.with_suffix(".errors.jsonl")
        if out.exists() and not self.database_path.exists():
            raise ValueError(
                f"--out: {str(out)!r} exists and has no {self.database_path.name} beside it, so it "
                "cannot be resumed; give another file, or remove it"
            )
        self.is_answered = bytearray(num_rows)
        self.reasons: dict[int, str] = {}
        """Why rows failed."""
        self.database = self._open()
        try:
            self._check(settings)
            self._read_back(retry_errors)
        except sqlite3.DatabaseError as error:
            self.database.close()
            raise ValueError(
                f"--out: {str(self.database_path)!r} is damaged ({error}); give another --out"
            ) from error
        except ValueError:
            self.database.close()
            raise

    @property
    def num_answered(self) -> int:
        return self.is_answered.count(True)

    @property
    def num_failed(self) -> int:
        return len(self.reasons)

    def is_pending(self, row: int) -> bool:
        return not self.is_answered[row] and row not in self.reasons

    def add(self, row: int, answered: dict[str, object]) -> None:
        """Keep an answered row; a kill after this returns does not lose it."""
        self._settle(row, {"input_row": row} | answered | {"input_row": row}, "")
        self.is_answered[row] = True

    def fail(self, row: int, reason: str, text: str) -> None:
        """Keep a row without answer, and why.

        Args:
            text: the row as read; it need not be JSON.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = text
        self._settle(row, {"input_row": row, "reason": reason, "row": content}, reason)
        self.reasons[row] = reason

    def finish(self) -> None:
        """Write the output, unless it is there already. Every row is settled."""
        known = self._get(WRITTEN) or []
        if self.out.exists() and self._identity(self.out) == known[-1]:
            return

        def write(place: Path) -> None:
            self._write_lines(place, "= ''")
            # Before the renaming, which a kill may follow or precede.
            self._set(WRITTEN, [*known[-1:], self._identity(place)])

        publish(self.out, write)

    def close(self) -> None:
        """Leave the rows without answer beside the output; a later run goes on from here."""
        errors = self.database.execute("SELECT count(*) FROM rows WHERE reason != ''")
        if errors.fetchone()[0]:
            publish(self.errors_path, lambda place: self._write_lines(place, "!= ''"))
        else:
            self.errors_path.unlink(missing_ok=True)
        self.database.close()

    def _open(self) -> sqlite3.Connection:
        path = self.database_path
        try:
            database = sqlite3.connect(path, timeout=0, isolation_level=None)
            # The first statement of a process locks the file until it ends, however it does.
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            # A commit is one write without fsync: a kill loses nothing, a power cut the last rows.
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(SCHEMA)
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise ValueError(
                    f"--out: another process is writing {str(self.out)!r}; wait for it, or give "
                    "another file"
                ) from error
            raise ValueError(
                f"--out: {str(path)!r} cannot be written ({error}); give another file"
            ) from error
        return database

    def _check(self, settings: Mapping[str, object]) -> None:
        """Compare with what the output was begun with; note it if there is nothing yet."""
        (num_settled,) = self.database.execute("SELECT count(*) FROM rows").fetchone()
        for name, value in settings.items():
            if not num_settled:
                self._set(name, value)
            begun = self._get(name)
            if begun != value:
                raise ValueError(
                    f"{name}: {value!r}, but {str(self.out)!r} was begun with {begun!r}; "
                    "give that one, or another --out"
                )
        known = [place for place, _ in self._get(WRITTEN) or []]
        if self.out.exists() and self._identity(self.out)[0] not in known:
            raise ValueError(
                f"--out: {str(self.out)!r} was changed after it was written; give another file, or "
                "remove it"
            )

    def _read_back(self, retry_errors: bool) -> None:
        """Note the rows that earlier runs have settled."""
        for row, reason in self.database.execute("SELECT row, reason FROM rows"):
            if not reason:
                self.is_answered[row] = True
            elif not retry_errors:
                self.reasons[row] = reason

    def _identity(self, path: Path) -> list[object]:
        """Size and time of an output, and its rows."""
        place = path.stat()
        return [[place.st_size, place.st_mtime_ns], self.num_answered]

    def _get(self, name: str) -> Any:
        found = self.database.execute("SELECT value FROM settings WHERE name = ?", (name,))
        (value,) = found.fetchone() or ("null",)
        return json.loads(value)

    def _set(self, name: str, value: object) -> None:
        self.database.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, _json(value)))

    def _settle(self, row: int, line: dict[str, object], reason: str) -> None:
        try:
            self.database.execute(
                "INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", (row, reason, _json(line))
            )
        except sqlite3.OperationalError as error:
            raise Failure(
                f"--out: {str(self.database_path)!r} cannot be written ({error}); free some space "
                "and resume with the same command"
            ) from error

    def _write_lines(self, place: Path, reason: str) -> None:
        rows = self.database.execute(f"SELECT line FROM rows WHERE reason {reason} ORDER BY row")
        with place.open("wb") as file:
            file.writelines(line + b"\n" for (line,) in rows)


def _json(value: object) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which that cannot hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


# -- conversations --------------------------------------------------------------------------

Messages = list[Message]

THINK, END_THINK = "<think>", "</think>"
THINKING_BLOCK = re.compile(f"{THINK}.*?{END_THINK}", re.DOTALL)
TURNS = ("messages", "conversations")


class RowFailed(Exception):
    """One row gets no answer; the reason is kept with the row, and the run goes on."""


class TargetLost(Exception):
    """No further row can be answered; the message is one line that says why."""


# How answers are drawn and what is kept of them. The docstring is a title in --help.
@dataclass(frozen=True, kw_only=True)
class AnswerSampling(Options):
    """answers"""

    thinking: Literal["keep", "strip"] = "keep"
    """keep: in <think> marks, also what a server separates; strip: only what is said"""
    temperature: float = option(1.0, metavar="T")
    """of sampled rows"""
    top_p: float = option(1.0, metavar="P")
    """of sampled rows"""
    max_tokens: int = option(1024, least=1)
    """per answer"""
    greedy_share: float = option(0.5, metavar="P")
    """rows with greedy answers"""
    seed: int = 0
    """of the sampling"""
    chat_template_kwargs: Values | None = option(
        None, metavar="JSON", parse=read_template_variables
    )
    """variables of the chat template, as {"enable_thinking": false}; a row's own count before"""

    def is_greedy(self, row: int) -> bool:
        """Spread evenly: among rows 0 to n - 1 there are int(n * greedy_share) greedy ones."""
        return int(row * self.greedy_share) < int((row + 1) * self.greedy_share)

    def seed_of(self, row: int, turn: int, attempt: int = 0) -> int:
        """Seed of one answer, below 2**31, which every server takes."""
        return zlib.crc32(f"{self.seed} {row} {turn} {attempt}".encode()) & 0x7FFFFFFF


@dataclass(frozen=True)
class TargetAnswer:
    """One answer of the target, as it goes into the row."""

    content: str
    is_cut: bool
    """Whether the answer stopped at --max-tokens, or where the target's positions end."""
    tool_calls: list[Values] = field(default_factory=list)
    """What a server found of calls in the answer."""


@dataclass
class Dialogue:
    """A conversation whose assistant turns are being replaced, from the first on."""

    row: int
    """Place in the input, from 0."""
    text: str
    """The input row as read."""
    fields: dict[str, object]
    """Other fields of the input row; copied to the output."""
    prompts: list[Messages]
    """What is said before each answer since the one before it; the last message is the user's."""
    tools: list[Values] | None = None
    variables: Values = field(default_factory=dict)
    """Of the chat template, which the row brings."""
    history: Messages = field(default_factory=list)
    """Prompts and answers so far."""
    num_answers: int = 0
    num_cut: int = 0

    @classmethod
    def read(cls, row: int, text: str) -> "Dialogue":
        """Read {"prompt": text}, ``messages`` or ``conversations`` from JSON.

        A conversation that ends with the user's turn gets an answer to that as well.

        Raises:
            RowFailed: the row is none of these, or an assistant turn does not follow a user's.
        """
        try:
            value = json.loads(text)
            if isinstance(value, dict) and "prompt" in value and not any(map(value.get, TURNS)):
                value = {**value, "messages": [{"role": "user", "content": value["prompt"]}]}
            found = read_row(value, needs_answers=False)
            text.encode()
            json.dumps(found.messages, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowFailed("half a surrogate pair: not text") from error
        except (ValueError, RecursionError) as error:
            is_json = not isinstance(error, json.JSONDecodeError | RecursionError)
            raise RowFailed(str(error) if is_json else "not JSON") from error
        told = (*TURNS, *SYSTEM_FIELDS, "prompt")
        fields = {name: value[name] for name in value if name not in told}
        prompts = split_prompts(found.messages)
        return cls(row, text, fields, prompts, found.tools, found.variables)

    @property
    def is_complete(self) -> bool:
        return self.num_answers == len(self.prompts)

    def question(self) -> Messages:
        """All that the target reads before its next answer."""
        return [*self.history, *self.prompts[self.num_answers]]

    def add(self, answer: TargetAnswer) -> None:
        turn: Message = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            turn["tool_calls"] = answer.tool_calls
        self.history = [*self.question(), turn]
        self.num_answers += 1
        self.num_cut += answer.is_cut

    def to_row(self, *, is_greedy: bool) -> dict[str, object]:
        """The input row with the answered conversation in OpenAI's form."""
        turns = [{n: x for n, x in turn.items() if n != "train"} for turn in self.history]
        for turn, read in zip(turns, self.history, strict=True):
            if not read.get("train", True):
                turn["weight"] = 0
        fields = self.fields
        if self.variables:
            fields = fields | {"chat_template_kwargs": self.variables}
        return {
            **fields,
            "messages": turns,
            "greedy_answers": is_greedy,
            "cut_answers": self.num_cut,
        }


def split_prompts(turns: Messages) -> list[Messages]:
    """The turns between answers: [system, user, assistant, user] -> [[system, user], [user]].

    A call of a tool that a result follows is the row's own, read and not learned: the result is
    that call's, and no other's.
    """
    if not turns:
        raise RowFailed("no turns")
    prompts: list[Messages] = []
    prompt: Messages = []
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        if turn["role"] != "assistant":
            prompt.append(turn)
            continue
        if not prompt or prompt[-1]["role"] not in ("user", "tool"):
            raise RowFailed("an assistant turn does not follow a user turn")
        if following is not None and following["role"] == "tool":
            prompt.append(turn | {"train": False})
            continue
        prompts.append(prompt)
        prompt = []
    if prompt:
        if prompt[-1]["role"] not in ("user", "tool"):
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
