"""The output of a long run over rows: in input order, and resumable after any kind of end.

    answers.sqlite          every row that is settled, committed one by one, and what was asked for
    answers.jsonl           {"input_row": i, ...} for every answered row, i ascending: at the end
    answers.errors.jsonl    {"input_row": i, "reason": ..., "row": ...} for every row without answer

A killed process loses no settled row. The database may be removed when no row is to be asked again.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipedraft.errors import Failure

PENDING, ANSWERED, FAILED = range(3)
WRITTEN = "written"
"""Among the settings: the latest outputs. Options begin with dashes."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS rows (row INTEGER PRIMARY KEY, reason TEXT, line BLOB);
"""


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
        self.database_path = out.with_suffix(".sqlite")
        self.errors_path = out.with_suffix(".errors.jsonl")
        if out.exists() and not self.database_path.exists():
            raise ValueError(
                f"--out: {str(out)!r} exists and has no {self.database_path.name} beside it, so it "
                "cannot be resumed; give another file, or remove it"
            )
        self.status = bytearray(num_rows)
        self.reasons: dict[int, str] = {}
        """Of the rows that failed."""
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
        return self.status.count(ANSWERED)

    @property
    def num_failed(self) -> int:
        return len(self.reasons)

    def is_pending(self, row: int) -> bool:
        return self.status[row] == PENDING

    def add(self, row: int, answered: dict[str, Any]) -> None:
        """Keep an answered row; a kill after this returns does not lose it."""
        self._settle(row, {"input_row": row} | answered | {"input_row": row}, "")
        self.status[row] = ANSWERED

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
        self.status[row], self.reasons[row] = FAILED, reason

    def finish(self) -> None:
        """Write the output, unless it is there already. Every row is settled."""
        known = self._get(WRITTEN) or []
        if not self.out.exists() or self._identity(self.out) != known[-1]:
            partial = _write(self.out, self._lines("= ''"))
            # Before the renaming, which a kill may follow or precede.
            self._set(WRITTEN, [*known[-1:], self._identity(partial)])
            partial.replace(self.out)

    def close(self) -> None:
        """Leave the rows without answer beside the output; a later run goes on from here."""
        errors = self.database.execute("SELECT count(*) FROM rows WHERE reason != ''")
        if errors.fetchone()[0]:
            _write(self.errors_path, self._lines("!= ''")).replace(self.errors_path)
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

    def _check(self, settings: dict[str, Any]) -> None:
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
        """What earlier runs have settled."""
        for row, reason in self.database.execute("SELECT row, reason FROM rows"):
            if not reason:
                self.status[row] = ANSWERED
            elif not retry_errors:
                self.status[row], self.reasons[row] = FAILED, reason

    def _identity(self, path: Path) -> list[Any]:
        """Size and time of an output, and its rows."""
        place = path.stat()
        return [[place.st_size, place.st_mtime_ns], self.num_answered]

    def _get(self, name: str) -> Any:
        found = self.database.execute("SELECT value FROM settings WHERE name = ?", (name,))
        (value,) = found.fetchone() or ("null",)
        return json.loads(value)

    def _set(self, name: str, value: Any) -> None:
        self.database.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, _json(value)))

    def _settle(self, row: int, line: dict[str, Any], reason: str) -> None:
        try:
            self.database.execute(
                "INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", (row, reason, _json(line))
            )
        except sqlite3.OperationalError as error:
            raise Failure(
                f"--out: {str(self.database_path)!r} cannot be written ({error}); free some space "
                "and resume with the same command"
            ) from error

    def _lines(self, reason: str) -> Iterator[bytes]:
        for (line,) in self.database.execute(
            f"SELECT line FROM rows WHERE reason {reason} ORDER BY row"
        ):
            yield line + b"\n"


def _json(value: Any) -> bytes:
    """Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _write(path: Path, lines: Iterator[bytes]) -> Path:
    """A file beside ``path``, which is to take its place."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    return partial
