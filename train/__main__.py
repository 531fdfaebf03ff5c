"""Train a draft head, or the embedded target: `accelerate launch -m pipedraft.train --help`."""

import os
import sys
from typing import Any

from pipedraft.errors import make_folder, run_command

EXAMPLE = (
    "example: accelerate launch -m pipedraft.train --config configs/spd/tiny.yaml --optim.lr 3e-4"
)


def registry() -> dict[str, tuple[type, Any]]:
    """Method name -> dataclass that configures its network and loss, and its objective."""
    from pipedraft.train.eagle import EagleObjective, EagleTrainConfig
    from pipedraft.train.eagle3 import Eagle3Objective, Eagle3TrainConfig
    from pipedraft.train.language_model import LanguageModelConfig, LanguageModelObjective
    from pipedraft.train.ppsd import PPSDObjective, PPSDTrainConfig
    from pipedraft.train.spd import SPDObjective, SPDTrainConfig

    return {
        "spd": (SPDTrainConfig, SPDObjective),
        "ppsd": (PPSDTrainConfig, PPSDObjective),
        "eagle": (EagleTrainConfig, EagleObjective),
        "eagle3": (Eagle3TrainConfig, Eagle3Objective),
        "language_model": (LanguageModelConfig, LanguageModelObjective),
    }


def methods() -> dict[str, type]:
    return {name: config for name, (config, _) in registry().items()}


def load_tokenizer_of(run: Any, model: Any) -> Any:
    from pipedraft.models.target import load_tokenizer

    if run.method != "language_model":
        if run.target is None:
            raise ValueError("target: missing; name the folder or Hub id of the frozen target")
        return load_tokenizer(run.target, revision=run.target_revision)
    if model.tokenizer or model.init_from:
        return load_tokenizer(model.tokenizer or model.init_from)
    from pipedraft.data_recipes.tokenizer import train_tokenizer

    return train_tokenizer(run.data, model.vocab_size)


def build_trainer(run: Any, model: Any) -> Any:
    """Everything that can refuse the configuration, so that training starts only if nothing did."""
    from pipedraft.data_recipes.recipe import load_data
    from pipedraft.models.target import load_target
    from pipedraft.train.loop import Trainer, make_accelerator, seed_everything

    accelerator = make_accelerator(run)
    seed_everything(run.seed)
    make_folder("output_dir", run.output_dir)
    objective_class = registry()[run.method][1]
    with accelerator.main_process_first():
        tokenizer, target = load_tokenizer_of(run, model), None
        if run.method != "language_model":
            target = load_target(
                run.target, revision=run.target_revision, device=accelerator.device
            )
            objective_class.check(model, target)
        side_file = run.output_dir / "bad_rows.jsonl" if accelerator.is_main_process else None
        data = load_data(run.data, tokenizer, side_file=side_file)
    if target is None:
        objective = objective_class(model, tokenizer)
    else:
        objective = objective_class(
            model, target, target_name=run.target, revision=run.target_revision, data=data
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Trainer(run, objective, data, pad_id=pad_id, accelerator=accelerator)


def quieten() -> None:
    """No loading bars of libraries; bars of the data's preparation only for a person."""
    import datasets
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def main() -> None:
    from pipedraft.train.config import parse_run

    run, model, resolved = parse_run(sys.argv[1:], methods(), EXAMPLE)
    quieten()
    trainer = build_trainer(run, model)
    trainer.restore()
    if trainer.accelerator.is_main_process:
        (run.output_dir / "config.yaml").write_text(resolved)
        print(trainer.data.report.summary(), file=sys.stderr)
        trainable = sum(p.numel() for p in trainer.module.parameters() if p.requires_grad)
        print(f"trainable parameters: {trainable / 1e6:.2f} M", file=sys.stderr)
    trainer.run()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    run_command(main)
