"""Draw every schedule: the tokens in each stage at each step.

    python docs/images/draw_schedules.py --out docs/images

The engine itself decodes; nothing is drawn by hand. All schedules have four stages and the same
Bernoulli draft (known_text.py). Its forward takes a quarter of a stage's time.
"""

from collections.abc import Iterator
from typing import Any

from known_text import PROMPT, KnownText, draw_luck, greedy_text, make_target
from picture_files import write_pictures

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.step_picture import RecordingPipeline, draw

NUM_STAGES = 4
SEED = 1287
DRAFT_PASS = 1 / 16  # in target passes; a stage takes 1/4
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


class PlainTokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def record(target: Any, text: list[int], options: dict[str, Any]) -> tuple[Any, DecodeResult]:
    """Run a schedule and return its steps and result; its text must be the target's own."""
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
        connect=lambda staged: RecordingPipeline(staged, text, len(PROMPT)),
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


def pictures() -> Iterator[tuple[str, str]]:
    target = make_target()
    text = greedy_text(target)
    for name, (title, options) in SCHEDULES.items():
        yield name, draw(title, *record(target, text, options), draft_pass=DRAFT_PASS)


if __name__ == "__main__":
    write_pictures(__doc__, pictures())
