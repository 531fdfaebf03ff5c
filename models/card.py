"""Model cards: what a draft is, how to run it, what it learned from and how far it was measured.

The words of a card stand in card.md.jinja.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from huggingface_hub import (
    EvalResult,
    ModelCardData,
    hf_hub_download,
    metadata_load,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from jinja2 import Environment, StrictUndefined, Template

from pipedraft.errors import one_line
from pipedraft.files import Values
from pipedraft.models.draft import CONFIG_FILE, Description
from pipedraft.pretrained import hub_link

CARD = "README.md"
MADE = "<!-- Written by pipedraft. Without this line the text is yours and is kept as it is. -->"
"""Last line of a card that ``push`` may write anew."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
ENGINES = {"sglang": "SGLang", "speculators": "vLLM"}
"""Layout of an export -> who serves it."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "eagle": ("sglang",),
    "eagle3": ("sglang", "speculators"),
    "mtp": ("sglang",),
    "dflash": ("sglang", "speculators"),
    "dspark": ("sglang", "speculators"),
}
"""Those that a kind of head can be exported in."""
LICENSE_FIELDS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class License:
    """License of the target, as its own card or configuration says."""

    fields: Values = field(default_factory=dict)
    """license, and for the license `other` license_name and license_link."""
    origin: str = "was not looked up"
    """Where the fields are from, or why there are none."""


@dataclass(frozen=True, kw_only=True)
class CardSource:
    """Everything that a model card is made of."""

    description: Description
    """config.json of the draft's checkpoint."""
    place: str = "THIS_FOLDER"
    """What a reader gives as --checkpoint: the repository once it has one."""
    revision: str | None = None
    """Branch of the repository, if it is not the main one."""
    layout: str | None = None
    """Layout of an export for a serving engine; None: a checkpoint."""
    launch: str | None = None
    """Command that serves the export."""
    license: License = field(default_factory=License)
    measured: "Measured | None" = None

    @property
    def target(self) -> str:
        return self.description["target"]["name"]

    @property
    def target_is_public(self) -> bool:
        """A name that others can load, not a folder of this machine."""
        return is_hub_id(self.target)

    def licensed(self, *, asks_hub: bool) -> "CardSource":
        """The same with the license of the target, as ``license_of`` finds it."""
        revision = self.description["target"].get("revision")
        return replace(self, license=license_of(self.target, revision, asks_hub=asks_hub))


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


@cache
def card_template() -> Template:
    """Compiled once: a run writes a card with everything that it saves."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text())


def render_card(source: CardSource) -> str:
    """README.md with the metadata that the Hub reads."""
    source = _shown(source)
    return card_template().render(
        source=source,
        description=source.description,
        metadata=_metadata(source),
        engine=None if source.layout is None else ENGINES[source.layout],
        engines=ENGINES,
        layouts=LAYOUTS,
        made=MADE,
    )


def plain(text: str) -> str:
    """Text of others that no Markdown or HTML of its own acts in."""
    line = one_line(text).replace("<", "&lt;").replace("`", "'").replace("|", "&#124;")
    return line.replace("](", "] (")


def _shown(source: CardSource) -> CardSource:
    """Plain text of what comes from checkpoints, rows and results; of local folders the name."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return plain(value)
        if isinstance(value, Mapping):
            return {plain(str(key)): clean(entry) for key, entry in value.items()}
        return [clean(entry) for entry in value] if isinstance(value, list | tuple) else value

    description = clean(source.description)
    name = source.target
    if not source.target_is_public:
        description["target"]["name"] = f".../{plain(Path(name).name)}"  # no name on the Hub
    data = description.get("training", {}).get("data") or {}
    if isinstance(data.get("sources"), dict):
        data["sources"] = {
            key if is_hub_id(key.partition(":")[0]) else f".../{Path(key).name}": counts
            for key, counts in data["sources"].items()
        }
    measured = source.measured
    if measured is not None:
        runs = msgspec.convert(clean(msgspec.to_builtins(measured.runs)), list[MeasuredRun])
        about = msgspec.to_builtins(measured.manifest)
        manifest = msgspec.convert(clean(about), EvaluationManifest)
        measured = replace(measured, runs=runs, manifest=manifest)
    license = replace(source.license, fields=clean(source.license.fields))
    return replace(source, description=description, measured=measured, license=license)


