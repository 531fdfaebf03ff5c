"""Record a decoded sequence for ``conformance``: every computed row, and what became of it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_atomically
from .conformance import Row
from .result import Observer

if TYPE_CHECKING:
    from .tree import TokenTree
    from .verdict import Verdict


class TraceRows(Observer):
    """Rows of one sequence, in the order of their verification. The prompt has none."""

    def __init__(self, request: str) -> None:
        self.request, self.epoch = request, 0
        self.rows: list[Row] = []

    def verified(self, tree: "TokenTree", walk: "Verdict") -> None:
        path, retained = walk.path, tuple(walk.path)
        if not walk.restarts:
            retained = tree.keep_for(path, walk.next_token).rows
        following = [*(tree.tokens[row] for row in path[1:]), walk.next_token]
        for row, token in zip(path, following, strict=True):
            self._add(tree, row, accepted=True, next=token)
        for row in range(tree.num_injected):
            if row not in retained:
                self._add(tree, row, accepted=False)
        self.epoch += len(retained) == len(path)

    def _add(self, tree: "TokenTree", row: int, **more: int) -> None:
        place: Row = {"request": self.request, "position": tree.position(row)}
        self.rows.append(place | {"token": tree.tokens[row], "epoch": self.epoch} | more)

    def write(self, file: Path) -> None:
        write_atomically(file, "".join(json.dumps(row) + "\n" for row in self.rows).encode())
