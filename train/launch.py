"""Make a run's accelerator and optimizers, load its target, and handle requests to stop."""

import math
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..devices import has_native_bf16, resolve_device, stored_dtype
from ..errors import Failure, requirement
from ..models.target import load_target
from ..models.target_part import load_more_layers
from .config import OptimConfig, RunConfig
from .launcher_settings import Judgment, check_strategy, complete_deepspeed, judge

T = TypeVar("T")
FSDP_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""FSDP's dtypes. Under accelerate's own policy, sums of gradients, loss and metrics are
bfloat16."""
WAIT_FOR_OTHERS = timedelta(hours=12)
"""Timeout for collective calls: the other processes wait during downloads and tokenization, and
these take hours. If a process ends, its launcher ends the others without waiting."""
LOST = re.compile(r"Timed out waiting|[Cc]onnection (closed|reset) by peer|caused pair closure")
"""Matches gloo's messages about a late or ended peer."""


def resolve_precision(precision: str) -> str:
    """Return accelerate's name for the autocast dtype."""
    if precision != "auto":
        return "no" if precision == "fp32" else "bf16"
    return "bf16" if has_native_bf16(resolve_device("auto")) else "no"


def judge_launcher(config: RunConfig) -> Judgment:
    """Return the verdict on the launcher's settings. Raise UsageError for a refused one."""
    return judge(os.environ, config, resolve_precision(config.precision)).require()


def make_accelerator(config: RunConfig, judgment: Judgment | None = None) -> Accelerator:
    """Make this process's accelerator, and check the number of processes against the launcher's.

    Some launcher configurations start independent replicas, or silently drop to one process. Both
    are refused here, since the run would train something else.
    """
    _check_trackers(config)
    judgment = judgment or judge_launcher(config)
    handlers = []
    if "RANK" in os.environ:
        has_accelerator = torch.accelerator.is_available()
        backend = None if has_accelerator else "gloo"
        handlers.append(InitProcessGroupKwargs(backend=backend, timeout=WAIT_FOR_OTHERS))
        if not has_accelerator:
            _shard_on_cpus()
    accelerator = Accelerator(
        mixed_precision=resolve_precision(config.precision),
        kwargs_handlers=handlers,
        # accelerate's compiler would rename the weights, and cannot compile every draft.
        dynamo_backend="no",
        # Without a plugin, accelerate's variable replaces the number, and every loss is divided.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        log_with=list(config.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=str(config.output_dir), logging_dir=str(config.output_dir / "logs")
        ),
    )
    # A process may refuse its configuration below and exit; first let all connect to it.
    accelerator.wait_for_everyone()
    world = int(os.environ.get("WORLD_SIZE", 1))
    is_replica = world > 1 and accelerator.distributed_type == DistributedType.NO
    if accelerator.num_processes != world or is_replica:
        raise ValueError(
            f"num_processes: the launcher started {world} processes but they would train "
            f"independent replicas; on CPUs launch with ACCELERATE_USE_CPU=true and --multi_gpu"
        )
    check_strategy(accelerator, judgment.strategy)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _prepare_deepspeed(accelerator, config)
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    if is_fsdp:
        # accelerate's way to send weights from the first process takes no persistent buffers.
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        # One group: the draft reads its layers' weights outside their forward.
        accelerator.state.fsdp_plugin.auto_wrap_policy = None
    if is_fsdp and accelerator.mixed_precision == "bf16":
        accelerator.state.fsdp_plugin.mixed_precision_policy = FSDP_PRECISION
    if is_fsdp and config.optim.name != "adamw":
        raise ValueError(
            f"optim.name: {config.optim.name!r} needs whole matrices, FSDP holds parts of them; "
            "give --optim.name adamw, or train with configs/accelerate/ddp.yaml"
        )
    return accelerator


