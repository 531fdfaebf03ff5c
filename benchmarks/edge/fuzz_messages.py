"""Mutated messages of sessions, for ``benchmarks/fuzz.py``.

While one session receives mutated messages, another one must continue its own sequence.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from pipedraft.inference.edge.session_messages import (
    REPLIES,
    REQUESTS,
    Close,
    More,
    Open,
    Preverify,
    Request,
    Settings,
    Stream,
    Verify,
    prefix_hash,
)
from pipedraft.inference.edge.target_session import SharedTarget, TargetSession


def areas(
    model: PreTrainedModel, mutate_bytes: Callable[[bytes, random.Random], bytes]
) -> dict[str, Callable[[random.Random], None]]:
    return {"wire": Messages(model, mutate_bytes).wire}


class Messages:
    def __init__(
        self, model: PreTrainedModel, mutate_bytes: Callable[[bytes, random.Random], bytes]
    ) -> None:
        self.mutate_bytes, self.shared = mutate_bytes, SharedTarget(model)
        ids = torch.tensor([[1, 2, 3]])
        out: Any = model.generate(  # type: ignore[operator]  # transformers' own annotation
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=120
        )
        self.reference: list[int] = out[0].tolist()
        self.honest: TargetSession | None = None

    def _messages(self, rng: random.Random) -> Iterator[Request]:
        rule: Any = rng.choice(("match", "gumbel", "rejection", "tail_escape", "topk"))
        settings = Settings(rule=rule, temperature=rng.choice((0.0, 1.0)), max_new_tokens=20)
        prompt = [rng.randrange(16) for _ in range(rng.randint(1, 5))]
        yield Open(prompt_ids=prompt, settings=settings, streams=rng.random() < 0.2)
        for seq in range(1, 5):
            known: dict[str, Any] = {"epoch": rng.randrange(2), "seq": seq}
            ids = [rng.randrange(16) for _ in range(rng.randrange(4))]
            after: dict[str, Any] = {
                **known,
                "base": len(prompt) + 1,
                "prefix_hash": prefix_hash(prompt + [0]),
            }
            drafted: dict[str, Any] = {
                "certain": [],
                "ids": ids,
                "q": [0.5] * len(ids),
                "next_s": 0.0,
            }
            made: list[Request] = [
                Verify(**after, **drafted),
                Preverify(**after, **drafted),
                More(**known, count=rng.randrange(9)),
                Stream(**after, certain=[]),
                Close(**known),
            ]
            yield rng.choice(made)

    def wire(self, rng: random.Random) -> None:
        """Send mutated messages to one session while another one streams its sequence."""
        hostile: TargetSession | None = None
        said = None
        for message in self._messages(rng):
            data = REQUESTS.to_bytes(message)
            data = self.mutate_bytes(data, rng) if rng.random() < 0.6 else data
            try:
                request = REQUESTS.decode(data)
                if hostile is not None:
                    hostile.receive(request, 0.0)
                elif isinstance(request, Open) and len(request.prompt_ids) < 100:
                    hostile = TargetSession(self.shared, request)
                for _ in range(3):
                    if hostile is None or hostile.is_closed or not hostile.start(0.0):
                        break
                    hostile.run()
                    hostile.finish(0.0)
            except ValueError as error:
                said = error
            self._check_honest()
        try:
            REPLIES.decode(self.mutate_bytes(data, rng))
        except ValueError as error:
            said = error
        if said is not None:
            raise said

    def _check_honest(self) -> None:
        """Stream one more token in the honest session, and compare it with the reference."""
        if self.honest is None or self.honest.is_closed or not self.honest.start(0.0):
            settings = Settings(max_new_tokens=120)
            opening = Open(prompt_ids=[1, 2, 3], settings=settings, streams=True)
            self.honest, self.num_honest = TargetSession(self.shared, opening), 3
            self.honest.start(0.0)
        self.honest.run()
        for reply in self.honest.finish(0.0):
            token, expected = getattr(reply, "token", None), self.reference[self.num_honest]
            assert token == expected, f"{token} where {expected} follows: another sequence"
            self.num_honest += 1
