"""Rows of a paper's table through the evaluations that exist: pipelines, links, fine-tuned targets.

A row that cannot be run says why, in place of its values.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.papers.checkpoints import Drafts
from pipedraft.eval.papers.declarations import BASE, PaperRow, PaperTable, read_roles
from pipedraft.eval.record import LatencyRecord, Results, RunRecord
from pipedraft.eval.tables import lossless_share
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.shapes import TreeShape

Interval = Sequence[float | None]
Value = tuple[float | None, Interval | None]
"""And its 95 % interval, where there is one."""
Values = dict[str | None, dict[str, Value]]
"""Benchmark, or None for all of them, -> quantity -> value."""


@dataclass
class Outcome:
    """What became of a row."""

    values: Values = field(default_factory=dict)
    remark: str = ""
    stages: int | None = None
    texts: str = "-"
    """How many of the texts that were compared with the target's own are equal to them."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What all rows of a table share."""

    target: Any
    name: str
    """Folder or Hub name of the target."""
    tokenizer: Any
    benchmarks: dict[str, Any]
    drafts: Drafts
    options: argparse.Namespace
    """Of the command: out, data_dir, limit, max_new_tokens, seed."""


@dataclass(frozen=True)
class Finished:
    outcomes: list[Outcome]
    """Of the table's rows, in their order."""
    results: Results | None
    """The entries behind them, as the other evaluations write them into results.json."""


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


def decode_config(settings: dict[str, Any], **shared: Any) -> DecodeConfig:
    """Settings as YAML has them: flat, the tree as its label."""
    values = dict(settings)
    if "boundaries" in values:
        values["boundaries"] = tuple(values["boundaries"])
    return DecodeConfig.of(**values, **shared)


def check_pipeline(table: PaperTable) -> None:
    for row in _runnable(table):
        config = decode_config(table.settings(row))
        if (config.schedule.grows is None) != (row.draft is None):
            name = config.schedule.name
            raise ValueError(f"schedule {name!r} of row {row.name!r}: draft {row.draft}")


def run_pipeline(table: PaperTable, world: World) -> Finished:
    from pipedraft.eval.run import Comparison, Method
    from pipedraft.eval.traces import traces_of

    outcomes = [_found(row, world) for row in table.rows]
    options = world.options
    methods = {}
    for index, (row, outcome) in enumerate(zip(table.rows, outcomes, strict=True)):
        if outcome.remark:
            continue
        draft = None if row.draft is None else world.drafts.find(row.draft)
        try:
            config = decode_config(
                table.settings(row), seed=options.seed, max_new_tokens=options.max_new_tokens
            )
            Engine(world.target, world.tokenizer, config, draft)
        except ValueError as error:  # this target cannot be cut so, or carries no trees
            outcome.remark = str(error)
            continue
        folder = None if row.draft is None else str(world.drafts.folders[row.draft])
        outcome.stages = config.num_stages
        methods[index] = Method(name=row.name, config=config, draft=draft, checkpoint=folder)
    if not methods:
        return Finished(outcomes, None)
    arguments = argparse.Namespace(out=options.out, fresh=False, backend="local", shard=None)
    comparison = Comparison(
        target=world.target,
        tokenizer=world.tokenizer,
        benchmarks=world.benchmarks,
        reference=world.target,
        traces=traces_of(arguments, world.target, world.name, None),
    )
    runs = comparison.run(list(methods.values()))
    for index, method in methods.items():
        name = method.name if method.draft is not None else AUTOREGRESSIVE
        own = {
            _benchmark(run, world): run
            for run in runs
            if (run.method, run.temperature) == (name, method.config.temperature)
        }
        outcomes[index].texts = lossless_share(own[None])
        outcomes[index].values = {
            benchmark: {q: get(run) for q, get in PIPELINE_QUANTITIES.items()}
            for benchmark, run in own.items()
        }
    return Finished(outcomes, Results(runs=runs))


