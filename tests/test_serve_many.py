"""Many edges at one server: exact outputs, never mixed up, and no session is kept."""

import asyncio
import gc
import random

from decode_runs import greedy_reference
from serve_runs import decode, hold_passes, in_loop, lm_draft, make_target, serving

from pipedraft.inference.edge.target_session import TargetSession

NUM_CLIENTS = 50
NEW_TOKENS = 6


def num_sessions() -> int:
    """Sessions in memory, with each one's keys and values."""
    gc.collect()
    return sum(type(thing) is TargetSession for thing in gc.get_objects())


def open_for_all(server, num_opened: int) -> None:
    """Start no pass before all edges have a session."""
    hold_passes(server, lambda: server.table.num_opened < num_opened)


@in_loop
async def test_fifty_edges_at_once():
    target = make_target()
    numbers = random.Random(0)
    prompts = [
        [numbers.randrange(16) for _ in range(numbers.randrange(1, 20))] for _ in range(NUM_CLIENTS)
    ]
    ways = ["autoregressive", "flexspec", "picospec", "pearl"]
    drafts = [lm_draft(target), lm_draft(target, right=True)]
    peaks = {"sessions": 0, "cache_bytes": 0}
    before = num_sessions()

    async def watch(table):
        while True:
            peaks["sessions"] = max(peaks["sessions"], len(table.held))
            peaks["cache_bytes"] = max(peaks["cache_bytes"], table.cache_bytes)
            assert table.cache_bytes <= table.reserved_bytes <= table.limits.max_cache_mb * 2**20
            await asyncio.sleep(0.01)

    async def wave(server):
        return await asyncio.gather(
            *(
                decode(
                    server.port,
                    prompt,
                    schedule=ways[index % 4],
                    draft=drafts[index // 4 % 2] if index % 4 else None,
                    max_new_tokens=NEW_TOKENS,
                )
                for index, prompt in enumerate(prompts)
            )
        )

    async with serving(target, max_sequences=NUM_CLIENTS) as server:
        watching = asyncio.create_task(watch(server.table))
        outcomes = []
        for num_opened in (NUM_CLIENTS, 2 * NUM_CLIENTS):
            open_for_all(server, num_opened)
            outcomes += await wave(server)
        if watching.done():
            watching.result()
        watching.cancel()
        assert not server.table.held
        shared = server.num_session_passes / server.num_passes
        kept = num_sessions()
    for index, prompt in enumerate(prompts):
        expected = greedy_reference(target, prompt, NEW_TOKENS)
        for outcome in (outcomes[index], outcomes[NUM_CLIENTS + index]):
            assert outcome.result.token_ids == expected
    assert server.table.num_opened == 2 * NUM_CLIENTS and peaks["sessions"] == NUM_CLIENTS
    assert shared > 1.5  # sessions wait for the thread together, and run together
    row_bytes = 3 * 2 * 2 * 8 * 4
    assert 0 < peaks["cache_bytes"] <= NUM_CLIENTS * 128 * row_bytes
    assert kept - before < 10  # still named by the last pass