def _metadata(source: CardSource) -> str:
    measured = source.measured
    kind = source.description["draft_type"]
    data = source.description.get("training", {}).get("data", {})
    tags = ["speculative-decoding", "pipedraft", kind]
    if source.layout is not None:
        tags.append(ENGINES[source.layout].lower())
    metadata = ModelCardData(
        library_name=source.layout or "pipedraft",
        base_model=source.target if source.target_is_public else None,
        datasets=data.get("hub_datasets") or None,
        tags=tags,
        model_name=None if measured is None else source.place.rpartition("/")[2],
        eval_results=None if measured is None else measured.eval_results(),
        **source.license.fields,
    )
    order = ["library_name", "base_model", *LICENSE_FIELDS, "datasets"]
    return metadata.to_yaml(original_order=[*order, "tags"])


# -- what was measured ----------------------------------------------------------------------


class MeasuredLength(msgspec.Struct, frozen=True):
    """Acceptance length in results.json, as eval/record.py writes it."""

    pooled: float | None
    ci95: tuple[float | None, float | None]


class MeasuredRun(msgspec.Struct, frozen=True):
    """Entry of results.json: what a card shows, and no more."""

    benchmark: str
    method: str
    schedule: str
    stages: int
    temperature: float
    tree_width: int
    tree: str | None
    checkpoint: str | None
    equivalent_acceptance_length: MeasuredLength
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    filters: dict[str, float] = {}
    """Of samples, those that remove something."""

    @property
    def sampling(self) -> str:
        """Temperature and filters; who differs here is not alike."""
        filters = (f", {name.replace('_', '-')} {x:g}" for name, x in self.filters.items())
        return f"{self.temperature:g}" + "".join(filters)


class MeasuredRuns(msgspec.Struct, frozen=True):
    runs: list[MeasuredRun]


class Prompts(msgspec.Struct, frozen=True):
    count: int
    sha256: str


class EvaluationOptions(msgspec.Struct, frozen=True):
    data_dir: str | None


class Machine(msgspec.Struct, frozen=True):
    processor: str


class EvaluationManifest(msgspec.Struct, frozen=True):
    """What a card shows of manifest.json, as eval/manifest.py writes it."""

    checkpoints: dict[str, str]
    prompts: dict[str, Prompts]
    config: EvaluationOptions
    hardware: Machine
    dtype: str
    command: str


