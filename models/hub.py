"""Model cards, and uploading a checkpoint folder to the Hub."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipedraft.models.draft import CONFIG_FILE, WEIGHTS_FILE, read_description

CARD = "README.md"


def acceptance_table(results: Path) -> str:
    """Markdown rows of a results.json of `pipedraft eval`, autoregressive decoding included.

    Raises:
        ValueError: no such file, or not one of those.
    """
    try:
        runs = json.loads(results.read_text())["runs"]
        rows = [_acceptance_row(run) for run in runs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--results: {results} is not a results.json of pipedraft eval ({error!r}); give the "
            "file that eval wrote into --out"
        ) from error
    head = "| benchmark | method | n | T | W | tree | alpha | tau | L' | 95 % CI |\n" + "|---" * 10
    return "\n".join([head + "|", *rows])


def _acceptance_row(run: dict[str, Any]) -> str:
    length = run["equivalent_acceptance_length"]
    low, high = length["ci95"]
    figures = [run["draft_acceptance_rate"], run["mean_acceptance_length"], length["pooled"]]
    cells = [
        *(run["benchmark"], run["method"], run["stages"], f"{run['temperature']:g}"),
        *(run["tree_width"], run["tree"] or "-"),
        *("-" if figure is None else f"{figure:.3f}" for figure in figures),
        "-" if low is None else f"{low:.3f} to {high:.3f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def model_card(description: dict[str, Any], results: Path | None = None) -> str:
    """README.md of a draft: metadata, what it is, how to run it, what it was trained on.

    Args:
        results: results.json of an evaluation, for the acceptance table.
    """
    target = description["target"]
    training = description["training"]
    metrics = training.get("metrics", {})
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in sorted(metrics.items()))
    data = training.get("data", {})
    sources = ", ".join(sorted(data.get("sources", {}))) or "not recorded"
    measured = ""
    if results is not None:
        measured = f"""
Measured by decoding (L': equivalent acceptance length n N / K, 1 for autoregressive decoding):

{acceptance_table(results)}
"""
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
{measured}"""


def prepare_upload(folder: Path, destination: Path, results: Path | None = None) -> list[Path]:
    """Copy what belongs on the Hub (never the training state); returns the files.

    Args:
        results: makes the card anew, with the acceptance table of this results.json; without it a
            README.md in the folder is taken as it is.
    """
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
    own = results is None and card.is_file()
    text = card.read_text() if own else model_card(description, results)
    (destination / CARD).write_text(text)
    return sorted(destination.iterdir())


def push(folder: Path, repo: str, *, private: bool, revision: str | None) -> str:
    """Create the repository if needed and upload the folder; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    info = api.upload_folder(repo_id=repo, folder_path=str(folder), revision=revision)
    return str(info.commit_url)
