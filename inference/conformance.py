"""Check a decoding trace: every token verified once, in order, and never from an outdated step.

    python -m pipedraft.inference.conformance TRACE.jsonl [TRACE.jsonl.rank0 ...]

A trace has one JSON object per line, in the order in which results are processed:

    {"request": "a", "position": 7, "token": 42, "epoch": 0, "accepted": true, "next": 5}

position, token: the computed token and its index in the sequence. epoch: number of restarts of this
request so far. accepted: the token belongs to the output. next, optional: the target's token for
the following position. cached, optional: tokens of this request that other requests may reuse.
Lines without ``accepted`` are a rank's own: what it computed, in order. Needs Python only. Exit
status 0: no fault. 1: a fault. 2: bad input.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
TYPES = {"request": str, "position": int, "token": int}
MAX_SHOWN = 20


class Sequence:
    """One request's accepted tokens."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.following: dict[int, int] = {}
        self.epoch, self.last = 0, -1

    def accept(self, row: Row) -> Iterator[str]:
        """Add an accepted row, and yield its faults."""
        place, token, epoch = row["position"], row["token"], row["epoch"]
        if epoch < self.epoch:
            yield f"epoch {epoch} is outdated by {self.epoch}, but its result was kept"
        elif epoch == self.epoch and self.tokens and place <= self.last:
            yield "the position was accepted before"
        elif self.tokens and place > self.last + 1:
            yield f"positions {self.last + 1} to {place - 1} were left out"
        if self.tokens.get(place, token) != token:
            yield f"token {self.tokens[place]} was accepted here before, now {token}"
        if self.following.get(place - 1, token) != token:
            yield f"token {token}, but the target's is {self.following[place - 1]}"
        if row.get("cached", 0) > place + 1:
            yield f"{row['cached']} tokens can be reused, but {place + 1} are verified"
        self.tokens[place], self.epoch, self.last = token, epoch, place
        if "next" in row:
            self.following[place] = row["next"]


def check(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the faults of a trace, with its own rows first in the order of processing.

    Raises:
        ValueError: a row lacks a field.
    """
    sequences: dict[str, Sequence] = defaultdict(Sequence)
    computed: dict[object, dict[str, list[tuple[int, int]]]] = {}
    for number, row in enumerate(rows, start=1):
        names = TYPES if "accepted" not in row else TYPES | {"epoch": int, "accepted": bool}
        for name, kind in names.items():
            if type(row.get(name)) is not kind:
                raise ValueError(f"row {number}: {name} must be {kind.__name__}: {row}")
        rank = row.get("rank") if "accepted" not in row else None
        by_request = computed.setdefault(rank, defaultdict(list))
        by_request[row["request"]].append((row["position"], row["token"]))
        if row.get("accepted"):
            for fault in sequences[row["request"]].accept(row):
                yield f"row {number}: request {row['request']}, position {row['position']}: {fault}"
    scheduled = computed.pop(None, {})
    for rank, by_request in computed.items():
        for request, wanted in scheduled.items():
            found = by_request[request][: len(wanted)]  # it may be ahead when a request ends
            if found != wanted:
                pairs = zip([*found, None], wanted, strict=False)
                place, (got, right) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
                yield f"rank {rank}: request {request}, token {place}: {got} instead of {right}"


def main() -> None:
    rows: list[Row] = []
    try:
        for name in sys.argv[1:] or ["(no file)"]:
            with open(name) as file:
                rows += [json.loads(line) for line in file]
        faults = list(check(rows))
    except (OSError, ValueError) as error:
        print(f"error: trace: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join([*faults[:MAX_SHOWN], f"{len(faults)} faults in {len(rows)} rows"]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