@dataclass(frozen=True)
class Measured:
    """Entries of an evaluation for one draft, and for decoding without one."""

    runs: list[MeasuredRun]
    manifest: EvaluationManifest

    @classmethod
    def read(cls, results: Path, weights_sha256: str) -> "Measured":
        """Read measured figures for a model card from an evaluation's results.

        Args:
            weights_sha256: of the draft's checkpoint; the evaluation must have run it.

        Raises:
            ValueError: no results of `pipedraft eval`, or those of other weights.
        """
        path = results
        try:
            runs = msgspec.json.decode(path.read_bytes(), type=MeasuredRuns).runs
            path = results.with_name("manifest.json")
            manifest = msgspec.json.decode(path.read_bytes(), type=EvaluationManifest)
            unknown = {run.benchmark for run in runs} - manifest.prompts.keys()
            if unknown:
                raise ValueError(f"prompts has no {min(unknown)!r}")
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"--results: {path} is not of pipedraft eval ({error!r}); give the results.json "
                "that eval wrote into --out, with the manifest.json beside it"
            ) from error
        hashes = manifest.checkpoints
        own = {name for name, digest in hashes.items() if digest == weights_sha256}
        if not own:
            raise ValueError(
                f"--results: {results} measured other weights ({', '.join(hashes) or 'none'}); "
                "evaluate this checkpoint, or leave --results out"
            )
        return cls([run for run in runs if run.checkpoint in {*own, None}], manifest)

    def eval_results(self) -> list[EvalResult]:
        """Results as the Hub's metadata has them; decoding without a draft is left out."""
        found = []
        for run in self.runs:
            if run.checkpoint is None:
                continue
            setting = {
                key: getattr(run, key)
                for key in ("schedule", "stages", "temperature", "tree_width", "tree")
            } | run.filters
            shown = f"{run.schedule}, n = {run.stages}, T = {run.sampling}, W = "
            shown += f"{run.tree_width}" + (f", {run.tree}" if run.tree else "")
            length = run.equivalent_acceptance_length
            values = {
                "equivalent_acceptance_length": length.pooled,
                "mean_acceptance_length": run.mean_acceptance_length,
                "draft_acceptance_rate": run.draft_acceptance_rate,
            }
            for name, value in values.items():
                extra = {"ci95": list(length.ci95)} if value is length.pooled else {}
                if value is not None:
                    found.append(
                        EvalResult(
                            task_type="text-generation",
                            **self._dataset(run.benchmark),
                            metric_type=name,
                            metric_value=value,
                            metric_name=f"{name} ({shown})",
                            metric_args={**setting, **extra},
                        )
                    )
        return found

    def _dataset(self, benchmark: str) -> Values:
        """Name and kind of the prompts; those in the form of a benchmark are not the benchmark."""
        folder, prompts = self.manifest.config.data_dir, self.manifest.prompts[benchmark]
        kind, name = benchmark, f"{benchmark}, {prompts.count} prompts"
        if folder is None:
            kind = f"pipedraft-{benchmark}"
            name = f"{prompts.count} prompts of pipedraft in the form of {benchmark}"
        elif folder.startswith("hub:") and folder != "hub:":
            kind = folder.removeprefix("hub:")
        return {
            "dataset_type": kind,
            "dataset_name": name,
            "dataset_args": {"prompts_sha256": prompts.sha256},
        }


# -- the target's license -------------------------------------------------------------------


def license_of(name: str, revision: str | None, *, asks_hub: bool) -> License:
    """License that the target's card names, else its configuration; nothing is inferred.

    Args:
        name: folder or Hub id of the target.
        asks_hub: otherwise only a folder or the cache of downloads is read.
    """
    is_found = False
    for path in _files_about(name, revision, asks_hub):
        is_found = True
        if fields := _license_fields(path):
            return License(fields, f"by its {path.name}")
    place = "on its card and in its configuration on the Hub"
    if Path(name).is_dir():
        place = f"in its folder's {CARD} and {CONFIG_FILE}"
    return License({}, f"is not given {place}" if is_found else f"was not found: nothing {place}")


def _files_about(name: str, revision: str | None, asks_hub: bool) -> Iterator[Path]:
    """Card and configuration of a model, as far as there are such."""
    for file in (CARD, CONFIG_FILE):
        found: object = Path(name, file)
        if not Path(name).is_dir() and asks_hub:
            with hub_link(f"target: {name!r}"):
                try:
                    found = hf_hub_download(name, file, revision=revision)
                except (EntryNotFoundError, HfHubHTTPError, HFValidationError):
                    continue  # a target that was renamed or hidden stops no upload
        elif not Path(name).is_dir():
            found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str | Path) and Path(found).is_file():
            yield Path(found)


def _license_fields(path: Path) -> Values:
    try:
        is_card = path.name == CARD
        found = (metadata_load(path) or {}) if is_card else json.loads(path.read_text())
        license = found.get("license")
    except (ValueError, AttributeError, yaml.YAMLError):
        return {}
    if is_card:
        return {key: found[key] for key in LICENSE_FIELDS if license and found.get(key)}
    return {"license": license} if isinstance(license, str) and license else {}
