"""Run an evaluation, from its options to the report."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from msgspec import UNSET
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chats import set_template_variables, warn_of_variables
from ..devices import resolve_dtype
from ..errors import UsageError, flag_name, make_folder
from ..files import Values, locked, make_place, to_json, write_atomically
from ..inference.command import place_of, resolve_cut
from ..inference.config import DecodeConfig, make_schedule, read_cost, setting_owners
from ..inference.cost_model import CostModel
from ..inference.defaults import choose_way, with_shape
from ..inference.engine import DraftNetwork
from ..inference.pipelines import Pipeline
from ..inference.pipelines.local import LocalPipeline
from ..inference.ranks.cluster import Cluster
from ..inference.schedules.base import Schedule
from ..inference.shapes import TreeShape
from ..inference.sources.lookup import make_lookup
from ..models.heads.language_model import load_draft_model
from ..models.speed.rounded import dtype_of
from ..models.target import (
    StagedTarget,
    choose_decoding_threads,
    load_target,
    load_tokenizer,
)
from ..models.target_part import weights_identity
from ..pretrained import quieten
from .arguments import (
    DraftsOptions,
    EvalOptions,
    MethodOptions,
    OutputOptions,
    TargetOptions,
)
from .checkpoints import load_head, read_drafts
from .evaluation import EvalMethod, Evaluation
from .manifest import build_manifest
from .outputs import outputs_page
from .record import RunRecord
from .replay import fit_cost
from .report import title_of, write_report
from .scores import check_scorable
from .screen import check_folder, screen_table
from .tasks import Prompt, load_tasks
from .traces import Recording, read_recordings, remove_traces, traces_of

LoadedDraft = tuple[str, str, DraftNetwork]
"""Name in tables, the draft's folder or Hub name, and its network. Heads of one type share a name
if they were trained for different stage counts."""


def _load_drafts(
    options: DraftsOptions,
    drafts: dict[Path, Values],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> list[LoadedDraft]:
    if options.draft_model is not None:
        network = load_draft_model(
            options.draft_model, target, tokenizer, dtype=options.draft_dtype
        )
        return [("draft model", options.draft_model, network)]
    if options.draft is not None:
        return [(options.draft, options.draft, make_lookup(options.draft, target))]
    kinds = [(d["draft_type"], d["architecture"].get("num_stages")) for d in drafts.values()]
    loaded: list[LoadedDraft] = []
    for folder, kind in zip(drafts, kinds, strict=True):
        name = kind[0]
        if kinds.count(kind) > 1:
            name = f"{name} ({folder.parent.name}/{folder.name})"
        loaded.append((name, str(folder), load_head(folder, target, options.draft_dtype)))
    return loaded


def ways_of(schedule: str, given: Values, label: str) -> list[tuple[str, Schedule]]:
    """Return (name, schedule) for each combination of the schedule's settings, in order.

    Args:
        given: setting -> one value or a list. Settings for other schedules are ignored.
        label: common name. Settings are added if no table column tells the combinations apart.
    """
    own = {
        name: value if isinstance(value, list) else [value]
        for name, value in given.items()
        if schedule in setting_owners()[name]
    }
    ways = [dict(zip(own, values, strict=True)) for values in product(*own.values())]
    made = [make_schedule(schedule, way) for way in ways]
    if len({(one.label, one.width) for one in made}) == len(ways):
        return [(label, one) for one in made]
    varied = [name for name, values in own.items() if len(set(values)) > 1]
    names = [", ".join([label, *(f"{name} {way[name]}" for name in varied)]) for way in ways]
    return list(zip(names, made, strict=True))


def make_methods(
    options: MethodOptions,
    drafts: Sequence[LoadedDraft],
    target: "_Target",
    cost: CostModel,
) -> list[EvalMethod]:
    """Return a method for each combination of draft, schedule, temperature and schedule setting."""
    stages = [network.num_stages or target.num_stages for _, _, network in drafts]
    ways = [
        [
            choose_way(
                network.draft_type,
                schedule=schedule,
                num_stages=num_stages,
                settings={"verifier": options.verifier} | options.settings,
                in_processes=target.in_processes,
            )
            for schedule in options.schedule or (None,)
        ]
        for (_, _, network), num_stages in zip(drafts, stages, strict=True)
    ]
    # Check all drafts together: a setting may belong to only one draft's schedule.
    used = dict.fromkeys(way.schedule for own in ways for way in own)
    for name, owners in setting_owners().items():
        if name in options.settings and not used.keys() & set(owners):
            raise UsageError(
                f"{flag_name(name)}: {', '.join(used)} has no such setting; it belongs to "
                f"{', '.join(owners)}"
            )
    shared = {
        "verifier": options.verifier,
        "bitwise": options.bitwise,
        "never_slower": options.never_slower,
        "boundaries": target.boundaries,
        "cost": cost,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        **options.filters,
    }
    methods = []
    for (name, place, network), own, num_stages in zip(drafts, ways, stages, strict=True):
        for way in own:
            # One draft may run under several schedules; its type alone would not tell them apart.
            label = name if len(own) == 1 else f"{name}: {way.schedule}"
            given = {x: value for x, value in way.settings.items() if x != "verifier"}
            common = shared | {"num_stages": num_stages}
            methods += [
                EvalMethod(
                    name=named,
                    config=DecodeConfig.of(schedule, temperature=temperature, **common),
                    draft=network,
                    checkpoint=place,
                    picks_shape=way.is_measured,
                )
                for temperature in options.temperature
                for named, schedule in ways_of(way.schedule, given, label)
            ]
    return methods


@dataclass(frozen=True)
class _Target:
    """The target for the engine, the target for transformers, and the pipeline's stages."""

    model: PreTrainedModel
    reference: PreTrainedModel | None
    trusts_plain: bool
    connect: Callable[[StagedTarget], Pipeline]
    boundaries: tuple[int, ...]
    num_stages: int
    """Default number of stages, if the draft's training fixed none."""
    in_processes: bool = False


