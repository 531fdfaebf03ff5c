"""Draw the tokens at each stage in each step of a decoded sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..models.target import KeepRows, Segment, StagedTarget
from .diagram import Diagram
from .pipelines import Ahead, Returned
from .pipelines.local import LocalPipeline
from .result import DecodeResult

STEP_WIDTH = 44.0
CELL, GAP, LEFT, TOP = 30.0, 4.0, 78.0, 30.0
SHOWN_STEPS = 20


@dataclass(frozen=True)
class FollowedRow:
    """Token in flight."""

    place: int
    """Index in the output; 0 is the token from the prompt's forward pass."""
    is_draft_token: bool
    is_right: bool

    @property
    def kind(self) -> str:
        if not self.is_right:
            return "wrong"
        return "right" if self.is_draft_token else "certain"


@dataclass
class PictureStep:
    """Rows per stage in one pipeline step, and the tokens it verified."""

    stages: list[list[FollowedRow]]
    certain: list[int] = field(default_factory=list)
    """Output indices verified after this step."""
    restarts: bool = False


class RecordingPipeline(LocalPipeline):
    """Follows every row from stage to stage while the pipeline computes."""

    def __init__(self, target: StagedTarget, text: Sequence[int], prompt_length: int) -> None:
        """``text`` has the prompt and the output. A row past the end counts as rejected."""
        super().__init__(target)
        self.text, self.prompt_length = text, prompt_length
        self.steps: list[PictureStep] = []
        self._tree: list[FollowedRow] = []
        self._queue: list[list[FollowedRow]] = []
        self._under_way: list[list[FollowedRow]] = [[] for _ in range(target.num_stages)]

    def inject(self, segment: Segment) -> None:
        super().inject(segment)
        assert segment.ids is not None
        rows = []
        for token, position, visible in zip(
            segment.ids.tolist(), segment.positions.tolist(), segment.visible, strict=True
        ):
            ancestors = visible.nonzero()[:, 0].tolist()[:-1]
            is_right = position < len(self.text) and token == self.text[position]
            is_right = is_right and all(self._tree[row].is_right for row in ancestors)
            row = FollowedRow(position - self.prompt_length, bool(ancestors), is_right)
            self._tree.append(row)
            rows.append(row)
        self._queue.append(rows)

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        entering = self._queue.pop(0) if self._queue else []
        self._under_way = [entering, *self._under_way[:-1]]
        returned = super().tick(ahead)
        # The picture follows rows by itself; it must not drift from the pipeline.
        assert [len(rows) for rows in self._under_way] == self.last_rows
        self.steps.append(PictureStep([list(rows) for rows in self._under_way]))
        return returned

    def keep(self, keep: KeepRows) -> dict[int, Tensor]:
        kept = [self._tree[row] for row in keep.rows if row < len(self._tree)]
        is_hit = len(keep.rows) > keep.num_committed
        self.steps[-1].restarts = not is_hit
        # By identity: two rows may be equal in place and kind.
        retained = {id(row) for row in kept[keep.num_committed :]}
        self._tree = [row for row in self._tree if id(row) in retained]
        for rows in [*self._queue, *self._under_way]:
            rows[:] = [row for row in rows if id(row) in retained]
        self._queue = [rows for rows in self._queue if rows]
        return super().keep(keep)


def events(result: DecodeResult) -> Iterator[tuple[int, bool | None]]:
    """Yield draft forwards and their time: True in a step, False after one, None without a step."""
    for times, forwards, *rest in result.step_log:
        yield from [(forwards, bool(rest[0]) if rest else None)] * times


def places_text(places: list[int]) -> str:
    return f"{places[0]}-{places[-1]}" if len(places) > 1 else "".join(map(str, places))


