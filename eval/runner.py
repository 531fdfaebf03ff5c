"""The rows of a specification through what decodes: pipelines, links, fine-tuned targets.

A row that cannot be run says why, in place of its values.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from pipedraft.cli import UsageError, make_folder
from pipedraft.eval.arguments import EdgeOptions
from pipedraft.eval.checkpoints import (
    CheckpointSearch,
    Drafts,
    TableContext,
    load_head,
    read_drafts,
)
from pipedraft.eval.edge_methods import (
    METHODS,
    TIMES,
    Simulation,
    radio_energy,
    radio_of,
    read_times,
)
from pipedraft.eval.edge_report import LinkRun, measure, write_edge_report
from pipedraft.eval.manifest import build_manifest
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import LatencyRecord, Results, RunRecord
from pipedraft.eval.retention import Retention, sync_seconds
from pipedraft.eval.run import Evaluation, Method
from pipedraft.eval.spec import BASE, Measure, Row, Spec, decode_config, read_roles
from pipedraft.eval.tables import lossless_share
from pipedraft.eval.tasks import load_tasks
from pipedraft.eval.traces import traces_of
from pipedraft.files import Values
from pipedraft.inference.channel import PRESETS, load_link
from pipedraft.inference.config import RULE_NAMES
from pipedraft.inference.draft_length import parse_policy
from pipedraft.inference.engine import DraftNetwork, Engine
from pipedraft.inference.pipelines.link import Times
from pipedraft.inference.pipelines.linked import check_draft
from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources import make_source
from pipedraft.inference.sources.lookup import make_lookup
from pipedraft.inference.transport.target_session import SharedTarget
from pipedraft.models.language_model import load_draft_model
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.models.target_part import weights_identity
from pipedraft.pretrained import quieten, resolve_device, resolve_dtype

Value = tuple[float | None, Sequence[float | None] | None]
"""A number and its 95 % interval, where there is one."""


@dataclass
class Outcome:
    """Values of a row, or why it has none."""

    values: dict[str | None, dict[str, Value]] = field(default_factory=dict)
    """Benchmark, or None for all of them, -> quantity -> value."""
    remark: str = ""
    stages: int | None = None
    agreement: str = "-"
    """How many of the outputs that were compared with the target's own are equal to them."""


@dataclass(frozen=True)
class Finished:
    """Outcomes of a specification's rows, and the entries behind them."""

    outcomes: list[Outcome]
    """One for each row of the specification, in their order."""
    results: Results | None
    """The entries behind them; None: nothing could be run."""


def load_context(
    spec: Spec,
    search: CheckpointSearch,
    out: Path,
    *,
    revision: str | None = None,
    device: str,
    has_reference: bool = True,
) -> TableContext:
    """Read the prompts, make the output folder, load the target.

    Args:
        has_reference: whether outputs are compared with the target's own.
    """
    benchmarks = {
        name: [p for ps in load_tasks(d.benchmarks, spec.data_dir, spec.limit).values() for p in ps]
        for name, d in spec.domains.items()
    } or load_tasks(spec.benchmarks, spec.data_dir, spec.limit)
    make_folder("--out", out)
    place = resolve_device(device)
    dtype = resolve_dtype(spec.dtype, place, spec.target, revision)
    target = load_target(spec.target, revision=revision, dtype=dtype, device=place)
    tokenizer = load_tokenizer(spec.target, revision=revision)
    return TableContext(
        target=target,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        drafts=Drafts(search, target, tokenizer),
        out=out,
        reference=target if has_reference else None,
    )


# -- pipelines ------------------------------------------------------------------------------

PIPELINE_QUANTITIES: dict[str, Callable[[RunRecord], Value]] = {
    "L'": lambda run: (
        run.equivalent_acceptance_length.pooled,
        run.equivalent_acceptance_length.ci95,
    ),
    "L' mean": lambda run: (run.equivalent_acceptance_length.mean or None, None),
    "tau": lambda run: (run.mean_acceptance_length, None),
    "alpha": lambda run: (run.draft_acceptance_rate, None),
    "S": lambda run: (run.theoretical_speedup, None),
}


def check_pipeline(spec: Spec) -> None:
    for row in _runnable(spec):
        config = decode_config(spec.settings(row))
        if (config.schedule.grows is None) != (row.draft is None):
            name = config.schedule.name
            raise ValueError(f"schedule {name!r} of row {row.name!r}: draft {row.draft}")


