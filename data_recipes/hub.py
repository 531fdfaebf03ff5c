"""Data sets of the Hugging Face Hub, downloaded once or streamed."""

from collections.abc import Callable, Iterator
from typing import Any

from pipedraft.data_recipes.sources import RawRow, Source, dump_row, needed_columns


def read_hub(source: Source) -> Iterator[RawRow]:
    data = load_hub(source)
    # A stream may not know its columns before its first row.
    columns = needed_columns(source, data.column_names or list(next(iter(data), {})))
    for number, row in enumerate(data.select_columns(columns) if columns else data, 1):
        yield RawRow(dump_row(row), f"{source.path}[{source.split}]:{number}")


def load_hub(source: Source) -> Any:
    """The split as a ``Dataset``, or as an ``IterableDataset`` if the source is streamed."""
    import datasets

    return _load(datasets.load_dataset, source, split=source.split, streaming=source.streaming)


def hub_stamp(source: Source) -> str:
    """Changes when the data set does: its fingerprint, or its commit if it is streamed."""
    import datasets

    if source.streaming:
        return str(_load(datasets.load_dataset_builder, source).hash)
    return load_hub(source)._fingerprint


def _load(loader: Callable[..., Any], source: Source, **options: Any) -> Any:
    from datasets.exceptions import DatasetsError

    place = {"name": source.subset, "data_files": source.files, "revision": source.revision}
    try:
        return loader(source.path, **place, **options)
    # RuntimeError: the data set is a loading script, which no release since 4.0 runs.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        given = "".join(f", {name} {value!r}" for name, value in place.items() if value is not None)
        raise ValueError(
            f"sources.path: {source.path!r} is neither a file nor a Hub data set that can be "
            f"loaded with split {source.split!r}{given} ({reason}); check the path, the split, the "
            "subset and the network"
        ) from error
