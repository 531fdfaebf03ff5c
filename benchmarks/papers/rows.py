"""Run a specification's rows, on pipelines or on links.

If a row cannot be run, its outcome has a remark with the reason instead of values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafts import CheckpointSearch, Drafts, TableContext
from spec import Column, Row, Spec, decode_config
from table_options import TableOptions

from pipedraft.chats import set_template_variables
from pipedraft.devices import resolve_device, resolve_dtype
from pipedraft.errors import make_folder
from pipedraft.eval.edge.methods import METHODS, TIMES, Simulation
from pipedraft.eval.edge.report import LinkRun, measure
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import LatencyRecord, Results, RunRecord
from pipedraft.eval.run import EvalMethod, Evaluation
from pipedraft.eval.tables import lossless_share
from pipedraft.eval.tasks import FORMS, load_tasks
from pipedraft.eval.traces import traces_of
from pipedraft.files import Values
from pipedraft.inference.edge.simulated import Times
from pipedraft.inference.edge.target_session import SharedTarget
from pipedraft.inference.engine import Engine
from pipedraft.inference.rules import RULE_NAMES
from pipedraft.models.rounded import dtype_of
from pipedraft.models.target import load_target, load_tokenizer
from pipedraft.models.target_part import weights_identity

Value = tuple[float | None, Sequence[float | None] | None]
"""A number and its 95 % interval, if there is one."""


@dataclass
class RowOutcome:
    """A row's values, or the reason why there are none."""

    values: dict[str | None, dict[str, Value]] = field(default_factory=dict)
    """Benchmark, or None for all together -> quantity -> value."""
    remark: str = ""
    stages: int | None = None
    agreement: str = "-"
    """Share of the compared outputs equal to the target's own."""


def load_context(spec: Spec, options: TableOptions) -> TableContext:
    """Find the drafts, read the prompts, make the output folder, load the target."""
    search = CheckpointSearch.of(options.checkpoints, spec.drafts)
    benchmarks = load_tasks(spec.benchmarks, spec.data_dir, spec.limit)
    make_folder("--out", options.out)
    place = resolve_device(options.device)
    dtype = resolve_dtype(spec.dtype, place, spec.target)
    target = load_target(spec.target, dtype=dtype, device=place)
    tokenizer = load_tokenizer(spec.target)
    set_template_variables(tokenizer, spec.chat_template_kwargs)
    return TableContext(
        target=target,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        drafts=Drafts(search, target, tokenizer),
        out=options.out,
        sequences=options.sequences,
        shard=options.shard,
    )


# -- pipelines ------------------------------------------------------------------------------

PIPELINE_QUANTITIES: dict[str, Callable[[RunRecord], Value]] = {
    "L'": lambda run: (
        run.equivalent_acceptance_length.pooled,
        run.equivalent_acceptance_length.ci95,
    ),
    "L' mean": lambda run: (run.equivalent_acceptance_length.mean or None, None),
    "L' benchmark mean": lambda run: (run.benchmark_mean, None),
    "tau": lambda run: (run.mean_acceptance_length, None),
    "alpha": lambda run: (run.draft_acceptance_rate, None),
    "S": lambda run: (run.theoretical_speedup, None),
}


def _prepare_pipeline(
    spec: Spec, context: TableContext
) -> tuple[list[RowOutcome], dict[int, EvalMethod], Evaluation]:
    """Return an outcome per row, a method per runnable row, and the evaluation that runs them."""
    outcomes = [_found(row, context) for row in spec.rows]
    methods = {}
    for index, (row, outcome) in enumerate(zip(spec.rows, outcomes, strict=True)):
        if outcome.remark:
            continue
        draft = None if row.draft is None else context.drafts.find(row.draft)
        try:
            config = decode_config(
                spec.settings(row),
                draft_stages=None if draft is None else draft.num_stages,
                seed=spec.seed,
                max_new_tokens=spec.max_new_tokens,
            )
            Engine(context.target, context.tokenizer, config, draft)
        except ValueError as error:  # this target does not support the cut or trees
            outcome.remark = str(error)
            continue
        folder = None if row.draft is None else str(context.drafts.folders[row.draft])
        outcome.stages = config.num_stages
        methods[index] = EvalMethod(name=row.name, config=config, draft=draft, checkpoint=folder)
    comparison = Evaluation(
        target=context.target,
        tokenizer=context.tokenizer,
        benchmarks={name: list(prompts) for name, prompts in context.benchmarks.items()},
        reference=context.target,
        sequences=context.sequences,
        traces=traces_of(
            context.out,
            context.target,
            weights=weights_identity(spec.target),
            dtype=dtype_of(context.target),
            shard=context.shard,
        ),
    )
    return outcomes, methods, comparison


