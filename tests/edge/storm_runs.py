"""Faulty connection and server: they delay messages and break sessions, on their own clock."""

import random
from types import SimpleNamespace

import pytest
from decode_runs import PlainTokenizer
from link_runs import TIMES, config_for

from pipedraft.inference.edge import SessionLimits, remote, stream
from pipedraft.inference.edge.engine import LinkEngine
from pipedraft.inference.edge.remote import RemotePipeline
from pipedraft.inference.edge.session_messages import REPLIES, REQUESTS, Description
from pipedraft.inference.edge.session_table import SessionTable
from pipedraft.inference.edge.stream import Access
from pipedraft.inference.edge.target_session import run_together


class Storm:
    """Stand-in for a ``Connection``, a server and the clock.

    Messages are late and come in order, as in gRPC, until the stream breaks.
    """

    access = Access(server="127.0.0.1:1", answer_s=5.0, connect_s=0.5, give_up_s=1e9)

    def __init__(self, target, seed: int, *, loss: float, falls_back_after: int = -1) -> None:
        self.rng, self.loss, self.falls_back_after = random.Random(seed), loss, falls_back_after
        self.table = SessionTable(target, SessionLimits(max_prompt_tokens=64), 0)
        self.now_s, self.num_turns = 0.0, 0
        self.lines: list[Line] = []
        self.patience = stream.Patience(self.access)
        self.pipeline = StormPipeline(self, keeps_drafting=True)

    def decode(self, source, prompt, **options):
        """Decode an output with this storm's clock in place of the machine's."""
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        config = config_for(source, **options)
        with pytest.MonkeyPatch.context() as patch:
            for module in (stream, remote):
                patch.setattr(module, "time", clock)
            patch.setattr(remote, "SessionStream", Line)
            patch.setattr(stream, "random", self.rng)
            engine = LinkEngine(self.pipeline, PlainTokenizer(), config, source=source)
            return engine.decode(prompt)

    def describe(self):
        about = dict.fromkeys(Description.__struct_fields__, 0)
        return Description(**about | {"forward_s": TIMES.verify_s, "row_s": 0.001}), 0.06

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def turn(self) -> None:
        self.num_turns += 1
        assert self.num_turns < 60_000, "the output does not end"
        self.now_s += 0.01
        line = self.lines[-1]
        self.rng.choice([self.compute, line.deliver, line.deliver])()
        if self.rng.random() < self.loss / 50:
            line.hang_up()
        if self.num_turns == self.falls_back_after:
            self.pipeline.fallback = "the test says so"

    def compute(self) -> None:
        for held in list(self.table.held.values()):
            if held.core.is_running:
                run_together([held.core])
                self.answer(held, held.core.finish(self.now_s))
            else:
                held.core.start(self.now_s)

    def answer(self, held, replies) -> None:
        held.line.down += map(REPLIES.to_bytes, replies)


class StormPipeline(RemotePipeline):
    """Pipeline on a storm: advances it while the draft computes and at every poll."""

    def drafted(self, num_tokens: int, started_s: float) -> None:
        for _ in range(self.connection.rng.randrange(5)):
            self.connection.turn()
        super().drafted(num_tokens, started_s)

    def verdict_waits(self) -> bool:
        if self.connection.rng.random() < 0.5:
            self.connection.turn()
        return super().verdict_waits()


class Line:
    """Stand-in for a ``SessionStream``."""

    def __init__(self, storm: Storm) -> None:
        self.storm, self.is_up, self.session = storm, True, None
        self.up, self.down = [], []
        storm.lines.append(self)

    def send(self, request) -> None:
        if self.session is None:
            self.session = self.storm.table.open(request, self.storm.now_s)
            self.session.line = self
        else:
            self.up.append(REQUESTS.to_bytes(request))

    def deliver(self) -> None:
        if self.up and self.is_up:
            request = REQUESTS.decode(self.up.pop(0))
            replies = self.session.core.receive(request, self.storm.now_s)
            self.storm.answer(self.session, replies)

    def take(self, *, waits: bool):
        """Return the next reply; an ended call still delivers earlier replies."""
        until_s = self.storm.now_s + (self.storm.access.answer_s if waits else 0.0)
        while not self.down and self.is_up and self.storm.now_s < until_s:
            self.storm.turn()
        if self.down:
            return REPLIES.decode(self.down.pop(0)), self.storm.now_s
        if waits or not self.is_up:
            raise stream.SessionLost("storm")
        return None

    def close(self, closing) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        self.is_up = False
        if self.session is not None:
            self.storm.table.drop(self.session)
