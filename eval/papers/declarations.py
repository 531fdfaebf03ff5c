"""Tables of the papers as data: configs/papers/NAME.yaml, and which drafts they are about.

A table is read and checked without a model: its settings must be ones that exist, and every
published number must have a source.
"""

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import yaml

import pipedraft
from pipedraft.inference.config import all_setting_names, setting_names
from pipedraft.inference.schedules import SCHEDULES

FOLDER = Path(pipedraft.__file__).parent / "configs" / "papers"
CHECKPOINTS_FILE = "checkpoints.yaml"
BASE = "base"
"""In place of a fine-tuned target: the target itself."""
T = TypeVar("T")


class Role(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft, or a fine-tuned target, that tables ask for by name."""

    kind: str
    """draft_type of a checkpoint, language_model, or target."""
    train: str
    """Command that makes it for the embedded target."""
    architecture: dict[str, Any] = msgspec.field(default_factory=dict)
    """Entries that the description of a checkpoint must have."""
    folder: str | None = None
    """Where it is looked for first, below the folders of --checkpoints; null: the role's name."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A column of what is measured: QUANTITY [over ROW] [on BENCHMARK]."""

    text: str

    @property
    def quantity(self) -> str:
        return self.text.partition(" on ")[0].partition(" over ")[0]

    @property
    def over(self) -> str | None:
        """Name of the row whose value, at the same place, divides."""
        return self.text.partition(" on ")[0].partition(" over ")[2] or None

    @property
    def benchmark(self) -> str | None:
        """None: all of them pooled."""
        return self.text.partition(" on ")[2] or None


class PaperRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line: a way to decode, and what was published about it."""

    name: str
    draft: str | None = None
    """Role; null: it needs none."""
    run: dict[str, Any] | None = msgspec.field(default_factory=dict)
    """Settings over the table's. null: cannot be run here, ``remark`` says why."""
    published: dict[str, float | str] = msgspec.field(default_factory=dict)
    """Column -> number, or text where the source gives a range."""
    is_ours: bool = False
    """The paper has no such row."""
    remark: str = ""


class PaperTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a paper, and how to make ours beside it."""

    title: str
    paper: str
    kind: Literal["pipeline", "edge", "retention"]
    measures: list[str]
    rows: list[PaperRow]
    differences: str
    """What differs between the published runs and ours, whatever the machine."""
    benchmarks: list[str] = msgspec.field(
        default_factory=lambda: ["mt_bench", "gsm8k", "humaneval"]
    )
    run: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings of every row."""
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Published column -> where its numbers are from."""

    def settings(self, row: PaperRow) -> dict[str, Any]:
        """The table's settings, as far as the row's schedule has them, and the row's own."""
        own = row.run or {}
        schedule = (self.run | own).get("schedule")
        if schedule not in SCHEDULES:
            return self.run | own
        foreign = all_setting_names() - set(setting_names(schedule))
        return {name: v for name, v in self.run.items() if name not in foreign} | own

    def place(self, row: PaperRow) -> tuple[Any, Any]:
        """Temperature, and network or benchmark: rows of one place can be compared."""
        settings = self.settings(row)
        return settings.get("temperature", 0), settings.get("network", settings.get("benchmark"))

    def baseline(self, row: PaperRow, measure: Measure) -> int | None:
        """Index of the row that a measure divides by."""
        for index, other in enumerate(self.rows):
            if other.name == measure.over and self.place(other) == self.place(row):
                return index
        return None

    def check(self, name: str, roles: dict[str, Role]) -> None:
        """Raise ValueError for what no paper, checkpoint or column stands behind."""
        keys = [(row.name, self.place(row)) for row in self.rows]
        for row, key in zip(self.rows, keys, strict=True):
            where = f"{name}: row {row.name!r}"
            if keys.count(key) > 1:
                raise ValueError(f"{where}: there are two at {key[1]}; rename one")
            if row.run is None and not row.remark:
                raise ValueError(f"{where}: run is null without a remark; say why it cannot be run")
            if row.draft is not None and row.draft not in roles:
                mend = _near(row.draft, roles)
                raise ValueError(f"{where}: draft {row.draft!r} is in no role; {mend}")
            for column in row.published:
                if column not in self.sources:
                    raise ValueError(
                        f"{where}: published {column!r} has no source; add it to sources"
                    )
        for text in self.measures:
            over = Measure(text=text).over
            if over is not None and over not in [row.name for row in self.rows]:
                raise ValueError(f"{name}: measure {text!r}: there is no row {over!r}")


def _near(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}"


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: no YAML ({' '.join(str(error).split())}); mend it") from error


def _convert(content: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}; mend configs/papers") from error


@cache
def read_roles(folder: Path = FOLDER) -> dict[str, Role]:
    return _convert(_read_yaml(folder / CHECKPOINTS_FILE), dict[str, Role], CHECKPOINTS_FILE)


def table_names(folder: Path = FOLDER) -> list[str]:
    """Of all tables; an installed wheel has none."""
    return sorted(p.stem for p in folder.glob("*.yaml") if p.name != CHECKPOINTS_FILE)


def read_table(name: str, folder: Path = FOLDER) -> PaperTable:
    """
    Raises:
        ValueError: there is none of that name, or it says what cannot be.
    """
    names = table_names(folder)
    if not names:
        raise ValueError(f"NAME: no tables in {folder}; run from a checkout of the repository")
    if name not in names:
        raise ValueError(f"NAME: {name!r} is no table; {_near(name, dict.fromkeys(names))}")
    table = _convert(_read_yaml(folder / f"{name}.yaml"), PaperTable, name)
    table.check(name, read_roles(folder))
    return table
