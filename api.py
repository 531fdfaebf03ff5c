"""Python API: ``pipedraft.load``, ``train_head``, ``new_head``, ``evaluate``, ``custom_generate``.

Each function is a thin wrapper around a command's code, with the same names, checks and defaults.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias

from accelerate.state import AcceleratorState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chats import encode_chat
from .data_recipes.config import DataConfig
from .data_recipes.fitting import load_fitting
from .devices import place_draft, resolve_device, resolve_dtype
from .errors import UsageError, flag_name
from .eval.arguments import EvalOptions
from .eval.command import evaluate_drafts
from .eval.compare import Evaluated, compare_runs, format_comparison
from .eval.record import RunRecord
from .eval.screen import screen_table
from .files import Values, write_atomically
from .inference.command import encode
from .inference.config import DecodeConfig
from .inference.custom_generate import CustomGenerate, NoText
from .inference.defaults import choose_way
from .inference.engine import DraftNetwork, Engine
from .inference.generation import Connect, Generation, TextPieces, tokens_of
from .inference.pipelines.local import LocalPipeline
from .inference.schedules.base import Schedule
from .inference.shapes import TreeShape
from .inference.sources.lookup import Lookup, make_lookup
from .models import load_draft
from .models.exchange.card import model_card
from .models.exchange.commands import FORMATS
from .models.exchange.export import export
from .models.exchange.hub import check_repo_id, fill_upload, push
from .models.heads.draft import Draft, resolve_folder
from .models.heads.language_model import LanguageModelDraft, load_draft_model, model_folder
from .models.speed.rounded import dtype_of
from .models.target import choose_decoding_threads, load_target, load_tokenizer
from .models.transformer.fingerprint import fingerprint_mismatch, read_target, target_fingerprint
from .pretrained import read_config, silent
from .train.config import check_run
from .train.methods import methods
from .train.own_loop import NewHead
from .train.run import registry, run_training

Place: TypeAlias = str | Path
"""Folder or Hub id."""
Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]
LOOKUPS = ("ngram", "suffix")


# -- decoding ---------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Model:
    """A target with its draft, made by ``load``."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: DraftNetwork | None
    target_name: str
    """Folder or Hub id; for an object, where it was loaded from, or ""."""
    draft_options: Values | None
    """Option of ``pipedraft eval`` that names the draft; None for an object."""
    _engine: Engine | None = field(default=None, init=False)

    def __repr__(self) -> str:
        draft = "no draft" if self.draft is None else f"draft {self.draft.draft_type}"
        name = self.target_name or type(self.target).__name__
        return f"Model({name}, {draft}, {self.target.device}, {dtype_of(self.target)})"

    def generate(
        self,
        prompt: Prompt,
        *,
        schedule: str | Schedule | None = None,
        stages: int | None = None,
        tree: str | TreeShape | None = None,
        temperature: float = 0.0,
        max_new_tokens: int = 128,
        seed: int = 0,
        stream: Callable[[str], object] | bool = False,
        **settings: object,
    ) -> Generation:
        """Answer one prompt. Greedy output equals the target's own output, token by token.

        Args:
            prompt: the user's message, a list of messages, or token ids, which skip the chat
                template.
            schedule: schedule name. None uses the draft's default schedule.
            stages: number of pipeline stages. None uses the draft's number from training, else 1.
            tree: draft tree shape, as "chain:5", "paper" or "auto". None with one stage is "auto",
                which times shapes and keeps the fastest, or none; with several it is "paper".
            temperature: 0 is greedy.
            stream: called with each piece of text once it is certain; True prints it.
            settings: fields of the schedule and ``DecodeConfig``, such as ``top_p=0.9``.

        Raises:
            ValueError: an unknown or out-of-range setting, or one that does not fit the draft.
        """
        settings |= {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
        config = self.configure(settings, schedule=schedule, stages=stages, tree=tree)
        write = partial(print, end="", flush=True) if stream is True else stream or None
        observer = TextPieces(self.tokenizer, write)
        result = self.engine(config).decode(self.encode(prompt), observer=observer)
        pieces = observer.finish(result.text)
        if stream is True:
            print()
        return Generation(
            result=result,
            tokens=tokens_of(result, pieces),
            schedule=config.schedule.name,
            make_engine=partial(self._make_engine, config),
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids.

        Raises:
            ValueError: the prompt is empty, or its type is not supported.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"prompt: {prompt!r} is empty; give at least one word")
            return encode(self.tokenizer, prompt, raw=False)
        items = list(prompt)
        if not items:
            raise ValueError("prompt: an empty list; give at least one message or token id")
        if all(isinstance(item, Mapping) for item in items):
            return encode_chat(self.tokenizer, items)  # type: ignore[arg-type]
        if not all(isinstance(item, int) for item in items):
            raise ValueError(
                f"prompt: a {type(prompt).__name__} of {type(items[0]).__name__}; give text, a "
                "list of messages, or a list of token ids"
            )
        return items  # type: ignore[return-value]

    def configure(
        self,
        settings: Values,
        *,
        schedule: str | Schedule | None = None,
        stages: int | None = None,
        tree: str | TreeShape | None = None,
    ) -> DecodeConfig:
        """Return the decoding configuration, with the commands' defaults for missing settings."""
        own = None if self.draft is None else self.draft.num_stages
        num_stages = stages or own or 1
        if tree is not None:
            settings = settings | {"tree": TreeShape.parse(tree) if isinstance(tree, str) else tree}
        if schedule is None or isinstance(schedule, str):
            kind = None if self.draft is None else self.draft.draft_type
            way = choose_way(kind, schedule=schedule, num_stages=num_stages, settings=settings)
            schedule, settings = way.schedule, way.settings
        return DecodeConfig.of(schedule, num_stages=num_stages, **settings)

    def engine(self, config: DecodeConfig) -> Engine:
        """Return an engine. Reuse the last one if schedule, stages and boundaries are the same."""
        last = self._engine
        if last is None or _cut(last.config) != _cut(config):
            self._engine = last = self._make_engine(config, LocalPipeline)
        last.config = config
        return last

    def _make_engine(self, config: DecodeConfig, connect: Connect) -> Engine:
        return Engine(self.target, self.tokenizer, config, self.draft, connect=connect)


def _cut(config: DecodeConfig) -> tuple[object, ...]:
    return config.schedule, config.num_stages, config.boundaries


def load(
    target: Place | PreTrainedModel,
    draft: Place | PreTrainedModel | DraftNetwork | TrainedHead | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    draft_dtype: str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Model:
    """Load a target and its draft.

    Args:
        target: folder, Hub id, or a loaded transformers model.
        draft: folder or Hub id of a head, or of a language model with the target's tokenizer. Also
            a loaded draft, "ngram", "suffix", or None to decode without a draft.
        device: cpu, cuda, cuda:N, or auto, which uses the accelerator if there is one.
        dtype: float32, bfloat16, float16, int8, int4 or auto. auto is float32 on a CPU, and the
            target's stored dtype on a GPU. On a CPU, the other dtypes round only the weights, and
            sums are in float32.
        draft_dtype: the same names. auto uses the target's dtype. On a CPU, int8 drafts faster, and
            greedy output stays the same.
        tokenizer: needed for a target object without a folder.

    Raises:
        ValueError: a missing model, an unsupported family, or a draft for another target.
    """
    with silent():
        if isinstance(target, PreTrainedModel):
            for option, value in (("device", device), ("dtype", dtype)):
                if value != "auto":
                    raise ValueError(f"{option}: {value!r}, but the target is loaded; leave it out")
            name, model = str(target.name_or_path), target.eval()
            tokenizer = tokenizer or load_tokenizer(name)
        else:
            name, place = str(target), resolve_device(device, "device")
            tokenizer = tokenizer or load_tokenizer(name)
            model = load_target(name, dtype=resolve_dtype(dtype, place, name), device=place)
            choose_decoding_threads(model)
        network, options = _load_network(draft, model, tokenizer, draft_dtype)
    return Model(model, tokenizer, network, name, options)


def _load_network(
    draft: Place | PreTrainedModel | DraftNetwork | TrainedHead | None,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: str = "auto",
) -> tuple[DraftNetwork | None, Values | None]:
    """Return the draft, and the ``pipedraft eval`` options for it (None for a loaded model)."""
    is_loaded = not isinstance(draft, str | Path | TrainedHead) or draft in LOOKUPS
    if dtype != "auto" and is_loaded:
        raise ValueError(f"draft_dtype: {dtype!r}, but no weights are loaded; leave it out")
    if draft is None:
        return None, {}
    if isinstance(draft, PreTrainedModel):
        return LanguageModelDraft(draft.eval(), target), None
    if isinstance(draft, Draft | LanguageModelDraft | Lookup):
        return draft, None
    if isinstance(draft, str) and draft in LOOKUPS:
        return make_lookup(draft, target), {"draft": draft}  # type: ignore[arg-type]
    name = str(draft.folder if isinstance(draft, TrainedHead) else draft)
    if "draft_type" in read_config(model_folder(name), None, field="draft"):
        head = place_draft(load_draft(name, target, dtype=dtype), target)
        return head, {"checkpoint": name, "draft_dtype": dtype}
    tokenizer = tokenizer or load_tokenizer(str(target.name_or_path))
    network = load_draft_model(name, target, tokenizer, dtype=dtype)
    return network, {"draft_model": name, "draft_dtype": dtype}


def custom_generate(
    draft: Place | PreTrainedModel | DraftNetwork | TrainedHead,
    *,
    schedule: str | Schedule | None = None,
    stages: int | None = None,
    tree: str | TreeShape | None = None,
    **settings: object,
) -> CustomGenerate:
    """Return a decoding loop for ``target.generate(..., custom_generate=loop)`` in transformers.

    The loop returns the same ids as ``target.generate`` does without it. Length, end tokens,
    temperature, top_k, top_p, min_p and typical_p come from ``generate``. The other arguments are
    as in ``Model.generate``.
    """
    made: list[Model] = []

    def make_engine(target: PreTrainedModel, sampling: Values) -> Engine:
        if not made or made[0].target is not target:
            network, _ = _load_network(draft, target, None)
            made[:] = [Model(target, NoText(), network, "", None)]  # type: ignore[arg-type]
        shape = {"schedule": schedule, "stages": stages, "tree": tree}
        return made[0].engine(made[0].configure(settings | sampling, **shape))  # type: ignore[arg-type]

    return CustomGenerate(make_engine)


# -- training ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """A trained draft head on disk."""

    folder: Path
    """The best checkpoint."""
    metrics: dict[str, float]

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool = False,
        revision: str | None = None,
        message: str | None = None,
        report: EvaluationReport | None = None,
        target: str | None = None,
    ) -> str:
        """Upload the head with a card, and return the commit's address.

        Args:
            repo: user/name.
            revision: branch. None uses the main branch.
            report: evaluation of this head, for the card's table.
            target: the target's Hub id, if training used a folder.
        """
        check_repo_id(repo)
        results = None if report is None else report.folder / "results.json"
        with tempfile.TemporaryDirectory() as out:
            fill_upload(
                Path(out),
                self.folder,
                repo=repo,
                revision=revision,
                results=results,
                target=target,
            )
            return push(Path(out), repo, revision=revision, private=private, message=message)

    def export(
        self,
        format: Literal["sglang", "vllm", "speculators"],
        out: Place,
        *,
        target: str | None = None,
    ) -> list[Path]:
        """Write the head in a serving engine's format, and return the files.

        Args:
            format: "sglang" (the EAGLE authors' layout), or "vllm" (speculators').
            target: name by which the engine loads the target. None uses the name from training.
        """
        layout = FORMATS.get(format)
        if layout is None or layout == "gguf":
            raise ValueError(f"format: {format!r} is unknown; give sglang or vllm")
        return export(resolve_folder(str(self.folder)), layout, Path(out), target=target)


def train_head(
    method: str,
    *,
    target: Place | PreTrainedModel | Model,
    dataset: Iterable[object] | DataConfig | Place,
    output_dir: Place,
    data: Mapping[str, object] | None = None,
    **fields: object,
) -> TrainedHead:
    """Train a draft head for a frozen target, as ``pipedraft train`` does.

    The same call resumes from the newest checkpoint in ``output_dir``. In a script started by
    ``accelerate launch``, every process makes the call.

    Args:
        method: "eagle3", "spd" or another name from ``pipedraft train --help``.
        target: folder or Hub id, or a model loaded from one.
        dataset: conversations as lists of {"role", "content"}, a ``datasets.Dataset`` with a column
            ``messages`` or ``conversations``, a file, or a ``DataConfig``.
        data: other ``DataConfig`` fields, for example {"max_length": 512}.
        fields: ``RunConfig`` fields, such as max_steps=500, optim={"lr": 3e-4}, model={...}.

    Raises:
        ValueError: an unknown or out-of-range field, or unusable data.
    """
    folder = Path(output_dir)
    values: Values = {"method": method, "target": _name_of(target), "output_dir": str(folder)}
    values["data"] = {**(data or {}), **_data_fields(dataset, folder)}
    run, model, resolved = check_run(values | fields, methods())
    with silent():
        trainer = run_training(run, model, resolved)
    if trainer.accelerator.num_processes == 1:  # the next run may have another precision
        AcceleratorState._reset_state(reset_partial_state=True)
    return TrainedHead(folder=folder / "best", metrics=dict(trainer.progress.metrics))


def new_head(
    method: str,
    *,
    target: Place | PreTrainedModel | Model,
    dataset: Iterable[object] | DataConfig | Place,
    data: Mapping[str, object] | None = None,
    device: str = "auto",
    **model: object,
) -> NewHead:
    """Make an untrained head with its loss and batches, for a training loop of your own.

    Args:
        method, target, dataset, data: as for ``train_head``.
        device: as for ``load``, if ``target`` is a folder or Hub id.
        model: the head's fields, such as num_steps=4; docs/config.md lists them by method.

    Raises:
        ValueError: an unknown or out-of-range field, or unusable data.
    """
    values: Values = {"method": method, "target": _name_of(target), "model": model}
    with tempfile.TemporaryDirectory() as folder, silent():
        values |= {"output_dir": folder}
        values["data"] = {**(data or {}), **_data_fields(dataset, Path(folder))}
        run, config, _ = check_run(values, methods())
        name, kind = str(run.target), registry()[method]
        tokenizer = load_tokenizer(name)
        network = target.target if isinstance(target, Model) else target
        if not isinstance(network, PreTrainedModel):
            network = load_target(name, device=resolve_device(device, "device"), may_round=False)
        kind.check(config, network)
        rows = load_fitting(run.data, tokenizer, network.config.get_text_config())
        objective = kind(config, network, target_name=name, revision=None, data=rows)
    objective.card = model_card
    made = NewHead(objective.to(network.device), rows, tokenizer.pad_token_id or 0)
    objective.start_on(made.batches(run.batch_tokens))
    return made


def _data_fields(dataset: Iterable[object] | DataConfig | Place, folder: Path) -> Values:
    """Return the ``DataConfig`` fields. Write in-memory conversations to a file first."""
    if isinstance(dataset, DataConfig):
        return asdict(dataset)
    if isinstance(dataset, str | Path):
        return {"sources": [{"path": str(dataset)}]}
    rows = [row if isinstance(row, Mapping) else {"messages": row} for row in dataset]
    if not rows:
        raise UsageError("dataset: no conversation; give at least one list of messages")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    # Named by content hash: every process in a launch may write it, and a later call finds it.
    path = folder / f"dataset-{sha256(text).hexdigest()[:12]}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return {"sources": [{"path": str(path)}]}


def _name_of(target: Place | PreTrainedModel | Model) -> str:
    """Return a target's folder or Hub id.

    Raises:
        ValueError: an object has no folder or Hub id, or its weights have changed since loading.
    """
    if isinstance(target, Model):
        target = target.target
    if not isinstance(target, PreTrainedModel):
        return str(target)
    name = target.name_or_path
    fix = "save it with save_pretrained, with its tokenizer, and give the folder"
    if not name:
        raise ValueError(f"target: this {type(target).__name__} was loaded from no folder; {fix}")
    change = fingerprint_mismatch(read_target(name, None).fingerprint, target_fingerprint(target))
    if change is not None:
        raise ValueError(f"target: this object is no longer what {name!r} holds ({change}); {fix}")
    return name


# -- evaluation -------------------------------------------------------------------------------


class ComparisonText(str):
    """A comparison table that displays verbatim in a notebook or shell."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationReport:
    """Evaluation results, and the folder with report.html, plots and results.json."""

    folder: Path
    entries: list[RunRecord]
    """Table lines: the baseline first."""

    def __repr__(self) -> str:
        return f"{screen_table(self.entries)}\n{self.folder}/report.html"

    def compare(self, other: EvaluationReport | Place) -> ComparisonText:
        """Compare this evaluation with the baseline ``other``, prompt by prompt."""
        baseline = other.folder if isinstance(other, EvaluationReport) else Path(other)
        runs = Evaluated.read(baseline), Evaluated.read(self.folder)
        return ComparisonText(format_comparison(*runs, compare_runs(*runs)))


def evaluate(
    model: Model | TrainedHead | Place,
    *,
    benchmarks: Sequence[str],
    limit: int | None = None,
    out: Place = "out/eval",
    **options: object,
) -> EvaluationReport:
    """Decode benchmarks and compare with autoregressive decoding, as ``pipedraft eval`` does.

    Args:
        model: a head, or a model loaded by names, not from objects.
        benchmarks: names, or .jsonl files with prompts.
        limit: use the first prompts in each benchmark. None uses all.
        out: results folder.
        options: command options, for example stages=4, schedule=["eagle"], temperature=[0, 1].

    Raises:
        ValueError: an unknown or out-of-range option, or a model without a name.
    """
    if isinstance(model, Model):
        if model.draft_options in (None, {}):
            raise ValueError("model: its draft has no name; load it by a folder or Hub id")
        dtype = str(dtype_of(model.target)).removeprefix("torch.")
        given: Values = {"target": _name_of(model), "dtype": dtype}
        given["device"] = str(model.target.device)
        given |= model.draft_options or {}
    else:
        given = {"checkpoint": str(model.folder if isinstance(model, TrainedHead) else model)}
    given |= {"benchmarks": list(benchmarks), "limit": limit, "out": str(out)} | options
    chosen = EvalOptions.of(given)
    if chosen.backend != "local":
        raise ValueError(f"backend: {chosen.backend!r} starts processes; use pipedraft eval")
    with silent(), ExitStack() as held:
        outcome = evaluate_drafts(chosen, _command(given), None, held)
    return EvaluationReport(folder=Path(out), entries=outcome.entries)


def _command(given: Values) -> list[str]:
    """Return the command that evaluates the same, for the manifest."""
    words = ["python", "-m", "pipedraft.eval"]
    for name, value in given.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [value]
            text = json.dumps(value) if isinstance(value, dict) else ",".join(map(str, values))
            words += [flag_name(name)] if value is True else [flag_name(name), text]
    return words