def _benchmark(run: RunRecord, world: World) -> str | None:
    alone = len(world.benchmarks) == 1
    return None if alone or run.benchmark == OVERALL else run.benchmark


def _runnable(table: PaperTable) -> list[PaperRow]:
    return [row for row in table.rows if row.run is not None]


def _found(row: PaperRow, world: World) -> Outcome:
    """Without a remark where the row can be tried."""
    if row.run is None:
        return Outcome(remark=row.remark)
    if row.draft is not None and world.drafts.find(row.draft) is None:
        return Outcome(remark=world.drafts.missing(row.draft))
    return Outcome()


# -- links ----------------------------------------------------------------------------------

EDGE_QUANTITIES: dict[str, Callable[[LatencyRecord], Value]] = {
    "ms/token": lambda row: (row.ms_per_token, row.ci95),
    "tokens/s": lambda row: (row.tokens_per_s, None),
    "alpha": lambda row: (row.draft_acceptance_rate, None),
    "tau": lambda row: (row.mean_acceptance_length, None),
    "drafted per token": lambda row: (row.drafted_per_token, None),
    "TTFT ms": lambda row: (row.ttft_ms, None),
    "bytes per token": lambda row: (row.wire_bytes_per_token, None),
    "J per token": lambda row: (row.joules_per_token, None),
}


def _scene(settings: dict[str, Any], **shared: Any) -> tuple[str, str, Any]:
    """Method, network and scene."""
    from pipedraft.inference.config import RULE_NAMES
    from pipedraft.inference.draft_length import parse_policy
    from pipedraft.inference.edge_cloud.constants import TIMES, radio_energy, radio_of
    from pipedraft.inference.edge_cloud.methods import METHODS, Scene
    from pipedraft.inference.edge_cloud.virtual import Times
    from pipedraft.inference.link_files import load_link

    fields = dict(settings)
    method, network, given = (fields.pop(name) for name in ("method", "network", "times"))
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; give one of {', '.join(METHODS)}")
    times = Times(**given) if isinstance(given, dict) else TIMES[given]
    if fields.get("rule") is not None and fields["rule"] not in RULE_NAMES:
        raise ValueError(f"rule {fields['rule']!r} is unknown; give one of {', '.join(RULE_NAMES)}")
    scene = Scene(
        link=load_link(network),
        times=times,
        energy=radio_energy(radio_of(network), draft_s=times.draft_s),
        **fields,
        **shared,
    )
    parse_policy(scene.policy)
    return method, network, scene


def check_edge(table: PaperTable) -> None:
    from pipedraft.inference.edge_cloud.methods import METHODS

    for row in _runnable(table):
        method, _, _ = _scene(table.settings(row), target=None, draft=None)
        if (METHODS[method].drafts_in is None) != (row.draft is None):
            raise ValueError(f"method {method!r} of row {row.name!r}: draft {row.draft}")


def run_edge(table: PaperTable, world: World) -> Finished:
    from pipedraft.eval.edge.measures import decode_all, measure
    from pipedraft.inference.edge_cloud.cloud import CloudTarget
    from pipedraft.inference.edge_cloud.drafter import ChainDrafter

    outcomes = [_found(row, world) for row in table.rows]
    options, target, texts, tried = world.options, CloudTarget(world.target), [], []
    for row, outcome in zip(table.rows, outcomes, strict=True):
        if outcome.remark:
            continue
        network = None if row.draft is None else world.drafts.find(row.draft)
        method, link, scene = _scene(
            table.settings(row),
            target=target,
            draft=None if network is None else lambda draft=network: ChainDrafter.of(draft),
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
        )
        outcome.remark = scene.caveat(_method(method))
        texts += decode_all([method], [(link, scene)], world.benchmarks, world.tokenizer)
        tried.append(outcome)
    measured = measure(texts, world.target, seed=options.seed)
    for outcome, entry in zip(tried, measured, strict=True):
        outcome.values = {None: {q: get(entry) for q, get in EDGE_QUANTITIES.items()}}
        outcome.texts = lossless_share(entry)
    return Finished(outcomes, Results(latency=measured))