def _prepare_pipeline(
    spec: Spec, context: TableContext
) -> tuple[list[Outcome], dict[int, Method], Evaluation]:
    """An outcome for every row, the method of each that can be run, and what runs them."""
    outcomes = [_found(row, context) for row in spec.rows]
    methods = {}
    for index, (row, outcome) in enumerate(zip(spec.rows, outcomes, strict=True)):
        if outcome.remark:
            continue
        draft = None if row.draft is None else context.drafts.find(row.draft)
        try:
            method = Method.from_row(spec, row, draft)
            Engine(context.target, context.tokenizer, method.config, draft)
        except ValueError as error:  # this target cannot be cut so, or carries no trees
            outcome.remark = str(error)
            continue
        folder = None if row.draft is None else str(context.drafts.folders[row.draft])
        outcome.stages = method.config.num_stages
        methods[index] = replace(method, checkpoint=folder)
    weights = weights_identity(spec.target)
    comparison = Evaluation(
        target=context.target,
        tokenizer=context.tokenizer,
        benchmarks={name: list(prompts) for name, prompts in context.benchmarks.items()},
        reference=context.reference,
        sequences=context.sequences,
        traces=traces_of(context.out, context.target, weights=weights, shard=context.shard),
    )
    return outcomes, methods, comparison


def decode_shard(spec: Spec, context: TableContext) -> tuple[list[Outcome], int | None]:
    """Decode this shard's turns of every row that can be run.

    Returns:
        What is known of the rows, and the turns that are on disk now; None: no row can be run.
    """
    outcomes, methods, comparison = _prepare_pipeline(spec, context)
    return outcomes, comparison.decode_shard(list(methods.values())) if methods else None


def run_pipeline(spec: Spec, context: TableContext) -> Finished:
    outcomes, methods, comparison = _prepare_pipeline(spec, context)
    if not methods:
        return Finished(outcomes, None)
    runs = comparison.run(list(methods.values()))
    for index, method in methods.items():
        name = method.name if method.draft is not None else AUTOREGRESSIVE
        own: dict[str | None, RunRecord] = {
            run.benchmark: run
            for run in runs
            if (run.method, run.sampling) == (name, method.config.sampling)
        }
        alone = next(iter(own.values()))  # one benchmark has no overall record
        own[None] = own.pop(OVERALL, alone)
        outcomes[index].agreement = lossless_share(own[None])
        outcomes[index].values = {
            benchmark: {q: get(run) for q, get in PIPELINE_QUANTITIES.items()}
            for benchmark, run in own.items()
        }
    return Finished(outcomes, Results(runs=runs))


def _runnable(spec: Spec) -> list[Row]:
    return [row for row in spec.rows if row.run is not None]


def _found(row: Row, context: TableContext) -> Outcome:
    """The outcome of a row that is to be run; its remark says why it cannot be."""
    if row.run is None:
        return Outcome(remark=row.remark)
    if row.draft is not None and context.drafts.find(row.draft) is None:
        return Outcome(remark=context.drafts.missing[row.draft])
    return Outcome()


# -- links ----------------------------------------------------------------------------------

EDGE_QUANTITIES: dict[str, Callable[[LatencyRecord], Value]] = {
    "ms/token": lambda row: (row.ms_per_token, row.ci95),
    "ms/round": lambda row: (row.ms_per_round, None),
    "tokens/s": lambda row: (row.tokens_per_s, None),
    "alpha": lambda row: (row.draft_acceptance_rate, None),
    "tau": lambda row: (row.mean_acceptance_length, None),
    "drafted per token": lambda row: (row.drafted_per_token, None),
    "TTFT ms": lambda row: (row.ttft_ms, None),
    "bytes per token": lambda row: (row.wire_bytes_per_token, None),
    "J per token": lambda row: (row.joules_per_token, None),
}


def _simulation(settings: Values, **shared: Any) -> tuple[str, str, Simulation]:
    """Method, network and simulation."""
    fields = dict(settings)
    method, network, given = (fields.pop(name) for name in ("method", "network", "times"))
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; give one of {', '.join(METHODS)}")
    if not isinstance(given, dict) and given not in TIMES:
        raise ValueError(f"times {given!r} is unknown; give one of {', '.join(TIMES)}")
    times = Times(**given) if isinstance(given, dict) else TIMES[given]
    if fields.get("rule") is not None and fields["rule"] not in RULE_NAMES:
        raise ValueError(f"rule {fields['rule']!r} is unknown; give one of {', '.join(RULE_NAMES)}")
    simulation = Simulation(
        link=load_link(network),
        times=times,
        energy=radio_energy(radio_of(network), draft_s=times.draft_s),
        **fields,
        **shared,
    )
    parse_policy(simulation.policy, max_length=simulation.max_length)
    return method, network, simulation


