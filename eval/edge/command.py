"""Run `eval edge`, which decodes with several methods and one draft on virtual links."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from ...devices import resolve_device, resolve_dtype
from ...errors import UsageError, make_folder
from ...inference.edge.channel import load_link
from ...inference.edge.pipeline import check_draft
from ...inference.edge.target_session import SharedTarget
from ...inference.engine import DraftNetwork
from ...inference.sources import make_source
from ...inference.sources.lookup import make_lookup
from ...models.heads.language_model import load_draft_model
from ...models.target import load_target, load_tokenizer
from ...pretrained import quieten
from ..checkpoints import load_head, read_drafts
from ..manifest import build_manifest
from ..tasks import load_tasks
from .arguments import EdgeOptions
from .methods import METHODS, Simulation, read_times
from .report import LinkRun, measure, write_edge_report

SETTINGS = ("rule", "policy", "token_bytes", "payload_tokens", "tail_samples")
"""Options named like a simulation setting."""


def make_runs(options: EdgeOptions) -> list[LinkRun]:
    """Return a run for each method, link and temperature, before target and draft are loaded."""
    times = read_times(options.times)
    return [
        LinkRun(
            method,
            link,
            Simulation.on(
                link,
                times,
                target=None,  # type: ignore[arg-type]
                draft=None,
                tokenizer=None,  # type: ignore[arg-type]
                temperature=temperature,
                fixed_length=options.draft_length,
                max_new_tokens=options.max_new_tokens,
                seed=options.seed,
                **{name: getattr(options, name) for name in SETTINGS},
                **options.filters,
            ),
        )
        for temperature in options.temperature
        for link in options.links
        for method in options.methods or METHODS
    ]


def run(options: EdgeOptions, argv: Sequence[str]) -> None:
    """Decode with every method, write the report and print it.

    Args:
        argv: the words after ``edge``.
    """
    quieten()
    for method in options.methods:
        if method not in METHODS:
            raise UsageError(f"--methods: {method!r} is unknown; give one of {', '.join(METHODS)}")
    for link in options.links:
        load_link(link, "--links")
    name, revision, drafts = read_drafts(
        [options.checkpoint] if options.checkpoint else [],
        options.target,
        options.draft_model,
        options.draft,
    )
    runs = make_runs(options)
    benchmarks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    make_folder("--out", options.out)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device, name, revision)
    target = load_target(name, revision=revision, dtype=dtype, device=device)
    tokenizer = load_tokenizer(name, revision=revision)
    place = str(options.checkpoint or options.draft_model or options.draft)
    draft: DraftNetwork
    if drafts:
        draft = load_head(next(iter(drafts)), target)
    elif options.draft is not None:
        draft = make_lookup(options.draft, target)
    else:
        draft = load_draft_model(place, target, tokenizer)
    check_draft(make_source(draft))
    shared = SharedTarget(target)
    for run in runs:
        drafts_with = None if METHODS[run.method].drafts_in is None else draft
        run.simulation = replace(
            run.simulation, target=shared, draft=drafts_with, tokenizer=tokenizer
        )
        run.run(benchmarks)
    latency = measure(runs, None if options.no_lossless else target, seed=options.seed)
    manifest = build_manifest(
        target=target,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        checkpoints=list(drafts),
        draft=draft,
        config=options.to_dict() | {"draft": f"{draft.draft_type} `{place}`"},
        argv=["python", "-m", "pipedraft.eval", "edge", *argv],
        seed=options.seed,
    )
    shown = write_edge_report(options.out, latency, manifest, runs[0].simulation.times)
    written = f"{shlex.quote(str(options.out))}/results.json, report.md and manifest.json"
    print(f"{shown}\nwritten: {written}")
