"""The checkpoints that a paper's table needs, among the folders that a user has."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipedraft.eval.papers.declarations import Role
from pipedraft.models.draft import CONFIG_FILE, resolve_folder

LANGUAGE_MODEL, TARGET = "language_model", "target"


def _folder_of(path: Path) -> Path | None:
    """The checkpoint in a folder, or in its best/."""
    for folder in (path, path / "best"):
        if (folder / CONFIG_FILE).is_file():
            return folder
    return None


def _describes(folder: Path, role: Role) -> bool:
    try:
        description = json.loads((folder / CONFIG_FILE).read_text())
    except ValueError:  # a file of something else
        return False
    if role.kind in (LANGUAGE_MODEL, TARGET):
        return "model_type" in description
    if description.get("draft_type") != role.kind:
        return False
    architecture = description.get("architecture", {})
    return all(architecture.get(name) == value for name, value in role.architecture.items())


class Places:
    """Where to look, in the order of the command line."""

    def __init__(self, places: Sequence[str], roles: dict[str, Role]) -> None:
        """
        Args:
            places: folders to search, and YAML files of role: checkpoint.

        Raises:
            ValueError: a file that names no role, or a place that is neither.
        """
        self.roles = roles
        self.given: dict[str, Path] = {}
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
        content = yaml.safe_load(path.read_text())
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
        role = self.roles[name]
        if name in self.given:
            yield self.given[name]
            return
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

    def __init__(self, places: Places, target: Any, tokenizer: Any) -> None:
        self.places, self.target, self.tokenizer = places, target, tokenizer
        self.folders: dict[str, Path] = {}
        """Of the roles that were found."""
        self._networks: dict[str, Any] = {}
        self._missing: dict[str, str] = {}

    def find(self, name: str) -> Any | None:
        """The network; None: there is no checkpoint of this role for this target."""
        if name in self._networks or name in self._missing:
            return self._networks.get(name)
        role, reason = self.places.roles[name], "no checkpoint"
        for folder in self.places.candidates(name):
            try:
                self._networks[name] = self._load(role, folder)
            except ValueError as error:  # of another target, or damaged
                reason = f"{folder}: {error}"
                if name in self.places.given:
                    raise
                continue
            self.folders[name] = folder
            return self._networks[name]
        self._missing[name] = f"{reason}; train it: {role.train}"
        return None

    def missing(self, name: str) -> str:
        """Why there is none, and what makes one."""
        return self._missing[name]

    def _load(self, role: Role, folder: Path) -> Any:
        from pipedraft.models import load_draft
        from pipedraft.models.language_model import load_draft_model

        if role.kind == LANGUAGE_MODEL:
            return load_draft_model(str(folder), self.target, self.tokenizer)
        draft = load_draft(str(folder), self.target)
        return draft.to(self.target.device, self.target.dtype)
