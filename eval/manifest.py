"""What a number depended on: versions, seeds, dtype, code, tokenizer, prompts, hardware."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import pipedraft
from pipedraft.eval.tasks import Prompt
from pipedraft.models.fingerprint import tokenizer_hash
from pipedraft.models.target import target_fingerprint

Manifest = dict[str, Any]
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over the system texts and turns, in order; equal hashes mean equal prompts."""
    return _sha256(json.dumps([[prompt.system, prompt.turns] for prompt in prompts]))


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout the code runs from; None for an installed wheel."""
    root = Path(pipedraft.__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """Name of the CPU; platform.processor() is empty on many Linux systems."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _hardware(device: torch.device) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _model(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "name": model.config.name_or_path,
        "parameters": model.num_parameters(),
        "fingerprint": target_fingerprint(model),
    }


def build_manifest(
    *,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    benchmarks: Mapping[str, Sequence[Prompt]],
    checkpoints: Sequence[Path],
    draft_model: PreTrainedModel | None = None,
    config: Mapping[str, Any],
    argv: Sequence[str],
    seed: int,
) -> dict[str, Any]:
    """Everything needed to repeat a run, or to see why two runs differ.

    Args:
        checkpoints: folders of the drafts; the SHA-256 of their weights is recorded.
        draft_model: a language model as the draft; recorded as the target is.
        config: the settings as resolved.
        argv: the command line, program first.
    """
    template = tokenizer.chat_template
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(argv),
        "config": dict(config),
        "seed": seed,
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": {
            "pipedraft": pipedraft.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "git": git_state(),
        "target": _model(target),
        "draft_model": None if draft_model is None else _model(draft_model),
        "tokenizer": {
            "name": tokenizer.name_or_path,
            "sha256": tokenizer_hash(tokenizer),
            "chat_template_sha256": _sha256(json.dumps(template)) if template else None,
        },
        "checkpoints": {
            str(folder): hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            for folder in checkpoints
        },
        "prompts": {
            name: {
                "count": len(prompts),
                "ids": [prompt.id for prompt in prompts],
                "sha256": prompts_hash(prompts),
            }
            for name, prompts in benchmarks.items()
        },
        "hardware": _hardware(target.device),
    }


# -- manifest.json as named lines of text; what another version left out is left out ---------------


def fact(manifest: Manifest, *path: str) -> Any:
    """A value by its place; None where it was not recorded."""
    value: Any = manifest
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _entries(manifest: Manifest, *path: str) -> list[tuple[str, Any]]:
    found = fact(manifest, *path)
    return list(found.items()) if isinstance(found, dict) else []


def _model_line(manifest: Manifest, field: str) -> str | None:
    name, parameters = fact(manifest, field, "name"), fact(manifest, field, "parameters")
    if name is None:
        return None
    size = f", {parameters:,} parameters" if isinstance(parameters, int) else ""
    digest = fact(manifest, field, "fingerprint", "hash")
    return f"{name}{size}" + (f", fingerprint {digest}" if digest else "")


def _code(manifest: Manifest) -> str | None:
    commit = fact(manifest, "git", "commit")
    changed = " with changes that are not committed" * bool(fact(manifest, "git", "modified"))
    return f"commit {commit}{changed}" if commit else None


def _hardware_line(manifest: Manifest) -> str | None:
    processor = fact(manifest, "hardware", "processor")
    if processor is None:
        return None
    parts = [str(processor)]
    for field, unit in (("cpu_count", "cores"), ("torch_threads", "threads")):
        count = fact(manifest, "hardware", field)
        parts += [f"{count} {unit}"] if count is not None else []
    parts += [str(fact(manifest, "hardware", field) or "") for field in ("accelerator", "device")]
    return ", ".join(filter(None, parts))


def _tokenizer(manifest: Manifest) -> str | None:
    name, digest = (fact(manifest, "tokenizer", field) for field in ("name", "sha256"))
    return f"{name}, SHA-256 {digest}" if name and digest else None


def describe(manifest: Manifest) -> list[tuple[str, str]]:
    """What it takes to repeat the run, or to see why two differ: (name, value)."""
    single = {
        "command": fact(manifest, "command"),
        "created": fact(manifest, "created"),
        "seed": fact(manifest, "seed"),
        "dtype": fact(manifest, "dtype"),
        "target": _model_line(manifest, "target"),
        "draft model": _model_line(manifest, "draft_model"),
        "tokenizer": _tokenizer(manifest),
        "hardware": _hardware_line(manifest),
        "code": _code(manifest),
        "versions": ", ".join(f"{name} {text}" for name, text in _entries(manifest, "versions")),
    }
    found = [(name, str(value)) for name, value in single.items() if value not in (None, "")]
    return found + list(_hashes(manifest))


def _hashes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for folder, digest in _entries(manifest, "checkpoints"):
        yield f"checkpoint {folder}", f"SHA-256 {digest}"
    for benchmark, _ in _entries(manifest, "prompts"):
        count, digest = (fact(manifest, "prompts", benchmark, key) for key in ("count", "sha256"))
        yield f"prompts of {benchmark}", f"{count}, SHA-256 {digest}"


def given_options(manifest: Manifest) -> list[tuple[str, str]]:
    """The command's resolved options, those that were left at nothing excluded."""
    return [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in _entries(manifest, "config")
        if value not in (None, [], False)
    ]
