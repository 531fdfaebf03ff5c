"""Evaluate drafts against autoregressive decoding: `python -m pipedraft.eval --help`."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedraft.errors import make_folder, run_command
from pipedraft.eval.arguments import EvaluationOptions
from pipedraft.eval.scores import make_scorer
from pipedraft.eval.traces import Traces, remove_traces, traces_of
from pipedraft.inference.arguments import backend_of, settings_grid
from pipedraft.options import subcommand

if TYPE_CHECKING:
    from pipedraft.eval.spec import Spec

SUBCOMMANDS = {
    "compare": "pipedraft.eval.compare",
    "edge": "pipedraft.eval.edge.command",
    "replay": "pipedraft.eval.replay",
    "report": "pipedraft.eval.report",
    "table": "pipedraft.eval.table_command",
}
"""First word of the command line -> module whose ``run`` gets the words after it."""


build_parser = EvaluationOptions.parser


def _read_drafts(
    arguments: EvaluationOptions,
) -> tuple[str, str | None, dict[Path, dict[str, Any]]]:
    """Name and revision of the target, and the description of every checkpoint."""
    from pipedraft.models.draft import read_description, resolve_folder

    drafts = {}
    for checkpoint in arguments.checkpoint:
        folder = resolve_folder(checkpoint)
        drafts[folder] = read_description(folder)
        trained_for = drafts[folder]["architecture"].get("num_stages")
        if trained_for and arguments.stages and arguments.stages != trained_for:
            raise ValueError(
                f"--stages: {arguments.stages}, but {checkpoint} was trained for {trained_for}; "
                "leave --stages out, or train a draft for that number"
            )
    if arguments.target is not None:
        return arguments.target, None, drafts
    if arguments.draft_model is not None:
        raise ValueError(f"--target: missing; --draft-model {arguments.draft_model} names none")
    references = [description["target"] for description in drafts.values()]
    targets = dict.fromkeys((target["name"], target.get("revision")) for target in references)
    if len(targets) > 1:
        names = ", ".join(f"{name} ({revision or 'newest'})" for name, revision in targets)
        raise ValueError(
            f"--checkpoint: the drafts name different targets: {names}; evaluate "
            "them one by one, or give --target"
        )
    ((name, revision),) = targets
    return name, revision, drafts


def _method_name(folder: Path, drafts: dict[Path, dict[str, Any]]) -> str:
    """The draft's type; with the folder if another draft has the same type and stages."""

    def kind(description: dict[str, Any]) -> tuple[str, int | None]:
        return description["draft_type"], description["architecture"].get("num_stages")

    draft_type = drafts[folder]["draft_type"]
    alone = [kind(other) for other in drafts.values()].count(kind(drafts[folder])) == 1
    return draft_type if alone else f"{draft_type} ({folder.parent.name}/{folder.name})"


def _load_drafts(
    arguments: EvaluationOptions, drafts: dict[Path, dict[str, Any]], target: Any, tokenizer: Any
) -> dict[str, tuple[str, Any]]:
    """Name of each draft -> its place and network."""
    from pipedraft.models import load_draft
    from pipedraft.models.language_model import load_draft_model

    if arguments.draft_model is not None:
        network = load_draft_model(arguments.draft_model, target, tokenizer)
        return {"draft model": (arguments.draft_model, network)}
    return {
        _method_name(folder, drafts): (
            str(folder),
            load_draft(str(folder), target).to(target.device, target.dtype),
        )
        for folder in drafts
    }


def _spec(
    arguments: EvaluationOptions, target: str, drafts: Mapping[str, tuple[str, Any]]
) -> "Spec":
    """Every draft x schedule x temperature x setting of the schedule."""
    from pipedraft.eval.spec import Row, Spec
    from pipedraft.inference.sources import default_schedule

    rows = []
    schedules_of = {
        name: list(arguments.schedule) or [default_schedule(network.draft_type)]
        for name, (_, network) in drafts.items()
    }
    # Of all drafts at once: a setting may belong to the schedule of one of them.
    used = list(dict.fromkeys(schedule for own in schedules_of.values() for schedule in own))
    grid = dict(zip(used, settings_grid(arguments.settings, used), strict=True))
    for name, schedules in schedules_of.items():
        for schedule in schedules:
            # One draft may run under several schedules; its type alone would hide which.
            label = name if len(schedules) == 1 else f"{name}: {schedule}"
            rows += [
                Row(name=label, draft=name, run={"schedule": schedule, "temperature": t, **way})
                for t in arguments.temperature
                for way in grid[schedule]
            ]
    return Spec(
        title="Evaluation",
        target=target,
        rows=rows,
        run={"verifier": arguments.verifier},
        drafts={name: place for name, (place, _) in drafts.items()},
        benchmarks=list(arguments.benchmarks),
        data_dir=arguments.data_dir,
        limit=arguments.limit,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        dtype=arguments.dtype,
    )


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--device: {name!r} cannot be used ({reason}); give cpu or leave it out"
        ) from error


@dataclass(frozen=True)
class _Target:
    """The target as the engine sees it, and as transformers does."""

    model: Any
    reference: Any
    connect: Callable[..., Any]
    boundaries: tuple[int, ...]
    num_stages: int | None


