"""Race trainers: compare heads after equal CPU seconds, each trained on one core.

    PYTHONPATH=.. PEERS/bin/python benchmarks/time_to_acceptance.py --minutes 5,10 --out out/race

`peer_losses.py` says how to make PEERS; SpecForge's entrants also need triton there. Every entrant
trains a head for one target, on the same conversations and on one thread, until its CPU
minutes are spent. pipedraft's entrants run pipedraft's training loop. SpecForge and speculators run
their own EAGLE-3 training pass, with their own optimizer settings or with ours (`ours`). Their
heads have the sizes of ours. With `ours` they also start with our fitted weights. All compute in
float32. SmolLM2's entrants need
out/smollm2 and data/smollm2_answers.jsonl (`make` both). Learning rates decay to the budget's end.
The fit counts. Imports, loading and tokenizing count separately, as `prepared`. `memory_mb` is how
far training raised the memory above what was resident when it started, `peak_mb` the whole process.

All heads then decode the same held-out prompts here, greedily: EAGLE-3 with a chain of three draft
tokens, SPD and PPSD with their own schedule on four stages. --out keeps finished entrants, so you
can repeat the command. `--only` selects entrants, `--core` the core.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import peer_losses
import torch
from measurement import make_parser, measure_apart, memory_kb, start_peak
from peer_losses import CHAINS, peer_of
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.data_recipes.table import row_lengths
from pipedraft.files import write_atomically
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.custom_generate import NoText
from pipedraft.inference.engine import Engine
from pipedraft.inference.shapes import TreeShape
from pipedraft.models import load_draft
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.target import load_target
from pipedraft.train.batch import Batch
from pipedraft.train.config import OptimConfig, parse_run
from pipedraft.train.decoding import first_turns
from pipedraft.train.eagle3 import Eagle3Objective
from pipedraft.train.launch import make_optimizers, rate_factor
from pipedraft.train.methods import methods
from pipedraft.train.position import Cut, batches_left
from pipedraft.train.run import build_trainer
from pipedraft.train.spd import SPDObjective

CHAIN, PROMPTS, NEW_TOKENS, STAGES = 3, 48, 64, 4
TRIED_STEPS = 3
"""Steps before a run's length is estimated from its pace."""
FIRST_SHARE = 0.9
"""Part of a budget with ``Recipe.first_steps``."""
PARTS = 10_000
"""Parts of a budget. They count as optimizer steps for the learning rate."""


def by_speculators(model: nn.Module) -> list[Optimizer]:
    """Return speculators' optimizers with the defaults of its command."""
    from speculators.train.config.schema import OptimizerArgs
    from speculators.train.optimizers import build_optimizers

    settings = OptimizerArgs()
    # As its command resolves an unset rate.
    own = {**settings.model_dump(), "muon_lr": settings.muon_lr or settings.lr}
    return build_optimizers(model, SimpleNamespace(**own))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A package's EAGLE-3 settings. Defaults: those in configs/eagle/tiny_eagle3.yaml."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(name="muon", lr=3e-3))
    optimizers: Callable[[nn.Module], list[Optimizer]] | None = None
    """The package's own; None: pipedraft's, by ``optim``."""
    tokens: int = 512
    """Padded tokens in a pass; 0: one conversation."""
    passes: int = 1
    """Passes per optimizer step."""
    steps: int = 7
    """Draft tokens per chain."""
    first_steps: int = 3
    """Draft tokens per chain in the first part of the budget; 0: ``steps`` from the start."""
    decay: float = 0.8
    """Draft token i, from 0, has weight ``decay ** i``."""
    start: str = "ridge"
    """Initial weights, as in ``model.start``."""


@dataclass(frozen=True)
class Entrant:
    package: Literal["pipedraft", "specforge", "speculators"]
    config: str = "eagle/tiny_eagle3"
    """pipedraft's configuration, which also names the target and the data."""
    options: tuple[str, ...] = ()
    """Changes of this configuration."""
    recipe: Recipe = field(default_factory=Recipe)
    """For the other packages."""


