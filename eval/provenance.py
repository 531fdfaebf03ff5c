"""manifest.json as named lines of text, for reports; what another version left out is left out."""

from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]


def fact(manifest: Manifest, *path: str) -> Any:
    """A value by its place; None where it was not recorded."""
    value: Any = manifest
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _entries(manifest: Manifest, *path: str) -> list[tuple[str, Any]]:
    found = fact(manifest, *path)
    return list(found.items()) if isinstance(found, dict) else []


def _model(manifest: Manifest, field: str) -> str | None:
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


def _hardware(manifest: Manifest) -> str | None:
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
        "target": _model(manifest, "target"),
        "draft model": _model(manifest, "draft_model"),
        "tokenizer": _tokenizer(manifest),
        "hardware": _hardware(manifest),
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


def settings(manifest: Manifest) -> list[tuple[str, str]]:
    """The command's resolved options, those that were left at nothing excluded."""
    return [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in _entries(manifest, "config")
        if value not in (None, [], False)
    ]