def decode_shard(spec: Spec, context: TableContext) -> tuple[list[RowOutcome], int | None]:
    """Decode this shard's turns for every runnable row.

    Returns:
        The rows' outcomes so far, and the number of turns on disk, or None if no row can run.
    """
    outcomes, methods, comparison = _prepare_pipeline(spec, context)
    return outcomes, comparison.decode_shard(list(methods.values())) if methods else None


def run_pipeline(spec: Spec, context: TableContext) -> tuple[list[RowOutcome], Results | None]:
    outcomes, methods, comparison = _prepare_pipeline(spec, context)
    if not methods:
        return outcomes, None
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
            FORMS.get(str(benchmark), benchmark): {
                q: get(run) for q, get in PIPELINE_QUANTITIES.items()
            }
            for benchmark, run in own.items()
        }
    return outcomes, Results(runs=runs)


def _found(row: Row, context: TableContext) -> RowOutcome:
    """Return a row's outcome before the run. A remark says why the row cannot be run."""
    if row.run is None:
        return RowOutcome(remark=row.remark)
    if row.draft is not None and context.drafts.find(row.draft) is None:
        return RowOutcome(remark=context.drafts.missing[row.draft])
    return RowOutcome()


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
    measured = measure(runs, context.target, seed=spec.seed)
    for outcome, entry in zip(tried, measured, strict=True):
        outcome.values = {None: {q: get(entry) for q, get in EDGE_QUANTITIES.items()}}
        outcome.agreement = lossless_share(entry)
    return outcomes, Results(latency=measured)


@dataclass(frozen=True)
class Kind:
    """A way to run a specification's rows."""

    quantities: frozenset[str]
    needs_draft: Callable[[Values], bool]
    """Returns True if a row with these settings has a draft; raises ValueError for bad settings."""
    run: Callable[[Spec, TableContext], tuple[list[RowOutcome], Results | None]]
    """Returns an outcome per row, and the entries behind them; None: no row could run."""


def _pipeline_drafts(settings: Values) -> bool:
    return decode_config(settings).schedule.grows is not None


def _edge_drafts(settings: Values) -> bool:
    method, _, _ = _simulation(settings, target=None, draft=None, tokenizer=None)
    return METHODS[method].drafts_in is not None


KINDS = {
    "pipeline": Kind(frozenset(PIPELINE_QUANTITIES), _pipeline_drafts, run_pipeline),
    "edge": Kind(frozenset(EDGE_QUANTITIES), _edge_drafts, run_edge),
}


def check(name: str, spec: Spec) -> None:
    """Raise ValueError for unknown settings or columns. Loads no model."""
    kind = KINDS[spec.kind]
    for text in spec.measures:
        if Column.parse(text).quantity not in kind.quantities:
            raise ValueError(
                f"{name}: measure {text!r} is none of a {spec.kind} table; give one of "
                f"{', '.join(sorted(kind.quantities))}"
            )
    for row in spec.rows:
        if row.run is None:
            continue
        try:
            needs_draft = kind.needs_draft(spec.settings(row))
        except (TypeError, KeyError, ValueError) as error:
            text = f"run: {error} is missing; set it" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{name}: {text}") from error
        if needs_draft != (row.draft is not None):
            what = "needs a draft" if needs_draft else "uses no draft"
            raise ValueError(f"{name}: row {row.name!r} {what}, and has draft {row.draft}")
