"""Train a draft head (or the embedded target): accelerate launch -m pipedraft.train --config X.yaml"""

import os
import sys
from typing import Any

from pipedraft.errors import run_command

EXAMPLE = (
    "example: accelerate launch -m pipedraft.train --config configs/spd/tiny.yaml --optim.lr 3e-4"
)


def methods() -> dict[str, type]:
    """Method name -> dataclass that configures its network and loss."""
    from pipedraft.train.language_model import LanguageModelConfig
    from pipedraft.train.spd import SPDTrainConfig

    return {"spd": SPDTrainConfig, "language_model": LanguageModelConfig}


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


def build_objective(run: Any, model: Any, tokenizer: Any, data: Any) -> Any:
    if run.method == "language_model":
        from pipedraft.train.language_model import LanguageModelObjective

        return LanguageModelObjective(model, tokenizer)
    from pipedraft.models.target import load_target
    from pipedraft.train.spd import SPDObjective

    target = load_target(run.target, revision=run.target_revision)
    return SPDObjective(
        model, target, target_name=run.target, revision=run.target_revision, data=data
    )


def main() -> None:
    from pipedraft.train.config import parse_run

    run, model, resolved = parse_run(sys.argv[1:], methods(), EXAMPLE)
    from pipedraft.data_recipes.recipe import load_data
    from pipedraft.train.loop import Trainer, make_accelerator, seed_everything

    accelerator = make_accelerator(run)
    seed_everything(run.seed)
    run.output_dir.mkdir(parents=True, exist_ok=True)
    with accelerator.main_process_first():
        tokenizer = load_tokenizer_of(run, model)
        side_file = run.output_dir / "bad_rows.jsonl" if accelerator.is_main_process else None
        data = load_data(run.data, tokenizer, side_file=side_file)
        objective = build_objective(run, model, tokenizer, data)
    if accelerator.is_main_process:
        (run.output_dir / "config.yaml").write_text(resolved)
        print(data.report.summary(), file=sys.stderr)
        trainable = sum(p.numel() for p in objective.parameters() if p.requires_grad)
        print(f"trainable parameters: {trainable / 1e6:.2f} M", file=sys.stderr)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    Trainer(run, objective, data, pad_id=pad_id, accelerator=accelerator).run()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    run_command(main)