def check_edge(spec: Spec) -> None:
    for row in _runnable(spec):
        method, _, _ = _simulation(spec.settings(row), target=None, draft=None, tokenizer=None)
        if (METHODS[method].drafts_in is None) != (row.draft is None):
            raise ValueError(f"method {method!r} of row {row.name!r}: draft {row.draft}")


def run_edge(spec: Spec, context: TableContext) -> Finished:
    outcomes = [_found(row, context) for row in spec.rows]
    target, runs, tried = SharedTarget(context.target), [], []
    for row, outcome in zip(spec.rows, outcomes, strict=True):
        if outcome.remark:
            continue
        method, link, simulation = _simulation(
            spec.settings(row),
            target=target,
            draft=None if row.draft is None else context.drafts.find(row.draft),
            tokenizer=context.tokenizer,
            max_new_tokens=spec.max_new_tokens,
            seed=spec.seed,
        )
        outcome.remark = simulation.caveat(METHODS[method])
        runs.append(LinkRun(method, link, simulation, row.name).run(context.benchmarks))
        tried.append(outcome)
    measured = measure(runs, context.reference, seed=spec.seed)
    for outcome, entry in zip(tried, measured, strict=True):
        outcome.values = {None: {q: get(entry) for q, get in EDGE_QUANTITIES.items()}}
        outcome.agreement = lossless_share(entry)
    return Finished(outcomes, Results(latency=measured))


def decode_links(options: EdgeOptions, argv: Sequence[str]) -> str:
    """`eval edge`: every method on every link at every temperature, with one draft.

    Args:
        argv: the words after ``edge``.

    Returns:
        What the terminal shows.
    """
    quieten()
    for method in options.methods:
        if method not in METHODS:
            raise UsageError(f"--methods: {method!r} is unknown; give one of {', '.join(METHODS)}")
    times = read_times(options.times)
    checkpoints = [options.checkpoint] if options.checkpoint else []
    name, revision, drafts = read_drafts(
        checkpoints, options.target, options.draft_model, options.draft
    )
    names = ("rule", "policy", "token_bytes", "payload_tokens", "tail_samples")
    spec = Spec(
        title="Decoding across links",
        kind="edge",
        target=name,
        rows=[
            Row(
                name=method,
                draft=None if METHODS[method].drafts_in is None else "draft",
                run={"method": method, "network": link, "temperature": temperature},
            )
            for temperature in options.temperature
            for link in options.links
            for method in options.methods or METHODS
        ],
        run={name: getattr(options, name) for name in names}
        | {"times": vars(times), "fixed_length": options.draft_length}
        | options.filters,
        benchmarks=list(options.benchmarks),
        data_dir=options.data_dir,
        limit=options.limit,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        dtype=options.dtype,
    )
    check_edge(spec)
    context = load_context(
        spec,
        CheckpointSearch([], {}),
        options.out,
        revision=revision,
        device=options.device,
        has_reference=not options.no_lossless,
    )
    place = str(options.checkpoint or options.draft_model or options.draft)
    draft: DraftNetwork
    if drafts:
        draft = load_head(next(iter(drafts)), context.target)
    elif options.draft is not None:
        draft = make_lookup(options.draft, context.target)
    else:
        draft = load_draft_model(place, context.target, context.tokenizer)
    check_draft(make_source(draft))
    context.drafts.networks["draft"] = draft
    results = run_edge(spec, context).results
    assert results is not None
    manifest = build_manifest(
        target=context.target,
        tokenizer=context.tokenizer,
        benchmarks=context.benchmarks,
        checkpoints=list(drafts),
        draft=draft,
        config=options.to_dict() | {"draft": f"{draft.draft_type} `{place}`"},
        argv=["python", "-m", "pipedraft.eval", "edge", *argv],
        seed=options.seed,
    )
    shown = write_edge_report(options.out, results.latency or [], manifest, times)
    written = f"{shlex.quote(str(options.out))}/results.json, report.md and manifest.json"
    return f"{shown}\nwritten: {written}"


# -- fine-tuned targets ---------------------------------------------------------------------

RETENTION_FIELDS = {"benchmark", "target", "tree", "temperature"}


def check_retention(spec: Spec) -> None:
    roles = read_roles()
    for name, settings in [
        *((f"row {row.name!r}", spec.settings(row)) for row in _runnable(spec)),
        *([("the rows", {"target": BASE, **spec.run})] if not spec.rows else []),
    ]:
        unknown = sorted(settings.keys() - RETENTION_FIELDS)
        if unknown:
            raise ValueError(f"run of {name}: {unknown[0]!r} is no setting")
        if settings["target"] != BASE and settings["target"] not in roles:
            raise ValueError(f"target {settings['target']!r} of {name} is no role")
        TreeShape.parse(settings["tree"])
    for row in _runnable(spec):
        if own := sorted({"tree", "temperature"} & (row.run or {}).keys()):
            raise ValueError(f"run of {row.name!r}: {own[0]!r} holds for all rows; set it there")
        if row.draft is None or "benchmark" not in spec.settings(row):
            raise ValueError(f"row {row.name!r}: incomplete; name a draft and a benchmark")


