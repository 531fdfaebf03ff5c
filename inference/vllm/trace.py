"""Write a conformance trace: one JSON line per computed token. See ``inference/conformance.py``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, TypeAlias

from .flight import Sent

Row: TypeAlias = dict[str, str | int | bool | None]


class Trace:
    """File of rows, in the order in which the scheduler processes their steps."""

    def __init__(self, file: str | None) -> None:
        self._file: TextIO | None = None
        if file:
            self._file = Path(file).open("w")  # noqa: SIM115  # until the engine ends

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def add(
        self, name: str, sent: Sent, *, accepted: bool, following: int | None, cached: int
    ) -> None:
        """Write the rows for one request's part of a step.

        Args:
            following: the token sampled behind the last of them.
            cached: the request's tokens in the prefix cache.
        """
        if self._file is None:
            return
        rows = []
        for index, token in enumerate(sent.tokens):
            row: Row = {"request": name, "position": sent.start + index, "token": token}
            row |= {"epoch": sent.epoch, "accepted": accepted}
            if index == len(sent.tokens) - 1 and following is not None:
                row |= {"next": following, "cached": cached}
            rows.append(row)
        self.write(rows)

    def write(self, rows: Sequence[Row]) -> None:
        if self._file is not None and rows:
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
