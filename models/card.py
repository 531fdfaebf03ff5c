"""Model cards: what a draft is, how to run it, what it learned from and how far it was measured."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

CARD = "README.md"
MADE = "<!-- Written by pipedraft. Without this line the text is yours and is kept as it is. -->"
"""Last line of a card that ``push`` may write anew."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
ENGINES = {"sglang": "SGLang", "speculators": "vLLM"}
"""Layout of an export -> who serves it."""


@dataclass(frozen=True, kw_only=True)
class CardSource:
    """What a card is made of."""

    description: dict[str, Any]
    """config.json of the draft's checkpoint."""
    place: str = "THIS_FOLDER"
    """What a reader gives as --checkpoint: the repository once it has one."""
    revision: str | None = None
    """Branch of the repository, if it is not the main one."""
    layout: str | None = None
    """Of an export for a serving engine."""
    launch: str | None = None
    """Command that serves the export."""
    license: "License" = field(default_factory=lambda: License())
    measured: "Measured | None" = None

    @property
    def target(self) -> str:
        return self.description["target"]["name"]

    @property
    def target_is_public(self) -> bool:
        """A name that others can load, not a folder of this machine."""
        return is_hub_id(self.target)


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def render_card(source: CardSource) -> str:
    """README.md with the metadata that the Hub reads."""
    kind, target = source.description["draft_type"], source.target
    shown = f"[{target}](https://huggingface.co/{target})" if source.target_is_public else target
    if source.layout is None:
        title = f"# {kind} draft for {target}"
        what = "A draft network for pipelined speculative decoding"
    else:
        title = f"# {kind} draft for {target}, for {ENGINES[source.layout]}"
        what = f"A draft network for speculative decoding with {ENGINES[source.layout]}"
    parts = [
        title,
        f"{what}, trained with pipedraft for {shown}. Decoding with it is lossless: the text stays "
        "the target's own.",
        "## Usage",
        *(_usage(source) if source.layout is None else _served(source)),
        "## Training data",
        *_training_data(source.description.get("training", {})),
        "## License",
        source.license.sentence(target),
        "## Acceptance",
        *_acceptance(source),
        "## Architecture",
        _table(["setting", "value"], list(source.description["architecture"].items())),
        MADE,
    ]
    return f"---\n{_metadata(source)}\n---\n" + "\n\n".join(parts) + "\n"


def _metadata(source: CardSource) -> str:
    from huggingface_hub import ModelCardData

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
    order = ["library_name", "base_model", "license", "license_name", "license_link", "datasets"]
    return metadata.to_yaml(original_order=[*order, "tags"])


# -- usage ----------------------------------------------------------------------------------


def _usage(source: CardSource) -> list[str]:
    place, lines, note = source.place, [], []
    if source.revision is not None:
        place = "draft"
        lines = [f"hf download {source.place} --revision {source.revision} --local-dir draft"]
    target = ""
    if not source.target_is_public:
        target = " --target TARGET_FOLDER"
        note = [
            f"The target was a folder on the machine of the training, `{source.target}`: "
            "TARGET_FOLDER is a copy of it."
        ]
    lines += [
        f'python -m pipedraft.inference --checkpoint {place}{target} --prompt "Hello!"',
        f"python -m pipedraft.eval --checkpoint {place}{target} --benchmarks gsm8k --out out/eval",
    ]
    load = f'load_draft("{source.place}", target'
    load += f', revision="{source.revision}")' if source.revision else ")"
    python = [
        "from pipedraft.models import load_draft",
        "from pipedraft.models.target import load_target",
        "",
        f'target = load_target("{source.target if not target else "TARGET_FOLDER"}")',
        f"draft = {load}",
    ]
    parts = [_code(lines), *note, "or in Python", _code(python), _fingerprint(source)]
    if source.description["draft_type"] == "eagle3":
        parts += ["For a serving engine, in its layout and with the line that launches it:"]
        layouts = " or ".join(f"{layout} ({name})" for layout, name in ENGINES.items())
        command = (
            f"python -m pipedraft.models export --checkpoint {place} --format FORMAT --out OUT"
        )
        parts += [_code([command]), f"FORMAT is {layouts}."]
    return parts


def _served(source: CardSource) -> list[str]:
    assert source.launch is not None
    note = f"The layout is `{source.layout}`; the weights are float32, `--dtype` is what the "
    parts = [_code([source.launch]), note + "engine computes in.", _fingerprint(source)]
    if source.revision is not None:
        download = f"hf download {source.place} --revision {source.revision} --local-dir draft"
        parts = [_code([download]), f"and then with `draft` for `{source.place}`:", *parts]
    return parts


def _fingerprint(source: CardSource) -> str:
    found = source.description["target"].get("fingerprint", {}).get("hash", "not recorded")
    return f"The target's fingerprint is `{found}`; pipedraft refuses another one by name."


