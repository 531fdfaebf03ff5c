"""Write model cards from card.md.jinja, with a draft's usage, training data and results."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from jinja2 import Environment, StrictUndefined, Template

from ...errors import one_line
from ...files import Values
from ...hub_link import hub_link
from ..heads.draft import Description

CARD = "README.md"
CHART = "length_by_benchmark.png"
"""Evaluation chart shown on a card."""
MADE = "<!-- Written by pipedraft. Without this line the text is yours and is kept as it is. -->"
"""Last line of a card that ``push`` may overwrite."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
ENGINES = {
    "sglang": "SGLang",
    "speculators": "vLLM",
    "transformers": "transformers",
    "openvino": "OpenVINO",
}
"""Export layout -> its serving engine."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "eagle": ("sglang",),
    "eagle3": ("sglang", "speculators", "openvino"),
    "mtp": ("sglang",),
    "dflash": ("sglang", "speculators", "transformers", "openvino"),
    "dspark": ("sglang", "speculators"),
}
"""Export layouts per head type."""
GGUF_HEADS = ("eagle3", "dflash", "dspark")
"""Head types that export writes for llama.cpp, too."""
LICENSE_FIELDS = ("license", "license_name", "license_link")


@dataclass(frozen=True, kw_only=True)
class CardSource:
    """All inputs for a model card."""

    description: Description
    """config.json from the draft's checkpoint."""
    place: str = "THIS_FOLDER"
    """Value of --checkpoint in the card's commands: the repository, once the draft has one."""
    revision: str | None = None
    """Repository branch, if it is not the main one."""
    layout: str | None = None
    """Export layout for a serving engine; None: a checkpoint."""
    launch: str | None = None
    """Command that serves the export."""
    measured: "Measured | None" = None

    @property
    def target(self) -> str:
        return self.description["target"]["name"]

    @property
    def target_is_public(self) -> bool:
        """Return True if others can load the target by name, because it is no local folder."""
        return is_hub_id(self.target)


def model_card(description: Description) -> str:
    """Return the card for a checkpoint that is not yet on the Hub, reading only local files."""
    return render_card(CardSource(description=description))


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


@cache
def card_template() -> Template:
    """Compile the template once, because a run writes a card with every save."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text())


def render_card(source: CardSource, *, asks_hub: bool = False) -> str:
    """Return README.md with metadata for the Hub.

    Args:
        asks_hub: if False, look for the target's license only in a folder or the download cache.
    """
    revision = source.description["target"].get("revision")
    license = _clean(license_of(source.target, revision, asks_hub=asks_hub))
    source = _shown(source)
    return card_template().render(
        source=source,
        description=source.description,
        license=license,
        metadata=_metadata(source, license),
        engine=None if source.layout is None else ENGINES[source.layout],
        engines=ENGINES,
        layouts=LAYOUTS,
        gguf=GGUF_HEADS,
        made=MADE,
        chart=CHART,
    )


def plain(text: str) -> str:
    """Escape Markdown and HTML in external text."""
    line = one_line(text).replace("<", "&lt;").replace("`", "'").replace("|", "&#124;")
    return line.replace("](", "] (")  # no Markdown link


def _clean(value: Any) -> Any:
    """Escape all texts in a value."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): _clean(entry) for key, entry in value.items()}
    return [_clean(entry) for entry in value] if isinstance(value, list | tuple) else value


def _shown(source: CardSource) -> CardSource:
    """Escape text from checkpoints, rows and results, and shorten local folders to their names."""
    description, measured = _clean(source.description), source.measured
    if not source.target_is_public:
        description["target"]["name"] = f".../{plain(Path(source.target).name)}"  # not a Hub name
    data = description.get("training", {}).get("data", {})
    if sources := data.get("sources"):
        data["sources"] = {
            key if is_hub_id(key.partition(":")[0]) else f".../{Path(key).name}": counts
            for key, counts in sources.items()
        }
    if measured is not None:
        runs = msgspec.convert(_clean(msgspec.to_builtins(measured.runs)), list[MeasuredRun])
        manifest = msgspec.convert(_clean(msgspec.to_builtins(measured.manifest)), MeasuredBy)
        measured = replace(measured, runs=runs, manifest=manifest)
    return replace(source, description=description, measured=measured)


def _metadata(source: CardSource, license: Values) -> str:
    measured, description = source.measured, source.description
    tags = ["speculative-decoding", "pipedraft", description["draft_type"]]
    if source.layout is not None:
        tags.append(ENGINES[source.layout].lower())
    metadata = ModelCardData(
        library_name=source.layout or "pipedraft",
        base_model=source.target if source.target_is_public else None,
        datasets=description.get("training", {}).get("data", {}).get("hub_datasets") or None,
        tags=tags,
        model_name=None if measured is None else source.place.rpartition("/")[2],
        eval_results=None if measured is None else measured.eval_results(),
        **license,
    )
    order = ["library_name", "base_model", *LICENSE_FIELDS, "datasets", "tags"]
    return metadata.to_yaml(original_order=order)


# -- what was measured ----------------------------------------------------------------------


class MeasuredLength(msgspec.Struct, frozen=True):
    """Acceptance length in results.json, as written by eval/record.py."""

    pooled: float | None
    ci95: tuple[float | None, float | None]


