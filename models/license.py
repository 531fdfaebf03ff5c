"""Under which license a target is, by what lies beside its weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pipedraft.models.card import CARD, License
from pipedraft.models.draft import CONFIG_FILE
from pipedraft.models.hub_link import hub_link

FIELDS = ("license", "license_name", "license_link")


def license_of(name: str, revision: str | None, *, asks_hub: bool) -> License:
    """What the target's card says, else its configuration; nothing is inferred from the name.

    Args:
        name: folder or Hub id of the target.
        asks_hub: otherwise only a folder or the cache of downloads is read.
    """
    find: Callable[[str], Path | None] = _from_folder(Path(name))
    place = f"in its folder's {CARD} and {CONFIG_FILE}"
    if not Path(name).is_dir():
        find = _from_hub(name, revision) if asks_hub else _from_cache(name, revision)
        place = "on its card and in its configuration on the Hub"
    found = None
    for file, read in ((CARD, _of_card), (CONFIG_FILE, _of_configuration)):
        path = find(file)
        if path is None:
            continue
        found = path
        if fields := read(path):
            return License(fields, f"by its {file}")
    return License({}, f"is not given {place}" if found else f"was not found: nothing {place}")


def _of_card(path: Path) -> dict[str, Any]:
    from huggingface_hub import metadata_load

    try:
        metadata = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError):
        return {}
    return {key: metadata[key] for key in FIELDS if metadata.get("license") and metadata.get(key)}


def _of_configuration(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text()).get("license")
    except (ValueError, AttributeError):
        return {}
    return {"license": value} if isinstance(value, str) and value else {}


def _from_folder(folder: Path) -> Callable[[str], Path | None]:
    return lambda file: folder / file if (folder / file).is_file() else None


def _from_cache(name: str, revision: str | None) -> Callable[[str], Path | None]:
    from huggingface_hub import try_to_load_from_cache

    def find(file: str) -> Path | None:
        found = try_to_load_from_cache(name, file, revision=revision)
        return Path(found) if isinstance(found, str) else None

    return find


def _from_hub(name: str, revision: str | None) -> Callable[[str], Path | None]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    def find(file: str) -> Path | None:
        with hub_link(f"target: {name!r}"):
            try:
                return Path(hf_hub_download(name, file, revision=revision))
            except (EntryNotFoundError, HfHubHTTPError, HFValidationError):
                return None  # a target that was renamed or hidden stops no upload

    return find