def run_retention(spec: Spec, context: TableContext) -> Finished:
    outcomes = [_found(row, context) for row in spec.rows]
    search, given = context.drafts.search, context.drafts.search.given
    drafts = {name: given[name] for name in spec.drafts}
    context.drafts.folders |= drafts
    domains: dict[str, tuple[list[str], dict[str, Path]]] = {
        name: (domain.benchmarks, {t: given[place_name(name, t)] for t in domain.targets})
        for name, domain in spec.domains.items()
    }
    for row, outcome in zip(spec.rows, outcomes, strict=True):
        target = spec.settings(row)["target"]
        folder = None if target == BASE else next(search.candidates(target), None)
        if not outcome.remark and target != BASE and folder is None:
            outcome.remark = f"no target {target}; train it: {search.roles[target].train}"
        if outcome.remark:
            continue
        benchmark = spec.settings(row)["benchmark"]
        _, found = domains.setdefault(benchmark, ([benchmark], {}))
        if folder is not None:
            found[target] = folder
        assert row.draft is not None
        drafts[row.draft] = context.drafts.folders[row.draft]
    if not drafts:
        return Finished(outcomes, None)
    settings: Values = {
        name: spec.run[name] for name in ("tree", "temperature") if name in spec.run
    }
    targets, measured = Retention(spec, settings, context, drafts).run(domains)
    drift = {(e.domain, e.target): (e.kl, e.kl_ci95) for e in targets}
    entries = {(e.domain, e.target, e.draft): e for e in measured}
    for row, outcome in zip(spec.rows, outcomes, strict=True):
        if outcome.remark:
            continue
        place = spec.settings(row)["benchmark"], spec.settings(row)["target"]
        assert row.draft is not None
        entry = entries[*place, row.draft]
        values: dict[str, Value] = {
            name: (getattr(entry, name), getattr(entry, f"{name}_ci95"))
            for name in ("alpha", "tau", "retained")
        }
        values |= {
            f"sync s, {link}": (s, None) for link, s in sync_seconds(entry.draft_bytes).items()
        }
        values |= {"draft MB": (entry.draft_bytes / 1e6, None), "KL": drift[place]}
        outcome.values = {None: values}
    config = msgspec.to_builtins(spec)
    return Finished(outcomes, Results(targets=targets, drafts=measured, config=config))


def place_name(domain: str, target: str) -> str:
    """Name of a domain's target among the places that a specification gives."""
    return f"domains.{domain}.targets.{target}"


def search_for(spec: Spec, places: list[str]) -> CheckpointSearch:
    """Where the drafts of a specification are looked for.

    Args:
        places: of --checkpoints.
    """
    given = dict(spec.drafts)
    for domain, found in spec.domains.items():
        given |= {place_name(domain, t): place for t, place in found.targets.items()}
    return CheckpointSearch(places, read_roles(), given)


@dataclass(frozen=True)
class Kind:
    """A way to make the rows of a specification."""

    quantities: frozenset[str]
    check: Callable[[Spec], None]
    """Raises ValueError for a row that no method could run."""
    run: Callable[[Spec, TableContext], Finished]


KINDS = {
    "pipeline": Kind(frozenset(PIPELINE_QUANTITIES), check_pipeline, run_pipeline),
    "edge": Kind(frozenset(EDGE_QUANTITIES), check_edge, run_edge),
    "retention": Kind(
        frozenset({"alpha", "tau", "retained", "KL", "draft MB"})
        | {f"sync s, {link}" for link in PRESETS},
        check_retention,
        run_retention,
    ),
}


def check(name: str, spec: Spec) -> None:
    """Raise ValueError for settings or measures that no evaluation has. Loads no model."""
    kind = KINDS[spec.kind]
    for text in spec.measures:
        if Measure.parse(text).quantity not in kind.quantities:
            raise ValueError(
                f"{name}: measure {text!r} is none of a {spec.kind} table; give one of "
                f"{', '.join(sorted(kind.quantities))}"
            )
    try:
        kind.check(spec)
    except (TypeError, KeyError, ValueError) as error:
        text = f"run: {error} is missing; set it" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name}: {text}") from error
