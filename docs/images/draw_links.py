"""Draw decoding across a link: who drafts, what travels, what the cloud computes, and when.

    python docs/images/draw_links.py --out docs/images

Both halves of inference/edge_cloud run on its virtual clock with PicoSpec's constants (24 ms for a
draft token, 87 ms for a pass of the target) and a link of 60 ms; the draft is known_text.py's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diagram import Diagram
from known_text import PROMPT, KnownText, draw_luck, greedy_text, make_target
from picture_files import write_pictures

from pipedraft.inference.channel import Channel, Link, LinkEstimate
from pipedraft.inference.draft_length import parse_policy
from pipedraft.inference.edge_cloud.cloud import CloudSession, CloudTarget
from pipedraft.inference.edge_cloud.constants import TIMES
from pipedraft.inference.edge_cloud.drafter import ChainDrafter
from pipedraft.inference.edge_cloud.edge import EdgeSession
from pipedraft.inference.edge_cloud.messages import (
    Open,
    Preverify,
    Reject,
    Reply,
    Result,
    Settings,
    decode_request,
)
from pipedraft.inference.edge_cloud.methods import METHODS
from pipedraft.inference.edge_cloud.plan import Beliefs
from pipedraft.inference.edge_cloud.virtual import VirtualRun

SEED = 1287
SCALE = 620.0  # pixels for a second
SHOWN_S = 1.3
LEFT = 78.0
TEXT_Y, EDGE_Y, CLOUD_Y, HEIGHT = 22.0, 44.0, 142.0, 28.0
CLOSE_TO_GREEDY = 1e-3
"""A temperature: corrections are drawn from distributions, and the text is the greedy one."""
PICTURES: dict[str, tuple[str, str, float, str]] = {
    "flexspec": ("FlexSpec", "flexspec", 0.0, "survival"),
    "dssd": ("DSSD", "dssd", CLOSE_TO_GREEDY, "fixed:4"),
    "pearl": ("PEARL", "pearl", 0.0, "fixed:4"),
    "picospec": ("PicoSpec", "picospec", 0.0, "survival"),
}
"""File, title, method, temperature, draft length."""


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


class RecordingDrafter(ChainDrafter):
    """Knows the text, and so whether a guess behind all others is right."""

    def __init__(self, source: KnownText, text: list[int]) -> None:
        super().__init__(source)
        self.text = text
        self.newest: tuple[int, bool] = (0, False)

    def add(self, token: int) -> None:
        super().add(token)
        tree = self._tree
        right = [t == self.text[tree.position(row)] for row, t in enumerate(tree.tokens)]
        self.newest = (tree.position(len(tree) - 1) - len(PROMPT), all(right))


class RecordingChannel(Channel):
    def __init__(self, link: Link) -> None:
        super().__init__(link, seed=0)
        self.messages: list[Message] = []

    def transmit(self, now_s: float, num_bytes: int, direction: Any) -> float:
        arrival_s = super().transmit(now_s, num_bytes, direction)
        self.messages.append(Message(now_s, arrival_s, direction == "up", num_bytes))
        return arrival_s


class RecordingCloud(CloudSession):
    """Keeps when each pass of the target began, and its rows."""

    def __init__(self, target: CloudTarget) -> None:
        super().__init__(target)
        self.passes: list[tuple[float, int]] = []

    def start(self, now_s: float) -> int:
        num_rows = super().start(now_s)
        if num_rows:
            self.passes.append((now_s, num_rows))
        return num_rows


class RecordingRun(VirtualRun):
    """Keeps what was drafted when, and what the messages are."""

    def follow(self, drafter: RecordingDrafter, channel: RecordingChannel) -> None:
        self.drafter, self.channel = drafter, channel
        self.drafted: list[Drafted] = []
        self.num_arrived = 0

    def _end_draft(self) -> None:
        self.drafted.append(Drafted(self.now_s, *self.drafter.newest))
        super()._end_draft()

    def _to_cloud(self, data: bytes) -> None:
        going_up = [message for message in self.channel.messages if message.is_up]
        going_up[self.num_arrived].kind = type(decode_request(data)).__name__
        self.num_arrived += 1
        super()._to_cloud(data)

    def _send_down(self, replies: list[Reply]) -> None:
        for reply in replies:
            super()._send_down([reply])
            self.channel.messages[-1].kind = type(reply).__name__


def record(target: Any, text: list[int], name: str, temperature: float, policy: str) -> Any:
    """The run of one method, and its edge session after the text."""
    method, times = METHODS[name], TIMES["picospec"]
    settings = Settings(
        rule=method.rule if temperature else "match",
        temperature=temperature,
        has_bonus=method.has_bonus,
        is_fast=method.is_fast,
        max_new_tokens=60,
    )
    channel = RecordingChannel(Link.constant(up_mbps=50, rtt_ms=60))
    beliefs = Beliefs(
        draft_s=times.draft_s,
        verify_s=times.verify_s,
        verify_row_s=times.verify_row_s,
        link=LinkEstimate(channel.link.state(0.0)),
    )
    drafter = RecordingDrafter(KnownText(text, draw_luck(SEED)), text)
    opening = Open(session=1, prompt_ids=PROMPT, settings=settings)
    edge = EdgeSession(opening, drafter, method.plan, parse_policy(policy), beliefs)
    cloud = RecordingCloud(CloudTarget(target))
    run = RecordingRun(edge, cloud, channel, times, draft_s=times.draft_s)
    run.follow(drafter, channel)
    run.run()
    tokens = edge.text.result.token_ids
    assert tokens == text[len(PROMPT) : len(PROMPT) + len(tokens)]
    return run


def x_of(time_s: float) -> float:
    return LEFT + SCALE * time_s


def draw(title: str, run: Any) -> str:
    picture = Diagram(title, width=x_of(SHOWN_S) + 12)
    for name, y in (("text", TEXT_Y), ("edge", EDGE_Y + 14), ("cloud", CLOUD_Y + 14)):
        picture.text(LEFT - 10, y, name, anchor="end")
    right = x_of(SHOWN_S)
    for y in (EDGE_Y, EDGE_Y + HEIGHT, CLOUD_Y, CLOUD_Y + HEIGHT):
        picture.path(f"M{LEFT} {y}H{right:.1f}", "grid")
    for message in run.channel.messages:
        draw_message(picture, message)
    for drafted in run.drafted:
        if drafted.end_s <= SHOWN_S:
            draw_guess(picture, drafted, run.draft_s)
    for start_s, num_rows in run.cloud.passes:
        if start_s + run.times.verify_s <= SHOWN_S:
            x, width = x_of(start_s), SCALE * run.times.verify_s
            picture.box(x, CLOUD_Y, width - 1, HEIGHT, "work")
            rows = "prompt" if num_rows == len(PROMPT) and start_s < 0.05 else f"{num_rows} rows"
            picture.text(x + width / 2, CLOUD_Y + 14, rows.replace("1 rows", "1 row"), size=10.5)
    draw_text_lane(picture, run.edge.text.result.token_times_s)
    draw_ruler(picture, CLOUD_Y + HEIGHT)
    draw_words(picture, run, CLOUD_Y + HEIGHT + 40)
    return picture.svg()


def draw_guess(picture: Diagram, drafted: Drafted, draft_s: float) -> None:
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
        picture.arrow(x1, ends[0], x2, ends[1], kind)


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


def draw_words(picture: Diagram, run: Any, y: float) -> None:
    picture.legend(
        LEFT,
        y,
        [
            ("right", "guess that is right"),
            ("wrong", "x, guess that is wrong"),
            ("work", "pass of the target"),
        ],
    )
    x = LEFT + 520
    for kind, words in (("edge", "accepted"), ("badline", "rejected"), ("line", "guesses")):
        picture.path(f"M{x} {y + 5}l16 -10", kind, 1.5)
        picture.text(x + 22, y, words, "faint", anchor="start")
        x += 90
    shown = [message for message in run.channel.messages if message.arrival_s <= SHOWN_S]
    up = sum(message.num_bytes for message in shown if message.is_up)
    down = sum(message.num_bytes for message in shown if not message.is_up)
    num_tokens = sum(time_s <= SHOWN_S for time_s in run.edge.text.result.token_times_s)
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
