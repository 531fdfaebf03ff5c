"""Write and read checkpoint folders and the training state in them.

A checkpoint folder is complete or absent. The file COMPLETE is written last and lists the size and
name of every other file. Anybody who can write a checkpoint can also write COMPLETE, so loading
trusts no file. The state is JSON, safetensors, and DeepSpeed's files. Of DeepSpeed's files, only
tensors and plain values are read. So no file can name code to run.
"""

import json
import math
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator, DistributedType
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import Failure
from ..files import flush, naming, partial
from .position import Cut, DonePart

STEP_PREFIX = "step-"
COMPLETE = "COMPLETE"


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write every file into a temporary sibling folder, then rename it to ``folder``.

    A kill at any moment leaves the previous folder or the new one, never a mixture. Files are
    flushed to disk before the rename, and the previous folder is removed after it. A replacement
    takes two renames. After a kill between them, ``recover`` restores the previous folder.
    """
    temporary = partial(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with naming(folder):
        fill(temporary)
        publish_folder(temporary, folder)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Add a manifest to the filled ``temporary``, flush all files, and rename it to ``folder``."""
    write_manifest(temporary)
    # All of it before the rename: after a power cut, a name must not point to lost data.
    for file in temporary.rglob("*"):
        if file.is_file():
            flush(file)
    flush(temporary)
    replaced = _replaced(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        # A rename cannot replace a folder that is not empty, so the old one moves first.
        folder.rename(replaced)
    temporary.rename(folder)
    # The new name must be on disk before the old files go.
    flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Restore the previous ``folder`` after a kill between the two renames of a replacement."""
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
    """Compare the files' sizes with the manifest. Return the first fault, or None without one."""
    try:
        lines = (folder / COMPLETE).read_text().splitlines()
        if not lines:
            return f"{COMPLETE}, its manifest, is empty"
        for line in lines:
            # The size comes first, because a name may contain spaces.
            size, name = line.split("  ", 1)
            if not (folder / name).is_file():
                return f"{name} is missing"
            # Sizes, not hashes, which would read every byte at each start.
            if (found := (folder / name).stat().st_size) != int(size):
                return f"{name} has {found} bytes instead of {size}"
    except (OSError, ValueError) as error:
        return f"{COMPLETE}, its manifest, cannot be read ({error})"
    return None


# -- checkpoints of a run -------------------------------------------------------------------


def step_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"{STEP_PREFIX}{step:07d}"


def step_folders(output_dir: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, oldest first. They may be damaged."""
    folders = sorted((output_dir / "checkpoints").glob(f"{STEP_PREFIX}*"))
    return [folder for folder in folders if (folder / COMPLETE).exists()]


def newest_sound(output_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint, and a line about each damaged newer one.

    The damaged newer ones are removed. Otherwise ``rotate`` would keep them and drop sound ones.

    Raises:
        ValueError: every checkpoint is damaged. None is removed in this case.
    """
    reasons: list[tuple[Path, str]] = []
    for folder in reversed(step_folders(output_dir)):
        reason = damage(folder)
        if reason is None:
            # Only now: without a sound checkpoint, the damaged ones stay for the user to repair.
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
    """Restore best/ if a kill interrupted its replacement, and remove partial checkpoints."""
    recover(output_dir / "best")
    for left in (output_dir / "checkpoints").glob(f".{STEP_PREFIX}*.partial"):
        shutil.rmtree(left)


def rotate(output_dir: Path, keep: int) -> None:
    """Keep the newest ``keep`` checkpoints and remove the others.

    An old checkpoint is renamed before its removal, so no reader sees it with files missing.
    """
    for folder in step_folders(output_dir)[:-keep]:
        shutil.rmtree(folder.rename(partial(folder)))


# -- what a run resumes from ------------------------------------------------------------------

PROGRESS = "progress.json"
DEEPSPEED_TAG = "deepspeed"


@dataclass
class Progress:
    """Progress counters and metrics of a run, saved in its checkpoints."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches already used in this epoch behind the parts ``done``, by all processes together."""
    cut: Cut = field(default_factory=Cut)
    """Settings with which ``batch`` counts."""
    done: list[DonePart] = field(default_factory=list)
    """Parts of this epoch that earlier launches trained on with other settings."""
    epoch_steps: int = 0
    """Steps of a whole epoch, and how many more or fewer the run has as its settings changed."""
    extra_steps: int = 0
    tokens: int = 0
    """Supervised tokens so far, over all processes."""
    best_score: float = -math.inf
    best_by: str = ""
    """What ``best_score`` measures, as ``Trainer.best_by``."""
    since_best: int = 0
    """Evaluations in a row without a better score."""
    best_step: int = 0
    """Step at which best/ was saved; 0: not yet."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics from the last evaluation."""
    evaluation_pending: bool = False
    """True if the run was stopped just before the evaluation due at this step."""
    unlogged: list[dict[str, float]] = field(default_factory=list)
    """Metrics for the steps since the last log record."""
    tracker_id: str = ""


@dataclass(frozen=True)
class Saved:
    """Contents of progress.json, with the settings that a resuming launch must share."""

    sharding: str
    """accelerate's name for the sharding; "NO": every file holds whole tensors."""
    num_processes: int
    optimizers: list[str]
    progress: Progress


@dataclass(frozen=True)
class TrainingState:
    """Training state of one process. ``accelerator`` has prepared ``module`` and ``optimizers``."""

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
        """Save this process's state into an existing folder. Every process must call this."""
        rank = self.accelerator.process_index
        if self.sharding == DistributedType.DEEPSPEED:
            # A collective call: every process writes its own files.
            self.module.save_checkpoint(str(folder), DEEPSPEED_TAG)
        elif rank == 0 or self.sharding != "NO":
            # Replicas have equal states, so one file serves them all.
            _write(self._weights(), folder / self._file("model"))
            _write(self._moments(), folder / self._file("optimizer"))
        if rank == 0:
            saved = Saved(
                self.sharding, self.accelerator.num_processes, self._optimizer_names(), progress
            )
            (folder / PROGRESS).write_text(json.dumps(asdict(saved)))

    def load(self, folder: Path) -> Progress:
        """Load the state in ``folder``.

        Raises:
            ValueError: a file cannot be read, or its contents do not fit this run.
        """
        saved = self._read_progress(folder)
        if self.sharding == DistributedType.DEEPSPEED:
            self._load_deepspeed(folder)
        else:
            self._load_weights(_read(folder / self._file("model")))
            self._load_moments(_read(folder / self._file("optimizer")))
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
            # Whole tensors suit any number of processes, shards only the number that wrote them.
            is_fixed = name != "number of processes" or self.sharding != "NO"
            if is_fixed and now != then:
                raise ValueError(f"the {name}: {then} then, {now} now")
        return saved

    def _optimizer_names(self) -> list[str]:
        # accelerate wraps an optimizer; the name inside is the same under every launcher.
        return [type(getattr(o, "optimizer", o)).__name__ for o in self.optimizers]

    def _file(self, name: str) -> str:
        shard = "" if self.sharding == "NO" else f"-{self.accelerator.process_index}"
        return f"{name}{shard}.safetensors"

    # -- weights and optimizers: every process its own part, tensors under the weights' names ---

    def _parameters(self) -> dict[str, nn.Parameter]:
        # DDP adds the prefix, but a run may resume with or without DDP.
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
            # In place, because the optimizers hold these tensors.
            value.copy_(saved[name])

    def _moments(self) -> dict[str, Tensor]:
        return {
            f"{name}:{key}": _part(value)
            for optimizer in self.optimizers
            for name, parameter in self._parameters().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def _load_moments(self, saved: dict[str, Tensor]) -> None:
        """Load the optimizers' moments. Rates, decay and betas stay as configured."""
        states: dict[str, dict[str, Tensor]] = {}
        for full_name, value in saved.items():
            name, _, key = full_name.rpartition(":")
            states.setdefault(name, {})[key] = value
        names = {parameter: name for name, parameter in self._parameters().items()}
        for kind, optimizer in zip(self._optimizer_names(), self.optimizers, strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {}
            for index, parameter in enumerate(parameters):
                found = states.pop(names[parameter], {})
                if found:
                    if (kind == "Muon") != ("momentum_buffer" in found):
                        raise ValueError(f"{names[parameter]} had another optimizer then")
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

        plain = [LossScaler, ZeroStageEnum, fragment_address]  # these hold only plain values

        class TensorsAndValues(TorchCheckpointEngine):
            """Checkpoint reader for tensors and plain values only.

            DeepSpeed's own reader runs code that a file names.
            """

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


# -- reading back what was written ------------------------------------------------------------

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensor name -> type and shape."""

STORED = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch's types, and their names in safetensors."""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}


def check_written(path: Path, due: Layout) -> None:
    """Read a written file's header back, and compare it with what it should hold.

    Raises:
        Failure: a tensor is missing, unexpected, or has another type or shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            found = {n: (x.get_dtype(), tuple(x.get_shape())) for n, x in slices.items()}
    except (OSError, SafetensorError) as error:
        raise Failure(_not_as_due(path, str(error))) from error
    wanted = {name: (STORED[dtype], shape) for name, (dtype, shape) in due.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            is_, should = (_entry(entries.get(name)) for entries in (found, wanted))
            count = f"{len(found)} tensors instead of {len(wanted)}"
            raise Failure(_not_as_due(path, f"{count}; {name}: {is_} instead of {should}"))


def check_deepspeed(state: Path, num_processes: int) -> None:
    """Check that DeepSpeed has written whole archives, with one optimizer state per process.

    Raises:
        Failure: a file is missing or cut short.
    """
    files = sorted((state / DEEPSPEED_TAG).glob("*_states.pt"))
    for path in files:
        # torch writes a zip archive, whose table of contents comes last.
        if not zipfile.is_zipfile(path):
            raise Failure(_not_as_due(path, "cut short"))
    count = sum(path.name.endswith("optim_states.pt") for path in files)
    if count != num_processes or count == len(files):
        raise Failure(_not_as_due(state / DEEPSPEED_TAG, f"{count} optimizer states"))


def _entry(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if entry is None else f"{entry[0]} {list(entry[1])}"


def _not_as_due(path: Path, reason: str) -> str:
    return (
        f"checkpoint: {path}, read back, is not what was to be saved ({reason}); it is not used, "
        "and the checkpoints before it stay; check the launcher's settings and the disk"
    )


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    # safetensors refuses views that are not contiguous.
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    check_written(path, layout_of(tensors))


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _part(value: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    held = value.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def _check_shape(name: str, found: Tensor, own: Tensor) -> None:
    if found.shape != own.shape or found.dtype != own.dtype:
        then, now = ([str(t.dtype), list(t.shape)] for t in (found, own))
        raise ValueError(f"{name}: {then} then, {now} now")


def _as_parts_of(
    parameter: nn.Parameter, name: str, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a parameter's optimizer state, sharded like the parameter."""
    state = {}
    for key, value in found.items():
        if value.ndim == 0:  # the number of updates
            state[key] = value
            continue
        _check_shape(f"{name}:{key}", value, _part(parameter))
        state[key] = value
        if isinstance(parameter, DTensor):
            # Every process has read its own part, so no check needs an exchange.
            state[key] = DTensor.from_local(
                value.to(parameter.device),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
    return state
