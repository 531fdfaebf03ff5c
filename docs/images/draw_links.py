"""Draw decoding across a link: drafting, messages and the cloud's passes over time.

    python docs/images/draw_links.py --out docs/images

Schedules run on the virtual clock in inference/edge/simulated.py, with PicoSpec's constants (24 ms
per draft token, 87 ms per target pass) and a link of 60 ms. The draft is in known_text.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from known_text import PROMPT, KnownText, draw_luck, greedy_text, make_target
from picture_files import write_pictures

from pipedraft.eval.edge.methods import TIMES
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.diagram import Diagram
from pipedraft.inference.edge.channel import Channel, Link, Transmission
from pipedraft.inference.edge.engine import LinkEngine
from pipedraft.inference.edge.pipeline import Estimates, RemoteTarget
from pipedraft.inference.edge.session_messages import (
    REQUESTS,
    Open,
    Preverify,
    Reject,
    Reply,
    Request,
    Result,
)
from pipedraft.inference.edge.simulated import SimulatedPipeline
from pipedraft.inference.edge.target_session import SharedTarget, TargetSession
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.tree import TokenTree

SEED = 1287
SCALE = 620.0  # pixels for a second
SHOWN_S = 1.3
LEFT = 78.0
TEXT_Y, EDGE_Y, CLOUD_Y, HEIGHT = 22.0, 44.0, 142.0, 28.0
CLOSE_TO_GREEDY = 1e-3
"""Temperature: above 0, so corrections are drawn from distributions, but low enough for the greedy
text."""
PICTURES: dict[str, tuple[str, str, float, str]] = {
    "flexspec": ("FlexSpec", "flexspec", 0.0, "geometric"),
    "dssd": ("DSSD", "dssd", CLOSE_TO_GREEDY, "fixed:4"),
    "pearl": ("PEARL", "pearl", 0.0, "fixed:4"),
    "picospec": ("PicoSpec", "picospec", 0.0, "geometric"),
}
"""File -> title, schedule, temperature, draft length."""


@dataclass(frozen=True)
class Drafted:
    end_s: float
    place: int
    is_right: bool


@dataclass
class Message:
    start_s: float
    arrival_s: float
    is_up: bool
    num_bytes: int
    kind: str = ""


class RecordingChannel(Channel):
    def __init__(self, link: Link) -> None:
        super().__init__(link, seed=0)
        self.messages: list[Message] = []

    def send(self, now_s: float, num_bytes: int, direction: Any) -> Transmission:
        sent = super().send(now_s, num_bytes, direction)
        self.messages.append(Message(now_s, sent.arrival_s, direction == "up", num_bytes))
        return sent


class RecordingTarget(TargetSession):
    """Target session with a record for each pass: its start and rows."""

    def __init__(self, target: SharedTarget, opening: Open) -> None:
        super().__init__(target, opening)
        self.passes: list[tuple[float, int]] = []

    def start(self, now_s: float) -> int:
        num_rows = super().start(now_s)
        if num_rows:
            self.passes.append((now_s, num_rows))
        return num_rows


class RecordingPipeline(SimulatedPipeline):
    """Pipeline with a record for each draft token and message, with its time."""

    def __init__(self, target: Any, text: list[int]) -> None:
        link = Link.constant(up_mbps=50, rtt_ms=60)
        super().__init__(RemoteTarget(), SharedTarget(target), link, TIMES["picospec"])
        self.text = text
        self.made: list[Drafted] = []
        self.tree: TokenTree
        self.result: DecodeResult

    def _begin(self) -> Estimates:
        estimates = super()._begin()
        self.channel = self.recorded = RecordingChannel(self.link)
        return estimates

    def _receive(self, data: bytes) -> None:
        if self._session is not None:
            super()._receive(data)
            return
        opening = REQUESTS.decode(data)
        assert isinstance(opening, Open)
        self._session = self.session = RecordingTarget(self.shared, opening)

    def note(self, tree: TokenTree) -> None:
        """Record the newest draft token."""
        right = [t == self.text[tree.position(row)] for row, t in enumerate(tree.tokens)]
        place = tree.position(len(tree) - 1) - len(PROMPT)
        self.made.append(Drafted(self.now() + self.draft_s, place, all(right)))

    def _send(self, request: Request) -> None:
        super()._send(request)
        self.recorded.messages[-1].kind = type(request).__name__

    def _send_down(self, replies: list[Reply]) -> None:
        for reply in replies:
            super()._send_down([reply])
            self.recorded.messages[-1].kind = type(reply).__name__


class NotingText(KnownText):
    """Draft reporting each draft token to the pipeline."""

    pipeline: RecordingPipeline

    def grow_layer(self, tree: TokenTree, features: Any, **options: Any) -> int:
        added = super().grow_layer(tree, features, **options)
        self.pipeline.note(tree)
        return added


def record(
    target: Any, text: list[int], name: str, temperature: float, policy: str
) -> RecordingPipeline:
    """Run one schedule and return its records."""
    pipeline, source = RecordingPipeline(target, text), NotingText(text, draw_luck(SEED))
    source.pipeline = pipeline
    settings = {"policy": policy, "temperature": temperature, "max_new_tokens": 36}
    config = DecodeConfig.of(name, num_stages=1, **settings)
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "")
    engine = LinkEngine(pipeline, tokenizer, config, source=source)
    pipeline.result = engine.decode(PROMPT)
    tokens = pipeline.result.token_ids
    assert tokens == text[len(PROMPT) : len(PROMPT) + len(tokens)]
    return pipeline


def x_of(time_s: float) -> float:
    return LEFT + SCALE * time_s


def draw(title: str, run: RecordingPipeline) -> str:
    picture = Diagram(title, width=x_of(SHOWN_S) + 12)
    for name, y in (("text", TEXT_Y), ("edge", EDGE_Y + 14), ("cloud", CLOUD_Y + 14)):
        picture.text(LEFT - 10, y, name, anchor="end")
    right = x_of(SHOWN_S)
    for y in (EDGE_Y, EDGE_Y + HEIGHT, CLOUD_Y, CLOUD_Y + HEIGHT):
        picture.path(f"M{LEFT} {y}H{right:.1f}", "grid")
    for message in run.recorded.messages:
        draw_message(picture, message)
    for drafted in run.made:
        if drafted.end_s <= SHOWN_S:
            draw_draft_token(picture, drafted, run.draft_s)
    for start_s, num_rows in run.session.passes:
        if start_s + run.times.verify_s <= SHOWN_S:
            x, width = x_of(start_s), SCALE * run.times.verify_s
            picture.box(x, CLOUD_Y, width - 1, HEIGHT, "work")
            rows = "prompt" if num_rows == len(PROMPT) and start_s < 0.05 else f"{num_rows} rows"
            picture.text(x + width / 2, CLOUD_Y + 14, rows.replace("1 rows", "1 row"), size=10.5)
    draw_text_lane(picture, run.result.token_times_s)
    draw_ruler(picture, CLOUD_Y + HEIGHT)
    draw_words(picture, run, CLOUD_Y + HEIGHT + 40)
    return picture.svg()


def draw_draft_token(picture: Diagram, drafted: Drafted, draft_s: float) -> None:
    width = SCALE * draft_s - 1
    x = x_of(drafted.end_s) - width - 1
    kind = "right" if drafted.is_right else "wrong"
    picture.box(x, EDGE_Y, width, HEIGHT, kind)
    words = str(drafted.place) if drafted.is_right else "x"
    picture.text(x + width / 2, EDGE_Y + 14, words, "ink" if drafted.is_right else "bad", size=9.5)


def draw_message(picture: Diagram, message: Message) -> None:
    if message.arrival_s > SHOWN_S or not message.kind:
        return
    is_bad, is_early = message.kind == Reject.__name__, message.kind == Preverify.__name__
    kind = "badline" if is_bad else "edge" if message.kind == Result.__name__ else "line"
    top, bottom = EDGE_Y + HEIGHT, CLOUD_Y
    ends = (top, bottom) if message.is_up else (bottom, top)
    x1, x2 = x_of(message.start_s), x_of(message.arrival_s)
    if is_early:
        picture.path(f"M{x1:.1f} {ends[0]}L{x2:.1f} {ends[1]}", "line", dashed=True)
    else:
        draw_arrow(picture, x1, ends[0], x2, ends[1], kind)


def draw_arrow(picture: Diagram, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
    picture.path(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", kind, 1.3)
    back = 5 if y2 > y1 else -5
    head = f"M{x2 - 4:.1f} {y2 - back:.1f}L{x2:.1f} {y2:.1f}L{x2 + 2:.1f} {y2 - 1.4 * back:.1f}"
    picture.path(head, kind, 1.3)


def draw_text_lane(picture: Diagram, times_s: list[float]) -> None:
    for time_s in sorted(set(times_s)):
        if time_s > SHOWN_S:
            break
        places = [place for place, when in enumerate(times_s) if when == time_s]
        words = f"{places[0]}-{places[-1]}" if len(places) > 1 else str(places[0])
        x = x_of(time_s)
        picture.path(f"M{x:.1f} {TEXT_Y + 9}V{EDGE_Y}", "edge", 1.5)
        picture.text(x, TEXT_Y, words, size=11)


def draw_ruler(picture: Diagram, y: float) -> None:
    for tenth in range(0, round(10 * SHOWN_S) + 1, 2):
        x = x_of(tenth / 10)
        picture.path(f"M{x:.1f} {y}v5", "line")
        picture.text(x, y + 14, f"{tenth / 10:.1f} s", "faint", size=10)


def draw_words(picture: Diagram, run: RecordingPipeline, y: float) -> None:
    picture.legend(
        LEFT,
        y,
        [
            ("right", "draft token that is right"),
            ("wrong", "x, draft token that is wrong"),
            ("work", "pass of the target"),
        ],
    )
    x = LEFT + 520
    for kind, words in (("edge", "accepted"), ("badline", "rejected"), ("line", "draft tokens")):
        picture.path(f"M{x} {y + 5}l16 -10", kind, 1.5)
        picture.text(x + 22, y, words, "faint", anchor="start")
        x += 90
    shown = [message for message in run.recorded.messages if message.arrival_s <= SHOWN_S]
    up = sum(message.num_bytes for message in shown if message.is_up)
    down = sum(message.num_bytes for message in shown if not message.is_up)
    num_tokens = sum(time_s <= SHOWN_S for time_s in run.result.token_times_s)
    picture.text(
        LEFT,
        y + 22,
        f"{num_tokens} tokens in {SHOWN_S} s; {up} bytes up, {down} bytes down, headers of the "
        "link not counted",
        "faint",
        anchor="start",
    )


def pictures() -> Iterator[tuple[str, str]]:
    target = make_target()
    text = greedy_text(target)
    for name, (title, method, temperature, policy) in PICTURES.items():
        yield name, draw(title, record(target, text, method, temperature, policy))


if __name__ == "__main__":
    write_pictures(__doc__, pictures())
