"""Training run configuration, read from YAML files and flags."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from ..data_recipes.config import DataConfig
from ..errors import UsageError, check_ranges, did_you_mean, nearest
from ..files import Values, read_yaml
from ..options import HELP_FLAGS, check_flags, explain, parse, parse_values, tidy

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
SPLIT_STEPS = 50
"""Shorter runs take seconds to minutes, and have their evaluation at the end."""
RUN_RANGES = {
    **dict.fromkeys(("batch_tokens", "accumulation", "batch_group", "reuse"), COUNT),
    "max_steps": f"{COUNT}, or leave it out to use epochs",
    **dict.fromkeys(("save_every_steps", "keep_checkpoints", "log_every_steps"), COUNT),
    **dict.fromkeys(("epochs", "max_minutes", "peak_tflops"), "(0, 1e9]"),
    "seed": "[0, 9e18]",
}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalized momentum for maps between hidden states, AdamW for the rest."""
    lr: float = 1e-4
    """Peak learning rate; for muon the update is scaled to AdamW's root mean square."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates for the mean and the mean square of the gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_fraction: float = 0.03
    """Share of all optimizer steps before the peak; the rate rises linearly from 0 there."""
    final_fraction: float = 0.0
    """Final learning rate as a fraction of the peak, reached one step after the last."""

    def __post_init__(self) -> None:
        check_ranges(self, OPTIM_RANGES, "optim.")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation during training."""

    every_steps: int = 200
    """Optimizer steps between evaluations on the validation rows; 0: only at the end. A run of 50
    steps or more, too short for one, is also evaluated in its middle."""
    max_rows: int = 64
    """Maximum number of validation rows; the first ones are used."""
    decode_prompts: int = 8
    """Held-out prompts decoded at each evaluation with the current head: greedily, 32 tokens each.
    The log then has the decoded tau and L'. 0: none."""
    best_by: Literal["auto", "expected", "decoded"] = "auto"
    """Score for best/ and patience. expected: acceptance from teacher-forced rates. decoded: L'
    measured on the decoded prompts. auto: decoded if prompts are decoded, else expected."""
    patience: int = 0
    """End the run after this many evaluations without a better score; 0: never."""

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

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return True if an evaluation follows a step before the last."""
        if self.every_steps >= num_steps >= SPLIT_STEPS:
            return step == num_steps // 2
        return bool(self.every_steps) and step % self.every_steps == 0

    def when(self, num_steps: int) -> str:
        if self.every_steps >= num_steps >= SPLIT_STEPS:
            return f"after {num_steps // 2} steps and at the end"
        return f"every {self.every_steps} steps" if self.every_steps else "at the end"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings for one training run. ``method`` decides which keys ``model`` has."""

    method: str
    """Head to train; decides the keys under model."""
    output_dir: Path
    """Folder for metrics.jsonl, best/ and checkpoints/."""
    data: DataConfig
    """Training data; see the section data."""
    target: str | None = None
    """Frozen target: a folder or a Hub id."""
    target_revision: str | None = None
    """Branch, tag or commit of the target on the Hub; null: its main branch."""
    target_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 if the target is stored in bf16 and the run computes in bf16; else fp32."""
    target_quantization: Literal["8bit", "4bit"] | None = None
    """Quantize the target's layers, with transformers and bitsandbytes."""
    shard_target: bool = False
    """Split every target layer between the processes; a layer is gathered while it runs."""
    features: str | None = None
    """Read hidden states instead of loading the target's layers: from a folder of pipedraft train
    features, or from vLLM servers as http://HOST:PORT,http://HOST:PORT."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer; see the section optim."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation; see the section evaluation."""
    batch_tokens: int = 4096
    """Maximum tokens per forward pass and process, padding included."""
    packing: bool = False
    """Join a forward pass's examples into one row without padding; they do not see each other."""
    checkpointing: bool = False
    """Use less memory but more time: compute the draft's layers again in backward."""
    accumulation: int = 1
    """Forward passes per optimizer step; the loss is the mean over all their supervised tokens."""
    reuse: int = 1
    """Optimizer steps with each batch for one pass of the target. The hidden states of 64 batches
    stay in memory for it. An epoch then has so many times the steps."""
    epochs: float = 1.0
    """Passes over the training rows; max_steps takes precedence."""
    max_steps: int | None = None
    """Optimizer steps, instead of epochs."""
    batch_group: int | None = None
    """Number of consecutive batches with similar lengths; a multiple of the number of processes.
    null: the number of processes at the first launch. A number of processes that divides the
    group trains the same run, and can resume it, if processes times accumulation is the same."""
    max_minutes: float | None = None
    """Wall-clock minutes for this launch, loading included; the run then saves and ends at the next
    step. The same command resumes it."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Autocast dtype; weights and optimizer state stay fp32. auto: bf16 if the processor supports
    it."""
    seed: int = 0
    """Random seed for initial weights, batch order and samples."""
    save_every_steps: int = 500
    """Optimizer steps between checkpoints for resuming."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep for resuming."""
    resume: bool = True
    """Resume from the newest complete checkpoint under output_dir, if there is one."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Trackers in addition to metrics.jsonl."""
    wandb_artifact: bool = False
    """Upload best/ to wandb as an artifact when the run ends."""
    log_every_steps: int = 10
    """Optimizer steps between lines in metrics.jsonl."""
    peak_tflops: float | None = None
    """Peak TFLOP/s per device in this precision, for example 989 for an H100 in bf16; adds mfu to
    the metrics."""

    def __post_init__(self) -> None:
        check_ranges(self, RUN_RANGES)
        if self.wandb_artifact and "wandb" not in self.trackers:
            raise UsageError(
                f"wandb_artifact: true, but trackers are {self.trackers}; give --trackers [wandb]"
            )
        if self.reuse > 1 and (self.shard_target or self.features):
            name = "shard_target" if self.shard_target else "features"
            raise UsageError(f"reuse: {self.reuse} with {name}; give reuse 1, or leave {name} out")
        if self.output_dir == Path():
            raise UsageError("output_dir: '.' holds other things; name one, for example out/spd")


