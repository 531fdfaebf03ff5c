"""Check the names of models and heads before anything is loaded, or torch imported."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from huggingface_hub import constants

from .errors import did_you_mean
from .files import packaged
from .model_kinds import Refused


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
    if is_offline_and_unknown(text):
        raise Refused(
            f"{field}: no folder {text!r} here{hint}; as a Hub name: not in the cache, and "
            "HF_HUB_OFFLINE is set; unset it, or give a folder"
        )


def is_offline_and_unknown(name: str) -> bool:
    """Return True in offline mode if a Hub model is not in the cache."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    return constants.HF_HUB_OFFLINE and not folder.is_dir()


def check_checkpoint(path_or_repo: str) -> None:
    """Refuse a missing folder with a head before the Hub is asked for it."""
    if Path(packaged(path_or_repo)).is_dir():
        return
    if path_or_repo.count("/") != 1 or path_or_repo.startswith((".", "/")):
        raise ValueError(
            f"checkpoint: no folder {path_or_repo!r}{did_you_mean(path_or_repo)}; give a folder "
            "written by pipedraft train, or user/name on the Hub"
        )
    if is_offline_and_unknown(path_or_repo):
        raise ValueError(
            f"checkpoint: no folder {path_or_repo!r} here{did_you_mean(path_or_repo)}; as a Hub "
            "name: not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
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
