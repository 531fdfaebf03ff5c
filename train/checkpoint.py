"""Checkpoint folders that are complete or absent, and finding the newest one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

STEP_PREFIX = "step-"
COMPLETE = "COMPLETE"


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make ``folder`` by one rename, after ``fill`` wrote every file into a temporary sibling.

    A kill at any moment leaves the previous folder or the new one, never a mixture: files are
    flushed to disk before the rename, and a replaced folder is removed only after it. Between the
    two renames of a replacement there is none under this name: ``recover`` brings one back.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    publish_folder(temporary, folder)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Flush a filled temporary folder, mark it complete and rename it to ``folder``."""
    (temporary / COMPLETE).write_text("")
    for file in temporary.rglob("*"):
        if file.is_file():
            _flush(file)
    _flush(temporary)
    replaced = _replaced(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    temporary.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    replaced = _replaced(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def step_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"{STEP_PREFIX}{step:07d}"


def step_folders(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    folders = sorted((output_dir / "checkpoints").glob(f"{STEP_PREFIX}*"))
    return [folder for folder in folders if (folder / COMPLETE).exists()]


def rotate(output_dir: Path, keep: int) -> None:
    for folder in step_folders(output_dir)[:-keep]:
        shutil.rmtree(folder)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by one rename."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    temporary.replace(path)
