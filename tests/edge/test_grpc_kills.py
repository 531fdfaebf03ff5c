"""SIGKILL at random moments in a server: the edge opens new sessions and loses nothing."""

import asyncio
import random
import signal
import time

import pytest
from command_processes import Process
from decode_runs import greedy_reference
from grpc_runs import decode, lm_draft
from tiny_models import byte_tokenizer, tiny_llama

KEPT = {"test_a_server_that_is_killed_again_and_again_gives_the_whole_sequence": 0}
MANY = pytest.param(13, marks=pytest.mark.all)


@pytest.mark.parametrize("num_kills", [1, MANY])
def test_a_server_that_is_killed_again_and_again_gives_the_whole_sequence(
    num_kills, parent, tmp_path
):
    model, numbers, size = tiny_llama(layers=3, vocab=300), random.Random(num_kills), 30
    model.save_pretrained(tmp_path / "t")
    byte_tokenizer().save_pretrained(tmp_path / "t")
    words = ["serve", "--target", str(tmp_path / "t"), "--port"]
    draft, tokens, allowed = lm_draft(model), list[int](), size
    logits = draft.network.logits

    def draft_until_the_next_kill(hidden_QH):
        while len(tokens) >= allowed:
            time.sleep(0.001)
        return logits(hidden_QH)

    draft.network.logits = draft_until_the_next_kill

    def start(port: str = "0") -> tuple[Process, str]:
        server = Process.start(parent, tmp_path, *words, port)
        return server, server.wait_for(r"on 127\.0\.0\.1:(\d+) \(")[1]

    async def scene():
        nonlocal allowed
        (server, port), num_killed = start(), 0
        decoding = asyncio.create_task(
            decode(
                int(port),
                [1, 2],
                draft=draft,
                max_new_tokens=size * (num_kills + 1),
                on_token=tokens.append,
                access={"give_up_s": 200.0},
            )
        )
        while num_killed < num_kills and not decoding.done():
            wanted = max(size * num_killed + numbers.randrange(size), len(tokens) + 1)
            while len(tokens) < wanted and not decoding.done():
                await asyncio.sleep(0.001)
            await asyncio.sleep(numbers.uniform(0, 0.02))
            server.send(signal.SIGKILL)
            assert server.finish()[0] == -signal.SIGKILL
            num_killed += not decoding.done()
            server, _ = await asyncio.to_thread(start, port)
            allowed += size
        outcome = await decoding
        server.send(signal.SIGTERM)
        assert server.finish()[0] == 0
        return outcome, num_killed

    outcome, num_killed = asyncio.run(scene())
    assert num_killed == num_kills == outcome.num_reopened
    expected = greedy_reference(model, [1, 2], size * (num_kills + 1))
    assert outcome.result.token_ids == expected