def draw(
    title: str,
    steps: list[PictureStep],
    result: DecodeResult,
    *,
    draft_pass: float,
    num_shown: int = SHOWN_STEPS,
) -> str:
    """Return an SVG of the first steps. ``draft_pass`` is a draft forward's time in passes."""
    num_stages = result.num_stages
    picture = Diagram(title)
    lanes = ["draft", *(f"stage {i + 1}" for i in range(num_stages)), "text"]
    tops = [TOP + index * (CELL + GAP) for index in range(len(lanes))]
    for name, top in zip(lanes, tops, strict=True):
        picture.text(LEFT - 10, top + CELL / 2, name, anchor="end")
    x, number = LEFT, 0
    unit = STEP_WIDTH * num_stages * draft_pass
    # Walk the clock's log: serial drafting takes width of its own, overlapped drafting does not.
    for forwards, is_beside in events(result):
        if number == min(num_shown, len(steps)):
            break
        serial = forwards * unit if not is_beside else 0.0
        if is_beside is None:
            draw_passes(picture, x, tops[0], serial, forwards)
            x += serial
            continue
        if forwards and is_beside:
            draw_passes(picture, x, tops[0], min(forwards * unit, STEP_WIDTH), forwards)
        draw_step(picture, x, tops, steps[number], number + 1)
        x += max(STEP_WIDTH, forwards * unit if is_beside else 0)
        if forwards and not is_beside:
            draw_passes(picture, x, tops[0], serial, forwards)
            x += serial
        number += 1
    picture.path(f"M{LEFT} {TOP - 4}H{x:.1f}", "line")
    draw_words(picture, steps[:number], num_stages, tops[-1] + CELL + 22)
    return picture.svg()


def draw_passes(picture: Diagram, x: float, top: float, width: float, forwards: int) -> None:
    """Draw draft forwards to scale, with their number."""
    if not forwards:
        return
    picture.box(x + 0.5, top + 4, width - 1, CELL - 8, "work")
    for index in range(1, forwards):
        line = x + index * width / forwards
        picture.path(f"M{line:.1f} {top + 4}v{CELL - 8}", "line", 0.6)
    picture.text(x + width / 2, top + CELL / 2, str(forwards), size=11)


def draw_step(
    picture: Diagram, x: float, tops: list[float], step: PictureStep, number: int
) -> None:
    width = STEP_WIDTH - GAP
    picture.text(x + STEP_WIDTH / 2, TOP - 13, str(number), "faint", size=10)
    for rows, top in zip(step.stages, tops[1:-1], strict=True):
        picture.path(f"M{x:.1f} {top}h{width}v{CELL}h{-width}z", "grid")
        if not rows:
            continue
        kinds = [row.kind for row in rows]
        counts = {kind: kinds.count(kind) for kind in ("certain", "right", "wrong")}
        picture.cell(x, top, width, CELL, counts)
        good = [row.place for row in rows if row.is_right]
        num_wrong, middle = counts["wrong"], x + width / 2
        if good:
            picture.text(middle, top + (9 if num_wrong else CELL / 2), places_text(good), size=11)
        if num_wrong:
            y, size = (22, 10) if good else (CELL / 2, 11)
            picture.text(middle, top + y, f"+{num_wrong}", "bad", size=size)
    if step.certain:
        picture.text(x + width / 2, tops[-1] + 9, places_text(step.certain), size=11)
    if step.restarts:
        end, bottom = x + width, tops[-1] + CELL - 4
        picture.path(f"M{end:.1f} {tops[1] - 2}V{bottom}", "badline", 2)
        picture.text(x + width / 2, tops[-1] + 22, "again", "bad", size=9.5)


def draw_words(picture: Diagram, steps: list[PictureStep], num_stages: int, y: float) -> None:
    entries = [
        ("certain", "certain when it entered"),
        ("right", "draft token that is right"),
        ("wrong", "draft tokens (+ how many) that are wrong"),
        ("work", "draft passes"),
    ]
    picture.legend(LEFT, y, entries)
    num_tokens = sum(len(step.certain) for step in steps)
    picture.text(
        LEFT,
        y + 22,
        f"{num_tokens} tokens in these {len(steps)} steps: equivalent acceptance length "
        f"{num_stages} x {num_tokens} / {len(steps)} = "
        f"{num_stages * num_tokens / len(steps):.2f}. Widths are times.",
        "faint",
        anchor="start",
    )