def _load_target(
    options: TargetOptions,
    name: str,
    revision: str | None,
    trained: Iterable[Values],
    cluster: Cluster | None,
    *,
    usual: int,
) -> _Target:
    """Load the target in this process, or on the cluster's ranks if there is a cluster.

    Args:
        trained: the drafts' descriptions, with stages and boundaries.
        usual: default number of stages in this process, if a draft's training fixed none.
    """
    device = place_of(options, cluster)
    dtype = resolve_dtype(options.dtype, device, name, revision)
    if cluster is None:
        model = load_target(name, revision=revision, dtype=dtype, device=device)
        choose_decoding_threads(model)
        reference = None if options.no_lossless else model
        return _Target(model, reference, False, LocalPipeline, options.boundaries, usual)
    architectures = [description["architecture"] for description in trained]
    wanted = {a["num_stages"] for a in architectures if a.get("num_stages")}
    cuts = {tuple(a["boundaries"]) for a in architectures if a.get("boundaries")}
    if len(wanted | {options.stages} - {None}) > 1 or len(cuts) > 1:
        raise ValueError(
            f"--checkpoint: drafts for {sorted(wanted)} stages and cuts {sorted(cuts)}, but the "
            "processes hold one cut of the target; evaluate them in several launches"
        )
    num_stages = cluster.num_stages(options.stages or next(iter(wanted), None))
    cut = options.boundaries or next(iter(cuts), ())
    model = cluster.load_target(
        name, revision=revision, num_stages=num_stages, boundaries=cut, dtype=dtype
    )
    # No GPU here has room for the whole target, and a CPU would take hours.
    is_loaded = device.type == "cpu" and not options.no_lossless
    reference = load_target(name, revision=revision, dtype=dtype) if is_loaded else None
    trusts_plain = not (is_loaded or options.no_lossless)
    cut = cluster.job.boundaries
    return _Target(model, reference, trusts_plain, cluster.connect, cut, num_stages, True)


def _read_prompts(options: EvalOptions) -> dict[str, list[Prompt]]:
    """Read the benchmarks, and name those shorter than --limit."""
    benchmarks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    for name, prompts in benchmarks.items():
        if len(prompts) < (options.limit or 0):
            print(f"{name} has only {len(prompts)} prompts", file=sys.stderr)
    return benchmarks


def _check_stages(wanted: int | None, drafts: Mapping[Path, Values]) -> None:
    for folder, description in drafts.items():
        trained_for = description["architecture"].get("num_stages")
        if trained_for and wanted and wanted != trained_for:
            raise ValueError(
                f"--stages: {wanted}, but {folder} was trained for {trained_for}; "
                "leave --stages out, or train a draft for that number"
            )


def _usual_stages(place: TargetOptions, way: MethodOptions, cost: CostModel) -> int:
    """Return the default number of stages, if a draft's training fixed none."""
    # One device, unless the user asks for a pipeline's schedule or cut.
    usual = 4 if way.schedule or place.boundaries else 1
    return place.stages or len(cost.stages) or len(place.boundaries[1:]) or usual