# SpecForge: TrainingConfig and BF16Optimizer, with one conversation per step.
SPECFORGE = Recipe(
    optim=OptimConfig(
        lr=1e-4, betas=(0.9, 0.999), clip_norm=0.5, schedule="cosine", warmup_fraction=0.015
    ),
    tokens=0,
    first_steps=0,
    start="deepest",
)
# speculators packs 8,192 tokens per step. Eight passes of separate conversations have the same
# gradient.
SPECULATORS = Recipe(
    optim=OptimConfig(warmup_fraction=0.01),
    optimizers=by_speculators,
    tokens=1024,
    passes=8,
    steps=3,
    first_steps=0,
    decay=1.0,
    start="deepest",
)
ENTRANTS = {
    "pipedraft, EAGLE-3": Entrant("pipedraft"),
    "SpecForge, EAGLE-3": Entrant("specforge", recipe=SPECFORGE),
    "SpecForge, EAGLE-3, ours": Entrant("specforge"),
    "speculators, EAGLE-3": Entrant("speculators", recipe=SPECULATORS),
    "speculators, EAGLE-3, ours": Entrant("speculators"),
    "pipedraft, SPD": Entrant("pipedraft", "spd/quickstart"),
    "pipedraft, PPSD": Entrant("pipedraft", "ppsd/tiny_n4"),
}
# The packages' heads have an LM head of their own and no norms before `fc`.
SMOLLM2_OPTIONS = ("--model.share_head=false", "--model.fc_norm=false")
SMOLLM2 = Recipe(optim=OptimConfig(name="muon", lr=2e-3), tokens=1024, steps=4, first_steps=0)
SMOLLM2_ENTRANTS = {
    "pipedraft, SmolLM2": Entrant("pipedraft", "real/smollm2_eagle3", SMOLLM2_OPTIONS),
    "SpecForge, SmolLM2, ours": Entrant(
        "specforge", "real/smollm2_eagle3", SMOLLM2_OPTIONS, SMOLLM2
    ),
    "speculators, SmolLM2, ours": Entrant(
        "speculators", "real/smollm2_eagle3", SMOLLM2_OPTIONS, SMOLLM2
    ),
}
ALL_ENTRANTS = {**ENTRANTS, **SMOLLM2_ENTRANTS}


# -- clocks ---------------------------------------------------------------------------------


class Budget:
    """CPU seconds of this process since the start, and what they were spent on."""

    def __init__(self, seconds: float, fit_s: float) -> None:
        """
        Args:
            fit_s: spent before, on the initial fit.
        """
        self.seconds, self.start = seconds, time.process_time() - fit_s
        self.parts: dict[str, float] = defaultdict(float, {"start": fit_s})

    @property
    def spent(self) -> float:
        return time.process_time() - self.start

    @property
    def share(self) -> float:
        return self.spent / self.seconds

    def timed(self, part: str, function: Callable) -> Callable:
        """Return the function, with its time added to ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[part] += time.process_time() - start

        return call

    def report(self) -> dict[str, float]:
        """Return the share of each part; the rest is the head's forward, the loss and batches."""
        shares = {part: seconds / self.spent for part, seconds in self.parts.items()}
        return {**shares, "head, loss and batches": 1 - sum(shares.values())}


# -- entrants -------------------------------------------------------------------------------


def trainer_of(entrant: Entrant, folder: Path, seed: int) -> tuple[Any, float]:
    """Build pipedraft's trainer, and return it with the CPU seconds of its initial fit."""
    words = [f"--config=configs/{entrant.config}.yaml", f"--output_dir={folder}"]
    words += [f"--seed={seed}", "--precision=fp32", *entrant.options]
    if entrant.package != "pipedraft":
        words.append(f"--model.start={entrant.recipe.start}")
    run, model, _ = parse_run([*words, "--evaluation.decode_prompts=0"], methods(), "")
    spent = 0.0

    def timed(fit: Callable) -> Callable:
        def call(*args: Any) -> None:
            nonlocal spent
            start = time.process_time()
            fit(*args)
            spent += time.process_time() - start

        return call

    for kind in (Eagle3Objective, SPDObjective):
        kind.start_on = timed(kind.start_on)  # type: ignore[method-assign]
    return build_trainer(run, model), spent