# -- what it learned from -------------------------------------------------------------------


def _training_data(training: dict[str, Any]) -> list[str]:
    data = training.get("data", {})
    if not data.get("sources"):
        return ["Not recorded."]
    rows = [
        [f"`{name}`", counts["rows_kept"], counts["tokens"]]
        for name, counts in sorted(data["sources"].items())
    ]
    parts = [
        _table(["source", "rows", "tokens"], rows),
        f"{data['supervised_tokens']} of {data['tokens']} tokens count in the loss.",
    ]
    if data.get("licenses"):
        counts = ", ".join(f"{name} {count}" for name, count in data["licenses"].items())
        parts.append(f"Rows by license: {counts}.")
    metrics = training.get("metrics", {})
    if metrics:
        values = [[name, f"{value:.4f}"] for name, value in sorted(metrics.items())]
        parts.append(
            "On held-out rows during training, with the text given (this is no decoding benchmark):"
        )
        parts.append(_table(["metric", "value"], values))
    return parts


@dataclass(frozen=True)
class License:
    """Of the target, as its own card or configuration says."""

    fields: dict[str, Any] = field(default_factory=dict)
    """license, and for the license `other` license_name and license_link."""
    origin: str = "was not looked up"
    """Where the fields are from, or why there are none."""

    def sentence(self, target: str) -> str:
        if not self.fields:
            return (
                f"Unknown: the license of the target `{target}` {self.origin}. A draft is made of "
                "its target's outputs; look there before you use this one."
            )
        names = [str(value) for value in self.fields.values()]
        return f"That of the target `{target}`: {', '.join(names)} ({self.origin})."


# -- what was measured ----------------------------------------------------------------------


class MeasuredLength(msgspec.Struct, frozen=True):
    """Of results.json, as eval/record.py writes it: what a card shows, and no more."""

    pooled: float | None
    ci95: tuple[float | None, float | None]


class MeasuredRun(msgspec.Struct, frozen=True):
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
    """Of manifest.json, as eval/manifest.py writes it."""

    checkpoints: dict[str, str]
    prompts: dict[str, Prompts]
    config: EvaluationOptions
    hardware: Machine
    dtype: str
    command: str


@dataclass(frozen=True)
class Measured:
    """An evaluation's entries of one draft, and of decoding without one."""

    runs: list[MeasuredRun]
    manifest: EvaluationManifest

    @classmethod
    def read(cls, results: Path, weights_sha256: str) -> "Measured":
        """
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

    def eval_results(self) -> list[Any]:
        """As the Hub's metadata has them; decoding without a draft is left out."""
        from huggingface_hub import EvalResult

        found = []
        for run in self.runs:
            if run.checkpoint is None:
                continue
            setting = {
                key: getattr(run, key)
                for key in ("schedule", "stages", "temperature", "tree_width", "tree")
            }
            shown = f"{run.schedule}, n = {run.stages}, T = {run.temperature:g}, W = "
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

    def _dataset(self, benchmark: str) -> dict[str, Any]:
        """The prompts' own name: prompts in the form of a benchmark are not the benchmark."""
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


def _acceptance(source: CardSource) -> list[str]:
    measured = source.measured
    if measured is None:
        return ["Not measured by decoding."]
    manifest = measured.manifest
    head = ["benchmark", "method", "n", "T", "W", "tree", "alpha", "tau", "L'", "95 % CI"]
    where = f"In {manifest.dtype} on {manifest.hardware.processor}, by"
    own = manifest.config.data_dir is None
    return [
        "Measured by decoding: n pipeline stages, T temperature, W tree width; alpha accepted over "
        "tested draft tokens, tau tokens per round, L' = n N / K the equivalent acceptance length "
        "(N tokens in K pipeline steps; 1 without a draft) with its 95 % bootstrap interval over "
        "prompts.",
        _table(head, [_acceptance_row(run) for run in measured.runs]),
        *(["The prompts are pipedraft's own, in the form of the benchmarks named."] if own else []),
        where,
        _code([manifest.command]),
    ]


def _acceptance_row(run: MeasuredRun) -> list[object]:
    length = run.equivalent_acceptance_length
    low, high = length.ci95
    figures = [run.draft_acceptance_rate, run.mean_acceptance_length, length.pooled]
    return [
        *(run.benchmark, run.method, run.stages, f"{run.temperature:g}"),
        *(run.tree_width, run.tree or "-"),
        *("-" if figure is None else f"{figure:.3f}" for figure in figures),
        "-" if low is None else f"{low:.3f} to {high:.3f}",
    ]


# -- Markdown -------------------------------------------------------------------------------


def _code(lines: list[str]) -> str:
    return "\n".join(f"    {line}" if line else "" for line in lines)


def _table(head: list[str], rows: list[Any]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    lines = [["-" if cell is None else str(cell) for cell in row] for row in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