@contextmanager
def needs_others() -> Iterator[None]:
    """Turn a collective call's error about a lost peer into a one-line failure.

    Raises:
        Failure: another process has ended, or missed a collective call's timeout.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors; only their text tells a lost process from a bug.
        if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
            raise
        reason = str(error).partition(". ")[0]
        raise Failure(
            f"processes: another one has ended, or did not come within {WAIT_FOR_OTHERS} "
            f"({reason}); see what it said; the same command goes on from what is saved"
        ) from error


def _shard_on_cpus() -> None:
    """Enable the launcher's FSDP or DeepSpeed on CPUs.

    accelerate enters FSDP only from its multi-GPU type, although FSDP2 itself works over gloo.
    DeepSpeed would compile an optional kernel for shared memory, so this kernel is switched off.
    """
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True, timeout=WAIT_FOR_OTHERS)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def gather_together(objective: nn.Module, accelerator: Accelerator) -> None:
    """Let ZeRO-3 gather all weights of a prepared draft together, as FSDP does."""
    if _is_zero3(accelerator):
        # The draft's attention reads its layers' weights outside their forward. By default
        # DeepSpeed gathers them during the layers' forward only.
        from deepspeed.runtime.zero import register_external_parameter

        for parameter in objective.parameters():
            register_external_parameter(objective, parameter)


def _is_zero3(accelerator: Accelerator) -> bool:
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def _check_trackers(config: RunConfig) -> None:
    """Raise ValueError for a tracker without its package, which accelerate would silently skip."""
    installed = {str(name) for name in get_available_trackers()}
    for name in config.trackers:
        if name not in installed:
            raise ValueError(
                f"trackers: {name!r} is not installed; pip install {requirement(name)}, or leave "
                "it out: metrics.jsonl is always written"
            )


def _prepare_deepspeed(accelerator: Accelerator, config: RunConfig) -> None:
    """Configure DeepSpeed, which has no data loader here, and refuse options it cannot support."""
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
    # Else transformers would shard the frozen target as a whole (ZeRO-3).
    unset_hf_deepspeed_config()
    complete_deepspeed(accelerator.state.deepspeed_plugin, config)


def check_one_disk(folder: Path, accelerator: Accelerator) -> None:
    """Raise ValueError in every process if the processes do not share ``folder`` on one disk.

    Several processes write a checkpoint, and one publishes it.
    """
    if accelerator.num_processes == 1:
        return
    mark = folder / on_main_process(accelerator, lambda: f".run-{uuid.uuid4().hex}")
    if accelerator.is_main_process:
        mark.touch()
    accelerator.wait_for_everyone()
    sees = _appears(mark)
    count = torch.tensor(float(not sees), device=accelerator.device)
    # Every process gets the sum, so all raise together and none waits forever.
    num_blind = int(accelerator.reduce(count, "sum"))
    if accelerator.is_main_process:
        # The sum has waited for every process, so none looks for the mark anymore.
        mark.unlink()
    if num_blind:
        raise ValueError(
            f"output_dir: {str(folder)!r} is another folder for {num_blind} of "
            f"{accelerator.num_processes} processes; give one on a disk that all nodes share"
        )


def _appears(mark: Path) -> bool:
    """Wait up to 5 s for a file to appear, because network file systems show new files late."""
    deadline = time.monotonic() + 5
    while mark.name not in os.listdir(mark.parent):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def on_main_process(accelerator: Accelerator, look: Callable[[], T]) -> T:
    """Run ``look`` in the main process, and give every process its result or its ValueError."""
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            found = [look(), None]
        except ValueError as error:
            # Broadcast before raising: the others would wait for it forever.
            found = [None, str(error)]
    value, refusal = broadcast_object_list(found)
    if refusal is not None:
        raise ValueError(refusal)
    return value


# -- optimizers -------------------------------------------------------------------------------


def make_optimizers(
    parameters: list[tuple[str, nn.Parameter]], optim: OptimConfig
) -> list[Optimizer]:
    """Make AdamW alone, or Muon for maps between hidden states and AdamW for other parameters.

    The maps are the matrices in decoder layers and the projections of the target's states.
    """
    parameters = [(name, p) for name, p in parameters if p.requires_grad]
    # Embeddings and LM heads are matrices, too, but they map tokens.
    parts = ("layer", "projections", "fc.") if optim.name == "muon" else ()
    is_hidden = {n: p.ndim == 2 and any(part in n for part in parts) for n, p in parameters}
    hidden = [p for n, p in parameters if is_hidden[n]]
    matrices = [p for n, p in parameters if p.ndim >= 2 and not is_hidden[n]]
    vectors = [p for n, p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        # Decay would pull a norm's scales to 0, but 1 is their neutral value.
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[Optimizer] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True))
    if hidden:
        # Updates scaled to AdamW's size, so one learning rate serves both optimizers.
        muon = torch.optim.Muon(
            hidden, lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    return optimizers


def rate_factor(step: int, num_steps: int, optim: OptimConfig) -> float:
    """Return the learning rate at optimizer step ``step`` (0-based), relative to the peak."""
    warmup = round(optim.warmup_fraction * num_steps)
    if step < warmup:
        # Never 0, or the first step would change nothing. The first step after warm-up has 1.
        return (step + 1) / (warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    done = (step - warmup) / max(num_steps - warmup, 1)
    shape = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.final_fraction + (1 - optim.final_fraction) * shape


# -- being asked to stop ----------------------------------------------------------------------

REPEAT_S = 2.0
"""Signals within this time count as one: the terminal sends Ctrl-C to every process, and launchers
pass it on once more."""


GO_ON = "everything is saved, the same command goes on from here"


@dataclass(frozen=True)
class Stop:
    reason: str
    status: int = 0
    """Exit status: 128 + the signal's number, or 0 for a configured end."""


