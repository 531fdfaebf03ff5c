"""Run a specification's rows on pipelines. ``kinds`` lists the other ways to run rows.

If a row cannot be run, its outcome has a remark with the reason instead of values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafts import CheckpointSearch, Drafts, TableContext
from spec import Row, Spec, decode_config
from table_options import TableOptions

from pipedraft.chats import set_template_variables
from pipedraft.devices import resolve_device, resolve_dtype
from pipedraft.errors import make_folder
from pipedraft.eval.evaluation import EvalMethod, Evaluation
from pipedraft.eval.metrics import AUTOREGRESSIVE, OVERALL
from pipedraft.eval.record import Results, RunRecord
from pipedraft.eval.tables import lossless_share
from pipedraft.eval.tasks import FORMS, load_tasks
from pipedraft.eval.traces import traces_of
from pipedraft.files import Values
from pipedraft.inference.engine import Engine
from pipedraft.models.speed.rounded import dtype_of
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
    outcomes = [find_row(row, context) for row in spec.rows]
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


def find_row(row: Row, context: TableContext) -> RowOutcome:
    """Return a row's outcome before the run. A remark says why the row cannot be run."""
    if row.run is None:
        return RowOutcome(remark=row.remark)
    if row.draft is not None and context.drafts.find(row.draft) is None:
        return RowOutcome(remark=context.drafts.missing[row.draft])
    return RowOutcome()


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


PIPELINE = Kind(frozenset(PIPELINE_QUANTITIES), _pipeline_drafts, run_pipeline)
