"""The accelerator of one training process, after checking what the launcher really started."""

import os
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from pipedraft.train.config import RunConfig


def resolve_precision(precision: str) -> str:
    """accelerate's name of the autocast dtype."""
    if precision != "auto":
        return "no" if precision == "fp32" else "bf16"
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "no"


def make_accelerator(config: RunConfig) -> Accelerator:
    """The accelerator of this process, after checking that the launcher's world is the real one.

    Some launcher configurations start independent replicas or silently drop to one process; that
    is refused here instead of training something else than asked.
    """
    _check_trackers(config)
    handlers = []
    if "RANK" in os.environ and not torch.accelerator.is_available():
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
        _shard_on_cpus()
    accelerator = Accelerator(
        mixed_precision=resolve_precision(config.precision),
        kwargs_handlers=handlers,
        log_with=list(config.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=str(config.output_dir), logging_dir=str(config.output_dir / "logs")
        ),
    )
    # A process that refuses its configuration leaves: not before the others have found it.
    accelerator.wait_for_everyone()
    world = int(os.environ.get("WORLD_SIZE", 1))
    is_replica = world > 1 and accelerator.distributed_type == DistributedType.NO
    if accelerator.num_processes != world or is_replica:
        raise ValueError(
            f"num_processes: the launcher started {world} processes but they would train "
            f"independent replicas; on CPUs launch with ACCELERATE_USE_CPU=true and --multi_gpu"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _prepare_deepspeed(accelerator, config)
    if accelerator.distributed_type == DistributedType.FSDP and config.optim.name != "adamw":
        raise ValueError(
            f"optim.name: {config.optim.name!r} needs whole matrices, FSDP holds parts of them; "
            "give --optim.name adamw, or train with configs/accelerate/ddp.yaml"
        )
    return accelerator


def _shard_on_cpus() -> None:
    """Make the launcher's FSDP or DeepSpeed what really runs, where there is no accelerator.

    accelerate takes the path to FSDP only from the type that several GPUs have, although FSDP2
    itself works over gloo. DeepSpeed would compile a kernel for shared memory that it can do
    without.
    """
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def gather_together(objective: Any, accelerator: Accelerator) -> None:
    """Let ZeRO-3 gather a prepared draft at once, as FSDP does: its attention reads weights of its
    layers outside their forward, where DeepSpeed would gather them for that moment only."""
    if _is_zero3(accelerator):
        from deepspeed.runtime.zero import register_external_parameter

        for parameter in objective.parameters():
            register_external_parameter(objective, parameter)


def _is_zero3(accelerator: Accelerator) -> bool:
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def _check_trackers(config: RunConfig) -> None:
    """accelerate leaves out a tracker that is not installed without a word."""
    installed = {str(name) for name in get_available_trackers()}
    for name in config.trackers:
        if name not in installed:
            raise ValueError(
                f"trackers: {name!r} is not installed; pip install 'pipedraft[{name}]', or leave "
                "it out: metrics.jsonl is always written"
            )


def _prepare_deepspeed(accelerator: Accelerator, config: RunConfig) -> None:
    """DeepSpeed sees no data loader and steps by itself: tell it the batch, refuse the rest."""
    if config.optim.name != "adamw":
        raise ValueError(
            f"optim.name: {config.optim.name!r} uses two optimizers, DeepSpeed takes one; "
            "give --optim.name adamw"
        )
    if config.accumulation > 1:
        raise ValueError(
            f"accumulation: {config.accumulation} with DeepSpeed, which would step after every "
            "batch; give --accumulation 1 and a larger --batch_tokens"
        )
    # Else transformers would give each process a part of the frozen target (ZeRO-3), all at once.
    unset_hf_deepspeed_config()
    plugin = accelerator.state.deepspeed_plugin
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    plugin.deepspeed_config["gradient_clipping"] = config.optim.clip_norm
    if _is_zero3(accelerator):  # small parameters that stay whole would be lost on resuming
        zero = plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
