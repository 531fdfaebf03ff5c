"""The ranks of a launch in one process; every message still becomes bytes and back."""

from random import Random

import pytest
from decode_runs import NEW_TOKENS, PlainTokenizer

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.process import ProcessPipeline
from pipedraft.inference.ranks.codec import CODEC, AnyMessage
from pipedraft.inference.ranks.links import Answers, Local
from pipedraft.inference.ranks.worker import SharedWorker
from pipedraft.inference.timeline import Timeline


class Wire(Local):
    """Link within a process: turns every message into bytes and back, as between processes."""

    def __init__(self, handle=None, ends=(None, None)) -> None:
        """``ends``: two devices; tensors on the first move directly to the second, not as bytes."""
        super().__init__(handle)
        self.ends = ends

    def send(self, message: AnyMessage) -> None:
        frame = CODEC.encode(message, self.ends[0])
        apart = iter(frame.apart)
        super().send(CODEC.decode(frame.data, lambda *_: next(apart).to(self.ends[1])))


class LateWire(Wire):
    """Drops every second cancellation, as if it came too late."""

    count = 0

    def send(self, message: AnyMessage) -> None:
        self.count += 1
        if self.count % 2:
            super().send(message)


def connect_inline(target, others=(), *, is_direct=False):
    """Connect all stages in this process, each finishing a message before the next is sent.

    Args:
        others: the same target again for each stage after the first, on its own devices.
        is_direct: hidden states go from device to device beside their frames.
    """
    last = target.num_stages - 1
    targets = [target, *others] if others else [target] * target.num_stages
    devices = [x.device if is_direct else None for x in targets]
    answers = [Wire(ends=(device, devices[0])) for device in devices]
    workers: list[SharedWorker] = []
    following = None
    for index in range(last, -1, -1):
        worker = SharedWorker(
            target=targets[index],
            index=index,
            following=following,
            controller=answers[index],
            timeline=Timeline(f"stage {index}"),
        )
        workers.append(worker)
        following = Wire(worker.handle, ends=(devices[max(index - 1, 0)], devices[index]))

    def cancel(worker):
        return LateWire(worker.cancel)

    return ProcessPipeline(
        target,
        following,
        Answers(answers),
        Timeline("controller"),
        cancels=[cancel(worker) for worker in workers],
    )


def decode_both(
    target, prompts, *, draft=None, make_source=None, connect_ranks=connect_inline, **options
):
    """Decode the same prompts on both backends, one after the other on one pipeline."""
    found = []
    for connect in (None, connect_ranks):
        extra = {} if connect is None else {"connect": connect}
        results, engine = [], None
        for prompt in prompts:
            source = make_source(prompt) if make_source else None
            config = DecodeConfig.of(max_new_tokens=NEW_TOKENS, **options)
            if engine is None or source is not None:
                engine = Engine(target, PlainTokenizer(), config, draft, source=source, **extra)
            results.append(engine.decode(prompt))
        found.append(results)
    for local, other in zip(*found, strict=True):
        for name in ("token_ids", "num_steps", "round_lengths", "position_tests", "num_drafted"):
            assert getattr(local, name) == getattr(other, name), name
        assert local.virtual_time == pytest.approx(other.virtual_time)
    return found[0]


class RanksInTurns:
    """Stages that work only while the controller waits: every cancellation is in time.

    With ``haste`` the first stage runs in the controller, as with one process per stage. While it
    computes, the other stages also work: before each layer, with probability ``haste``.
    """

    def __init__(self, target, haste: float | None = None, seed: int = 0) -> None:
        num_stages = target.num_stages
        self.haste, self.random = haste, Random(seed)
        self.queues = [Wire() for _ in range(num_stages)]
        self.answers = [Lazy(self) for _ in range(num_stages)]
        self.workers = [
            SharedWorker(
                target=target,
                index=index,
                following=self.queues[index + 1] if index + 1 < num_stages else None,
                controller=self.answers[index],
                timeline=Timeline(""),
            )
            for index in range(num_stages)
        ]
        first = self.queues[0] if haste is None else Wire(self.workers[0].handle)
        self.pipeline = ProcessPipeline(
            target, first, Answers(self.answers), Timeline(""), cancels=[Wire(self.cancel)]
        )
        if haste is not None:
            self.workers[0].is_still_wanted = self.is_wanted

    def cancel(self, message: AnyMessage) -> None:
        for worker in self.workers[self.haste is not None :]:
            worker.cancel(message)

    def is_wanted(self) -> bool:
        if self.random.random() < self.haste:
            self.work()
        return self.pipeline.is_wanted()

    def work(self) -> None:
        """Let every stage take one message, the last stage first: a lock-step."""
        for queue, worker in zip(reversed(self.queues), reversed(self.workers), strict=True):
            if queue.has_arrived():
                worker.handle(queue.receive())


def connect_in_turns(target):
    return RanksInTurns(target).pipeline


class Lazy(Wire):
    def __init__(self, owner) -> None:
        super().__init__()
        self.owner = owner

    def receive(self) -> AnyMessage:
        while not self.has_arrived():
            self.owner.work()
        return super().receive()
