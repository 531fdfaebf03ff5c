"""Kinds of tables: pipelines, and those that other folders of benchmarks add."""

import runpy

from rows import PIPELINE, Kind
from spec import FOLDER, Column, Spec

from pipedraft.errors import nearest

KINDS: dict[str, Kind] = {"pipeline": PIPELINE}
for path in sorted(FOLDER.parent.glob("*/paper_kind.py")):
    KINDS |= runpy.run_path(str(path))["KINDS"]


def check(name: str, spec: Spec) -> None:
    """Raise ValueError for unknown settings or columns. Loads no model."""
    if spec.kind not in KINDS:
        raise ValueError(f"{name}: kind: {spec.kind!r} is unknown; {nearest(spec.kind, KINDS)}")
    kind = KINDS[spec.kind]
    for text in spec.measures:
        if Column.parse(text).quantity not in kind.quantities:
            raise ValueError(
                f"{name}: measure {text!r} is none of a {spec.kind} table; give one of "
                f"{', '.join(sorted(kind.quantities))}"
            )
    for row in spec.rows:
        if row.run is None:
            continue
        try:
            needs_draft = kind.needs_draft(spec.settings(row))
        except (TypeError, KeyError, ValueError) as error:
            text = f"run: {error} is missing; set it" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{name}: {text}") from error
        if needs_draft != (row.draft is not None):
            what = "needs a draft" if needs_draft else "uses no draft"
            raise ValueError(f"{name}: row {row.name!r} {what}, and has draft {row.draft}")
