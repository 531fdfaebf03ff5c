"""Store on-policy answers in SQLite, one row per conversation, and export them as JSONL.

This module needs neither model nor network, so answers from servers and local models share it. The
output follows the input order. A row is settled once it has an answer or has failed. A run can
resume after any exit. With --out answers.jsonl, these files are written:

    answers.sqlite          settled rows, committed one by one, and the run's input and settings
    answers.jsonl           {"input_row": i, ...} per answered row, i ascending; written at the end
    answers.errors.jsonl    {"input_row": i, "reason": ..., "row": ...} per row without an answer

A killed process loses no settled row. Remove the database once you will not retry any row.
"""

import json
import re
import sqlite3
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..chats import END_THINK, THINK, read_template_variables
from ..errors import Failure
from ..files import Values, publish
from ..options import Options, option
from ..responses import Response
from .conversations import SYSTEM_FIELDS, Message, in_messages, read_row

WRITTEN = "written"
"""Settings key for the files written last. It never equals an option: these begin with dashes."""
SCHEMA = """
-- The first statement locks the file until the process ends, for any reason.
PRAGMA locking_mode = EXCLUSIVE;
-- A commit is one write without fsync: a kill loses nothing, a power cut may lose the last rows.
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS rows (row INTEGER PRIMARY KEY, reason TEXT, line BLOB);
"""


class AnswerFile:
    """Answer store of one process. Takes rows in any order and writes lines in input order."""

    def __init__(
        self, out: Path, settings: Mapping[str, object], *, num_rows: int, retry_errors: bool
    ) -> None:
        """Open the database next to ``out``, or create it.

        Args:
            settings: option -> value for each option that changes the answers; JSON values only.

        Raises:
            ValueError: ``out`` belongs to another input, other settings or a running process.
        """
        if out.suffix != ".jsonl":
            raise ValueError(f"--out: {str(out)!r} does not end in .jsonl; give such a name")
        self.out = out
        self.errors_path = out.with_suffix(".errors.jsonl")
        place = out.with_suffix(".sqlite")
        if out.exists() and not place.exists():
            raise ValueError(
                f"--out: {str(out)!r} exists and has no {place.name} beside it, so it cannot be "
                "resumed; give another file, or remove it"
            )
        self.is_answered = bytearray(num_rows)
        self.reasons: dict[int, str] = {}
        """Failed row -> its reason."""
        try:
            self.database = sqlite3.connect(place, timeout=0, isolation_level=None)
            self.database.executescript(SCHEMA)
            self._check(settings)
            for row, reason in self.database.execute("SELECT row, reason FROM rows"):
                if not reason:
                    self.is_answered[row] = True
                elif not retry_errors:
                    self.reasons[row] = reason
        except sqlite3.Error as error:
            used = "another process is writing it" if "locked" in str(error) else error
            raise ValueError(
                f"--out: {str(place)!r} cannot be written ({used}); give another file"
            ) from error

    @property
    def num_answered(self) -> int:
        return self.is_answered.count(True)

    @property
    def num_failed(self) -> int:
        return len(self.reasons)

    @property
    def num_cut(self) -> int:
        """Number of cut answers in the answered rows, earlier runs' included."""
        # SQLite would read a BLOB as its binary JSON.
        count = "sum(json_extract(CAST(line AS TEXT), '$.cut_answers'))"
        found = self.database.execute(f"SELECT {count} FROM rows WHERE reason = ''")
        return int(found.fetchone()[0] or 0)

    def is_pending(self, row: int) -> bool:
        return not self.is_answered[row] and row not in self.reasons

    def add(self, row: int, answered: dict[str, object]) -> None:
        """Store an answered row. Killing the process after this returns does not lose the row."""
        self._settle(row, {"input_row": row} | answered | {"input_row": row}, "")
        self.is_answered[row] = True

    def fail(self, row: int, reason: str, text: str) -> None:
        """Store a failed row and its reason. ``text`` is the row as read, which may not be JSON."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = text
        self._settle(row, {"input_row": row, "reason": reason, "row": content}, reason)
        self.reasons[row] = reason

    def finish(self) -> None:
        """Write the output, unless the file already has all answers. Every row must be settled."""
        known = self._get(WRITTEN) or []
        if self.out.exists() and self._identity(self.out) == known[-1]:
            return

        def write(place: Path) -> None:
            self._write_lines(place, "= ''")
            # Note it before the rename: a kill may come before or after.
            self._set(WRITTEN, [*known[-1:], self._identity(place)])

        publish(self.out, write)

    def close(self) -> None:
        """Write the failed rows next to the output, and close. A later run can resume."""
        errors = self.database.execute("SELECT count(*) FROM rows WHERE reason != ''")
        if errors.fetchone()[0]:
            publish(self.errors_path, lambda place: self._write_lines(place, "!= ''"))
        else:
            self.errors_path.unlink(missing_ok=True)
        self.database.close()

    def _check(self, settings: Mapping[str, object]) -> None:
        """Refuse other settings than the stored ones, and an output changed after it was written.

        While no row is settled, new settings replace the stored ones.
        """
        (num_settled,) = self.database.execute("SELECT count(*) FROM rows").fetchone()
        for name, value in settings.items():
            if not num_settled:
                self._set(name, value)
            begun = self._get(name)
            if begun != value:
                self.database.close()
                raise ValueError(
                    f"{name}: {value!r}, but {str(self.out)!r} was begun with {begun!r}; "
                    "give that one, or another --out"
                )

        known = [place for place, _ in self._get(WRITTEN) or []]
        if self.out.exists() and self._identity(self.out)[0] not in known:
            self.database.close()
            raise ValueError(
                f"--out: {str(self.out)!r} was changed after it was written; give another file, or "
                "remove it"
            )

    def _identity(self, path: Path) -> list[object]:
        """Return size, modification time and row count for an output."""
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
                f"--out: the database of {str(self.out)!r} cannot be written ({error}); free some "
                "space and resume with the same command"
            ) from error

    def _write_lines(self, place: Path, reason: str) -> None:
        rows = self.database.execute(f"SELECT line FROM rows WHERE reason {reason} ORDER BY row")
        with place.open("wb") as file:
            file.writelines(line + b"\n" for (line,) in rows)


def _json(value: object) -> bytes:
    """Encode a value as UTF-8 JSON, with a question mark for each unpaired surrogate."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


