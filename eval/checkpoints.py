"""Read the drafts that a command names."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ..devices import place_draft
from ..errors import UsageError
from ..files import Values
from ..models import load_draft
from ..models.heads.draft import Draft, read_description, resolve_folder


def load_head(folder: Path, target: PreTrainedModel, dtype: str = "auto") -> Draft:
    """Load a head on the target's device. The dtype ``auto`` is the target's dtype."""
    return place_draft(load_draft(str(folder), target, dtype=dtype), target)


def read_drafts(
    checkpoints: Sequence[str],
    target: str | None,
    draft_model: str | None,
    lookup: str | None = None,
) -> tuple[str, str | None, dict[Path, Values]]:
    """Return the target's name and revision, and every checkpoint's description.

    Args:
        target: value of --target. None uses the target named in the checkpoints.
        draft_model, lookup: language model or lookup method to use instead of checkpoints. Neither
            names a target.
    """
    folders = [resolve_folder(checkpoint) for checkpoint in checkpoints]
    drafts = {folder: read_description(folder) for folder in folders}
    if target is not None:
        return target, None, drafts
    if draft_model is not None:
        raise UsageError(f"--target: missing; --draft-model {draft_model} names none")
    if lookup is not None:
        raise UsageError(f"--target: missing; --draft {lookup} names none")
    references = [description["target"] for description in drafts.values()]
    targets = dict.fromkeys((target["name"], target.get("revision")) for target in references)
    if len(targets) > 1:
        names = ", ".join(f"{name} ({revision or 'newest'})" for name, revision in targets)
        raise UsageError(
            f"--checkpoint: the drafts name different targets: {names}; evaluate "
            "them one by one, or give --target"
        )
    ((name, revision),) = targets
    return name, revision, drafts
