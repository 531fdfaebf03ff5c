"""Rows of tables/ on links, for ``benchmarks/papers``, which finds this file."""

from collections.abc import Callable
from typing import Any

from drafts import TableContext
from rows import Kind, RowOutcome, Value, find_row
from spec import Spec

from pipedraft.eval.edge.methods import METHODS, TIMES, Simulation
from pipedraft.eval.edge.report import LinkRun, measure
from pipedraft.eval.record import LatencyRecord, Results
from pipedraft.eval.tables import lossless_share
from pipedraft.files import Values
from pipedraft.inference.edge.simulated import Times
from pipedraft.inference.edge.target_session import SharedTarget
from pipedraft.inference.rules import RULE_NAMES

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
    """Return method, network and simulation from a row's settings."""
    fields = dict(settings)
    method, network, given = (fields.pop(name) for name in ("method", "network", "times"))
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; give one of {', '.join(METHODS)}")
    if not isinstance(given, dict) and given not in TIMES:
        raise ValueError(f"times {given!r} is unknown; give one of {', '.join(TIMES)}")
    times = Times(**given) if isinstance(given, dict) else TIMES[given]
    if fields.get("rule") is not None and fields["rule"] not in RULE_NAMES:
        raise ValueError(f"rule {fields['rule']!r} is unknown; give one of {', '.join(RULE_NAMES)}")
    return method, network, Simulation.on(network, times, **fields, **shared)


def run_edge(spec: Spec, context: TableContext) -> tuple[list[RowOutcome], Results | None]:
    outcomes = [find_row(row, context) for row in spec.rows]
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
    measured = measure(runs, context.target, seed=spec.seed)
    for outcome, entry in zip(tried, measured, strict=True):
        outcome.values = {None: {q: get(entry) for q, get in EDGE_QUANTITIES.items()}}
        outcome.agreement = lossless_share(entry)
    return outcomes, Results(latency=measured)


def _edge_drafts(settings: Values) -> bool:
    method, _, _ = _simulation(settings, target=None, draft=None, tokenizer=None)
    return METHODS[method].drafts_in is not None


KINDS = {"edge": Kind(frozenset(EDGE_QUANTITIES), _edge_drafts, run_edge)}
