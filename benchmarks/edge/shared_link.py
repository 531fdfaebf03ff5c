"""Simulate milliseconds per token for many edge users on one link and one cloud.

    python benchmarks/edge/shared_link.py --users 1 10 100 1000

No model runs: recorded acceptance for a small draft (assets/acceptance) decides each round. All
users share a link's bandwidth, and a target verifies all waiting drafts in one pass. The presets
run without jitter and loss here, because these would delay other users' messages. "cloud" streams
the target's own tokens, without a draft. "storm" is the time in seconds until every user has a new
draft, as needed after fine-tuning a target without FlexSpec's frozen parts.
"""

import argparse
import heapq
import itertools
import random
from dataclasses import replace

from draft_length import FLEXSPEC, HEADER, make_text

from pipedraft.eval.edge.methods import TIMES
from pipedraft.eval.tables import Table, align_columns
from pipedraft.inference.config import read_cost
from pipedraft.inference.edge.channel import NEVER, PRESETS, Channel


def ms_per_token(network: str, num_users: int, length: int, row: float, seconds: float) -> float:
    """Return a user's mean milliseconds per token.

    Args:
        length: draft tokens per round, or 0 if the cloud decodes alone.
        row: time for a further row in a pass, relative to the first row's.
        seconds: simulated time.
    """
    channel = Channel(replace(PRESETS[network], jitter_s=NEVER, loss=NEVER))
    rng, order = random.Random(0), itertools.count()
    tokens, waiting, batch = [0] * num_users, list[int](), list[int]()
    # One text for all, entered at another place by each user.
    right = make_text("t0_match", 4_000, 0).num_right
    places = [rng.randrange(3_000) for _ in range(num_users)]
    pass_s = FLEXSPEC.verify_s if length else TIMES["flexspec"].forward_s(1, alone=True)
    events = [(rng.random() * pass_s, next(order), "ask", user) for user in range(num_users)]
    heapq.heapify(events)

    def at(time_s: float, kind: str, user: int) -> None:
        heapq.heappush(events, (time_s, next(order), kind, user))

    busy_until_s, now_s = 0.0, 0.0
    while now_s < seconds:
        now_s, _, kind, user = heapq.heappop(events)
        if kind == "ask":  # drafted: send
            up_bytes = FLEXSPEC.up_bytes + FLEXSPEC.up_bytes_per_token * length
            at(channel.transmit(now_s, up_bytes - HEADER, "up"), "arrive", user)
        elif kind == "read":
            accepted = min(length, right[places[user] % len(right)]) if length else 0
            places[user] += accepted + 1
            tokens[user] += accepted + 1
            if length:
                at(now_s + length * FLEXSPEC.draft_s, "ask", user)
        elif kind == "arrive":
            waiting.append(user)
        elif kind == "done":
            for one in batch:
                read_s = channel.transmit(now_s, FLEXSPEC.down_bytes - HEADER, "down")
                at(read_s, "read", one)
                if not length:  # streamed: the next token needs no request
                    waiting.append(one)
        if waiting and now_s >= busy_until_s:
            batch, waiting = waiting, []
            rows = len(batch) * (length + 1)
            busy_until_s = now_s + pass_s * (1 + row * (rows - 1))
            at(busy_until_s, "done", -1)
    return 1e3 * seconds * num_users / sum(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 1, 3, 5, 7])
    parser.add_argument("--cost", default="h100", help="its price of a row; see eval --cost")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--draft-gb", type=float, default=3.2, help="FlexSpec's table I: 3.2")
    args = parser.parse_args()
    lines = []
    for (network, link), row in itertools.product(PRESETS.items(), (0.0, read_cost(args.cost).row)):
        for users in args.users:
            found = [ms_per_token(network, users, k, row, args.seconds) for k in args.lengths]
            storm_s = link.down_bytes_per_s.reach(0.0, users * args.draft_gb * 1e9)
            cells = [f"{ms:.0f}" for ms in found]
            lines.append([network, f"{row:g}", str(users), *cells, f"{storm_s:.0f}"])
    names = [f"K = {length}" if length else "cloud" for length in args.lengths]
    print(align_columns(Table(["link", "row", "users", *names, "storm, s"], lines)))


if __name__ == "__main__":
    main()
