"""Drafts that a command names, and those that a specification needs, among a user's folders."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.cli import UsageError
from pipedraft.eval.spec import Role
from pipedraft.eval.tasks import Prompt
from pipedraft.files import Values, read_yaml
from pipedraft.inference.engine import DraftNetwork
from pipedraft.models import load_draft
from pipedraft.models.draft import CONFIG_FILE, Draft, read_description, resolve_folder
from pipedraft.models.language_model import load_draft_model
from pipedraft.pretrained import place_draft

LANGUAGE_MODEL, TARGET = "language_model", "target"


def _folder_of(path: Path) -> Path | None:
    """The checkpoint in a folder, or in its best/."""
    for folder in (path, path / "best"):
        if (folder / CONFIG_FILE).is_file():
            return folder
    return None


def _description(folder: Path) -> Values:
    """config.json of a folder; empty if it is of something else."""
    try:
        found = json.loads((folder / CONFIG_FILE).read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_model(folder: Path) -> bool:
    return "model_type" in _description(folder)


def _describes(folder: Path, role: Role) -> bool:
    description = _description(folder)
    if role.kind in (LANGUAGE_MODEL, TARGET):
        return "model_type" in description
    if description.get("draft_type") != role.kind:
        return False
    architecture = description.get("architecture", {})
    return all(architecture.get(name) == value for name, value in role.architecture.items())


def load_head(folder: Path, target: PreTrainedModel, *, allow_evolved: bool = False) -> Draft:
    """A checkpoint of this package, on the target's device and in its dtype."""
    return place_draft(load_draft(str(folder), target, allow_evolved=allow_evolved), target)


def read_drafts(
    checkpoints: Sequence[str],
    target: str | None,
    draft_model: str | None,
    lookup: str | None = None,
) -> tuple[str, str | None, dict[Path, Values]]:
    """Name and revision of the target, and the description of every checkpoint.

    Args:
        target: of --target; None: the one that the checkpoints name.
        draft_model, lookup: a language model, or a draft without a network, in place of
            checkpoints; they name no target.
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


class CheckpointSearch:
    """Where to look, in the order of the command line."""

    def __init__(
        self,
        places: Sequence[str],
        roles: Mapping[str, Role],
        given: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            places: folders to search, and YAML files of role: checkpoint.
            given: name -> folder of what a specification names itself.

        Raises:
            UsageError: a file that names no role, a place that is neither, or a folder that a
                specification names without a checkpoint in it; all of these at once.
        """
        self.roles = roles
        found = {name: _folder_of(Path(place)) for name, place in (given or {}).items()}
        missing = [f"{given[name]} ({name})" for name, path in found.items() if given and not path]
        if missing:
            raise UsageError(
                f"drafts, targets: no {CONFIG_FILE} in {', '.join(missing)}; train them, or take "
                "them out of the specification"
            )
        self.given: dict[str, Path] = {name: path for name, path in found.items() if path}
        self.folders: list[Path] = []
        for place in places:
            path = Path(place)
            if path.is_dir():
                self.folders.append(path)
            elif path.is_file():
                self.given |= self._read(path)
            else:
                raise ValueError(
                    f"--checkpoints: there is no folder or file {place!r}; give the folder that "
                    "holds the runs, or a YAML file of role: folder"
                )

    def _read(self, path: Path) -> dict[str, Path]:
        content = read_yaml(path, "--checkpoints")
        if not isinstance(content, dict):
            raise ValueError(f"--checkpoints: {path} is no mapping; write lines of role: folder")
        for name, folder in content.items():
            if name not in self.roles:
                raise ValueError(
                    f"--checkpoints: {path}: no table asks for {name!r}; known: "
                    f"{', '.join(self.roles)}"
                )
            if not isinstance(folder, str):
                raise ValueError(f"--checkpoints: {path}: {name}: {folder!r} is no folder")
        return {name: resolve_folder(folder) for name, folder in content.items()}

    def candidates(self, name: str) -> Iterator[Path]:
        """Checkpoints for a role: the one given, or those found; the folder of that name first.

        A language model or a fine-tuned target is known by its folder's name alone.
        """
        if name in self.given:
            yield self.given[name]
            return
        role = self.roles[name]
        for folder in self.folders:
            own = _folder_of(folder / (role.folder or name))
            if own is not None and _describes(own, role):
                yield own
            if role.kind in (LANGUAGE_MODEL, TARGET):
                continue
            for path in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())):
                found = _folder_of(path)
                if found is not None and found != own and _describes(found, role):
                    yield found


class Drafts:
    """Drafts by role, each loaded once for one target."""

    def __init__(
        self, search: CheckpointSearch, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.search, self.target, self.tokenizer = search, target, tokenizer
        self.folders: dict[str, Path] = {}
        """Where the drafts that were found are."""
        self.networks: dict[str, DraftNetwork] = {}
        self.missing: dict[str, str] = {}
        """Why there is no draft of a name, and what makes one."""

    def find(self, name: str) -> DraftNetwork | None:
        """The network; None: there is no checkpoint of this role for this target."""
        if name in self.networks or name in self.missing:
            return self.networks.get(name)
        reason = "no checkpoint"
        for folder in self.search.candidates(name):
            try:
                self.networks[name] = self.load(folder, self.target)
            except ValueError as error:  # of another target, or damaged
                reason = f"{folder}: {error}"
                if name in self.search.given:
                    raise
                continue
            self.folders[name] = folder
            return self.networks[name]
        self.missing[name] = f"{reason}; train it: {self.search.roles[name].train}"
        return None

    def is_model(self, name: str) -> bool:
        """Whether what was found is a language model, not a head."""
        return _is_model(self.folders[name])

    def load(
        self, folder: Path, target: PreTrainedModel, *, allow_evolved: bool = False
    ) -> DraftNetwork:
        """The draft of a folder: a language model, or a head that this package trained.

        Args:
            allow_evolved: on a target whose weights are not those that the draft names.
        """
        if _is_model(folder):
            return load_draft_model(str(folder), target, self.tokenizer)
        return load_head(folder, target, allow_evolved=allow_evolved)


@dataclass(frozen=True, kw_only=True)
class TableContext:
    """Target, prompts and drafts that all rows of a table share."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    benchmarks: Mapping[str, Sequence[Prompt]]
    drafts: Drafts
    out: Path
    reference: PreTrainedModel | None
    """Decodes greedily once more, to compare outputs with; None: they are not compared."""
    sequences: int = 1
    """Conversations of a pipeline that are decoded at once."""
    shard: str | None = None
    """Share of a pipeline's prompts: "2/4" is the second of four; None: all."""