def train_own(trainer: Any, budget: Budget) -> tuple[int, int]:
    """Run pipedraft's loop, and return its steps and supervised tokens."""
    trainer.objective.hidden = budget.timed("target", trainer.objective.hidden)
    trainer.accelerator.backward = budget.timed("backward", trainer.accelerator.backward)
    for optimizer in trainer.optimizers:
        optimizer.step = budget.timed("optimizer", optimizer.step)
    windows, progress = trainer.windows(), trainer.progress
    while budget.share < 1:
        if progress.step >= TRIED_STEPS:  # the rate decays to the budget's end
            trainer.num_steps = max(progress.step + 1, round(progress.step / budget.share))
        trainer.optimize(next(windows))
    return progress.step, progress.tokens


def batches_of(data: TokenizedData, tokens: int, seed: int) -> Iterator[Batch]:
    """Yield padded batches of all epochs; 0 tokens: single conversations."""
    lengths = row_lengths(data.train)
    for epoch in range(10**6):
        if tokens:
            chosen = batches_left(lengths, seed, epoch, Cut(tokens), [])
        else:
            chosen = [[row] for row in range(len(lengths))]
            random.Random(f"{seed} {epoch}").shuffle(chosen)
        for rows in chosen:
            yield Batch.of_rows(data.train, rows, 0, packing=False)


