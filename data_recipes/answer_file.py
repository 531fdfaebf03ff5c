"""The output of a long run over rows: in input order, and resumable after any kind of end.

    answers.jsonl           {"input_row": i, ...} for every answered row, i ascending
    answers.journal.jsonl   line 1: what was asked for; then rows answered before an earlier one was
    answers.errors.jsonl    {"input_row": i, "reason": ..., "row": ...} for every row without answer

Each line is appended and flushed by itself, so that a killed process leaves at most one line that
is not whole, the last one of a file. A row is in the journal until it is in the output.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pipedraft.files import publish

NUMBERED = re.compile(rb'\{"input_row": (\d+)[,}]')
PENDING, ANSWERED, FAILED = range(3)


class AnswerFile:
    """Rows in, in any order; lines out, in input order. One process at a time."""

    def __init__(
        self, out: Path, settings: dict[str, Any], *, num_rows: int, retry_errors: bool
    ) -> None:
        """
        Args:
            settings: option -> value, what the answers depend on; JSON values only.

        Raises:
            ValueError: ``out`` belongs to another input, other settings or a running process.
        """
        if out.suffix != ".jsonl":
            raise ValueError(f"--out: {str(out)!r} does not end in .jsonl; give such a name")
        self.out = out
        self.journal_path = out.with_suffix(".journal.jsonl")
        self.errors_path = out.with_suffix(".errors.jsonl")
        if out.exists() and not self.journal_path.exists():
            raise ValueError(
                f"--out: {str(out)!r} exists and has no {self.journal_path.name} beside it, so it "
                "cannot be resumed; give another file, or remove it"
            )
        self.status = bytearray(num_rows)
        self.last_row = -1
        """The last row in the output."""
        self.next_row = 0
        """Every row before it is answered or failed."""
        self.waiting: dict[int, int] = {}
        """Row in the journal and not in the output -> its place in the journal."""
        self.num_lines_of_errors = 0
        self.reasons: dict[int, str] = {}
        """Of the rows that failed."""
        try:
            self.journal = self.journal_path.open("a+b")
        except OSError as error:
            raise ValueError(
                f"--out: {str(out)!r} cannot be written ({error.strerror}); give another file"
            ) from error
        self._lock()
        self._check(settings)
        self._read_back(retry_errors)
        self.output = out.open("ab")
        self.errors = self.errors_path.open("ab")
        self._advance()

    @property
    def num_answered(self) -> int:
        return self.status.count(ANSWERED)

    @property
    def num_failed(self) -> int:
        return len(self.reasons)

    def is_pending(self, row: int) -> bool:
        return self.status[row] == PENDING

    def add(self, row: int, answered: dict[str, Any]) -> None:
        """Keep an answered row; it is on its way to the disk when this returns."""
        line = _line({**answered, "input_row": row}, first="input_row")
        self.status[row] = ANSWERED
        if row == self.next_row and row > self.last_row:
            self._append(row, line)
        else:
            self.waiting[row] = self.journal.seek(0, os.SEEK_END)
            self.journal.write(line)
            self.journal.flush()
        self._advance()

    def fail(self, row: int, reason: str, text: str) -> None:
        """Keep a row without answer, and why.

        Args:
            text: the row as read; it need not be JSON.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = text
        self.errors.write(_line({"input_row": row, "reason": reason, "row": content}))
        self.errors.flush()
        self.num_lines_of_errors += 1
        self.status[row] = FAILED
        self.reasons[row] = reason
        self._advance()

    def finish(self) -> None:
        """Put late rows in their places and drop errors that were mended. Every row is settled."""
        if self.waiting:
            self.output.close()
            self._merge()
        self.errors.close()
        if not self.num_failed:
            self.errors_path.unlink()
        elif self.num_lines_of_errors > self.num_failed:
            latest = dict(_numbered_lines(self.errors_path))
            kept = {row: line for row, line in latest.items() if self.status[row] == FAILED}
            _replace(self.errors_path, (line for _, line in sorted(kept.items())))
        self.journal.truncate(self.header_size)

    def close(self) -> None:
        """Leave what is on the disk; a later run goes on from there."""
        for file in (self.output, self.errors, self.journal):
            file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self.journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.journal.close()
            raise ValueError(
                f"--out: another process is writing {str(self.out)!r}; wait for it, or give "
                "another file"
            ) from error

    def _check(self, settings: dict[str, Any]) -> None:
        """Compare with the first line of the journal; write it if there is nothing yet."""
        self.journal.seek(0)
        header = self.journal.readline()
        sizes = [path.stat().st_size for path in (self.out, self.errors_path) if path.exists()]
        if not any(sizes) and self.journal_path.stat().st_size == len(header):
            self.journal.truncate(0)
            header = _line(settings)
            self.journal.write(header)
            self.journal.flush()
        self.header_size = len(header)
        begun = json.loads(header)
        for name, value in settings.items():
            if begun.get(name) != value:
                raise ValueError(
                    f"{name}: {value!r}, but {str(self.out)!r} was begun with {begun.get(name)!r}; "
                    "give that one, or another --out"
                )

    def _read_back(self, retry_errors: bool) -> None:
        """What earlier runs have settled; lines that are not whole are cut off."""
        if self.out.exists():
            for row, _ in _numbered_lines(self.out):
                if not self.last_row < row < len(self.status):
                    raise ValueError(
                        f"--out: row {row} of {str(self.out)!r} is not in its place; the file was "
                        "changed: give another one"
                    )
                self.status[row] = ANSWERED
                self.last_row = row
        place = self.header_size
        for row, line in _numbered_lines(self.journal_path, place):
            if self.status[row] == PENDING:
                self.status[row] = ANSWERED
                self.waiting[row] = place
            place += len(line)
        if self.errors_path.exists():
            for row, line in _numbered_lines(self.errors_path):
                self.num_lines_of_errors += 1
                if self.status[row] != ANSWERED and not retry_errors:
                    self.status[row] = FAILED
                    self.reasons[row] = json.loads(line)["reason"]

    def _append(self, row: int, line: bytes) -> None:
        self.output.write(line)
        self.output.flush()
        self.last_row = row

    def _advance(self) -> None:
        """Move rows whose turn it is from the journal to the output."""
        while self.next_row < len(self.status) and self.status[self.next_row] != PENDING:
            row = self.next_row
            if row in self.waiting and row > self.last_row:
                self._append(row, self._journal_line(row))
                del self.waiting[row]
            self.next_row += 1
        if not self.waiting and self.journal.seek(0, os.SEEK_END) > self.header_size:
            self.journal.truncate(self.header_size)

    def _journal_line(self, row: int) -> bytes:
        self.journal.seek(self.waiting[row])
        return self.journal.readline()

    def _merge(self) -> None:
        """Rows that were answered when later ones were in the output already: errors retried."""

        def merged() -> Iterator[bytes]:
            late = sorted(self.waiting)
            for row, line in _numbered_lines(self.out):
                while late and late[0] < row:
                    yield self._journal_line(late.pop(0))
                yield line
            for row in late:
                yield self._journal_line(row)

        _replace(self.out, merged())
        self.waiting.clear()


def _line(value: dict[str, Any], first: str = "") -> bytes:
    """One line of JSON. Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    ordered = {first: value[first], **value} if first else value
    return (json.dumps(ordered, ensure_ascii=False) + "\n").encode(errors="replace")


def _numbered_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(row, line) of every whole line from byte ``start`` on; a last one that is not is cut off."""
    with path.open("r+b") as file:
        file.seek(start)
        place = start
        for line in file:
            found = NUMBERED.match(line)
            if not line.endswith(b"\n"):
                _cut(file, place)
                return
            if not found:
                raise ValueError(
                    f"--out: {str(path)!r} has a line that this command did not write, at byte "
                    f"{place}; mend or remove the file"
                )
            place += len(line)
            yield int(found[1]), line


def _cut(file: BinaryIO, size: int) -> None:
    file.seek(size)
    file.truncate()


def _replace(path: Path, lines: Iterator[bytes]) -> None:
    def write(place: Path) -> None:
        with place.open("wb") as file:
            file.writelines(lines)

    publish(path, write)