class MeasuredClock(msgspec.Struct, frozen=True):
    """An entry's wall-clock figures, compared with autoregressive decoding in the same process."""

    tokens_per_s: float | None
    speedup: float | None = None


class MeasuredRun(msgspec.Struct, frozen=True):
    """Entry in results.json, with only the fields shown on a card."""

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
    position_tests: list[int] = []
    position_accepts: list[int] = []
    filters: dict[str, float] = {}
    """Active sampling filters."""
    wallclock: MeasuredClock | None = None

    @property
    def sampling(self) -> str:
        """Label for temperature and filters. Only entries with equal labels are comparable."""
        filters = (f", {name.replace('_', '-')} {x:g}" for name, x in self.filters.items())
        return f"{self.temperature:g}" + "".join(filters)


class _Runs(msgspec.Struct, frozen=True):
    runs: list[MeasuredRun]


class _Prompts(msgspec.Struct, frozen=True):
    count: int
    sha256: str


class _Settings(msgspec.Struct, frozen=True):
    data_dir: str | None


class _Machine(msgspec.Struct, frozen=True):
    processor: str


class MeasuredBy(msgspec.Struct, frozen=True):
    """Fields from manifest.json for a card, as written by eval/manifest.py."""

    checkpoints: dict[str, str]
    prompts: dict[str, _Prompts]
    config: _Settings
    hardware: _Machine
    dtype: str
    command: str


@dataclass(frozen=True)
class Measured:
    """Evaluation entries for one draft, and for autoregressive decoding."""

    runs: list[MeasuredRun]
    manifest: MeasuredBy
    chart: Path | None = None
    """Chart of L' by benchmark, if it shows only this draft."""

    @property
    def best(self) -> MeasuredRun | None:
        """Return the greedy entry with the most speed-up, or most tokens per round if untimed."""

        def gain(run: MeasuredRun) -> tuple[float, float]:
            speedup = run.wallclock.speedup if run.wallclock else None
            return speedup or 0.0, run.mean_acceptance_length or 0.0

        drafted = [run for run in self.runs if run.checkpoint is not None and not run.temperature]
        return max(drafted, key=gain, default=None)

    @classmethod
    def read(cls, results: Path, weights_sha256: str) -> "Measured":
        """Read measured figures for a model card from an evaluation's results.

        Args:
            weights_sha256: hash of the weights that the evaluation must have used.

        Raises:
            ValueError: no results from `pipedraft eval`, or results for other weights.
        """
        path = results
        try:
            runs = msgspec.json.decode(path.read_bytes(), type=_Runs).runs
            path = results.with_name("manifest.json")
            manifest = msgspec.json.decode(path.read_bytes(), type=MeasuredBy)
            if unknown := {run.benchmark for run in runs} - manifest.prompts.keys():
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
        chart = results.with_name("charts") / CHART
        is_own = chart.is_file() and len(hashes) == 1
        runs = [run for run in runs if run.checkpoint in {*own, None}]
        return cls(runs, manifest, chart if is_own else None)

    def eval_results(self) -> list[EvalResult]:
        """Return the draft's results as Hub metadata, without the baseline."""
        found = []
        for run in (run for run in self.runs if run.checkpoint is not None):
            names = ("schedule", "stages", "temperature", "tree_width", "tree")
            setting = {name: getattr(run, name) for name in names} | run.filters
            shown = f"{run.schedule}, n = {run.stages}, T = {run.sampling}, W = {run.tree_width}"
            shown += f", {run.tree}" if run.tree else ""
            prompts = self.manifest.prompts[run.benchmark]
            # Without data_dir the prompts only imitate the benchmark: its name gets a prefix.
            is_own = self.manifest.config.data_dir is None
            prefix = "pipedraft-" * (is_own and not run.benchmark.startswith("pipedraft-"))
            kind, length = prefix + run.benchmark, run.equivalent_acceptance_length
            values = {
                "equivalent_acceptance_length": (length.pooled, {"ci95": list(length.ci95)}),
                "mean_acceptance_length": (run.mean_acceptance_length, {}),
                "draft_acceptance_rate": (run.draft_acceptance_rate, {}),
            }
            found += [
                EvalResult(
                    task_type="text-generation",
                    dataset_type=kind,
                    dataset_name=f"{kind}, {prompts.count} prompts",
                    dataset_args={"prompts_sha256": prompts.sha256},
                    metric_type=name,
                    metric_value=value,
                    metric_name=f"{name} ({shown})",
                    metric_args={**setting, **extra},
                )
                for name, (value, extra) in values.items()
                if value is not None
            ]
        return found


# -- the target's license -------------------------------------------------------------------


def license_of(name: str, revision: str | None, *, asks_hub: bool) -> Values:
    """Return the license named on the target's card, or {} if the card names none.

    Args:
        name: folder or Hub id of the target.
        asks_hub: if False, read only a folder or the download cache.
    """
    path: object = Path(name, CARD)
    if not Path(name).is_dir():
        path = try_to_load_from_cache(name, CARD, revision=revision) if is_hub_id(name) else None
        if asks_hub:
            with hub_link(f"target: {name!r}"), suppress(HfHubHTTPError, HFValidationError):
                path = hf_hub_download(name, CARD, revision=revision)
    try:
        found = metadata_load(path) if isinstance(path, str | Path) else None
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict) or not found.get("license"):
        return {}
    return {key: found[key] for key in LICENSE_FIELDS if found.get(key)}