def _load_target(
    arguments: EvaluationOptions, name: str, revision: str | None, trained: Any, cluster: Any
) -> _Target:
    """
    Args:
        trained: descriptions of the drafts.
    """
    import torch

    from pipedraft.inference.pipelines.local import LocalPipeline
    from pipedraft.models.target import choose_decoding_threads, load_target

    dtype = getattr(torch, arguments.dtype)
    if cluster is None:
        model = load_target(name, revision=revision, dtype=dtype, device=_device(arguments.device))
        choose_decoding_threads(model)
        reference = None if arguments.no_lossless else model
        return _Target(model, reference, LocalPipeline, arguments.boundaries, arguments.stages)
    if arguments.device != "auto":
        raise ValueError(
            f"--device: {arguments.device!r} is for one process; with --backend process every "
            "rank takes an accelerator of its own, or the CPU: leave it out"
        )
    architectures = [description["architecture"] for description in trained]
    wanted = {a["num_stages"] for a in architectures if a.get("num_stages")}
    cuts = {tuple(a["boundaries"]) for a in architectures if a.get("boundaries")}
    if len(wanted | {arguments.stages} - {None}) > 1 or len(cuts) > 1:
        raise ValueError(
            f"--checkpoint: drafts for {sorted(wanted)} stages and cuts {sorted(cuts)}, but the "
            "processes hold one cut of the target; evaluate them in several launches"
        )
    num_stages = cluster.num_stages(arguments.stages or next(iter(wanted), None))
    cut = arguments.boundaries or next(iter(cuts), ())
    model = cluster.load_target(
        name, revision=revision, num_stages=num_stages, boundaries=cut, dtype=dtype
    )
    reference = None if arguments.no_lossless else load_target(name, revision=revision, dtype=dtype)
    return _Target(model, reference, cluster.connect, cluster.job.boundaries, num_stages)


def run(argv: Sequence[str]) -> None:
    """The whole command; bad input raises ValueError, cheap checks before the models load.

    Args:
        argv: a subcommand and its arguments, or the options of an evaluation.
    """
    if argv and not argv[0].startswith("-"):
        name = subcommand(argv[0], list(SUBCOMMANDS))
        importlib.import_module(SUBCOMMANDS[name]).run(argv[1:])
        return
    arguments = EvaluationOptions.read(argv)
    with backend_of(arguments) as cluster:
        if cluster is None or cluster.is_controller:
            _evaluate(arguments, argv, cluster)
        else:
            cluster.serve()


def _evaluate(arguments: EvaluationOptions, argv: Sequence[str], cluster: Any) -> None:
    from transformers.utils import logging

    from pipedraft.eval.manifest import build_manifest
    from pipedraft.eval.replay import fit_cost, read_cost
    from pipedraft.eval.report import format_table, write_report
    from pipedraft.eval.run import Evaluation, Method
    from pipedraft.eval.tasks import load_tasks
    from pipedraft.inference.clock import CostModel
    from pipedraft.models.target import load_tokenizer
    from pipedraft.models.target_part import weights_identity

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    benchmarks = load_tasks(arguments.benchmarks, arguments.data_dir, arguments.limit)
    scorer, lines = make_scorer(arguments, benchmarks)
    target_name, revision, drafts = _read_drafts(arguments)
    cost = CostModel() if arguments.cost is None else read_cost(arguments.cost)
    make_folder("--out", arguments.out)
    if arguments.fresh and not arguments.calibrate:
        remove_traces(arguments.out)
    tokenizer = load_tokenizer(target_name, revision=revision)
    target = _load_target(arguments, target_name, revision, drafts.values(), cluster)
    comparison = Evaluation(
        target=target.model,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        reference=target.reference,
        connect=target.connect,
        scorer=scorer,
        repeats=arguments.repeats,
        traces=Traces()
        if arguments.calibrate
        else traces_of(
            arguments.out,
            target.model,
            weights=weights_identity(target_name, revision),
            backend=arguments.backend,
            shard=arguments.shard,
        ),
    )
    for line in lines:
        print(line)
    loaded = _load_drafts(arguments, drafts, target.model, tokenizer)
    spec = _spec(arguments, target_name, loaded)
    machine = {"boundaries": target.boundaries, "num_stages": target.num_stages, "cost": cost}
    methods = [
        replace(Method.from_row(spec, row, network, **machine), checkpoint=place)
        for row in spec.rows
        for place, network in [loaded[str(row.draft)]]
    ]
    if arguments.shard is not None:
        turns = comparison.decode_shard(methods)
        print(f"{turns} decoded turns of this share are in {arguments.out}/traces")
        return
    runs = comparison.run(methods)
    manifest = build_manifest(
        target=target.model,
        tokenizer=tokenizer,
        benchmarks=benchmarks,
        checkpoints=list(drafts),
        draft_model=loaded["draft model"][1].model if arguments.draft_model else None,
        config=arguments.to_dict() | {"target": target_name, "device": str(target.model.device)},
        argv=["python", "-m", "pipedraft.eval", *argv],
        seed=arguments.seed,
    )
    write_report(arguments.out, runs, manifest)
    print(format_table(runs))
    print(f"written: {arguments.out}/results.json, report.md, report.html, manifest.json and plots")
    if arguments.calibrate is not None:
        measured = fit_cost(runs)
        arguments.calibrate.write_text(json.dumps(vars(measured), indent=2) + "\n")
        print(f"written: {arguments.calibrate}: {vars(measured)}")


def main() -> None:
    run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
