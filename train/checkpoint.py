"""Checkpoint folders that are complete or absent, proof that one is as it was written, the newest.

COMPLETE, written last, is the manifest: a line with SHA-256, bytes and name of every other file,
and as its last line the SHA-256 of the lines before.
"""

import hashlib
import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipedraft.files import file_damage, file_sha256, flush, partial

STEP_PREFIX = "step-"
COMPLETE = "COMPLETE"


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make ``folder`` by one rename, after ``fill`` wrote every file into a temporary sibling.

    A kill at any moment leaves the previous folder or the new one, never a mixture: files are
    flushed to disk before the rename, and a replaced folder is removed only after it. Between the
    two renames of a replacement there is none under this name: ``recover`` brings one back.
    """
    temporary = partial(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    publish_folder(temporary, folder)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Write the manifest of a filled temporary folder, flush everything, rename to ``folder``."""
    write_manifest(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            flush(file)
    flush(temporary)
    replaced = _replaced(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    temporary.rename(folder)
    flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    replaced = _replaced(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


# -- manifests ------------------------------------------------------------------------------


def write_manifest(folder: Path) -> None:
    """Digests are of what the files hold when read back."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter
        digests = list(pool.map(lambda name: file_sha256(folder / name), names))
    sizes = [(folder / name).stat().st_size for name in names]
    lines = [f"{d}  {size}  {n}\n" for d, size, n in zip(digests, sizes, names, strict=True)]
    body = "".join(lines)
    (folder / COMPLETE).write_text(f"{body}{hashlib.sha256(body.encode()).hexdigest()}\n")


def damage(folder: Path) -> str | None:
    """The first file that is not as ``publish_folder`` left it and what is wrong, None if all are.

    Files that the manifest does not name are ignored.
    """
    name = COMPLETE
    try:
        manifest = (folder / name).read_bytes()
        body, own = manifest[:-65], manifest[-65:]
        if own != hashlib.sha256(body).hexdigest().encode() + b"\n":
            return f"{name}, its manifest, is empty or damaged itself"
        for line in body.decode().splitlines():
            digest, size, name = line.split("  ", 2)
            found = file_damage(folder / name, int(size), digest)
            if found is not None:
                return f"{name} {found}"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


# -- checkpoints of a run -------------------------------------------------------------------


def step_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"{STEP_PREFIX}{step:07d}"


def step_folders(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; they may be damaged."""
    folders = sorted((output_dir / "checkpoints").glob(f"{STEP_PREFIX}*"))
    return [folder for folder in folders if (folder / COMPLETE).exists()]


def newest_sound(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is as it was written, and a line about each damaged newer one.

    Damaged ones are kept under another name, where neither resuming nor ``rotate`` sees them, so
    that they never displace a sound one.

    Raises:
        ValueError: there are checkpoints, and every one is damaged; none was renamed.
    """
    reasons: list[tuple[Path, str]] = []
    for folder in reversed(step_folders(output_dir)):
        reason = damage(folder)
        if reason is None:
            return folder, [_set_aside(bad, why, folder) for bad, why in reasons]
        reasons.append((folder, reason))
    if not reasons:
        return None, []
    found = "; ".join(f"{folder}: {reason}" for folder, reason in reasons)
    raise ValueError(
        f"resume: every checkpoint is damaged: {found}; copy one back, or remove "
        f"{output_dir / 'checkpoints'} or give another --output_dir to start afresh"
    )


def _set_aside(folder: Path, reason: str, sound: Path) -> str:
    names = (folder.with_name(f"damaged{i or ''}-{folder.name}") for i in itertools.count())
    aside = next(path for path in names if not path.exists())
    folder.rename(aside)
    return (
        f"checkpoint {folder} is damaged: {reason}; kept as {aside.name}, "
        f"{sound.name} is used instead"
    )


def tidy(output_dir: Path) -> None:
    """Remove or bring back what a kill left half done."""
    recover(output_dir / "best")
    for left in (output_dir / "checkpoints").glob(f".{STEP_PREFIX}*.partial"):
        shutil.rmtree(left)


def rotate(output_dir: Path, keep: int) -> None:
    """Remove all but the newest; renamed first, so that none is ever seen with files missing."""
    for folder in step_folders(output_dir)[:-keep]:
        shutil.rmtree(folder.rename(partial(folder)))
