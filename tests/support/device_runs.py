"""Train and decode on a pretended GPU, for tests and for a benchmark's budget."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode_runs import PlainTokenizer
from inline_ranks import connect_inline
from pretended_device import Log, pretended_cuda
from tiny_models import tiny_llama
from train_runs import World

from pipedraft.devices import place_draft
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.pipelines.process import ProcessPipeline
from pipedraft.inference.ranks.worker import SharedWorker
from pipedraft.inference.sources.row_cache import TEXT, RowCache
from pipedraft.inference.tree import TokenTree
from pipedraft.models.target import StagedTarget
from pipedraft.train.launch import make_optimizers

CUDA = torch.device("cuda", 0)
PROMPT = [7, 3, 9, 3, 7, 1]


def train_on_gpu(world: World, method: str, folder: Path, **changes: Any) -> tuple[Log, float]:
    """Run a step of one micro-batch on the pretended GPU; return its log and the gradient norm."""
    trainer = world.trainer(method, folder, precision="bf16", **changes)
    objective = trainer.objective
    vars(objective).pop("forward", None)  # accelerate's autocast for the CPU
    state = vars(trainer.accelerator.state)
    before = state["device"]
    trainer.accelerator.autocast = partial(torch.autocast, "cuda", torch.bfloat16)
    try:
        with pretended_cuda() as log:
            state["device"] = CUDA
            objective.to(CUDA)
            objective.target.to(CUDA)
            trainer.module = objective
            named = list(objective.named_parameters())
            trainer.optimizers = make_optimizers(named, trainer.config.optim)
            batch = trainer.load(trainer.data.train, [0, 1, 2])
            log.clear()
            return log, trainer.optimize([batch])["grad_norm"]
    finally:
        state["device"] = before


def connect_ranks(target: StagedTarget, *, is_direct: bool = False) -> ProcessPipeline:
    """Connect two ranks, each with a GPU; hidden states pass through host memory unless direct."""
    other = tiny_llama().to("cuda:1")
    return connect_inline(target, [StagedTarget(other, target.boundaries)], is_direct=is_direct)


@contextmanager
def without_stages(log: Log) -> Iterator[None]:
    """Drop the stage ranks' work from the log, leaving only the controller's."""
    right, working = SharedWorker.handle, []

    def handle(self: SharedWorker, message: Any) -> None:
        before = [log.launches.copy(), log.uploads.copy(), log.syncs.copy()]
        working.append(self)  # each calls the next one from here
        right(self, message)
        working.pop()
        if not working:
            log.launches, log.uploads, log.syncs = before

    with patch.object(SharedWorker, "handle", handle):
        yield


def decode_on_gpu(
    make_draft: Any, schedule: str, *, of_controller: bool = False, **settings: Any
) -> dict[str, float]:
    """Count a decode's work after its prompt; an earlier decode has captured the CUDA graphs.

    Args:
        of_controller: run the stages as ranks on another GPU, and leave their work out.
    """
    config = DecodeConfig.of(schedule, max_new_tokens=12, **settings)
    target = tiny_llama()
    draft = make_draft(target)
    launches, passes = Counter[str](), Counter[str]()
    with pretended_cuda() as log:

        @contextmanager
        def span(kind: str, *_: int) -> Iterator[None]:
            before = log.launches.total()
            yield
            launches[kind] += log.launches.total() - before
            passes[kind] += 1

        def start(token: int) -> None:
            """Clear the counts after the prompt."""
            if not started:
                log.clear()
                launches.clear()
                passes.clear()
                started.append(token)

        target.to(CUDA)
        place_draft(draft, target)
        connect = partial(connect_ranks, is_direct=True) if of_controller else LocalPipeline
        with without_stages(log) if of_controller else nullcontext():
            engine = Engine(target, PlainTokenizer(), config, draft, connect=connect)
            for _ in range(1 + of_controller):  # the caches of SPD's trees grow in the first one
                engine.decode(PROMPT)
            started: list[int] = []
            with patch.object(engine.pipeline.timeline, "span", span):
                result = engine.decode(PROMPT, on_token=start)
    steps = max(result.num_steps, 1)
    beside = log.launches.total() - launches["stage"] - launches["draft"] - launches["verify"]
    return {
        "syncs_per_step": log.syncs.total() / steps,
        "uploads_per_step": log.uploads.total() / steps,
        "launches_per_stage": launches["stage"] / max(passes["stage"], 1),
        "launches_per_draft_forward": launches["draft"] / max(result.num_draft_forwards, 1),
        "launches_of_a_verification": launches["verify"] / max(passes["verify"], 1),
        "launches_beside_per_step": beside / steps,
    } | {f"sync: {what} {where}": count / steps for (what, where), count in log.syncs.items()}


def bookkeeping_s(num_text: int, rounds: int = 60) -> float:
    """Least processor time for a row to join a draft's cache and be dropped again."""
    cache, heads = RowCache(1), torch.zeros(1, 2, 8)

    def forward(caches: list, visible_RC: torch.Tensor) -> torch.Tensor:
        rows_RJD = heads.expand(len(visible_RC), -1, -1)
        caches[0].append_rows(rows_RJD, rows_RJD)
        return rows_RJD[:, 0]

    tree = TokenTree(0, num_text)
    for _ in range(num_text // 512):  # like a prompt in parts
        cache.compute(tree, [], forward, num_text=512)
    row, times = tree.add(0, 1, 0.0), []
    for turn in range(rounds):
        began = time.process_time()
        cache.compute(tree, [row], forward)
        cache.rename({row: TEXT} if turn % 2 else {})
        times.append(time.process_time() - began)
    return min(times)
