"""Run one training: the registry of methods, and the parts of a run."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import set_seed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data_recipes.fitting import load_fitting
from ..data_recipes.recipe import TokenizedData
from ..errors import make_folder
from ..files import locked, make_place, write_atomically
from ..models.exchange.card import model_card
from ..models.speed import cpu
from ..models.target import check_packable, load_tokenizer
from ..pretrained import load_config
from .config import RunConfig
from .dflash import DFlashObjective
from .dspark import DSparkObjective
from .eagle import EagleObjective
from .eagle3 import Eagle3Objective
from .features.partial_target import load_embedding_and_head, open_features
from .flexspec import FlexSpecObjective
from .launch import (
    check_one_disk,
    gather_together,
    is_sharded,
    judge_launcher,
    load_frozen_target,
    make_accelerator,
    needs_others,
    shard_target,
)
from .loop import Trainer
from .mtp import MTPObjective
from .ppsd import PPSDObjective
from .record import record_of
from .spd import SPDObjective

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RESOLVED = "# as resolved by pipedraft train\n"
"""First line in a run's config.yaml."""


def registry() -> "dict[str, Any]":
    """Map each method's name to its objective class."""
    return {
        "spd": SPDObjective,
        "ppsd": PPSDObjective,
        "eagle": EagleObjective,
        "eagle3": Eagle3Objective,
        "mtp": MTPObjective,
        "dflash": DFlashObjective,
        "dspark": DSparkObjective,
        "flexspec": FlexSpecObjective,
    }


def load_tokenizer_of(run: "RunConfig") -> "PreTrainedTokenizerBase":
    """Load the target's tokenizer."""

    if run.target is None:
        raise ValueError("target: missing; name the folder or Hub id of the frozen target")
    return load_tokenizer(run.target, revision=run.target_revision)


LoadData = Callable[
    [RunConfig, PreTrainedTokenizerBase, PreTrainedModel, Path | None], TokenizedData
]
"""Loads a run's data for its target. The path is for the rows left out; None: do not write them."""


def load_rows(
    run: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedModel,
    side_file: Path | None,
) -> TokenizedData:
    """Load all rows of a run's data."""
    config = load_config(str(run.target), run.target_revision).get_text_config()
    return load_fitting(run.data, tokenizer, config, side_file=side_file)


def build_trainer(
    run: "RunConfig", model: "DataclassInstance", load: LoadData = load_rows
) -> "Trainer":
    """Build the trainer, and check the whole configuration before training starts."""

    started = time.monotonic()
    judgment = judge_launcher(run)
    accelerator = make_accelerator(run, judgment)
    if accelerator.device.type == "cpu":
        cpu.keep_freed_memory()
    if accelerator.is_main_process:
        for note in judgment.notes:
            print(note, file=sys.stderr)
    # Before any network exists: all processes must draw equal initial weights.
    set_seed(run.seed)
    make_folder("output_dir", run.output_dir)
    # Before the target: loading it may take minutes.
    check_one_disk(run.output_dir, accelerator)
    objective_class = registry()[run.method]
    # Once per node: nodes may have separate caches.
    with accelerator.local_main_process_first():
        tokenizer = load_tokenizer_of(run)
        if run.features is None and not is_sharded(run, accelerator):
            target = load_frozen_target(run, accelerator)
        else:
            target = load_embedding_and_head(run, objective_class, model, accelerator)
        objective_class.check(model, target)
        objective_class.check_start(model)
        side_file = run.output_dir / "bad_rows.jsonl" if accelerator.is_main_process else None
        data = load(run, tokenizer, target, side_file)
    objective = objective_class(
        model, target, target_name=run.target, revision=run.target_revision, data=data
    )
    if accelerator.device.type == "cpu":
        cpu.lay_out(target)
        cpu.lay_out(objective)
    objective.card = model_card
    if run.features is not None:
        objective.features = open_features(run, objective, tokenizer, data, accelerator)
    if is_sharded(run, accelerator):
        # Only now: making the objective copies the target's whole weights into the draft.
        shard_target(target, accelerator)
    if run.packing and run.features is None:
        check_packable(target.get_decoder().config)
    if run.checkpointing:
        objective.use_checkpointing()
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    trainer = Trainer(run, objective, data, pad_id=pad_id, accelerator=accelerator, started=started)
    if accelerator.is_main_process:
        trainer.record = record_of(run, model, objective.reference, tokenizer, data)
    # After Trainer has handed the draft to DeepSpeed.
    gather_together(objective, accelerator)
    return trainer


@needs_others()
def run_training(run: "RunConfig", model: "DataclassInstance", resolved: str) -> "Trainer":
    """Lock the output folder and train. ``resolved`` is the configuration as YAML."""
    make_place("output_dir", run.output_dir / "config.yaml", RESOLVED.encode())
    is_first = os.environ.get("RANK", "0") == "0"
    # One lock per run, because all its processes share the folder.
    with locked(run.output_dir, "output_dir") if is_first else nullcontext():
        trainer = build_trainer(run, model)
        train(trainer, resolved)
    return trainer


def train(trainer: "Trainer", resolved: str) -> None:
    """Restore the newest checkpoint, if there is one, and train to the end of the run."""
    # First: if the checkpoint is refused, the run's config.yaml stays as it was.
    trainer.restore()
    if trainer.accelerator.is_main_process:
        write_atomically(trainer.config.output_dir / "config.yaml", (RESOLVED + resolved).encode())
        print(trainer.data.report.summary(), file=sys.stderr)
    trainer.run()
    if trainer.stop is not None and trainer.stop.status:
        sys.exit(trainer.stop.status)