# -- conversations --------------------------------------------------------------------------

Messages = list[Message]

LOST_CHANNELS = re.compile(
    r"\s*(?:analysis.*assistant(?:final|commentary)|<\|channel\|>)", re.DOTALL
)
"""Matches gpt-oss's answer without its special tokens, or with all of them."""
TURNS = ("messages", "conversations")
WAS_CUT = "an answer was cut at --max-tokens (--drop-cut)"
"""Reason of a row that --drop-cut leaves out."""


class RowFailed(Exception):
    """Raised if one row gets no answer. The row is stored with the reason, and the run goes on."""


class TargetLost(Exception):
    """Raised if no further row can be answered. The message is a one-line reason."""


# How answers are sampled and stored. The docstring is a title in --help.
@dataclass(frozen=True, kw_only=True)
class AnswerSampling(Options):
    """answers"""

    thinking: Literal["keep", "strip"] = "keep"
    """keep: store it in the turn's reasoning_content; strip: drop it"""
    temperature: float = option(1.0, metavar="T")
    """sampling temperature"""
    top_p: float = option(1.0, metavar="P")
    """nucleus sampling threshold"""
    max_tokens: int = option(1024, least=1)
    """maximum tokens per answer"""
    greedy_share: float = option(0.5, metavar="P")
    """share of rows with greedy answers"""
    seed: int = 0
    """sampling seed"""
    chat_template_kwargs: Values | None = option(
        None, metavar="JSON", parse=read_template_variables
    )
    """variables for the chat template, for example {"enable_thinking": false}; a row's own
    variables take precedence"""

    def is_greedy(self, row: int) -> bool:
        """Return True for a greedy row. Of the first n rows, int(n * greedy_share) are greedy."""
        return int(row * self.greedy_share) < int((row + 1) * self.greedy_share)

    def seed_of(self, row: int, turn: int, attempt: int = 0) -> int:
        """Return the seed for one answer. It is below 2**31, so every server accepts it."""
        return zlib.crc32(f"{self.seed} {row} {turn} {attempt}".encode()) & 0x7FFFFFFF


