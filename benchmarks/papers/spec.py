"""Read specifications of tables. They combine rows, prompts and settings.

A row is a draft with its decoding settings, optionally with a paper's published numbers. A
specification is YAML (tables/ here and in folders beside, configs/eval). Reading and
checking a specification needs no model. Its settings must exist, and every published number must
have a source.
"""

import csv
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from pipedraft.errors import UsageError, nearest
from pipedraft.eval.tasks import task_name
from pipedraft.files import Values, read_yaml
from pipedraft.inference.arguments import Dtype
from pipedraft.inference.config import DecodeConfig, setting_owners
from pipedraft.inference.schedules import SCHEDULES

FOLDER = Path(__file__).parent
ROLES_FILE = "checkpoints.yaml"
PUBLISHED = "published.csv"
DEFAULT_TARGET = str(FOLDER.parents[1] / "assets" / "target")
BENCHMARKS = ("mt_bench", "gsm8k", "humaneval")
Name = Annotated[str, Meta(min_length=1, max_length=10_000)]
Names = Annotated[list[Name], Meta(max_length=1_000)]
Places = dict[Name, Name]
Cell = tuple[str, ...]
"""Table, row, temperature, network and column of a published number."""
CELL = ("table", "row", "T", "network", "column")
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
T = TypeVar("T")


class Column(NamedTuple):
    """Measured column, written as QUANTITY [over ROW] [on BENCHMARK]."""

    quantity: str
    over: str | None
    """Name of the row to divide by, at the same temperature and network; None: do not divide."""
    benchmark: str | None
    """Benchmark to measure; None: all benchmarks pooled."""

    @classmethod
    def parse(cls, text: str) -> "Column":
        of_row, _, benchmark = text.partition(" on ")
        quantity, _, over = of_row.partition(" over ")
        return cls(quantity, over or None, benchmark or None)


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a table, with decoding settings and published values."""

    name: Name
    draft: Name | None = None
    """Role, or one of the specification's own drafts; null: no draft."""
    run: Values | None = {}
    """Settings that override the common ones in this row. null: the row cannot be run here, and
    ``remark`` says why."""
    published: dict[str, float | str] = {}
    """Column -> number, or text where the source gives a range. Beside those in published.csv."""
    is_ours: bool = False
    """True: this row is not in the paper."""
    remark: str = ""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table with the rows to decode, their settings, and the published values to compare."""

    title: Name
    kind: Name = "pipeline"
    target: Name = DEFAULT_TARGET
    """The target's folder or Hub name."""
    rows: Annotated[list[Row], Meta(min_length=1, max_length=10_000)]
    run: Values = {}
    """Settings for every row."""
    drafts: Places = {}
    """Name -> folder with a checkpoint or language model; other names are roles."""
    benchmarks: Names = msgspec.field(default_factory=lambda: list(BENCHMARKS))
    data_dir: Name | None = None
    limit: Positive | None = None
    max_new_tokens: Positive = 128
    seed: Annotated[int, Meta(ge=0)] = 0
    dtype: Dtype = "float32"
    chat_template_kwargs: Values = {}
    """Variables for the target's chat template."""
    paper: str = ""
    published: str = ""
    """Table's name in published.csv, which has the rows' published values; "": none."""
    measures: Names = []
    sources: dict[Name, str] = {}
    """Published column -> where its numbers are from."""
    differences: str = ""
    """Differences between the published runs and ours, on any machine."""

    def with_published(self) -> "Spec":
        """Return the specification with published.csv's values in its rows."""
        found: dict[Cell, dict[str, float | str]] = {}
        lines = read_published()
        if self.published and self.published not in (names := sorted({cell[0] for cell in lines})):
            raise UsageError(
                f"published: {self.published!r} is no table in {PUBLISHED}; "
                f"{nearest(self.published, names)}"
            )
        for (table, *row, column), line in lines.items():
            if table == self.published:
                found.setdefault(tuple(row), {})[column] = _number(line["published"])
        rows = [
            msgspec.structs.replace(
                row, published=found.get(self.cell(row)[1:], {}) | row.published
            )
            for row in self.rows
        ]
        return msgspec.structs.replace(self, rows=rows)

    def cell(self, row: Row) -> Cell:
        """Return table, row, temperature and network as in published.csv."""
        temperature, network = self.place(row)
        return self.published, row.name, f"{temperature:g}", network or ""

    def settings(self, row: Row) -> Values:
        """Return the common settings known to the row's schedule, overridden by the row's own."""
        own = row.run or {}
        schedule = (self.run | own).get("schedule")
        if schedule not in SCHEDULES:
            return self.run | own
        foreign = {name for name, owners in setting_owners().items() if schedule not in owners}
        return {name: v for name, v in self.run.items() if name not in foreign} | own

    def place(self, row: Row) -> tuple[float, str | None]:
        """Return temperature and network. Rows can be compared if both are equal."""
        settings = self.settings(row)
        return settings.get("temperature", 0), settings.get("network")

    def baseline(self, row: Row, measure: Column) -> int | None:
        """Return the index of the row by which a column is divided, or None."""
        for index, other in enumerate(self.rows):
            if other.name == measure.over and self.place(other) == self.place(row):
                return index
        return None

    def check(self, name: str, roles: Iterable[str]) -> None:
        """Raise ValueError for duplicate rows, or for unknown sources, drafts or columns."""
        known = [*self.drafts, *roles]
        keys = [(row.name, self.place(row)) for row in self.rows]
        for row, key in zip(self.rows, keys, strict=True):
            where = f"{name}: row {row.name!r}"
            if keys.count(key) > 1:
                raise ValueError(f"{where}: there are two at {key[1]}; rename one")
            if row.run is None and not row.remark:
                raise ValueError(f"{where}: run is null without a remark; say why it cannot be run")
            if row.draft is not None and row.draft not in known:
                raise ValueError(
                    f"{where}: draft {row.draft!r} is in no role; {nearest(row.draft, known)}"
                )
            for column in row.published:
                if column not in self.sources:
                    raise ValueError(
                        f"{where}: published {column!r} has no source; add it to sources"
                    )
        tasks = sorted({task_name(benchmark) for benchmark in self.benchmarks})
        for text in self.measures:
            measure = Column.parse(text)
            if measure.over is not None and measure.over not in [row.name for row in self.rows]:
                raise ValueError(f"{name}: measure {text!r}: there is no row {measure.over!r}")
            if measure.benchmark is None:
                continue
            if self.kind != "pipeline":
                raise ValueError(
                    f"{name}: measure {text!r}: a {self.kind} table has all benchmarks together; "
                    f"leave ' on {measure.benchmark}' out"
                )
            if measure.benchmark not in tasks:
                raise ValueError(
                    f"{name}: measure {text!r}: no benchmark here is {measure.benchmark!r}; "
                    f"{nearest(task_name(measure.benchmark), tasks)}"
                )


