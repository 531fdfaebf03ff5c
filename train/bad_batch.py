"""The batches of a step whose loss or gradient was not finite, kept to look at and to run again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipedraft.files import publish


@dataclass(frozen=True)
class BadBatches:
    """With the network of that step, ``trainer.module(batch, trainer.generator(step, place))`` is
    the forward pass that failed."""

    step: int
    rank: int
    losses: dict[int, float]
    """Sum over the counted tokens by place in the step's window of all processes; all finite if
    only the gradient was not."""
    batches: dict[int, dict[str, Tensor]]
    """Place in the window -> input_ids, loss_mask, lengths."""


def save_bad_batches(output_dir: Path, bad: BadBatches) -> Path:
    """Write bad_batch-step-S-rank-R.safetensors by one rename."""
    path = output_dir / f"bad_batch-step-{bad.step:07d}-rank-{bad.rank}.safetensors"
    tensors = {
        f"{index}.{name}": value.cpu().contiguous()
        for index, batch in bad.batches.items()
        for name, value in batch.items()
    }
    losses = json.dumps({str(index): str(loss) for index, loss in bad.losses.items()})
    metadata = {"step": str(bad.step), "rank": str(bad.rank), "losses": losses}
    publish(path, lambda place: save_file(tensors, place, metadata=metadata))
    return path


def load_bad_batches(path: Path) -> BadBatches:
    with safe_open(path, "pt") as file:
        metadata: Mapping[str, str] = file.metadata()
        batches: dict[int, dict[str, Tensor]] = {}
        for key in file.keys():  # noqa: SIM118 (no mapping)
            index, _, name = key.partition(".")
            batches.setdefault(int(index), {})[name] = file.get_tensor(key)
    losses = {int(index): float(loss) for index, loss in json.loads(metadata["losses"]).items()}
    return BadBatches(int(metadata["step"]), int(metadata["rank"]), losses, batches)
