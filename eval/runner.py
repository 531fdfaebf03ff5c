"""The rows of a specification through what decodes: pipelines, links, fine-tuned targets.

A row that cannot be run says why, in place of its values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from pipedraft.eval.checkpoints import CheckpointSearch
from pipedraft.eval.edge.constants import TIMES, radio_energy, radio_of
from pipedraft.eval.edge.measures import decode_all, measure
from pipedraft.eval.edge.methods import METHODS, Simulation
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.published import Outcome, TableContext, Value
from pipedraft.eval.record import LatencyRecord, Results, RunRecord
from pipedraft.eval.retention import Retention
from pipedraft.eval.run import Evaluation, Method
from pipedraft.eval.spec import BASE, Measure, Row, Spec, decode_config, read_roles
from pipedraft.eval.tables import lossless_share
from pipedraft.eval.traces import traces_of
from pipedraft.inference.config import RULE_NAMES
from pipedraft.inference.draft_length import parse_policy
from pipedraft.inference.engine import Engine
from pipedraft.inference.link_files import load_link
from pipedraft.inference.pipelines.link import Times
from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.transport.target_session import SharedTarget
from pipedraft.models.target_part import weights_identity


@dataclass(frozen=True)
class Finished:
    outcomes: list[Outcome]
    """Of the specification's rows, in their order."""
    results: Results | None
    """The entries behind them; None: nothing could be run."""


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


def run_pipeline(spec: Spec, context: TableContext) -> Finished:
    outcomes = [_found(row, context) for row in spec.rows]
    methods = {}
    for index, (row, outcome) in enumerate(zip(spec.rows, outcomes, strict=True)):
        if outcome.remark:
            continue
        draft = None if row.draft is None else context.drafts.find(row.draft)
        try:
            method = Method.of(spec, row, draft)
            Engine(context.target, context.tokenizer, method.config, draft)
        except ValueError as error:  # this target cannot be cut so, or carries no trees
            outcome.remark = str(error)
            continue
        folder = None if row.draft is None else str(context.drafts.folders[row.draft])
        outcome.stages = method.config.num_stages
        methods[index] = replace(method, checkpoint=folder)
    if not methods:
        return Finished(outcomes, None)
    comparison = Evaluation(
        target=context.target,
        tokenizer=context.tokenizer,
        benchmarks={name: list(prompts) for name, prompts in context.benchmarks.items()},
        reference=context.target,
        traces=traces_of(context.out, context.target, weights=weights_identity(spec.target)),
    )
    runs = comparison.run(list(methods.values()))
    for index, method in methods.items():
        name = method.name if method.draft is not None else AUTOREGRESSIVE
        own = {
            _benchmark(run, context): run
            for run in runs
            if (run.method, run.temperature) == (name, method.config.temperature)
        }
        outcomes[index].texts = lossless_share(own[None])
        outcomes[index].values = {
            benchmark: {q: get(run) for q, get in PIPELINE_QUANTITIES.items()}
            for benchmark, run in own.items()
        }
    return Finished(outcomes, Results(runs=runs))


def _benchmark(run: RunRecord, context: TableContext) -> str | None:
    alone = len(context.benchmarks) == 1
    return None if alone or run.benchmark == OVERALL else run.benchmark


def _runnable(spec: Spec) -> list[Row]:
    return [row for row in spec.rows if row.run is not None]


def _found(row: Row, context: TableContext) -> Outcome:
    """Without a remark where the row can be tried."""
    if row.run is None:
        return Outcome(remark=row.remark)
    if row.draft is not None and context.drafts.find(row.draft) is None:
        return Outcome(remark=context.drafts.missing(row.draft))
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


def _simulation(settings: Mapping[str, Any], **shared: Any) -> tuple[str, str, Simulation]:
    """Method, network and simulation."""
    fields = dict(settings)
    method, network, given = (fields.pop(name) for name in ("method", "network", "times"))
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; give one of {', '.join(METHODS)}")
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
    parse_policy(simulation.policy)
    return method, network, simulation


def check_edge(spec: Spec) -> None:
    for row in _runnable(spec):
        method, _, _ = _simulation(spec.settings(row), target=None, draft=None, tokenizer=None)
        if (METHODS[method].drafts_in is None) != (row.draft is None):
            raise ValueError(f"method {method!r} of row {row.name!r}: draft {row.draft}")


def run_edge(spec: Spec, context: TableContext) -> Finished:
    outcomes = [_found(row, context) for row in spec.rows]
    target, texts, tried = SharedTarget(context.target), [], []
    for row, outcome in zip(spec.rows, outcomes, strict=True):
        if outcome.remark:
            continue
        network = None if row.draft is None else context.drafts.find(row.draft)
        method, link, simulation = _simulation(
            spec.settings(row),
            target=target,
            draft=network,
            tokenizer=context.tokenizer,
            max_new_tokens=spec.max_new_tokens,
            seed=spec.seed,
        )
        outcome.remark = simulation.caveat(METHODS[method])
        texts += decode_all([method], [(link, simulation)], context.benchmarks)
        tried.append(outcome)
    measured = measure(texts, context.target, seed=spec.seed)
    for outcome, entry in zip(tried, measured, strict=True):
        outcome.values = {None: {q: get(entry) for q, get in EDGE_QUANTITIES.items()}}
        outcome.texts = lossless_share(entry)
    return Finished(outcomes, Results(latency=measured))


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
    settings: dict[str, Any] = {
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
        outcome.values = {None: values | {"KL": drift[place]}}
    config = msgspec.to_builtins(spec)
    return Finished(outcomes, Results(targets=targets, drafts=measured, config=config))


def place_name(domain: str, target: str) -> str:
    """What a domain's target is called among the places that a specification gives."""
    return f"domains.{domain}.targets.{target}"


def search_for(spec: Spec, places: list[str]) -> CheckpointSearch:
    """
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
        frozenset({"alpha", "tau", "retained", "KL"}), check_retention, run_retention
    ),
}


def check(name: str, spec: Spec) -> None:
    """Raise ValueError for settings or measures that no evaluation has. Loads no model."""
    kind = KINDS[spec.kind]
    for text in spec.measures:
        if Measure(text=text).quantity not in kind.quantities:
            raise ValueError(
                f"{name}: measure {text!r} is none of a {spec.kind} table; give one of "
                f"{', '.join(sorted(kind.quantities))}"
            )
    try:
        kind.check(spec)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
