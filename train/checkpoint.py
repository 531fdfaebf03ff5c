"""Checkpoint folders that are complete or absent, and the state that a run resumes from.

COMPLETE is written last: a line with size and name of every other file. Whoever writes a checkpoint
also writes that, so nothing in it is trusted: the state is JSON, safetensors, and DeepSpeed's files
as tensors and plain values only. None of them can name code to run.
"""

import json
import math
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator, DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipedraft.files import flush, partial

STEP_PREFIX = "step-"
COMPLETE = "COMPLETE"


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make ``folder`` by one rename, after ``fill`` wrote every file into a temporary sibling.

    A kill at any moment leaves the previous folder or the new one, never a mixture: files are
    flushed to disk before the rename, and a replaced folder is removed only after it. Between the
    two renames of a replacement there is none under this name: ``recover`` brings one back.
    """
    temporary = partial(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    publish_folder(temporary, folder)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Write the manifest of a filled temporary folder, flush everything, rename to ``folder``."""
    write_manifest(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            flush(file)
    flush(temporary)
    replaced = _replaced(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    temporary.rename(folder)
    flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    replaced = _replaced(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


# -- manifests ------------------------------------------------------------------------------


def write_manifest(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{path.stat().st_size}  {path.relative_to(folder)}\n" for path in paths]
    (folder / COMPLETE).write_text("".join(lines))


def damage(folder: Path) -> str | None:
    """The first file that is missing, or has another size than when it was written."""
    try:
        lines = (folder / COMPLETE).read_text().splitlines()
        if not lines:
            return f"{COMPLETE}, its manifest, is empty"
        for line in lines:
            size, name = line.split("  ", 1)
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (found := (folder / name).stat().st_size) != int(size):
                return f"{name} has {found} bytes instead of {size}"
    except (OSError, ValueError) as error:
        return f"{COMPLETE}, its manifest, cannot be read ({error})"
    return None


# -- checkpoints of a run -------------------------------------------------------------------


def step_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"{STEP_PREFIX}{step:07d}"


def step_folders(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; they may be damaged."""
    folders = sorted((output_dir / "checkpoints").glob(f"{STEP_PREFIX}*"))
    return [folder for folder in folders if (folder / COMPLETE).exists()]


def newest_sound(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is as it was written, and a line about each damaged newer one.

    The damaged ones are removed: ``rotate`` would otherwise keep them and drop sound ones.

    Raises:
        ValueError: there are checkpoints, and every one is damaged; none was removed.
    """
    reasons: list[tuple[Path, str]] = []
    for folder in reversed(step_folders(output_dir)):
        reason = damage(folder)
        if reason is None:
            for bad, _ in reasons:
                shutil.rmtree(bad)
            ending = f"removed, {folder.name} is used instead"
            return folder, [f"checkpoint {bad} is damaged: {why}; {ending}" for bad, why in reasons]
        reasons.append((folder, reason))
    if not reasons:
        return None, []
    found = "; ".join(f"{folder}: {reason}" for folder, reason in reasons)
    raise ValueError(
        f"resume: every checkpoint is damaged: {found}; copy one back, or remove "
        f"{output_dir / 'checkpoints'} or give another --output_dir to start afresh"
    )


def tidy(output_dir: Path) -> None:
    """Remove or bring back what a kill left half done."""
    recover(output_dir / "best")
    for left in (output_dir / "checkpoints").glob(f".{STEP_PREFIX}*.partial"):
        shutil.rmtree(left)


def rotate(output_dir: Path, keep: int) -> None:
    """Remove all but the newest; renamed first, so that none is ever seen with files missing."""
    for folder in step_folders(output_dir)[:-keep]:
        shutil.rmtree(folder.rename(partial(folder)))


# -- what a run resumes from ------------------------------------------------------------------

PROGRESS = "progress.json"
DEEPSPEED_TAG = "deepspeed"


@dataclass
class Progress:
    """Where a run stands; saved and restored with it."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch already used by all processes together."""
    batch_group: int = 0
    tokens: int = 0
    """Counted tokens so far, all processes."""
    best_score: float = -math.inf
    since_best: int = 0
    """Evaluations in a row without a better score."""
    best_step: int = 0
    """Of the network in best/; 0: there is none yet."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    evaluation_pending: bool = False
    """The run was stopped at a step that ends with an evaluation, before it."""
    unlogged: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the steps since the last record."""
    tracker_id: str = ""


@dataclass(frozen=True)
class Saved:
    """progress.json: what a launch must have in common with the one that wrote the state."""

    sharding: str
    """accelerate's name of the launcher; "NO" for a state that is whole in its files."""
    num_processes: int
    optimizers: list[str]
    progress: Progress


@dataclass(frozen=True)
class TrainingState:
    """The state of one process; ``module`` and ``optimizers`` are prepared by ``accelerator``."""

    accelerator: Accelerator
    module: Any
    """The network, perhaps inside DDP or DeepSpeed's engine."""
    optimizers: list[torch.optim.Optimizer]

    @property
    def sharding(self) -> str:
        kind = self.accelerator.distributed_type
        is_sharded = kind in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        return kind.value if is_sharded else "NO"

    def save(self, folder: Path, progress: Progress) -> None:
        """Save the state of every process, which all call it; ``folder`` is there."""
        rank = self.accelerator.process_index
        if self.sharding == DistributedType.DEEPSPEED:
            self.module.save_checkpoint(str(folder), DEEPSPEED_TAG)
        elif rank == 0 or self.sharding != "NO":
            _write(self._weights(), folder / self._file("model"))
            _write(self._moments(), folder / self._file("optimizer"))
        _write(self._random_states(), folder / f"random-{rank}.safetensors")
        if rank == 0:
            saved = Saved(
                self.sharding, self.accelerator.num_processes, self._optimizer_names(), progress
            )
            (folder / PROGRESS).write_text(json.dumps(asdict(saved)))

    def load(self, folder: Path) -> Progress:
        """Take over the state in ``folder``.

        Raises:
            ValueError: it is the state of another run, or holds something else than a state.
        """
        saved = self._read_progress(folder)
        if self.sharding == DistributedType.DEEPSPEED:
            self._load_deepspeed(folder)
        else:
            self._load_weights(_read(folder / self._file("model")))
            self._load_moments(_read(folder / self._file("optimizer")))
        rank = self.accelerator.process_index
        if rank < saved.num_processes:  # a process that was not there before keeps its own
            self._set_random_states(folder / f"random-{rank}.safetensors")
        return saved.progress

    def _read_progress(self, folder: Path) -> Saved:
        try:
            content = json.loads((folder / PROGRESS).read_bytes())
            saved = msgspec.convert(content, Saved)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{PROGRESS}: {error}") from error
        own = (self.sharding, self.accelerator.num_processes, self._optimizer_names())
        names = ("sharding", "number of processes", "optimizers")
        found = (saved.sharding, saved.num_processes, saved.optimizers)
        for name, now, then in zip(names, own, found, strict=True):
            is_fixed = name != "number of processes" or self.sharding != "NO"
            if is_fixed and now != then:
                raise ValueError(f"the {name}: {then} then, {now} now")
        return saved

    def _optimizer_names(self) -> list[str]:
        return [type(getattr(o, "optimizer", o)).__name__ for o in self.optimizers]

    def _file(self, name: str) -> str:
        shard = "" if self.sharding == "NO" else f"-{self.accelerator.process_index}"
        return f"{name}{shard}.safetensors"

    # -- weights and optimizers: every process its own part, tensors under the weights' names ---

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name.removeprefix("module."): p for name, p in self.module.named_parameters()}

    def _weights(self) -> dict[str, Tensor]:
        buffers = {name.removeprefix("module."): b for name, b in self.module.named_buffers()}
        return {name: _part(value) for name, value in {**self._parameters(), **buffers}.items()}

    @torch.no_grad()
    def _load_weights(self, saved: dict[str, Tensor]) -> None:
        weights = self._weights()
        for name in sorted(weights.keys() ^ saved.keys()):
            raise ValueError(f"{name} is {'not in it' if name in weights else 'no weight now'}")
        for name, value in weights.items():
            _check_shape(name, saved[name], value)
            value.copy_(saved[name])

    def _moments(self) -> dict[str, Tensor]:
        return {
            f"{name}:{key}": _part(value)
            for optimizer in self.optimizers
            for name, parameter in self._parameters().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def _load_moments(self, saved: dict[str, Tensor]) -> None:
        """Rates, decay and betas are the configuration's, not the checkpoint's."""
        states: dict[str, dict[str, Tensor]] = {}
        for full_name, value in saved.items():
            name, _, key = full_name.rpartition(":")
            states.setdefault(name, {})[key] = value
        names = {parameter: name for name, parameter in self._parameters().items()}
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {}
            for index, parameter in enumerate(parameters):
                found = states.pop(names[parameter], {})
                if found:
                    state[index] = _as_parts_of(parameter, names[parameter], found)
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        for name in states:
            raise ValueError(f"{name} is not trained now")

    # -- DeepSpeed ------------------------------------------------------------------------------

    def _load_deepspeed(self, folder: Path) -> None:
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        plain = [LossScaler, ZeroStageEnum, fragment_address]  # numbers and nothing that acts

        class TensorsAndValues(TorchCheckpointEngine):
            """DeepSpeed's own reader would run whatever code a file names."""

            def load(self, path: str, map_location: Any = None) -> object:
                try:
                    with torch.serialization.safe_globals(plain):
                        return torch.load(path, map_location=map_location, weights_only=True)
                except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                    name = Path(path).name
                    raise ValueError(f"{name} is no file of tensors and plain values") from error

        self.module.checkpoint_engine = TensorsAndValues(self.module._config)
        path, _ = self.module.load_checkpoint(str(folder), DEEPSPEED_TAG)
        if path is None:
            raise ValueError(f"{DEEPSPEED_TAG}/ holds no state")

    # -- random numbers -------------------------------------------------------------------------

    def _random_states(self) -> dict[str, Tensor]:
        """Torch's, for dropout; all else of a run is drawn from generators of its own."""
        device = self.accelerator.device
        states = {"cpu": torch.get_rng_state()}
        if device.type != "cpu":
            states[device.type] = torch.get_device_module(device).get_rng_state(device)
        return states

    def _set_random_states(self, path: Path) -> None:
        saved, device = _read(path), self.accelerator.device
        try:
            torch.set_rng_state(saved["cpu"])
            if device.type != "cpu":
                torch.get_device_module(device).set_rng_state(saved[device.type], device)
        except (KeyError, RuntimeError, TypeError) as error:
            reason = f"{error}".strip().splitlines()[0]
            raise ValueError(f"{path.name} is no state of random numbers: {reason}") from error


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _part(value: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    held = value.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def _check_shape(name: str, found: Tensor, own: Tensor) -> None:
    if found.shape != own.shape or found.dtype != own.dtype:
        then, now = ([str(t.dtype), list(t.shape)] for t in (found, own))
        raise ValueError(f"{name}: {then} then, {now} now")


def _as_parts_of(
    parameter: nn.Parameter, name: str, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """An optimizer's state of one parameter, sharded as the parameter is."""
    state = {}
    for key, value in found.items():
        if value.ndim == 0:  # the number of updates
            state[key] = value
            continue
        _check_shape(f"{name}:{key}", value, _part(parameter))
        state[key] = value
        if isinstance(parameter, DTensor):
            state[key] = DTensor.from_local(
                value.to(parameter.device),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
    return state
