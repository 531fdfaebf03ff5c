"""Record a measurement's conditions: versions, seeds, dtype, code, tokenizer, prompts, hardware."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import Values
from ..inference.engine import DraftNetwork
from ..models.heads.language_model import LanguageModelDraft
from ..models.speed.rounded import dtype_of
from ..models.target import target_fingerprint
from ..models.transformer.fingerprint import tokenizer_hash
from ..pretrained import unapplied_settings
from ..version import __version__
from .record import Manifest
from .tasks import Prompt

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Return SHA-256 over the system messages and turns, in order."""
    return _sha256(json.dumps([[prompt.system, prompt.turns] for prompt in prompts]))


def git_state() -> dict[str, str | bool] | None:
    """Return the checkout's commit and whether it is modified, or None for an installed wheel."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def processor_name() -> str:
    """Return the CPU's name, also on Linux, where platform.processor() is often empty."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _model(model: PreTrainedModel) -> dict[str, object]:
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
    draft: DraftNetwork | None = None,
    config: Values,
    argv: Sequence[str],
    seed: int,
) -> Manifest:
    """Return everything needed to repeat a run, or to see why two runs differ.

    Args:
        checkpoints: draft folders. The SHA-256 of their weights is recorded.
        draft: a language model is recorded like the target. ``checkpoints`` records other drafts.
    """
    device = target.device
    return describe_call(tokenizer, benchmarks, config=config, argv=argv, seed=seed) | {
        "dtype": str(dtype_of(target)).removeprefix("torch."),
        "target": _model(target) | {"unapplied": unapplied_settings(target)},
        "draft_model": _model(draft.model) if isinstance(draft, LanguageModelDraft) else None,
        "checkpoints": {
            str(folder): hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            for folder in checkpoints
        },
        "hardware": {
            "machine": platform.machine(),
            "processor": processor_name(),
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "device": str(device),
            "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
    }


def describe_call(
    tokenizer: PreTrainedTokenizerBase,
    benchmarks: Mapping[str, Sequence[Prompt]],
    *,
    config: Values,
    argv: Sequence[str],
    seed: int,
) -> Manifest:
    """Return a manifest's entries about the command, its code and its prompts."""
    template = tokenizer.chat_template
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(argv),
        "config": dict(config),
        "seed": seed,
        "versions": {
            "pipedraft": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "git": git_state(),
        "tokenizer": {
            "name": tokenizer.name_or_path,
            "sha256": tokenizer_hash(tokenizer),
            "chat_template_sha256": _sha256(json.dumps(template)) if template else None,
        },
        "prompts": {
            name: {
                "count": len(prompts),
                "ids": [prompt.id for prompt in prompts],
                "sha256": prompts_hash(prompts),
            }
            for name, prompts in benchmarks.items()
        },
    }
