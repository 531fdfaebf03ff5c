"""Judge the settings that a launcher hands to a training run through environment variables.

`accelerate launch` turns the answers from `accelerate config` into variables, and accelerate reads
them in each process. Some would train something else than the run's configuration says, or save
it under other names. Each setting is honored, refused by name, or named in a note.
docs/lab/launcher.md lists all of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from accelerate import Accelerator, DistributedType
from accelerate.utils import DeepSpeedPlugin

from ..errors import UsageError
from .config import RunConfig

OFF = ("", "no", "none", "false", "0")
"""Values for a setting that is off, in lower case."""
FSDP2 = "give fsdp_version: 2, see configs/accelerate/fsdp2.yaml"
STAGE_0 = "stage 0 reports no gradient norm; give 1, 2 or 3, or configs/accelerate/ddp.yaml"
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass
class Judgment:
    """Verdict on a launcher's settings."""

    strategy: str = "single"
    """How the processes share the draft: single, ddp, fsdp2, zero1 to zero3."""
    refusals: list[str] = field(default_factory=list)
    """Messages that name a setting, its value and the fix."""
    notes: list[str] = field(default_factory=list)
    """Lines about settings that the run replaces by its own."""

    def require(self) -> "Judgment":
        """Raise UsageError for the first refusal."""
        for line in self.refusals:
            raise UsageError(line)
        return self


class Limit(NamedTuple):
    """A variable, the setting that writes it, and its allowed values in lower case."""

    variable: str
    setting: str
    allowed: tuple[str, ...]
    reason: str


ALWAYS = [
    Limit(
        "ACCELERATE_USE_MEGATRON_LM",
        "distributed_type",
        OFF,
        "Megatron-LM trains its own models only; give configs/accelerate/fsdp2.yaml",
    ),
    Limit(
        "ACCELERATE_USE_SAGEMAKER",
        "compute_environment",
        OFF,
        "SageMaker's launcher is not supported; start the job with torchrun",
    ),
    Limit(
        "ACCELERATE_MIXED_PRECISION",
        "mixed_precision",
        ("no", "bf16"),
        "runs compute in fp32 or bf16; give mixed_precision: bf16 and --precision bf16",
    ),
    Limit(
        "ACCELERATE_FP8_BACKEND",
        "fp8_config",
        OFF,
        "runs compute in fp32 or bf16; leave fp8_config out",
    ),
]
WITH_FSDP = [
    Limit("FSDP_VERSION", "fsdp_version", ("2",), f"FSDP 1 is not supported; {FSDP2}"),
    Limit(
        "FSDP_RESHARD_AFTER_FORWARD",
        "fsdp_reshard_after_forward",
        ("true", "false"),
        "FSDP2 has no strategies; give true or false",
    ),
    Limit(
        "FSDP_SHARDING_STRATEGY",
        "fsdp_sharding_strategy",
        ("full_shard", "1"),
        "FSDP2 has no strategies; leave it out, or give fsdp_reshard_after_forward",
    ),
    Limit(
        "FSDP_IGNORED_MODULES",
        "fsdp_ignored_modules",
        ("",),
        "every process would train its own copy of them; leave it out",
    ),
    Limit(
        "FSDP_OFFLOAD_PARAMS",
        "fsdp_offload_params",
        OFF,
        "the draft stays on its device; give false, and --shard_target true to save memory",
    ),
    Limit(
        "FSDP_ACTIVATION_CHECKPOINTING",
        "fsdp_activation_checkpointing",
        OFF,
        "the draft has its own; give false and --checkpointing true",
    ),
    Limit(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "fsdp_activation_checkpointing_offload",
        OFF,
        "the draft has its own checkpointing; give false and --checkpointing true",
    ),
    Limit(
        "FSDP_STATE_DICT_TYPE",
        "fsdp_state_dict_type",
        ("sharded_state_dict", "full_state_dict"),
        "FSDP2 has no such type; give SHARDED_STATE_DICT",
    ),
]
WITH_DEEPSPEED = [
    Limit(
        f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE",
        f"offload_{part}_device",
        OFF,
        "the draft stays on its device; give none, and --shard_target true to save memory",
    )
    for part in ("optimizer", "param")
] + [
    Limit(
        "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "zero_stage",
        ("1", "2", "3"),
        STAGE_0,
    ),
    Limit(
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        "deepspeed_moe_layer_cls_names",
        ("",),
        "drafts have no such layers; leave it out",
    ),
]
MESHES = {
    **dict.fromkeys(
        ("TP_SIZE", "CP_SIZE", "SP_SIZE"),
        "each process trains on its own rows with the whole draft",
    ),
    "DP_REPLICATE_SIZE": "FSDP2 splits the draft over all processes",
}
"""Size in accelerate's parallelism_config -> why it must be 1."""

