"""The configuration of one training run, and how YAML files and flags become it."""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from pipedraft.cli import HELP_FLAGS, UsageError, check_ranges, explain, parse
from pipedraft.data_recipes.recipe import DataConfig
from pipedraft.files import read_yaml

COUNT = "[1, 1e12]"
OPTIM_RANGES = {
    "lr": "(0, 1000]",
    "betas": "[0, 1)",
    "weight_decay": "[0, 1000]",
    "clip_norm": "[0, inf)",
    "warmup_fraction": "[0, 1)",
    "final_fraction": "[0, 1]",
}
EVALUATION_RANGES = {
    "every_steps": "[0, 1e12]",
    "max_rows": COUNT,
    "decode_prompts": "[0, 1e6]; 0 switches it off",
    "patience": "[0, 1e12]; 0 switches it off",
}
RUN_RANGES = {
    **dict.fromkeys(("batch_tokens", "accumulation", "batch_group"), COUNT),
    "max_steps": f"{COUNT}, or leave it out to use epochs",
    **dict.fromkeys(("save_every_steps", "keep_checkpoints", "log_every_steps"), COUNT),
    **dict.fromkeys(("epochs", "max_minutes", "peak_tflops"), "(0, 1e9]"),
    "seed": "[0, 9e18]",
}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalized momentum for weight matrices inside the layers, AdamW for the rest."""
    lr: float = 1e-4
    """Peak learning rate; for muon the update is scaled to AdamW's root mean square."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_fraction: float = 0.03
    """Share of all optimizer steps in which the rate rises linearly from 0."""
    final_fraction: float = 0.0
    """Final learning rate as a fraction of the peak, reached one step after the last."""

    def __post_init__(self) -> None:
        check_ranges(self, OPTIM_RANGES, "optim.")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation during training."""

    every_steps: int = 200
    """Optimizer steps between evaluations on the validation rows; 0: only at the end."""
    max_rows: int = 64
    """Validation rows used, the first ones."""
    decode_prompts: int = 8
    """Held-out prompts that each evaluation decodes, greedily, 32 tokens each, with the head as it
    is: the log then has tau and L' as decoded. 0: none."""
    best_by: Literal["expected", "decoded"] = "expected"
    """What best/ and patience go by: the acceptance expected from teacher-forced rates, or L' as
    decoded."""
    patience: int = 0
    """Evaluations in a row without a better score that end the run; 0: none do."""

    def __post_init__(self) -> None:
        check_ranges(self, EVALUATION_RANGES, "evaluation.")
        if self.best_by == "decoded" and not self.decode_prompts:
            raise ValueError(
                "evaluation.best_by: 'decoded' with evaluation.decode_prompts 0; give prompts"
            )
        if self.patience and not self.every_steps:
            raise ValueError(
                f"evaluation.patience: {self.patience} with evaluation.every_steps 0, which "
                "evaluates at the end only; give every_steps"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. The network itself is configured under ``model``, by its method."""

    method: str
    output_dir: Path
    data: DataConfig
    target: str | None = None
    """Frozen target of a draft: a folder or a Hub id."""
    target_revision: str | None = None
    target_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 for a target that is stored in it, in a run that computes in it; else fp32."""
    target_quantization: Literal["8bit", "4bit"] | None = None
    """Quantization of the target's layers, by transformers and bitsandbytes."""
    shard_target: bool = False
    """Each process holds a part of every layer of the target, and gathers a layer while it runs."""
    features: str | None = None
    """Folder of hidden states written by python -m pipedraft.train.features, or HOST:PORT of its
    serve, of several HOST:PORT,HOST:PORT: the target's layers are then not loaded."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    batch_tokens: int = 4096
    """Tokens in one forward pass of one process, padding included."""
    packing: bool = False
    """A forward pass is one row without padding: its examples, none of which sees another. (With
    data.pack they do, and make blocks of one length.)"""
    checkpointing: bool = False
    """Less memory for more time: the draft's layers are computed again in backward."""
    accumulation: int = 1
    """Forward passes per optimizer step; the loss is the mean over all their counted tokens."""
    epochs: float = 1.0
    max_steps: int | None = None
    """Optimizer steps, instead of epochs."""
    batch_group: int | None = None
    """Batches of similar length that follow each other, a multiple of the number of processes;
    null: their number at the first launch. With accumulation to match, every number of processes
    that divides it trains the same run, and goes on with the checkpoints of another."""
    max_minutes: float | None = None
    """Wall-clock minutes of this launch, loading included, after which it saves and ends at the
    next step; the same command goes on from there."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Autocast dtype; weights and optimizer state stay fp32. auto: bf16 where the processor
    computes in it."""
    seed: int = 0
    save_every_steps: int = 500
    """Optimizer steps between checkpoints that a run can resume from."""
    keep_checkpoints: int = 2
    resume: bool = True
    """Go on from the newest complete checkpoint under output_dir, if there is one."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Besides metrics.jsonl, which is always written."""
    wandb_artifact: bool = False
    """Upload best/ to wandb as an artifact when the run ends."""
    log_every_steps: int = 10
    peak_tflops: float | None = None
    """Peak TFLOP/s of one process's device in this precision, for example 989 for an H100 in bf16:
    the metrics then have mfu."""

    def __post_init__(self) -> None:
        check_ranges(self, RUN_RANGES)
        if self.wandb_artifact and "wandb" not in self.trackers:
            raise UsageError(
                f"wandb_artifact: true, but trackers are {self.trackers}; give --trackers [wandb]"
            )
        if self.output_dir == Path():
            raise UsageError("output_dir: '.' holds other things; name one, for example out/spd")


def _refuse_nulls(kind: Any, values: Any, prefix: str = "") -> None:
    """jsonargparse takes a key without a value for a field of any type."""
    if isinstance(values, int | float | str | list):
        raise UsageError(f"{prefix[:-1]}: {values!r} does not fit; give a mapping")
    types = get_type_hints(kind)
    for part in fields(kind) if isinstance(values, Namespace) else ():
        value, key = values.get(part.name, part.default), prefix + part.name
        if value is None and NoneType not in get_args(types[part.name]):
            raise UsageError(f"{key}: null; give a value, or leave it out")
        if is_dataclass(types[part.name]):
            _refuse_nulls(types[part.name], value, f"{key}.")


def _peek_method(arguments: Sequence[str], methods: Sequence[str], default: str | None) -> str:
    """The method named by ``--method`` or by the last ``--config`` file that names one."""
    method, given = default, None
    words = [part for word in arguments for part in word.split("=", 1)]
    for flag, value in zip(words, words[1:], strict=False):
        if flag == "--method":
            given = value  # of several, the last, as for every option
        if flag == "--config":
            if not Path(value).is_file():
                raise UsageError(
                    f"--config: no file {value}; give a YAML file, for example "
                    "configs/spd/tiny.yaml"
                )
            layer = read_yaml(Path(value), "--config")
            if not isinstance(layer, dict):
                raise UsageError(f"--config: {value} holds no mapping; see configs/spd/tiny.yaml")
            method = layer.get("method", method)
            for key in layer.keys() - {part.name for part in fields(RunConfig)} - {"model"}:
                if not layer[key]:  # of what holds nothing jsonargparse says nothing
                    raise UsageError(f"{key}: unknown; see --help")
    method = given or method
    if method is None:
        raise UsageError(
            f"method: missing; give --config FILE or --method, one of {', '.join(methods)}"
        )
    if method not in methods:
        near = difflib.get_close_matches(str(method), methods, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"method: {method!r} is unknown; {hint}known: {', '.join(methods)}")
    return method


def make_parser(method: str, methods: dict[str, type], example: str) -> ArgumentParser:
    """Parser of a run with this method; arguments as in ``parse_run``."""
    others = ", ".join(name for name in methods if name != method)
    parser = ArgumentParser(
        prog="pipedraft train",
        description="Train a draft head. The options --model.* are "
        f"those of --method {method}; add --method NAME to see those of {others}.",
        epilog=example,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", action="config", help="YAML file; later ones override earlier")
    parser.description += " --plan FILE says what the run of a configuration takes, and ends."
    parser.add_class_arguments(RunConfig, as_group=False)
    parser.add_class_arguments(methods[method], "model")
    return parser


@cache
def parser_of(method: str, methods: tuple[tuple[str, type], ...], example: str) -> ArgumentParser:
    """A parser of ``make_parser``, once: to make it takes longer than to read a run with it."""
    return make_parser(method, dict(methods), example)


def parse_run(
    arguments: Sequence[str], methods: dict[str, type], example: str
) -> tuple[RunConfig, Any, str]:
    """Read ``--config`` layers and ``--a.b value`` flags.

    Args:
        methods: method name -> dataclass that configures its network.
        example: shown at the end of ``--help``.

    Returns:
        The run, the network's configuration, and the resolved YAML.

    Raises:
        UsageError: one line that names the field, the value and the fix.
    """
    wants_help = any(word in HELP_FLAGS for word in arguments)
    if wants_help:  # reads the docstring under every field, which takes a second
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
    default = next(iter(methods)) if wants_help else None
    method = _peek_method(arguments, list(methods), default)
    if wants_help:
        parser = make_parser(method, methods, example)
    else:
        parser = parser_of(method, tuple(methods.items()), example)
    parsed = parse(parser, arguments)
    _refuse_nulls(RunConfig, parsed)
    _refuse_nulls(methods[method], parsed.model, "model.")
    try:
        parts = vars(parser.instantiate(parsed))
        run = RunConfig(**{key: parts[key] for key in parts if key not in ("config", "model")})
    except (ArgumentError, ValueError, TypeError) as error:
        raise UsageError(explain(error, parser)) from error
    return run, parts["model"], parser.dump(parsed)