class Stopping:
    """Collects SIGTERM, SIGINT and ``max_minutes`` as requests to end the run after its step."""

    def __init__(self, *, max_minutes: float | None, started: float) -> None:
        self.max_minutes, self.started = max_minutes, started
        self.received: int | None = None
        self.received_at = 0.0
        self.agreed: Stop | None = None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Record signals that arrive inside the ``with`` body.

        A second signal after ``REPEAT_S`` acts as it would without this method. A signal that was
        ignored before the body stays ignored, for example a background job's SIGINT.
        """
        found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.previous = {n: handler for n, handler in found.items() if handler != signal.SIG_IGN}
        for number in self.previous:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        # A handler may run between any two instructions: it only notes the signal, the loop acts.
        if self.received is None:
            self.received, self.received_at = number, now
        elif now - self.received_at > REPEAT_S:
            self._restore()
            signal.raise_signal(number)

    def wishes(self) -> dict[str, float]:
        """Return this process's requests, 1 or 0 for each kind. The keys are always the same."""
        minutes = (time.monotonic() - self.started) / 60
        return {
            "stop_sigterm": float(self.received == signal.SIGTERM),
            "stop_sigint": float(self.received == signal.SIGINT),
            "stop_time": float(self.max_minutes is not None and minutes >= self.max_minutes),
        }

    def agree(self, totals: Mapping[str, float]) -> None:
        """Set ``agreed`` from the wishes summed over all processes."""
        if totals["stop_sigterm"]:
            self.agreed = Stop(f"SIGTERM; {GO_ON}", 128 + signal.SIGTERM)
        elif totals["stop_sigint"]:
            self.agreed = Stop(f"SIGINT; {GO_ON}", 128 + signal.SIGINT)
        elif totals["stop_time"]:
            self.agreed = Stop(f"max_minutes {self.max_minutes:g} are over; {GO_ON}")


# -- the target -------------------------------------------------------------------------------


def load_frozen_target(config: RunConfig, accelerator: Accelerator) -> PreTrainedModel:
    """Load a draft run's target onto this process's device."""
    assert config.target is not None
    return load_target(
        config.target,
        revision=config.target_revision,
        dtype=resolve_dtype(config, accelerator.mixed_precision, uses_autocast(accelerator)),
        device=accelerator.device,
        quantization=quantization_config(config.target_quantization),
        may_round=False,
    )


def is_sharded(config: RunConfig, accelerator: Accelerator) -> bool:
    """Return True if the target is sharded over several processes."""
    return config.shard_target and accelerator.num_processes > 1


def uses_autocast(accelerator: Accelerator) -> bool:
    """Return False for DeepSpeed, which already has bfloat16 weights and inputs in a bf16 run."""
    return accelerator.distributed_type != DistributedType.DEEPSPEED


def resolve_dtype(
    config: RunConfig, mixed_precision: str, has_autocast: bool = True
) -> torch.dtype:
    """Return the target's dtype.

    ``auto`` means bfloat16 if the target is stored in bfloat16 and the run computes in it, else
    float32. In bf16 without autocast the dtype is always bfloat16.
    """
    if mixed_precision == "bf16" and not has_autocast:
        return torch.bfloat16
    if config.target_dtype != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.target_dtype]
    assert config.target is not None
    stored = stored_dtype(config.target, config.target_revision)
    is_bf16 = (stored, mixed_precision) == (torch.bfloat16, "bf16")
    return torch.bfloat16 if is_bf16 else torch.float32


def quantization_config(kind: str | None) -> BitsAndBytesConfig | None:
    """Return transformers' configuration for bitsandbytes."""
    if kind is None:
        return None
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            f"target_quantization: {kind!r} needs bitsandbytes; pip install "
            f"{requirement('quantization')}, or leave it out"
        )
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def shard_target(target: PreTrainedModel, accelerator: Accelerator) -> None:
    """Shard every decoder layer over the processes with FSDP2, which gathers a layer when it runs.

    Each process reads only its part of the layers that are not loaded yet, so neither host nor
    device holds more than one whole layer. Embedding, final norm and LM head stay whole, because
    the teacher reads them outside the model's forward. All processes must run the target equally
    often, as the training loop does.
    """
    # Shard inside each node, replicate across nodes: gathering then uses only fast links.
    world, local = accelerator.num_processes, int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    shape = (world // local, local) if 0 < local < world and world % local == 0 else (world,)
    names = ("copies", "parts")[-len(shape) :]
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
    layers = target.get_decoder().layers
    absent = [i for i, layer in enumerate(layers) if next(layer.parameters()).is_meta]
    for layer in layers:
        # Explicit: by default a root module keeps its weights gathered after its forward.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if absent:
        load_more_layers(target, absent, accelerator.device)
