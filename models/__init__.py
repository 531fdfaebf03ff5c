"""Networks: the staged target and the drafts that draft ahead for it."""

from pathlib import Path
from typing import Any


def load_draft(
    path_or_repo: str, target: Any, *, revision: str | None = None, allow_evolved: bool = False
) -> Any:
    """Load a draft of any type and check that it belongs to ``target``.

    Args:
        path_or_repo: checkpoint folder, output folder of a run (its best checkpoint), or Hub id.
        target: the loaded target model.
        allow_evolved: take a target of the same sizes with other weights than the draft's own, to
            measure what the draft is worth on it.

    Raises:
        ValueError: missing or damaged checkpoint, unknown type, or another target's draft.
    """
    from pipedraft.models.draft import resolve_folder

    draft = load_untied(resolve_folder(path_or_repo, revision=revision))
    draft.reference.check_fingerprint(draft.fingerprint(target), allow_evolved=allow_evolved)
    draft.attach(target)
    return draft


def load_untied(folder: Path) -> Any:
    """Load a draft of any type without its target: its weights are right, its target is unseen.

    Raises:
        ValueError: missing or damaged checkpoint, or unknown type.
    """
    from pipedraft.models.draft import Draft, read_description
    from pipedraft.models.eagle import Eagle
    from pipedraft.models.eagle3 import Eagle3
    from pipedraft.models.flexspec import FlexSpec
    from pipedraft.models.ppsd import PPSD
    from pipedraft.models.spd import SPD

    known: tuple[type[Draft], ...] = (SPD, PPSD, Eagle, Eagle3, FlexSpec)
    drafts = {draft_class.draft_type: draft_class for draft_class in known}
    description = read_description(folder)
    kind = description["draft_type"]
    if kind not in drafts:
        raise ValueError(
            f"checkpoint: draft_type {kind!r} in {folder} is unknown; known: {', '.join(drafts)}"
        )
    return drafts[kind].load(folder, description)


def stage_boundaries(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Cut L layers into n contiguous stages: (0, b1, .., L).

    Sizes differ by at most one and the longer stages come last: the first stage also embeds.

    Raises:
        ValueError: n is not in [1, L].
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_stages: {num_stages} stages do not fit a target of {num_layers} layers; "
            f"choose 1 to {num_layers}"
        )
    size, num_longer = divmod(num_layers, num_stages)
    first_longer = num_stages - num_longer
    return tuple(k * size + max(k - first_longer, 0) for k in range(num_stages + 1))
