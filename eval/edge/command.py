"""Latency of decoding across a link: `python -m pipedraft.eval edge --help`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipedraft.errors import UsageError, make_folder
from pipedraft.inference.arguments import read_temperature
from pipedraft.inference.config import RuleName
from pipedraft.options import Options, option

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


@dataclass(frozen=True, kw_only=True)
class EdgeOptions(Options):
    """Decode benchmarks across virtual links by several methods."""

    PROG: ClassVar[str] = "pipedraft eval edge"
    EXAMPLE: ClassVar[str] = EXAMPLE
    ONE_OF = (("checkpoint", "draft_model"),)

    checkpoint: str | None = option(None, metavar="DIR")
    """folder or Hub name of a FlexSpec draft"""
    draft_model: str | None = option(None, metavar="DIR")
    """a language model with the target's tokenizer as the draft; needs --target"""
    target: str | None = None
    """folder or Hub name of the target; default: the one the draft names"""
    benchmarks: tuple[str, ...] = option(metavar="NAMES")
    """as of an evaluation"""
    data_dir: str | None = option(None, metavar="D")
    """see eval --help"""
    limit: int | None = option(None, metavar="P", least=1)
    """the first P prompts of each; default: all"""
    methods: tuple[str, ...] = option((), metavar="NAMES")
    """comma list; default: all"""
    links: tuple[str, ...] = option(("5g", "4g", "wifi"), metavar="LINKS")
    """comma list of 5g, 4g, wifi, TRACE.csv, 5g:TRACE.csv, PROFILES.json:NAME"""
    temperature: tuple[float, ...] = option((0.0,), metavar="T", parse=read_temperature)
    """comma list"""
    times: str = option("picospec", metavar="TIMES")
    """picospec, flexspec, or a JSON file of draft_s, verify_s, verify_row_s, cloud_draft_s"""
    draft_length: int = option(4, metavar="K", least=1)
    """of stop_and_wait and dssd"""
    rule: RuleName | None = None
    """acceptance at T > 0; default: each method's own"""
    policy: str = "survival"
    """draft length, except of stop_and_wait, dssd and pearl, which have their own: fixed:K, eq11,
    alg2, geometric or survival"""
    top_k: int = option(10, metavar="K", least=1)
    """tokens of a rejection, by topk and tail_escape"""
    tail_samples: int = option(4, metavar="M", least=1)
    """tokens of a rejection, by tail_escape"""
    max_new_tokens: int = option(128, metavar="M", least=1)
    """of each answer"""
    seed: int = 0
    """of all that is random"""
    no_lossless: bool = False
    """do not compare outputs with plain decoding"""
    out: Path = option(metavar="OUT")
    """folder of the results"""


build_parser = EdgeOptions.parser


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


def _load(options: EdgeOptions) -> LoadedModels:
    from pipedraft.eval.tasks import load_tasks
    from pipedraft.inference.pipelines.linked import check_draft
    from pipedraft.inference.sources import make_source
    from pipedraft.models import load_draft
    from pipedraft.models.draft import Draft, read_description, resolve_folder
    from pipedraft.models.language_model import LanguageModelDraft, load_draft_model
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
    draft: Draft | LanguageModelDraft
    if folders:
        draft = load_draft(str(folders[0]), target).to(target.device, target.dtype)
    else:
        draft = load_draft_model(str(options.draft_model), target, tokenizer)
    check_draft(make_source(draft))
    place = options.checkpoint or options.draft_model
    described = f"{draft.draft_type} `{place}`"
    return LoadedModels(target, tokenizer, draft, described, folders, benchmarks)


def _simulations(options: EdgeOptions, job: LoadedModels) -> list[tuple[str, Any]]:
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


def _check(options: EdgeOptions) -> list[str]:
    """Names of the methods; cheap checks before anything is loaded."""
    from pipedraft.eval.edge.methods import METHODS
    from pipedraft.inference.draft_length import parse_policy
    from pipedraft.inference.link_files import load_link

    names = [_one_of("--methods", n, list(METHODS)) for n in options.methods or METHODS]
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
    options = EdgeOptions.read(argv)
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
    manifest = build_manifest(
        target=job.target,
        tokenizer=job.tokenizer,
        benchmarks=job.benchmarks,
        checkpoints=job.checkpoints,
        draft_model=None if job.checkpoints else job.draft.model,
        config=options.to_dict() | {"draft": job.description},
        argv=["python", "-m", "pipedraft.eval", "edge", *argv],
        seed=options.seed,
    )
    print(write_edge_report(options.out, rows, manifest, _read_times(options.times)))
    print(f"written: {shlex.quote(str(options.out))}/results.json, report.md and manifest.json")