def train_peer(
    model: Any, trainer: Any, entrant: Entrant, budget: Budget, seed: int
) -> tuple[int, int]:
    """Run a package's training pass, and return its steps and supervised tokens."""
    recipe, loss_of = entrant.recipe, CHAINS[entrant.package][2]
    target = trainer.objective.target
    for name in ("taps_of", "raw_states_of"):
        setattr(peer_losses, name, budget.timed("target", getattr(peer_losses, name)))
    step, backward = budget.timed("optimizer", step_all), budget.timed("backward", Tensor.backward)
    parameters = list(model.named_parameters())
    own = recipe.optimizers
    optimizers = make_optimizers(parameters, recipe.optim) if own is None else own(model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    trained = [x for x in model.parameters() if x.requires_grad]
    batches = batches_of(trainer.data, recipe.tokens, seed)
    num_steps = num_tokens = 0
    while budget.share < 1:
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                done = min(PARTS, round(budget.share * PARTS))
                group["lr"] = peak * rate_factor(done, PARTS, recipe.optim)
        is_first = budget.share < FIRST_SHARE
        num_drafted = (recipe.first_steps if is_first else 0) or recipe.steps
        window = [next(batches) for _ in range(recipe.passes)]
        counted = sum(int(batch.mask_BT.sum()) for batch in window)
        for batch in window:
            loss = loss_of(model, target, batch, steps=num_drafted, decay=recipe.decay)
            backward(loss / counted)
        torch.nn.utils.clip_grad_norm_(trained, recipe.optim.clip_norm)
        step(optimizers)
        num_steps, num_tokens = num_steps + 1, num_tokens + counted
    return num_steps, num_tokens


def step_all(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def run_entrant(name: str, seconds: float, folder: Path, seed: int) -> dict[str, Any]:
    """Train one entrant in this process, and decode the held-out prompts with its head."""
    entrant, head = ALL_ENTRANTS[name], folder / "head"
    torch.set_num_threads(1)
    trainer, fit_s = trainer_of(entrant, folder / "run", seed)
    source = trainer.objective.draft.reference.name
    if entrant.package == "pipedraft":
        prepared, budget = time.process_time() - fit_s, Budget(seconds, fit_s)
        before_kb = start_peak()
        num_steps, num_tokens = train_own(trainer, budget)
    else:
        model = peer_of(entrant.package, trainer.objective.draft, trainer.objective.target)
        prepared, budget = time.process_time() - fit_s, Budget(seconds, fit_s)
        before_kb = start_peak()
        num_steps, num_tokens = train_peer(model, trainer, entrant, budget, seed)
    spent, parts, peak_kb = budget.spent, budget.report(), memory_kb("VmHWM")
    if entrant.package == "pipedraft":
        head.mkdir(exist_ok=True)
        trainer.objective.save(head, {}, trainer.module.state_dict())
    else:
        model.save_pretrained(folder / "peer")
        import_head(str(folder / "peer"), source, head)
    return {
        "entrant": name,
        "cpu_s": round(spent, 1),
        "prepared_s": round(prepared, 1),
        "steps": num_steps,
        "supervised_tokens": num_tokens,
        "memory_mb": round((peak_kb - before_kb) / 1024),
        "peak_mb": round(peak_kb / 1024),
        "parts": {part: round(share, 3) for part, share in parts.items()},
        **decoded(head, source, trainer.data),
    }


def decoded(head: Path, source: str, data: TokenizedData) -> dict[str, float]:
    """Decode the held-out prompts greedily, and return tau and L'."""
    target = load_target(source, dtype=torch.float32)
    draft = load_draft(str(head), target)
    prompts = first_turns(data.valid, PROMPTS, max_positions=512 - NEW_TOKENS)
    kind = draft.draft_type
    own: dict[str, Any] = {"tree": TreeShape(kind="chain", depth=CHAIN)}
    if kind in ("spd", "ppsd"):
        own = {"num_stages": STAGES, "boundaries": draft.boundaries}
    schedule = kind if kind in ("spd", "ppsd") else "eagle"
    config = DecodeConfig.of(schedule, max_new_tokens=NEW_TOKENS, **own)
    engine = Engine(target, NoText(), config, draft)
    results = [engine.decode(ids) for ids in prompts]
    rounds = [length for result in results for length in result.round_lengths]
    num_tokens, num_steps = (
        sum(getattr(r, x) for r in results) for x in ("num_tokens", "num_steps")
    )
    return {
        "prompts": len(prompts),
        "tau": round(sum(rounds) / len(rounds), 3),
        "equivalent_length": round(results[0].num_stages * num_tokens / num_steps, 3),
    }


# -- the race -------------------------------------------------------------------------------


def races(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run what is not finished, each entrant in its own process, and yield every result."""
    for length in args.minutes:
        for name in args.only:
            other = f"-seed{args.seed}" if args.seed else ""
            place = args.out / f"{name.replace(', ', '-')}-{length:g}min{other}"
            place.mkdir(parents=True, exist_ok=True)
            file = place / "result.json"
            if not file.exists():
                seconds = str(60 * length)
                words = ("--seconds", seconds, "--seed", str(args.seed), "--in", str(place))
                result = measure_apart("--entrant", name, *words)
                write_atomically(file, json.dumps(result).encode())
            yield {"minutes": length, "seed": args.seed, **json.loads(file.read_text())}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--minutes",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[5.0, 10.0],
        help="CPU minutes per run, a comma list; default: 5,10",
    )
    parser.add_argument("--out", type=Path, default=Path("out/race"))
    parser.add_argument(
        "--only",
        type=lambda text: [part.strip() for part in text.split(";")],
        default=list(ENTRANTS),
        help=f"entrants, with semicolons; default: {'; '.join(ENTRANTS)}; "
        f"also known: {'; '.join(SMOLLM2_ENTRANTS)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; default: 0")
    parser.add_argument("--core", type=int, help="core to stay on")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    for hidden, kind in (("--entrant", str), ("--seconds", float), ("--in", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in args.only:
        if name not in ALL_ENTRANTS:
            parser.error(f"--only: {name!r} is no entrant; give some of {'; '.join(ALL_ENTRANTS)}")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.core is None else args.core})
    if args.entrant:
        with redirect_stdout(sys.stderr):
            result = run_entrant(args.entrant, args.seconds, vars(args)["in"], args.seed)
        print(json.dumps(result))
        return
    os.nice(max(0, 10 - os.nice(0)))
    found = []
    print(f"{'entrant':<28}{'minutes':>8}{'CPU s':>7}{'steps':>7}{'tokens':>9}{'tau':>7}{'L_':>7}")
    for result in races(args):
        found.append(result)
        print(
            f"{result['entrant']:<28}{result['minutes']:>8g}{result['cpu_s']:>7.0f}"
            f"{result['steps']:>7}{result['supervised_tokens']:>9}{result['tau']:>7.3f}"
            f"{result['equivalent_length']:>7.3f}",
            flush=True,
        )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
