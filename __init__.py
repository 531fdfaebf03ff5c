"""pipedraft: train draft heads to keep a pipelined language model busy, and decode with them."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__ as __version__

if "OMP_WAIT_POLICY" not in os.environ:
    # Set how often torch's threads (libgomp's on Linux) spin before they sleep. Importing torch
    # reads it. With libgomp's default, 300,000 spins, a small model's step takes 40 times as long
    # next to one busy program. With 3,000 spins it takes 3 times as long, and is no slower alone:
    # docs/lab/training_trials.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if TYPE_CHECKING:
    from .api import DecodeConfig as DecodeConfig
    from .api import custom_generate as custom_generate
    from .api import evaluate as evaluate
    from .api import load as load
    from .api import new_head as new_head
    from .api import train_head as train_head

PUBLIC = {
    "load": "api",
    "train_head": "api",
    "new_head": "api",
    "evaluate": "api",
    "custom_generate": "api",
    "DecodeConfig": "inference.config",
}
"""Public name -> its module."""


def __getattr__(name: str) -> object:
    """Import torch and transformers on first use of the API, not before."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'pipedraft' has no attribute {name!r}")
    return getattr(import_module(f".{PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*PUBLIC, "__version__"])