def _refuse_nulls(kind: Any, values: Any, prefix: str = "") -> None:
    """Raise UsageError for a key without a value: jsonargparse accepts it for any type."""
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
    """Return the method from ``--method``, or from the last ``--config`` file with a method."""
    # The method decides which options exist, so it is read before there is a parser.
    method, given = default, None
    words = [part for word in arguments for part in word.split("=", 1)]
    for flag, value in zip(words, words[1:], strict=False):
        if flag == "--method":
            given = value  # the last one wins, as for every option
        if flag == "--config":
            if not Path(value).is_file():
                raise UsageError(
                    f"--config: no file {value}{did_you_mean(value)}; give a YAML file, for "
                    "example configs/spd/tiny.yaml"
                )
            layer = read_yaml(Path(value), "--config")
            if not isinstance(layer, dict):
                raise UsageError(f"--config: {value} holds no mapping; see configs/spd/tiny.yaml")
            method = layer.get("method", method)
            for key in layer.keys() - {part.name for part in fields(RunConfig)} - {"model"}:
                if not layer[key]:  # jsonargparse ignores empty keys silently
                    raise UsageError(f"{key}: unknown; see --help")
    method = given or method
    if method is None:
        raise UsageError(
            f"method: missing; give --config FILE or --method, one of {', '.join(methods)}"
        )
    return _known(method, methods)


def _known(method: str, methods: Sequence[str]) -> str:
    if method not in methods:
        raise UsageError(f"method: {method!r} is unknown; {nearest(str(method), methods)}")
    return method


def make_parser(method: str, methods: dict[str, type], example: str) -> ArgumentParser:
    """Make the parser for runs with this method. For the arguments see ``parse_run``."""
    others = ", ".join(name for name in methods if name != method)
    parser = ArgumentParser(
        prog="pipedraft train",
        description="Train a draft head. The --model.* options below "
        f"are for --method {method}; add --method NAME to see {others}.",
        epilog=example,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", action="config", help="YAML file; later ones override earlier")
    parser.description += (
        " --plan FILE estimates what a run needs, and ends. --overfit-one [N] learns one "
        "conversation by heart, and ends."
    )
    parser.add_class_arguments(RunConfig, as_group=False)
    parser.add_class_arguments(methods[method], "model")
    tidy(parser)
    return parser


@cache
def parser_of(method: str, methods: tuple[tuple[str, type], ...], example: str) -> ArgumentParser:
    """Cache parsers from ``make_parser``, because making one takes longer than reading a run."""
    return make_parser(method, dict(methods), example)


def check_run_flags(
    arguments: Sequence[str], methods: dict[str, type], beside: Sequence[str] = ()
) -> None:
    """Raise UsageError for a flag unknown to every method.

    Args:
        beside: the calling command's own flags, for the hint.
    """
    parser = parser_of(next(iter(methods)), tuple(methods.items()), "")
    shared = [word for word in arguments if not word.startswith("--model.")]
    check_flags(shared, parser, beside)


def parse_run(
    arguments: Sequence[str], methods: dict[str, type], example: str
) -> tuple[RunConfig, Any, str]:
    """Read a run's configuration from ``--config`` files and ``--a.b value`` flags.

    Args:
        methods: method name -> configuration dataclass for its network.
        example: shown last in ``--help``.

    Returns:
        The run, the network's configuration, and the resolved YAML.

    Raises:
        UsageError: one line with the field, the value and the fix.
    """
    wants_help = any(word in HELP_FLAGS for word in arguments)
    if wants_help:  # reading every field's docstring takes a second
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # --help must work without a configuration.
    default = next(iter(methods)) if wants_help else None
    try:
        method = _peek_method(arguments, list(methods), default)
    except UsageError:
        check_run_flags(arguments, methods)
        raise
    if wants_help:
        # Not from the cache: parsers made before set_parsing_settings lack the docstrings.
        parser = make_parser(method, methods, example)
    else:
        parser = parser_of(method, tuple(methods.items()), example)
    return _make_run(parser, parse(parser, arguments), methods[method])


def check_run(values: Values, methods: dict[str, type]) -> tuple[RunConfig, Any, str]:
    """Check a run's configuration, given as nested values, like ``parse_run`` does for words."""
    method = _known(values["method"], list(methods))
    parser = parser_of(method, tuple(methods.items()), "")
    return _make_run(parser, parse_values(parser, values), methods[method])


def _make_run(
    parser: ArgumentParser, parsed: Namespace, model_config: type
) -> tuple[RunConfig, Any, str]:
    _refuse_nulls(RunConfig, parsed)
    _refuse_nulls(model_config, parsed.model, "model.")
    try:
        parts = vars(parser.instantiate(parsed))
        run = RunConfig(**{key: parts[key] for key in parts if key not in ("config", "model")})
    except (ArgumentError, ValueError, TypeError) as error:
        raise UsageError(explain(error, parser)) from error
    return run, parts["model"], parser.dump(parsed)
