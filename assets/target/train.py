"""Train a small language model: the embedded target, a draft model, or a fine-tuned target.

    python assets/target/train.py --config configs/target/tiny.yaml

pipedraft.data_recipes reads the rows, transformers' Trainer trains on them, and adapters are peft's
(LoRA, arXiv:2106.09685). After a kill, the same command resumes from the newest checkpoint. The
finished model is in OUTPUT_DIR/best. Adapters are merged into it, and also saved in best/adapter.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipedraft.endings import leave_at_interrupts, run_command

if __name__ == "__main__":
    leave_at_interrupts()

import numpy as np
import torch
from byte_pairs import train_tokenizer
from jsonargparse import ArgumentParser
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from pipedraft.data_recipes.config import DataConfig
from pipedraft.data_recipes.recipe import load_data
from pipedraft.data_recipes.table import Rows
from pipedraft.files import Values
from pipedraft.train.config import OptimConfig
from pipedraft.train.launch import make_optimizers

MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters: W + alpha / rank * B A; training changes only A and B."""

    rank: int = 8
    alpha: float = 16.0
    layers: Literal["before_last", "all"] = "before_last"
    """before_last: every decoder layer except the last: a FlexSpec draft copied this one."""
    modules: list[str] = field(default_factory=lambda: list(MAPS))
    """Linear maps in a decoder layer."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    output_dir: str
    data: DataConfig
    """Documents, joined and cut into rows of one length; data.max_length has no effect."""
    row_length: int
    """Tokens per row."""
    training: dict[str, Any]
    """transformers.TrainingArguments by name."""
    init_from: str | None = None
    """Continue from this model, with its shape and tokenizer. None: a new one with ``shape``."""
    shape: dict[str, Any] = field(default_factory=dict)
    """transformers' configuration for a new model, model_type included."""
    tokenizer: str | None = None
    """None: init_from's tokenizer, or a new byte-level BPE with vocab_size tokens."""
    vocab_size: int = 4096
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel in training; on CPUs, eager is faster for rows with a few hundred tokens."""
    loss_on: Literal["all", "assistant"] = "all"
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices inside the layers, AdamW for the rest."""
    adapters: AdapterConfig | None = None
    """Train low-rank adapters in init_from instead of its weights."""
    save_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        if bool(self.shape) == (self.init_from is not None):
            raise ValueError("shape, init_from: give one of the two")
        if self.adapters is not None and self.init_from is None:
            raise ValueError("adapters: set without init_from; name the model to adapt")


def pack(documents: Rows, config: TargetConfig, separator: int) -> list[Values]:
    """Shuffle the documents, end each with the separator, join them, and cut rows.

    The separator is a label after a text, but not after a conversation.
    """
    joined: Values = {"input_ids": [], "loss_mask": []}
    for index in np.random.default_rng(config.data.seed).permutation(len(documents)).tolist():
        document = documents[index]
        joined["input_ids"] += [*document["input_ids"], separator]
        is_text = document["source"] not in config.data.chat_sources
        joined["loss_mask"] += [*document["loss_mask"], int(is_text)]
    starts = range(0, len(joined["input_ids"]), config.row_length)
    return [{k: x[i : i + config.row_length] for k, x in joined.items()} for i in starts]


def make_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    place = config.tokenizer or config.init_from
    if place is not None:
        return AutoTokenizer.from_pretrained(place)
    return train_tokenizer(config.data, config.vocab_size)


def make_model(config: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load or initialize a model in float32, with adapters if the configuration has any."""
    if config.init_from is None:
        ids = {"bos": None, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        shape = AutoConfig.for_model(
            **config.shape,
            **{f"{name}_token_id": token for name, token in ids.items()},
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
        )
        return AutoModelForCausalLM.from_config(shape, attn_implementation=config.attention)
    model = AutoModelForCausalLM.from_pretrained(
        config.init_from, dtype=torch.float32, attn_implementation=config.attention
    )
    if config.adapters is None:
        return model
    num_layers = model.config.num_hidden_layers - (config.adapters.layers == "before_last")
    import peft  # an optional package, only for adapters

    adapters = peft.LoraConfig(
        r=config.adapters.rank,
        lora_alpha=config.adapters.alpha,  # type: ignore[arg-type]  # declared int, used as a number
        target_modules=list(config.adapters.modules),
        layers_to_transform=list(range(num_layers)),
        layers_pattern="layers",
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, adapters)


class Both(torch.optim.Optimizer):
    """Several optimizers as one for the Trainer: its scheduler sets the rates for all groups."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for part in parts for g in part.param_groups for p in g["params"]], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.defaults = parts[0].defaults

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(i)])
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def train(config: TargetConfig) -> None:
    # YAML reads `no`, a strategy's name, as false.
    given = {k: "no" if v is False and "strategy" in k else v for k, v in config.training.items()}
    settings = {"report_to": [], "remove_unused_columns": False, **given}
    arguments = TrainingArguments(output_dir=config.output_dir, **settings)
    torch.manual_seed(arguments.seed)
    with arguments.main_process_first():
        tokenizer = make_tokenizer(config)
        data = load_data(replace(config.data, max_length=10**9), tokenizer)
    separator = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if separator is None:
        raise ValueError("tokenizer: it has neither a padding nor an EOS token; give another")
    train_rows, valid_rows = (pack(x, config, separator) for x in (data.train, data.valid))
    model = make_model(config, tokenizer)
    optim = OptimConfig(
        name=config.optimizer,
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        weight_decay=arguments.weight_decay,
    )

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        masks = [torch.tensor(row["loss_mask"]) for row in rows]
        if config.loss_on == "all":
            masks = [torch.ones_like(mask) for mask in masks]
        labels = [torch.where(mask == 1, x, -100) for x, mask in zip(ids, masks, strict=True)]
        # Only a split's last row is short. Padding after it changes nothing before it.
        return {
            "input_ids": pad_sequence(ids, batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=train_rows,
        eval_dataset=valid_rows,
        optimizers=(Both(make_optimizers(list(model.named_parameters()), optim)), None),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir))
    loss = trainer.evaluate()["eval_loss"]
    print(f"validation loss {loss:.4f}, perplexity {math.exp(loss):.2f}")
    if trainer.is_world_process_zero():
        save(trainer.model, tokenizer, Path(config.output_dir) / "best", config.save_dtype)


def save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: str) -> None:
    if hasattr(model, "merge_and_unload"):  # a peft model
        model.save_pretrained(folder / "adapter")
        model = model.merge_and_unload()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", action="config", help="YAML file")
    parser.add_class_arguments(TargetConfig, as_group=False)
    return parser


def read(words: list[str] | None = None) -> TargetConfig:
    parser = build_parser()
    parts = vars(parser.instantiate(parser.parse_args(words)))
    return TargetConfig(**{key: parts[key] for key in parts if key != "config"})


if __name__ == "__main__":
    run_command(lambda: train(read()))
