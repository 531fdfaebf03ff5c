"""A checkpoint with its weights in half precision: half the size to ship."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedraft.files import write_folder
from pipedraft.models.card import CARD
from pipedraft.models.draft import CONFIG_FILE, WEIGHTS_FILE, load_untied, read_description
from pipedraft.models.hub import model_card


def halve(folder: Path, out: Path) -> list[Path]:
    """Write a draft with fp16 weights, which loading makes float32 again; returns the files.

    fp16 has eleven bits where bf16 has eight, and a draft's weights are far below its largest
    number, 65,504.

    Raises:
        ValueError: no sound checkpoint, or a weight that fp16 cannot hold.
    """
    load_untied(folder)
    description, weights = read_description(folder), load_file(folder / WEIGHTS_FILE)
    halved = {name: _half(name, value) for name, value in weights.items()}

    def fill(place: Path) -> None:
        (place / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n")
        save_file(halved, place / WEIGHTS_FILE, metadata={"format": "pt"})
        (place / CARD).write_text(model_card(description))

    return write_folder(out, fill, inputs=[folder])


def _half(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    if not bool((half := value.half()).isfinite().all()):
        largest = float(value.abs().max())
        raise ValueError(
            f"--checkpoint: {name} reaches {largest:.3g}, fp16 65504; ship it as it is"
        )
    return half
