"""Folders of the ``datasets`` library: rows written by ``save_to_disk``, and its caches.

A data set is saved as Arrow files with state.json and dataset_info.json beside them, a DatasetDict
as a folder for each split with dataset_dict.json above them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files import Values, read_json

ARROW = ".arrow"
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
DESCRIPTIONS = {INFO, "dataset_infos.json"}
"""Files beside rows that describe a data set, and hold none."""
TOKENIZED = ("input_ids", "loss_mask")


def saved_files(folder: Path, split: str) -> list[Path] | None:
    """Return the Arrow files of a folder written by ``save_to_disk``, or None for other folders.

    Args:
        split: read from a DatasetDict.

    Raises:
        ValueError: no such split, missing or damaged files, or a folder that holds no rows itself.
    """
    if (folder / SPLITS).is_file():
        known = read_json(folder / SPLITS, "sources.path", dict[str, Any]).get("splits", [])
        if split not in known:
            raise ValueError(
                f"sources.split: {split!r} is not in {str(folder)!r}; give one of "
                f"{', '.join(map(str, known))}"
            )
        folder = folder / split
    if is_saved(folder):
        return _files_of(folder, read_json(folder / STATE, "sources.path", dict[str, Any]))
    _refuse_folder(folder)
    return None


def is_saved(folder: Path) -> bool:
    return (folder / STATE).is_file() and (folder / INFO).is_file()


def hub_snapshot(folder: Path) -> Path:
    """Return the newest snapshot in a data set's folder of the Hub's cache, else the folder."""
    main = folder / "refs" / "main"
    if not main.is_file() or not (folder / "snapshots").is_dir():
        return folder
    return folder / "snapshots" / main.read_text().strip()


def _files_of(folder: Path, state: Values) -> list[Path]:
    named = state.get("_data_files") or []
    names = [str(x.get("filename")) for x in named if isinstance(x, dict)]
    if not names:
        raise ValueError(
            f"sources.path: {str(folder / STATE)!r} names no Arrow files, so the data set is empty "
            "or damaged; save it again"
        )
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(
            f"sources.path: {str(folder)!r} was saved with an index of its rows, by datasets "
            "before 2.0; load it with load_from_disk and save it again"
        )
    files = [folder / Path(name).name for name in names]
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(
            f"sources.path: {str(folder)!r} lacks {missing[0].name}; copy the whole folder again"
        )
    return files


def _refuse_folder(folder: Path) -> None:
    """Refuse folders that hold several data sets, or a description without rows."""
    if any(folder.glob("*--*/snapshots")):
        raise ValueError(
            f"sources.path: {str(folder)!r} is the Hub's cache; give the name of one data set"
        )
    saved = sorted(x.parent for x in folder.rglob(STATE) if is_saved(x.parent))
    if saved:
        names = ", ".join(dict.fromkeys(str(x.relative_to(folder)) for x in saved))
        raise ValueError(
            f"sources.path: {str(folder)!r} holds data sets written by save_to_disk ({names}); "
            "give one of them"
        )
    infos = sorted(folder.rglob(INFO))
    if not infos:
        return
    place = infos[0].parent
    if any(place.glob(f"*{ARROW}")):
        raise ValueError(
            f"sources.path: {str(folder)!r} is a cache of the datasets library, with several "
            "splits and versions; give the data set's name on the Hub, or one of its .arrow files"
        )
    if all(x.is_dir() or x.name in DESCRIPTIONS for x in folder.rglob("*")):
        raise ValueError(
            f"sources.path: {str(folder)!r} has {INFO}, which describes a data set, and no rows; "
            "give the folder with its rows (parquet, .arrow or JSONL)"
        )


def read_arrow(file: Path, batch_rows: int, choose: Any) -> Iterator[Values]:
    """Yield an Arrow file's rows, a batch in memory at a time.

    Args:
        choose: column names -> those to read, or None for all.

    Raises:
        ValueError: a damaged file, or rows that are tokenized already.
    """
    import datasets
    import pyarrow

    try:
        data = datasets.Dataset.from_file(str(file))
    except (pyarrow.ArrowException, OSError, ValueError, TypeError) as error:
        try:  # Arrow's form for files (Feather), which is mapped into memory, too
            whole = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
            data = datasets.Dataset(datasets.table.InMemoryTable(whole))
        except (pyarrow.ArrowException, OSError):
            said = " ".join(str(error).split())
            raise ValueError(
                f"sources.path: {str(file)!r} is not a readable Arrow file ({said})"
            ) from error
    if {*TOKENIZED} <= {*data.column_names}:
        raise ValueError(
            f"sources.path: {str(file.parent)!r} holds tokenized rows ({' and '.join(TOKENIZED)}, "
            "written with save_to_disk), as pipedraft data makes them; give the rows before that "
            "(parquet, JSONL)"
        )
    columns = choose(data.column_names)
    try:
        for batch in (data.select_columns(columns) if columns else data).iter(batch_rows):
            names = [*batch]
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"sources.path: {str(file)!r} is not a readable Arrow file ({error})"
        ) from error
