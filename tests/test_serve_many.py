"""Many edges at one server: right texts, nobody else's text, bounded memory."""

import asyncio
import gc
import os
import random
from pathlib import Path

from decode_runs import greedy_reference
from serve_runs import decode, lm_draft, make_target, run, serving

NUM_CLIENTS = 50
NEW_TOKENS = 10


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def open_for_all(server) -> None:
    """No pass begins before all edges have a session."""
    choose = server._next_batch

    def choose_when_full():
        if len(server.table.held) < NUM_CLIENTS:
            return []
        server._next_batch = choose
        return choose()

    server._next_batch = choose_when_full


def test_fifty_edges_at_once():
    target = make_target()
    numbers = random.Random(0)
    prompts = [
        [numbers.randrange(16) for _ in range(numbers.randrange(1, 20))] for _ in range(NUM_CLIENTS)
    ]
    ways = ["autoregressive", "flexspec", "picospec", "pearl"]
    drafts = [lm_draft(target), lm_draft(target, right=True)]
    peaks = {"sessions": 0, "cache_bytes": 0}

    async def watch(table):
        while True:
            peaks["sessions"] = max(peaks["sessions"], len(table.held))
            peaks["cache_bytes"] = max(peaks["cache_bytes"], table.cache_bytes)
            assert table.cache_bytes <= table.reserved_bytes <= table.limits.cache_bytes
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

    async def scene():
        async with serving(target, sessions=NUM_CLIENTS) as server:
            watching = asyncio.create_task(watch(server.table))
            open_for_all(server)
            first = await wave(server)
            gc.collect()
            before = resident_bytes()
            open_for_all(server)
            second = await wave(server)
            gc.collect()
            grown = resident_bytes() - before
            if watching.done():
                watching.result()
            watching.cancel()
            assert not server.table.held
            shared = server.num_session_passes / server.num_passes
            return [*first, *second], grown, shared, server.table.num_opened

    outcomes, grown, shared, num_opened = run(scene())
    for index, prompt in enumerate(prompts):
        expected = greedy_reference(target, prompt, NEW_TOKENS)
        for outcome in (outcomes[index], outcomes[NUM_CLIENTS + index]):
            assert outcome.result.token_ids == expected
    assert num_opened == 2 * NUM_CLIENTS and peaks["sessions"] == NUM_CLIENTS
    assert shared > 1.5  # sessions wait for the thread together, and go together
    row_bytes = 3 * 2 * 2 * 8 * 4
    assert 0 < peaks["cache_bytes"] <= NUM_CLIENTS * 128 * row_bytes
    # A second wave needs what the first one needed: 50 leaked sessions of it would be 2.5 MB of
    # keys and values alone; the allocator's own noise is about as much.
    assert grown < 30e6
