"""Model cards, and uploading a checkpoint folder to the Hub."""

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipedraft.models.draft import CONFIG_FILE, WEIGHTS_FILE, read_description

CARD = "README.md"


def model_card(description: dict[str, Any]) -> str:
    """README.md of a draft: metadata, what it is, how to run it, what it was trained on."""
    target = description["target"]
    training = description["training"]
    metrics = training.get("metrics", {})
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in sorted(metrics.items()))
    data = training.get("data", {})
    sources = ", ".join(sorted(data.get("sources", {}))) or "not recorded"
    return f"""---
library_name: pipedraft
base_model: {target["name"]}
tags:
- speculative-decoding
- pipedraft
- {description["draft_type"]}
---
# {description["draft_type"]} draft for {target["name"]}

A draft network for pipelined speculative decoding. The text stays the target's own.

    python -m pipedraft.inference --checkpoint THIS_FOLDER --prompt "..."

Target fingerprint: `{target["fingerprint"]["hash"]}`. Loading checks it.

Architecture: `{description["architecture"]}`

Training data: {sources}; {data.get("supervised_tokens", "?")} assistant tokens.

Validation during training (teacher-forced, not a decoding benchmark):

| metric | value |
|---|---|
{rows}
"""


def prepare_upload(folder: Path, destination: Path) -> list[Path]:
    """Copy what belongs on the Hub (never the training state); returns the files."""
    description = read_description(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"checkpoint: {folder / name} is missing; give a complete checkpoint")
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt"):
            pass  # reads the header and compares it with the size of the file
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint: {folder / WEIGHTS_FILE} is damaged ({error}); give another checkpoint"
        ) from error
    destination.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(folder / name, destination / name)
    card = folder / CARD
    text = card.read_text() if card.is_file() else model_card(description)
    (destination / CARD).write_text(text)
    return sorted(destination.iterdir())


def push(folder: Path, repo: str, *, private: bool, revision: str | None) -> str:
    """Create the repository if needed and upload the folder; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    info = api.upload_folder(repo_id=repo, folder_path=str(folder), revision=revision)
    return str(info.commit_url)