def decode_config(
    settings: Values, *, draft_stages: int | None = None, **shared: Any
) -> DecodeConfig:
    """Build the configuration from flat YAML settings. The tree is text, such as ``chain:5``.

    Args:
        draft_stages: pipeline stages used to train the draft, for settings without ``num_stages``.
    """
    values = {**settings, "boundaries": tuple(settings.get("boundaries", ()))}
    num_stages = values.pop("num_stages", None) or draft_stages
    if num_stages is not None:
        values["num_stages"] = num_stages
    return DecodeConfig.of(**values, **shared)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def beside(pattern: str) -> list[Path]:
    """Return files here and in the folders beside this one, which add tables."""
    return sorted(FOLDER.parent.glob(f"*/{pattern}"))


def read_lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def read_published() -> dict[Cell, dict[str, str]]:
    """Read each published.csv, one line for each published value."""
    lines = [line for path in beside(PUBLISHED) for line in read_lines(path)]
    found = {tuple(line[name] for name in CELL): line for line in lines}
    if len(found) < len(lines):
        raise ValueError(f"{PUBLISHED}: two lines have the same {', '.join(CELL)}; remove one")
    return found


def _read(path: Path, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(read_yaml(path, where), kind)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `(.*?)`", str(error))
        fields = {field for part in (Spec, Row) for field in part.__struct_fields__}
        fix = nearest(unknown[1], sorted(fields - {unknown[1]})) if unknown else "fix it"
        raise UsageError(f"{where}: {error}; {fix}") from error


@cache
def read_roles() -> dict[str, str]:
    """Map each role in the shipped specifications to its training command.

    A role is the name of a draft's folder in --checkpoints.
    """
    return _read(FOLDER / ROLES_FILE, dict[str, str], ROLES_FILE)


def table_files() -> dict[str, Path]:
    """Return the file of each shipped table."""
    return {path.stem: path for path in beside("tables/*.yaml")}


def table_names() -> list[str]:
    return sorted(table_files())


def read_spec(name: str) -> Spec:
    """Read a table's specification, by its name or from a file.

    Args:
        name: a shipped table, or a YAML file.

    Raises:
        UsageError: an unknown name, or an invalid specification.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in (names := table_names()):
            raise UsageError(f"NAME: {name!r} is no table; {nearest(name, names)}")
        path = table_files()[name]
    elif not path.is_file():
        raise UsageError(f"NAME: there is no file {name!r}; give a YAML file, or a name of --list")
    spec = _read(path, Spec, name).with_published()
    spec.check(name, read_roles())
    return spec
