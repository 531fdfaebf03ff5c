"""Latency of decoding across a link: `python -m pipedraft.eval edge --help`."""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedraft.errors import Parser, UsageError, make_folder
from pipedraft.inference.arguments import listed, positive, temperature

EXAMPLE = """\
example:
  python -m pipedraft.eval edge --draft-model out/draft_model/best --target assets/target \\
      --benchmarks gsm8k,mt_bench --links 5g,4g,wifi --temperature 0,1 --limit 4 --out out/edge

Networks and texts are real, the clock is virtual: computing takes the constants of --times, every
message crosses the link as the bytes it is encoded to. Writes results.json, report.md and
manifest.json into --out and prints the tables; `eval report OUT` plots the latencies. The cloud
alone, co-located speculation, stop and wait and the edge alone are the baselines.
"""


@dataclass(frozen=True)
class LoadedModels:
    """Everything that is loaded."""

    target: Any
    tokenizer: Any
    draft: Any
    description: str
    """Of the draft."""
    checkpoints: list[Path]
    benchmarks: dict[str, Any]


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m pipedraft.eval edge",
        description="Decode benchmarks across virtual links by several methods.",
        epilog=EXAMPLE,
    )
    drafts = parser.add_mutually_exclusive_group(required=True)
    drafts.add_argument(
        "--checkpoint", metavar="DIR", help="folder or Hub name of a FlexSpec draft"
    )
    drafts.add_argument(
        "--draft-model",
        metavar="DIR",
        help="a language model with the target's tokenizer as the draft; needs --target",
    )
    add = parser.add_argument
    add("--target", help="folder or Hub name of the target; default: the one the draft names")
    add(
        "--benchmarks", type=listed(str), required=True, metavar="NAMES", help="as of an evaluation"
    )
    add("--data-dir", metavar="D", help="see eval --help")
    add("--limit", type=positive, metavar="P", help="the first P prompts of each (default: all)")
    add("--methods", type=listed(str), metavar="NAMES", help="comma list (default: all)")
    add(
        "--links",
        type=listed(str),
        default=["5g", "4g", "wifi"],
        metavar="LINKS",
        help="comma list of 5g, 4g, wifi, TRACE.csv, 5g:TRACE.csv, PROFILES.json:NAME",
    )
    add("--temperature", type=listed(temperature), default=[0.0], metavar="T", help="comma list")
    add(
        "--times",
        default="picospec",
        metavar="TIMES",
        help="picospec, flexspec, or a JSON file of draft_s, verify_s, verify_row_s, cloud_draft_s",
    )
    add(
        "--draft-length",
        type=positive,
        default=4,
        metavar="K",
        help="of stop_and_wait and dssd (default: 4)",
    )
    add("--rule", metavar="RULE", help="acceptance at T > 0 (default: each method's own)")
    add(
        "--policy",
        default="survival",
        help="draft length, except of stop_and_wait, dssd and pearl, which have their own: "
        "fixed:K, eq11, alg2, geometric or survival (default: %(default)s)",
    )
    for flag, default, metavar, text in (
        ("--top-k", 10, "K", "tokens of a rejection, by topk and tail_escape"),
        ("--tail-samples", 4, "M", "tokens of a rejection, by tail_escape"),
        ("--max-new-tokens", 128, "M", "of each answer"),
    ):
        help_text = f"{text} (default: {default})"
        add(flag, type=positive, default=default, metavar=metavar, help=help_text)
    add("--seed", type=int, default=0, help="of all that is random (default: 0)")
    add("--no-lossless", action="store_true", help="do not compare texts with plain decoding")
    add("--out", type=Path, required=True, metavar="OUT", help="folder of the results")
    return parser


