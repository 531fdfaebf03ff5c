"""Draw what every schedule does: which tokens are at which stage at which time.

    python docs/images/draw_schedules.py --out docs/images

The engine itself decodes; nothing is drawn by hand. Four stages, one draft pass takes a quarter of
a stage's time, and the same Bernoulli draft for all (known_text.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from diagram import Diagram
from known_text import PROMPT, KnownText, draw_luck, greedy_text, make_target
from picture_files import write_pictures

from pipedraft.inference.clock import CostModel
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import Ahead, LocalPipeline, Returned
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.shapes import TreeShape
from pipedraft.models.target import KeepRows, Segment, StagedTarget

NUM_STAGES = 4
SEED = 1287
DRAFT_PASS = 1 / 16  # of a target pass: a quarter of a stage
STEP_WIDTH = 44.0
CELL, GAP, LEFT, TOP = 30.0, 4.0, 78.0, 30.0
SHOWN_STEPS = 20
TREE = TreeShape(kind="dynamic", depth=5, top_k=2, num_tokens=9)
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("Plain decoding on a pipeline", {"schedule": "autoregressive"}),
    "spd_chain": ("SPD, a chain", {"schedule": "spd"}),
    "spd_tree": ("SPD, a tree of width 4", {"schedule": "spd", "tree_width": 4}),
    "ppsd": ("PPSD", {"schedule": "ppsd"}),
    "eagle": ("EAGLE, one batch", {"schedule": "eagle", "tree": TREE}),
    "naive_pp": ("Naive pipeline parallelism", {"schedule": "naive_pp", "tree": TREE}),
    "pruned_pp": ("Pruned pipeline parallelism", {"schedule": "pruned_pp", "tree": TREE}),
    "pipedec": ("PipeDec, width 16", {"schedule": "pipedec"}),
    "flowspec": (
        "FlowSpec",
        {"schedule": "flowspec", "tree": TREE, "expansion_depth": 4, "expansion_tokens": 9},
    ),
    "flowspec_continued": (
        "FlowSpec continued",
        {"schedule": "flowspec_continued", "step_tokens": 2},
    ),
    "pipeinfer": (
        "PipeInfer, micro-batches of 3",
        {"schedule": "pipeinfer", "draft_tokens": 3},
    ),
    "ssd": ("SSD, chains of 4", {"schedule": "ssd", "draft_tokens": 4}),
}


@dataclass(frozen=True)
class Row:
    """A token under way."""

    place: int
    """In the text; 0 is the token that the prompt's pass gave."""
    is_draft_token: bool
    is_right: bool

    @property
    def kind(self) -> str:
        if not self.is_right:
            return "wrong"
        return "right" if self.is_draft_token else "certain"


@dataclass
class Step:
    stages: list[list[Row]]
    certain: list[int] = field(default_factory=list)
    """Places of the tokens that became certain after it."""
    restarts: bool = False


class RecordingPipeline(LocalPipeline):
    """Follows every row from stage to stage, beside the pipeline that computes them."""

    def __init__(self, target: StagedTarget, text: list[int]) -> None:
        super().__init__(target)
        self.text = text
        self.steps: list[Step] = []
        self._tree: list[Row] = []
        self._queue: list[list[Row]] = []
        self._under_way: list[list[Row]] = [[] for _ in range(target.num_stages)]

    def inject(self, segment: Segment) -> None:
        super().inject(segment)
        assert segment.ids is not None
        rows = []
        for token, position, visible in zip(
            segment.ids.tolist(), segment.positions.tolist(), segment.visible, strict=True
        ):
            ancestors = visible.nonzero()[:, 0].tolist()[:-1]
            is_right = token == self.text[position]
            is_right = is_right and all(self._tree[row].is_right for row in ancestors)
            row = Row(position - len(PROMPT), bool(ancestors), is_right)
            self._tree.append(row)
            rows.append(row)
        self._queue.append(rows)

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        entering = self._queue.pop(0) if self._queue else []
        self._under_way = [entering, *self._under_way[:-1]]
        returned = super().tick(ahead)
        assert [len(rows) for rows in self._under_way] == self.last_rows
        self.steps.append(Step([list(rows) for rows in self._under_way]))
        return returned

    def keep(self, keep: KeepRows) -> Any:
        kept = [self._tree[row] for row in keep.rows if row < len(self._tree)]
        is_hit = len(keep.rows) > keep.num_committed
        self.steps[-1].restarts = not is_hit
        retained = {id(row) for row in kept[keep.num_committed :]}
        self._tree = [row for row in self._tree if id(row) in retained]
        for rows in [*self._queue, *self._under_way]:
            rows[:] = [row for row in rows if id(row) in retained]
        self._queue = [rows for rows in self._queue if rows]
        return super().keep(keep)


class PlainTokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def record(target: Any, text: list[int], options: dict[str, Any]) -> tuple[Any, DecodeResult]:
    """Steps and result of a schedule; the text is compared with the target's own."""
    cost = CostModel(draft_forward=DRAFT_PASS)
    config = DecodeConfig.of(num_stages=NUM_STAGES, max_new_tokens=40, cost=cost, **options)
    source = None
    if config.schedule.grows is not None:
        source = KnownText(text, draw_luck(SEED))
    engine = Engine(
        target,
        PlainTokenizer(),
        config,
        source=source,
        connect=lambda staged: RecordingPipeline(staged, text),
    )
    emitted = iter(range(config.max_new_tokens))

    def on_token(token: int) -> None:
        place = next(emitted)
        if engine.pipeline.steps:
            engine.pipeline.steps[-1].certain.append(place)

    result = engine.decode(PROMPT, on_token=on_token)
    assert result.token_ids == text[len(PROMPT) : len(PROMPT) + len(result.token_ids)]
    steps = engine.pipeline.steps
    if source is None:  # nothing is drafted, so nothing begins again
        for step in steps:
            step.restarts = False
    return steps, result


def events(result: DecodeResult) -> list[tuple[int, bool | None]]:
    """In order: draft passes, and whether they were beside a step; None: every stage waited."""
    found: list[tuple[int, bool | None]] = []
    for times, forwards, *rest in result.step_log:
        found += [(forwards, bool(rest[0]) if rest else None)] * times
    return found


def places_text(places: list[int]) -> str:
    return f"{places[0]}-{places[-1]}" if len(places) > 1 else "".join(map(str, places))


def draw(title: str, steps: list[Step], result: DecodeResult) -> str:
    picture = Diagram(title)
    lanes = ["draft", *(f"stage {i + 1}" for i in range(NUM_STAGES)), "text"]
    tops = [TOP + index * (CELL + GAP) for index in range(len(lanes))]
    for name, top in zip(lanes, tops, strict=True):
        picture.text(LEFT - 10, top + CELL / 2, name, anchor="end")
    x, number = LEFT, 0
    unit = STEP_WIDTH * NUM_STAGES * DRAFT_PASS
    for forwards, is_beside in events(result):
        if number == min(SHOWN_STEPS, len(steps)):
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
    draw_words(picture, steps[:number], tops[-1] + CELL + 22)
    return picture.svg()


def draw_passes(picture: Diagram, x: float, top: float, width: float, forwards: int) -> None:
    """Draft passes to scale, with their number."""
    if not forwards:
        return
    picture.box(x + 0.5, top + 4, width - 1, CELL - 8, "work")
    for index in range(1, forwards):
        line = x + index * width / forwards
        picture.path(f"M{line:.1f} {top + 4}v{CELL - 8}", "line", 0.6)
    picture.text(x + width / 2, top + CELL / 2, str(forwards), size=11)


def draw_step(picture: Diagram, x: float, tops: list[float], step: Step, number: int) -> None:
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
        num_wrong = counts["wrong"]
        middle = x + width / 2
        if good and num_wrong:
            picture.text(middle, top + 9, places_text(good), size=11)
            picture.text(middle, top + 22, f"+{num_wrong}", "bad", size=10)
        elif good:
            picture.text(middle, top + CELL / 2, places_text(good), size=11)
        else:
            picture.text(middle, top + CELL / 2, f"+{num_wrong}", "bad", size=11)
    if step.certain:
        picture.text(x + width / 2, tops[-1] + 9, places_text(step.certain), size=11)
    if step.restarts:
        end, bottom = x + width, tops[-1] + CELL - 4
        picture.path(f"M{end:.1f} {tops[1] - 2}V{bottom}", "badline", 2)
        picture.text(x + width / 2, tops[-1] + 22, "again", "bad", size=9.5)


def draw_words(picture: Diagram, steps: list[Step], y: float) -> None:
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
        f"{NUM_STAGES} x {num_tokens} / {len(steps)} = "
        f"{NUM_STAGES * num_tokens / len(steps):.2f}. Widths are times.",
        "faint",
        anchor="start",
    )


def pictures() -> Iterator[tuple[str, str]]:
    target = make_target()
    text = greedy_text(target)
    for name, (title, options) in SCHEDULES.items():
        yield name, draw(title, *record(target, text, options))


if __name__ == "__main__":
    write_pictures(__doc__, pictures())
