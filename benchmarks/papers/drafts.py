"""Find drafts for a specification among a user's folders."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from spec import read_roles
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.errors import UsageError, blaming
from pipedraft.eval.checkpoints import load_head
from pipedraft.eval.tasks import Prompt
from pipedraft.files import read_yaml
from pipedraft.inference.engine import DraftNetwork
from pipedraft.models.heads.draft import CONFIG_FILE, head_of_run, resolve_folder
from pipedraft.models.heads.language_model import load_draft_model


def _folder_of(path: Path) -> Path | None:
    """Return the folder with the checkpoint, ``path`` or the head of the run in it, or None."""
    return path if (path / CONFIG_FILE).is_file() else head_of_run(path)


def _is_model(folder: Path) -> bool:
    """Return True if a folder holds a language model, not a head."""
    try:
        return "model_type" in json.loads((folder / CONFIG_FILE).read_text())
    except ValueError:
        return False


def _read_places(path: Path) -> dict[str, Path]:
    """Return the folder for each role in a YAML file with lines ``role: checkpoint``."""
    try:
        content = msgspec.convert(read_yaml(path, "--checkpoints"), dict[str, str])
    except msgspec.ValidationError as error:
        raise UsageError(f"--checkpoints: {path}: {error}; write lines of role: folder") from error
    if unknown := sorted(content.keys() - read_roles().keys()):
        raise UsageError(
            f"--checkpoints: {path}: no table asks for {unknown[0]!r}; known: "
            f"{', '.join(read_roles())}"
        )
    places = {}
    for name, folder in content.items():
        with blaming(f"--checkpoints: {path}: {name}"):
            places[name] = resolve_folder(folder)
    return places


@dataclass(frozen=True)
class CheckpointSearch:
    """Places to search for drafts, in command-line order."""

    folders: list[Path]
    given: dict[str, Path]

    @classmethod
    def of(cls, places: Iterable[str], drafts: Mapping[str, str] | None = None) -> Self:
        """Make a search from the places on the command line.

        Args:
            places: folders to search, and YAML files with lines ``role: checkpoint``.
            drafts: name -> folder, from the specification.
        """
        given: dict[str, Path] = {}
        for name, place in (drafts or {}).items():
            folder = _folder_of(Path(place))
            if folder is None:
                raise UsageError(
                    f"drafts: no {CONFIG_FILE} in {place} ({name}); train it, or take it out of "
                    "the specification"
                )
            given[name] = folder
        folders = []
        for path in map(Path, places):
            if path.is_dir():
                folders.append(path)
            elif path.is_file():
                given |= _read_places(path)
            else:
                raise UsageError(
                    f"--checkpoints: there is no folder or file {str(path)!r}; give the folder "
                    "that holds the runs, or a YAML file of role: folder"
                )
        return cls(folders, given)

    def find(self, name: str) -> Path | None:
        """Return the checkpoint given for a name, else the first in a folder with this name."""
        if name in self.given:
            return self.given[name]
        found = (_folder_of(folder / name) for folder in self.folders)
        return next((folder for folder in found if folder is not None), None)


class Drafts:
    """Drafts by name, each loaded once for the target."""

    def __init__(
        self, search: CheckpointSearch, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.search, self.target, self.tokenizer = search, target, tokenizer
        self.folders: dict[str, Path] = {}
        self.networks: dict[str, DraftNetwork] = {}
        self.missing: dict[str, str] = {}
        """Reason for each missing draft, and the command to train it."""

    def find(self, name: str) -> DraftNetwork | None:
        """Return the named draft, or None if no checkpoint with this name fits the target."""
        if name in self.networks or name in self.missing:
            return self.networks.get(name)
        folder, reason = self.search.find(name), "no checkpoint"
        network: DraftNetwork
        if folder is not None:
            try:
                if _is_model(folder):
                    network = load_draft_model(str(folder), self.target, self.tokenizer)
                else:
                    network = load_head(folder, self.target)
                self.networks[name], self.folders[name] = network, folder
                return network
            except ValueError as error:  # for another target, or damaged
                if name in self.search.given:
                    raise
                reason = f"{folder}: {error}"
        self.missing[name] = f"{reason}; train it: {read_roles()[name]}"
        return None

    def is_model(self, name: str) -> bool:
        """Return True if the draft found is a language model, not a head."""
        return _is_model(self.folders[name])


@dataclass(frozen=True, kw_only=True)
class TableContext:
    """Target, prompts and drafts shared by all rows in a table."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    benchmarks: Mapping[str, Sequence[Prompt]]
    drafts: Drafts
    out: Path
    sequences: int = 1
    """Conversations decoded at once in a pipeline."""
    shard: str | None = None
    """Share of a pipeline's prompts: "2/4" is the second quarter; None: all."""