def _one_of(field: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise UsageError(f"{field}: {name!r} is unknown; give one of {', '.join(known)}")
    return name


def _read_times(text: str) -> Any:
    from pipedraft.eval.edge.constants import TIMES
    from pipedraft.inference.pipelines.link import Times

    if text in TIMES:
        return TIMES[text]
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--times: {text!r} is no file; give it or one of {', '.join(TIMES)}")
    try:
        return Times(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"--times: {text!r} holds no times ({error}); give an object of draft_s, verify_s, "
            "verify_row_s and cloud_draft_s, in seconds"
        ) from error


def _load(options: argparse.Namespace) -> LoadedModels:
    from pipedraft.eval.tasks import load_tasks
    from pipedraft.inference.pipelines.linked import check_draft
    from pipedraft.inference.sources import make_source
    from pipedraft.models import load_draft
    from pipedraft.models.draft import read_description, resolve_folder
    from pipedraft.models.language_model import load_draft_model
    from pipedraft.models.target import load_target, load_tokenizer

    benchmarks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    name, revision, folders = options.target, None, []
    if options.checkpoint is not None:
        folders = [resolve_folder(options.checkpoint)]
        if name is None:
            reference = read_description(folders[0])["target"]
            name, revision = reference["name"], reference.get("revision")
    elif name is None:
        raise UsageError(f"--target: missing; --draft-model {options.draft_model} names none")
    make_folder("--out", options.out)
    target = load_target(name, revision=revision)
    tokenizer = load_tokenizer(name, revision=revision)
    if folders:
        draft = load_draft(str(folders[0]), target).to(target.device, target.dtype)
    else:
        draft = load_draft_model(options.draft_model, target, tokenizer)
    check_draft(make_source(draft))
    place = options.checkpoint or options.draft_model
    described = f"{draft.draft_type} `{place}`"
    return LoadedModels(target, tokenizer, draft, described, folders, benchmarks)


def _simulations(options: argparse.Namespace, job: LoadedModels) -> list[tuple[str, Any]]:
    """Every link and temperature."""
    from pipedraft.eval.edge.constants import radio_energy, radio_of
    from pipedraft.eval.edge.methods import Simulation
    from pipedraft.inference.link_files import load_link
    from pipedraft.inference.transport.target_session import SharedTarget

    times, target = _read_times(options.times), SharedTarget(job.target)
    return [
        (
            name,
            Simulation(
                target=target,
                draft=job.draft,
                tokenizer=job.tokenizer,
                link=load_link(name),
                times=times,
                energy=radio_energy(radio_of(name), draft_s=times.draft_s),
                temperature=degrees,
                fixed_length=options.draft_length,
                rule=options.rule,
                policy=options.policy,
                top_k=options.top_k,
                tail_samples=options.tail_samples,
                max_new_tokens=options.max_new_tokens,
                seed=options.seed,
            ),
        )
        for degrees in options.temperature
        for name in options.links
    ]


def _check(options: argparse.Namespace) -> list[str]:
    """Names of the methods; cheap checks before anything is loaded."""
    from pipedraft.eval.edge.methods import METHODS
    from pipedraft.inference.config import RULE_NAMES
    from pipedraft.inference.draft_length import parse_policy
    from pipedraft.inference.link_files import load_link

    names = [_one_of("--methods", n, list(METHODS)) for n in options.methods or METHODS]
    if options.rule is not None:
        _one_of("--rule", options.rule, RULE_NAMES)
    for link in options.links:
        load_link(link)
    parse_policy(options.policy)
    _read_times(options.times)
    return names


def run(argv: Sequence[str]) -> None:
    """
    Args:
        argv: the words after ``edge``.
    """
    options = build_parser().parse_args(argv)
    names = _check(options)
    from transformers.utils import logging

    from pipedraft.eval.edge.measures import decode_all, measure
    from pipedraft.eval.edge.tables import write_edge_report
    from pipedraft.eval.manifest import build_manifest

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    job = _load(options)
    texts = decode_all(names, _simulations(options, job), job.benchmarks)
    rows = measure(texts, None if options.no_lossless else job.target, seed=options.seed)
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
    manifest = build_manifest(
        target=job.target,
        tokenizer=job.tokenizer,
        benchmarks=job.benchmarks,
        checkpoints=job.checkpoints,
        draft_model=None if job.checkpoints else job.draft.model,
        config=settings | {"draft": job.description},
        argv=["python", "-m", "pipedraft.eval", "edge", *argv],
        seed=options.seed,
    )
    print(write_edge_report(options.out, rows, manifest, _read_times(options.times)))
    print(f"written: {shlex.quote(str(options.out))}/results.json, report.md and manifest.json")