def _method(name: str) -> Any:
    from pipedraft.inference.edge_cloud.methods import METHODS

    return METHODS[name]


# -- fine-tuned targets ---------------------------------------------------------------------

RETENTION_FIELDS = {"benchmark", "target", "tree", "temperature"}


def check_retention(table: PaperTable) -> None:
    roles = read_roles()
    for row in _runnable(table):
        settings = table.settings(row)
        unknown = sorted(settings.keys() - RETENTION_FIELDS)
        if unknown:
            raise ValueError(f"run of row {row.name!r}: {unknown[0]!r} is no setting")
        if settings["target"] != BASE and settings["target"] not in roles:
            raise ValueError(f"target {settings['target']!r} of row {row.name!r} is no role")
        TreeShape.parse(settings["tree"])


def run_retention(table: PaperTable, world: World) -> Finished:
    from pipedraft.eval.retention import Domain, Retention, RetentionConfig

    outcomes = [_found(row, world) for row in table.rows]
    domains: dict[str, dict[str, str]] = {}
    drafts: dict[str, str] = {}
    for row, outcome in zip(table.rows, outcomes, strict=True):
        target = table.settings(row)["target"]
        if not outcome.remark and target != BASE:
            outcome.remark = _missing_target(target, world)
        if outcome.remark:
            continue
        found = domains.setdefault(table.settings(row)["benchmark"], {})
        if target != BASE:
            found[target] = str(_target_folder(target, world))
        assert row.draft is not None
        drafts[row.draft] = str(world.drafts.folders[row.draft])
    if not drafts:
        return Finished(outcomes, None)
    options = world.options
    kinds = world.drafts.places.roles
    config = RetentionConfig(
        base=world.name,
        domains={n: Domain(benchmarks=[n], targets=found) for n, found in domains.items()},
        drafts={n: d for n, d in drafts.items() if kinds[n].kind != "language_model"},
        draft_models={n: d for n, d in drafts.items() if kinds[n].kind == "language_model"},
        tree=table.run["tree"],
        temperature=table.run.get("temperature", 0.0),
        max_new_tokens=options.max_new_tokens,
        data_dir=options.data_dir,
        limit=options.limit,
        seed=options.seed,
    )
    retention = Retention(config, options.out, world.target, world.tokenizer)
    targets, measured = retention.run()
    drift = {(e.domain, e.target): (e.kl, e.kl_ci95) for e in targets}
    entries = {(e.domain, e.target, e.draft): e for e in measured}
    for row, outcome in zip(table.rows, outcomes, strict=True):
        if outcome.remark:
            continue
        settings = table.settings(row)
        where = settings["benchmark"], settings["target"]
        assert row.draft is not None
        entry = entries[*where, row.draft]
        values: dict[str, Value] = {
            name: (getattr(entry, name), getattr(entry, f"{name}_ci95"))
            for name in ("alpha", "tau", "retained")
        }
        outcome.values = {None: values | {"KL": drift[where]}}
    return Finished(outcomes, Results(targets=targets, drafts=measured, config=asdict(config)))


def _target_folder(name: str, world: World) -> Path | None:
    return next(iter(world.drafts.places.candidates(name)), None)


def _missing_target(name: str, world: World) -> str:
    if _target_folder(name, world) is not None:
        return ""
    return f"no target {name}; train it: {world.drafts.places.roles[name].train}"


@dataclass(frozen=True)
class Kind:
    """A way to make the rows of a table."""

    quantities: frozenset[str]
    check: Callable[[PaperTable], None]
    """Raises ValueError for a row that no method could run."""
    run: Callable[[PaperTable, World], Finished]


KINDS = {
    "pipeline": Kind(frozenset(PIPELINE_QUANTITIES), check_pipeline, run_pipeline),
    "edge": Kind(frozenset(EDGE_QUANTITIES), check_edge, run_edge),
    "retention": Kind(
        frozenset({"alpha", "tau", "retained", "KL"}), check_retention, run_retention
    ),
}