PLAIN_KEYS = {
    *("bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "zero_optimization"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "communication_data_type"),
    *("zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown", "dump_state"),
    *("memory_breakdown", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor"),
    "zero_force_ds_cpu_optimizer",
}
"""Top-level keys in a DeepSpeed file that leave the training as it is, or are judged one by one."""
ZERO_KEYS = {
    *("stage", "offload_optimizer", "offload_param", "contiguous_gradients", "overlap_comm"),
    *("reduce_scatter", "reduce_bucket_size", "allgather_partitions", "allgather_bucket_size"),
    *("round_robin_gradients", "ignore_unused_parameters", "sub_group_size"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save"),
    *("stage3_gather_fp16_weights_on_model_save", "cpu_offload", "elastic_checkpoint"),
}
"""Keys in a DeepSpeed file's zero_optimization, as above."""


def judge(
    environment: Mapping[str, str],
    run: RunConfig,
    precision: str,
    *,
    read: Callable[[str], str] = lambda path: Path(path).read_text(),
) -> Judgment:
    """Judge a launcher's variables for this run. The function changes nothing.

    Args:
        precision: accelerate's name for the run's precision.
        read: returns the text of the DeepSpeed file named in the environment.
    """
    found = Judgment()
    _judge_processes(environment, found)
    found.refusals += _outside(environment, ALWAYS)
    wanted = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if wanted == "bf16" and precision == "no":
        found.notes.append(
            f"mixed_precision: {wanted!r} is not used, --precision {run.precision} computes in fp32"
        )
    if _is_on(environment, "ACCELERATE_USE_FSDP"):
        found.strategy = "fsdp2"
        _judge_fsdp(environment, found)
    elif _is_on(environment, "ACCELERATE_USE_DEEPSPEED"):
        _judge_deepspeed(environment, run, precision, read, found)
    _judge_accumulation(environment, run, found)
    if _is_on(environment, "ACCELERATE_DYNAMO_BACKEND"):
        found.notes.append(
            f"dynamo_backend: {environment['ACCELERATE_DYNAMO_BACKEND']} is not used; runs are not "
            "compiled, because torch's compiler cannot trace the backward pass of some drafts"
        )
    return found


def _is_on(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "").lower() not in OFF


def _outside(environment: Mapping[str, str], limits: list[Limit]) -> Iterator[str]:
    """Yield a refusal for each variable with a value outside its limit."""
    for variable, setting, allowed, reason in limits:
        value = environment.get(variable)
        if value is not None and value.lower() not in allowed:
            yield f"{setting}: {value!r} in the launcher's settings ({variable}), but {reason}"


def _judge_processes(environment: Mapping[str, str], found: Judgment) -> None:
    """Judge how the processes were started."""
    has_rank = "RANK" in environment
    found.strategy = "ddp" if has_rank else "single"
    if not has_rank and any(int(environment.get(name, 1)) > 1 for name in MPI_SIZES):
        found.refusals.append(
            "mpirun_config: processes started by MPI would train independent replicas; start them "
            "with accelerate's configs/accelerate/ddp.yaml or with torchrun"
        )
    elif not has_rank and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= environment.keys():
        found.refusals.append(
            "num_processes: the launcher's settings name several (MASTER_ADDR is set), but it "
            "started one; give configs/accelerate/ddp.yaml with ACCELERATE_USE_CPU=true, or "
            "--num_processes 1"
        )
    if not has_rank:
        for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
            if _is_on(environment, variable):
                found.refusals.append(
                    f"distributed_type: {variable} is set, but no launcher has numbered the "
                    "processes (RANK); start the run with accelerate launch or torchrun"
                )
    _judge_meshes(environment, found)


def _judge_meshes(environment: Mapping[str, str], found: Judgment) -> None:
    if not _is_on(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    for name, reason in MESHES.items():
        size = environment.get(f"PARALLELISM_CONFIG_{name}", "1")
        if size != "1":
            found.refusals.append(
                f"parallelism_config_{name.lower()}: {size}, but {reason}; give 1"
            )


def _judge_fsdp(environment: Mapping[str, str], found: Judgment) -> None:
    # A missing version means 1 to accelerate.
    found.refusals += _outside({"FSDP_VERSION": "1", **environment}, WITH_FSDP)
    if _is_on(environment, "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        found.notes.append(
            "fsdp_cpu_ram_efficient_loading: true is not used; every process makes the draft and "
            "loads the target itself (--shard_target true splits the target)"
        )
    classes = environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    is_by_size = environment.get("FSDP_AUTO_WRAP_POLICY", "").lower() == "size_based_wrap"
    if is_by_size or classes:
        setting = "auto_wrap_policy" if is_by_size else "transformer_layer_cls_to_wrap"
        found.notes.append(
            f"fsdp_{setting}: {'SIZE_BASED_WRAP' if is_by_size else classes} is not used; the "
            "draft is one group, as it reads its layers' weights outside their forward"
        )
    if environment.get("FSDP_STATE_DICT_TYPE", "").lower() == "full_state_dict":
        found.notes.append(
            "fsdp_state_dict_type: FULL_STATE_DICT is not used; heads are saved whole, and "
            "training states in one part per process"
        )
    for name in ("FSDP_FORWARD_PREFETCH", "FSDP_BACKWARD_PREFETCH"):
        if environment.get(name, "").lower() not in (*OFF, "no_prefetch"):
            found.notes.append(f"{name.lower()}: {environment[name]} has no effect in FSDP2")
    for name in ("FSDP_USE_ORIG_PARAMS", "FSDP_SYNC_MODULE_STATES"):
        if environment.get(name, "true").lower() == "false":
            found.notes.append(f"{name.lower()}: false has no effect in FSDP2")


def _judge_accumulation(environment: Mapping[str, str], run: RunConfig, found: Judgment) -> None:
    variable, own = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(run.accumulation)
    value = environment.get(variable, own)
    # accelerate writes 1 into every DeepSpeed configuration.
    if value not in (own, "auto", "1" if found.strategy.startswith("zero") else own):
        found.refusals.append(
            f"accumulation: {own}, but the launcher's settings have gradient_accumulation_steps "
            f"{value} ({variable}); give both the same number"
        )


# -- DeepSpeed --------------------------------------------------------------------------------


def _judge_deepspeed(
    environment: Mapping[str, str],
    run: RunConfig,
    precision: str,
    read: Callable[[str], str],
    found: Judgment,
) -> None:
    found.strategy = f"zero{environment.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"
    if _is_on(environment, "ACCELERATE_USE_CPU"):
        found.refusals.append(
            f"use_cpu: ACCELERATE_USE_CPU turns {found.strategy} into ddp; leave it out (DeepSpeed "
            "runs on CPUs without it), or give configs/accelerate/ddp.yaml"
        )
    found.refusals += _outside(environment, WITH_DEEPSPEED)
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() not in OFF:
        _judge_deepspeed_file(file, read, run, precision, found)
        return
    _note_clipping(environment.get("ACCELERATE_GRADIENT_CLIPPING"), run, found)
    if found.strategy == "zero3":
        if not _is_on(environment, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"):
            found.notes.append(
                "zero3_save_16bit_model: false is not used; every save gathers the whole head"
            )
        if _is_on(environment, "ACCELERATE_DEEPSPEED_ZERO3_INIT"):
            found.notes.append(
                "zero3_init_flag: true is not used; every process makes the draft and loads the "
                "target itself (--shard_target true splits the target)"
            )


def _note_clipping(value: object, run: RunConfig, found: Judgment) -> None:
    norm = run.optim.clip_norm
    if value not in (None, "auto") and float(cast(str, value)) != norm:
        found.notes.append(f"gradient_clipping: {value} is not used, optim.clip_norm {norm:g} is")


def _judge_deepspeed_file(
    file: str, read: Callable[[str], str], run: RunConfig, precision: str, found: Judgment
) -> None:
    try:
        values = json.loads(read(file))
        zero = values["zero_optimization"]
        stage = {"auto": 2}.get(zero.get("stage"), zero.get("stage", 0))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        found.refusals.append(
            f"deepspeed_config_file: {file!r} cannot be read ({error}); give a JSON file with "
            "zero_optimization, or leave it out"
        )
        return
    found.strategy = f"zero{stage}"
    refuse, note = found.refusals.append, found.notes.append
    if stage not in (1, 2, 3):
        refuse(f"deepspeed_config_file: stage {stage} in {file!r}, but {STAGE_0}")
    unknown = [*sorted(values.keys() - PLAIN_KEYS)]
    unknown += [f"zero_optimization.{key}" for key in sorted(zero.keys() - ZERO_KEYS)]
    for key in unknown:
        refuse(
            f"deepspeed_config_file: {key} in {file!r} is not supported; leave it out (the run's "
            "configuration has the optimizer, the schedule and checkpointing)"
        )
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device not in ("none", "auto"):
            refuse(
                f"deepspeed_config_file: {part}.device {device!r} in {file!r}, but the draft stays "
                "on its device; give none, and --shard_target true to save memory"
            )
    if zero.get("cpu_offload"):
        refuse(f"deepspeed_config_file: cpu_offload in {file!r}; leave it out")
    steps = values.get("gradient_accumulation_steps", 1)
    if steps not in (1, "auto"):
        refuse(
            f"accumulation: gradient_accumulation_steps is {steps} in {file!r}, but DeepSpeed "
            "steps after every batch here; give 1 and a larger --batch_tokens"
        )
    for kind, own in (("fp16", False), ("bf16", precision == "bf16")):
        enabled = (values.get(kind) or {}).get("enabled", own)
        if enabled not in ("auto", own):
            refuse(
                f"precision: {run.precision} computes in {precision.replace('no', 'fp32')}, but "
                f"{kind}.enabled is {json.dumps(enabled)} in {file!r}; give auto there, and "
                "--precision fp32 or bf16"
            )
    _note_clipping(values.get("gradient_clipping"), run, found)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if values.get(key, "auto") != "auto":
            note(f"{key}: {values[key]} is not used, batch_tokens {run.batch_tokens} is")
    if values.get("communication_data_type", "fp32") != "fp32":
        note("communication_data_type: gradients are summed in fp32")
    if zero.get("stage3_param_persistence_threshold", 0) not in (0, "auto"):
        note("stage3_param_persistence_threshold: 0 is used, so that every weight is saved")


def complete_deepspeed(plugin: DeepSpeedPlugin, run: RunConfig) -> None:
    """Fill a judged DeepSpeed configuration with this run's values."""
    values, zero = plugin.deepspeed_config, plugin.deepspeed_config["zero_optimization"]
    # Buckets by the model's hidden size, which an objective does not have.
    for part in (values, zero):
        for key in [key for key, value in part.items() if value == "auto"]:
            del part[key]
    values.pop("train_batch_size", None)
    # DeepSpeed requires a value, but the loop itself divides by the window's tokens.
    values["train_micro_batch_size_per_gpu"] = 1
    values["gradient_accumulation_steps"] = 1
    values["gradient_clipping"] = run.optim.clip_norm
    # Sums over processes in bfloat16 would round small gradients away.
    values["communication_data_type"] = "fp32"
    if plugin.zero_stage == 3:
        # Unsharded small parameters would be lost on resuming.
        zero["stage3_param_persistence_threshold"] = 0
        # Otherwise accelerate refuses to gather the weights, at the first save.
        zero["stage3_gather_16bit_weights_on_model_save"] = True


# -- what accelerate made of them -------------------------------------------------------------


def strategy_of(accelerator: Accelerator) -> str:
    """Return how this run's processes share the draft: single, ddp, fsdp2, zero1 to zero3."""
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return "single"
    if kind == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if kind == DistributedType.FSDP:
        return f"fsdp{accelerator.state.fsdp_plugin.fsdp_version}"
    if kind in (DistributedType.XLA, DistributedType.MEGATRON_LM):
        return kind.value.lower()
    return "ddp"


def check_strategy(accelerator: Accelerator, wanted: str) -> None:
    """Raise UsageError if accelerate trains in another way than its launcher's settings say."""
    strategy = strategy_of(accelerator)
    if strategy in ("xla", "megatron_lm"):
        raise UsageError(
            f"distributed_type: {strategy!r} is not supported; give configs/accelerate/ddp.yaml, "
            "fsdp2.yaml, zero2.yaml or zero3.yaml"
        )
    # A launcher may number a single process, too.
    if strategy != wanted and not (strategy, wanted) == ("single", "ddp"):
        raise UsageError(
            f"distributed_type: the launcher's settings ask for {wanted}, but accelerate trains "
            f"with {strategy} on {accelerator.device.type}; see configs/accelerate/{wanted}.yaml"
        )
