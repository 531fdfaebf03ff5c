"""Networks: the staged target and the drafts that guess ahead for it."""

from typing import Any


def load_draft(path_or_repo: str, target: Any, *, revision: str | None = None) -> Any:
    """Load a draft of any type and check that it belongs to ``target``.

    Args:
        path_or_repo: checkpoint folder, output folder of a run (its best checkpoint), or Hub id.
        target: the loaded target model.

    Raises:
        ValueError: missing or damaged checkpoint, unknown type, or another target's draft.
    """
    from pipedraft.models.draft import Draft, read_description, resolve_folder
    from pipedraft.models.eagle import Eagle
    from pipedraft.models.eagle3 import Eagle3
    from pipedraft.models.ppsd import PPSD
    from pipedraft.models.spd import SPD

    drafts: dict[str, type[Draft]] = {"spd": SPD, "ppsd": PPSD, "eagle": Eagle, "eagle3": Eagle3}
    folder = resolve_folder(path_or_repo, revision=revision)
    description = read_description(folder)
    kind = description["draft_type"]
    if kind not in drafts:
        raise ValueError(
            f"checkpoint: draft_type {kind!r} in {folder} is unknown; known: {', '.join(drafts)}"
        )
    draft = drafts[kind].load(folder, description)
    draft.reference.check(target)
    draft.attach(target)
    return draft