def _claim_folder(options: OutputOptions, config: Values, held: ExitStack) -> None:
    """Create and lock the output folder. Refuse another evaluation's folder."""
    if options.calibrate is not None:
        make_place("--calibrate", options.calibrate, b'{\n  "row": ')
    make_folder("--out", options.out)
    held.enter_context(locked(options.out, "--out", shared=options.shard is not None))
    check_folder(options.out, config, is_fresh=options.fresh)
    # Stored turns bring no measurements of the processes.
    if options.fresh or options.calibrate is not None:
        remove_traces(options.out, options.shard)


def _recordings_of(
    methods: Sequence[EvalMethod], runs: Sequence[RunRecord], out: Path
) -> list[Recording]:
    """Read these methods' recordings, and leave out others in the folder."""
    chosen = {run.tree for run in runs if run.chosen is not UNSET and run.tree}
    configs = [method.config for method in methods if not method.picks_shape]
    for method in (method for method in methods if method.picks_shape):
        configs += [with_shape(method.config, TreeShape.parse(tree)) for tree in chosen]
    return [one for one in read_recordings([out]) if one.config in configs]


@dataclass(frozen=True)
class Outcome:
    """Result of an evaluation."""

    entries: list[RunRecord]
    """Table lines, the baseline first; empty if only a share is decoded."""
    text: str
    """Table and file names."""


def evaluate_drafts(
    options: EvalOptions, argv: Sequence[str], cluster: Cluster | None, held: ExitStack
) -> Outcome:
    """Load the models in the options, evaluate them, and write the report.

    Args:
        argv: the call, for the manifest.
        held: this function adds the output folder's lock to it.
        cluster: decoding ranks. None runs everything in this process.
    """
    quieten()
    named, place = options.part(DraftsOptions), options.part(TargetOptions)
    way, output = options.part(MethodOptions), options.part(OutputOptions)
    benchmarks = _read_prompts(options)
    chosen = named.checkpoint, named.target, named.draft_model, named.draft
    target_name, revision, drafts = read_drafts(*chosen)
    if output.score:
        check_scorable(benchmarks)
    _check_stages(place.stages, drafts)
    cost = CostModel() if way.cost is None else read_cost(way.cost)
    usual = _usual_stages(place, way, cost)
    cut = resolve_cut(place.boundaries, cost, target_name, revision, usual)
    place = replace(place, boundaries=cut)
    config = options.to_dict() | {"target": target_name, "boundaries": cut}
    _claim_folder(output, config, held)
    tokenizer = load_tokenizer(target_name, revision=revision)
    set_template_variables(tokenizer, place.chat_template_kwargs)
    for folder, description in drafts.items():
        warn_of_variables(str(folder), description, place.chat_template_kwargs)
    target = _load_target(place, target_name, revision, drafts.values(), cluster, usual=usual)
    comparison = Evaluation(
        target=target.model,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        reference=target.reference,
        trusts_plain=target.trusts_plain,
        connect=target.connect,
        scores=output.score,
        answers=output.out / "answers" if output.save_answers and not output.shard else None,
        repeats=way.repeats,
        sequences=way.sequences,
        traces=traces_of(
            output.out,
            target.model,
            weights=weights_identity(target_name, revision),
            dtype=dtype_of(target.model),
            backend=place.backend,
            shard=output.shard,
        ),
    )
    loaded = _load_drafts(named, drafts, target.model, tokenizer)
    methods = make_methods(way, loaded, target, cost)
    if output.shard is not None:
        turns = comparison.decode_shard(methods)
        return Outcome([], f"{turns} decoded turns of this share are in {output.out}/traces")
    runs = comparison.run(methods)
    manifest = build_manifest(
        target=target.model,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        checkpoints=list(drafts),
        draft=loaded[0][2] if named.draft_model else None,
        config=config | {"device": str(target.model.device)},
        argv=argv,
        seed=way.seed,
    )
    write_report(output.out, runs, manifest)
    recordings = _recordings_of(methods, runs, output.out)
    page = outputs_page(recordings, benchmarks, tokenizer, title_of([manifest], runs))
    write_atomically(output.out / "outputs.html", page.encode())
    names = (
        f"{output.out}/report.html, charts/, report.md, results.json, manifest.json, outputs.html "
        "(answers, accepted tokens colored)"
    )
    if output.calibrate is not None:
        measured = asdict(fit_cost(runs, target.boundaries))
        write_atomically(output.calibrate, to_json(measured))
        names = f"{names}\nwritten: {output.calibrate}: {measured}"
    return Outcome(runs, f"{screen_table(runs)}\neverything else: {names}")