@dataclass
class Dialogue:
    """Conversation in which the assistant turns are regenerated one after the other."""

    row: int
    """Index in the input, from 0."""
    text: str
    """The input row as read."""
    fields: dict[str, object]
    """Other fields of the input row; copied to the output."""
    prompts: list[Messages]
    """For each answer: the turns between the previous answer and this one."""
    tools: list[Values] | None = None
    variables: Values = field(default_factory=dict)
    """Chat template variables from the row."""
    history: Messages = field(default_factory=list)
    """Prompts and answers so far."""
    num_answers: int = 0
    num_cut: int = 0
    drops_cut: bool = False
    """Fail at an answer that was cut, instead of counting it."""

    @classmethod
    def read(cls, row: int, text: str) -> "Dialogue":
        """Read {"prompt": text}, ``messages`` or ``conversations`` from JSON.

        If the conversation ends with the user's turn, that turn gets an answer, too.

        Raises:
            RowFailed: the text has none of these forms, or an assistant turn follows no user turn.
        """
        try:
            value = in_messages(json.loads(text))
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
        """Return all turns that the target reads before its next answer."""
        return [*self.history, *self.prompts[self.num_answers]]

    def add(self, answer: Response, *, is_cut: bool) -> None:
        """Add the target's answer. Raise RowFailed if it was cut and such rows are dropped.

        Args:
            is_cut: the answer stopped at --max-tokens or at the target's last position.
        """
        if is_cut and self.drops_cut:
            raise RowFailed(WAS_CUT)
        if answer.tool_calls and self.num_answers + 1 < len(self.prompts):
            raise RowFailed("a call of a tool where the row goes on otherwise")
        self.history = [*self.question(), answer.message()]
        self.num_answers += 1
        self.num_cut += is_cut

    def to_row(self, *, is_greedy: bool) -> dict[str, object]:
        """Return the input row with the answered conversation in the OpenAI form."""
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
    """Return the turns before each answer.

    [system, user, assistant, user] becomes [[system, user], [user]].

    An assistant turn before a tool result is not regenerated, because the result belongs to the
    turn's tool call. That turn stays as context without loss.
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


def kept_response(response: Response, *, thinking: Literal["keep", "strip"]) -> Response:
    """Return an answer as stored in the row, with or without its thinking.

    Raises:
        RowFailed: the answer is empty, or it is thinking alone.
    """
    thought, content = response.thinking.strip(), response.content.strip()
    if not content and not response.tool_calls:
        said = "thinking without an answer; raise --max-tokens" if thought else "empty answer"
        raise RowFailed(said)
    return Response("" if thinking == "strip" else thought, content, response.tool_calls)


def split_served(content: str, reasoning: str) -> Response:
    """Split an answer's content from a server, which may not have separated the thinking.

    A template may open the thinking in the prompt. The answer then has only the closing mark.

    Args:
        reasoning: thinking that the server returned in a separate field.

    Raises:
        RowFailed: the thinking does not end, or the server has lost the marks of its channels.
    """
    if LOST_CHANNELS.match(content):
        raise RowFailed("the server mixes thinking and answer; start it with its reasoning parser")
    before, mark, answer = content.partition(END_THINK)
    if reasoning or (not mark and not content.lstrip().startswith(THINK)):
        return Response(reasoning, content)
    if not mark:
        raise RowFailed("the thinking does not end; raise --max-tokens")
    head, opening, thought = before.partition(THINK)
    if opening and head.strip():
        return Response("", content)  # marks inside an answer are text
    return Response(thought if opening else head, answer)
