"""Check the names of models and heads before anything is loaded, or torch imported."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx2
from huggingface_hub import constants

from .errors import did_you_mean
from .files import packaged
from .model_kinds import Refused

HUB_TIMEOUT_S = 5.0


def check_exists(name_or_path: str, *, field: str = "target") -> None:
    """Refuse a missing local path before the Hub is asked for it."""
    text = str(name_or_path)
    if Path(text).exists():
        return
    names_path = text.startswith(("/", ".", "~")) or text.count("/") != 1
    hint = did_you_mean(text)
    if names_path:
        raise Refused(
            f"{field}: no folder {text!r}{hint}; give an existing folder or a Hub name "
            "(owner/model)"
        )
    if reason := out_of_reach(text):
        raise Refused(f"{field}: no folder {text!r} here{hint}; {reason}")


def out_of_reach(name: str) -> str:
    """Return why a Hub model that is not in the cache cannot be had, with a fix, or ""."""
    if (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return ""
    if constants.HF_HUB_OFFLINE:
        return (
            "as a Hub name: not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
        )
    try:  # huggingface_hub would try six times, for a minute and a half
        httpx2.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except httpx2.TransportError as error:
        return (
            f"as a Hub name: not in the cache, and {constants.ENDPOINT} cannot be reached "
            f"({str(error) or type(error).__name__}); give a folder, or set HF_ENDPOINT"
        )
    return ""


def check_checkpoint(path_or_repo: str) -> None:
    """Refuse a missing folder with a head before the Hub is asked for it."""
    if Path(packaged(path_or_repo)).is_dir():
        return
    if path_or_repo.count("/") != 1 or path_or_repo.startswith((".", "/")):
        raise ValueError(
            f"checkpoint: no folder {path_or_repo!r}{did_you_mean(path_or_repo)}; give a folder "
            "written by pipedraft train, or user/name on the Hub"
        )
    if reason := out_of_reach(path_or_repo):
        raise ValueError(
            f"checkpoint: no folder {path_or_repo!r} here{did_you_mean(path_or_repo)}; {reason}"
        )


def check_names(models: Mapping[str, str | None], checkpoints: Iterable[str | None] = ()) -> None:
    """Refuse misspelled paths.

    Args:
        models: option -> folder, Hub name or GGUF file.

    Raises:
        ValueError: a path does not exist, and cannot be on the Hub.
    """
    for checkpoint in checkpoints:
        if checkpoint is not None:
            check_checkpoint(checkpoint)
    for field, name in models.items():
        if name is not None and not name.endswith(".gguf"):
            check_exists(packaged(name), field=field)
