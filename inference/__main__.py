"""Decode one prompt: text is streamed as it becomes certain, then the figures."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedraft.errors import Parser, UsageError, run_command
from pipedraft.inference import remote_command
from pipedraft.inference.arguments import (
    add_backend_arguments,
    add_schedule_arguments,
    backend_of,
    given_settings,
)
from pipedraft.inference.config import RULE_NAMES
from pipedraft.inference.prompts import Stream, encode
from pipedraft.inference.schedules import SCHEDULES

EXAMPLE = """example:
  python -m pipedraft.inference --checkpoint out/spd --prompt "What is 12 + 30?"
  python -m pipedraft.inference --checkpoint out/eagle3 --schedule flowspec --stages 4 --prompt "Hi"
  python -m pipedraft.inference --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --stages 4 \\
      --prompt "Hi"
  python -m pipedraft.inference --target assets/target --schedule autoregressive --prompt "Hi"
  torchrun --nproc-per-node 4 -m pipedraft.inference --checkpoint out/spd --backend process \\
      --prompt "Hi"

  python -m pipedraft.inference serve --target assets/target   the target for drafts elsewhere
  python -m pipedraft.inference --server 127.0.0.1:50051 --checkpoint out/flexspec --prompt "Hi"
  python -m pipedraft.inference --server cloud.example:50051 --draft-model out/draft_model \\
      --schedule picospec --tls-ca server.pem --token-file token --prompt "Hi"
  python -m pipedraft.inference --server 127.0.0.1:50051 --status

With --server and without a draft give --tokenizer, a folder or Hub id with the target's tokenizer.
`inference edge` is another name for `inference` with --server.
"""
SUBCOMMANDS = {
    "edge": "pipedraft.inference.__main__",
    "serve": "pipedraft.inference.transport.serve",
}
"""First word of the command line -> module with the parser of the words after it."""


def build_parser() -> Parser:
    parser = Parser(
        prog="pipedraft inference",
        description=__doc__,
        epilog=EXAMPLE,
    )
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--checkpoint", help="folder or Hub id of a trained draft")
    drafts.add_argument(
        "--draft-model",
        help="folder or Hub id of a language model with the target's tokenizer, as the draft "
        "(its own schedule is pipeinfer)",
    )
    parser.add_argument("--target", help="folder or Hub id; default: the one the draft names")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", help="the user's message; - reads stdin")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--schedule", help=f"{', '.join(SCHEDULES)}; default: the draft's own")
    parser.add_argument("--stages", type=int, help="pipeline stages; default: the draft's")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add_schedule_arguments(parser)
    parser.add_argument("--verifier", default="auto", choices=["auto", *RULE_NAMES])
    parser.add_argument(
        "--payload-tokens",
        type=int,
        default=10,
        metavar="K",
        help="the target's best tokens in a rejection, by topk and tail_escape (10)",
    )
    parser.add_argument(
        "--tail-samples",
        type=int,
        default=4,
        metavar="M",
        help="drawn tokens in a rejection, by tail_escape (4)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    add_backend_arguments(parser)
    remote_command.add_server_arguments(parser, asked)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what every process did (Chrome trace; with --backend process)",
    )
    parser.add_argument("--quiet", action="store_true", help="only the text, no figures")
    return parser


@dataclass(frozen=True)
class Choice:
    target: str
    revision: str | None
    schedule: str
    num_stages: int | None
    boundaries: tuple[int, ...]


def describe(options: argparse.Namespace) -> Choice:
    """Which target and schedule the options and the checkpoint's description ask for."""
    from pipedraft.inference.sources import default_schedule
    from pipedraft.models.draft import read_description, resolve_folder

    if options.checkpoint is None and options.target is None:
        if options.draft_model is not None:
            raise ValueError(f"--target: missing; --draft-model {options.draft_model} names none")
        raise ValueError("--checkpoint: missing; give a trained draft, or --target alone for AR")
    if options.draft_model is not None:
        schedule = options.schedule or default_schedule("language_model")
        return Choice(options.target, None, schedule, options.stages, options.boundaries)
    if options.checkpoint is None:
        if options.schedule not in (None, "autoregressive"):
            raise ValueError(
                f"--schedule: {options.schedule!r} needs a draft; give --checkpoint DIR, "
                "--draft-model DIR, or --schedule autoregressive"
            )
        return Choice(options.target, None, "autoregressive", options.stages, options.boundaries)
    description = read_description(resolve_folder(options.checkpoint))
    reference, architecture = description["target"], description["architecture"]
    return Choice(
        options.target or reference["name"],
        reference.get("revision") if options.target is None else None,
        options.schedule or default_schedule(description["draft_type"]),
        architecture.get("num_stages") if options.stages is None else options.stages,
        options.boundaries or tuple(architecture.get("boundaries") or ()),
    )


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Of the schedule, and those that every schedule has."""
    names = ("temperature", "verifier", "payload_tokens", "tail_samples", "seed", "max_new_tokens")
    return {name: getattr(options, name) for name in names} | given_settings(options)


def run(options: argparse.Namespace, cluster: Any) -> None:
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text.strip():
        raise ValueError(f"--prompt: {text!r} is empty; give at least one word")
    if options.trace is not None and cluster is None:
        raise ValueError(f"--trace: {str(options.trace)!r} needs --backend process")
    from transformers.utils import logging

    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.pipelines.local import LocalPipeline
    from pipedraft.models import load_draft
    from pipedraft.models.language_model import load_draft_model
    from pipedraft.models.target import choose_decoding_threads, load_target, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    choice = describe(options)
    num_stages = 1 if choice.num_stages is None else choice.num_stages
    if cluster is not None:
        num_stages = cluster.num_stages(choice.num_stages)
    # Before anything is loaded, so that bad values are refused at once.
    config = DecodeConfig.of(
        choice.schedule,
        num_stages=num_stages,
        boundaries=choice.boundaries,
        **settings_of(options),
    )
    tokenizer = load_tokenizer(choice.target, revision=choice.revision)
    if cluster is None:
        target = load_target(choice.target, revision=choice.revision)
        choose_decoding_threads(target)
    else:
        target = cluster.load_target(
            choice.target,
            revision=choice.revision,
            num_stages=num_stages,
            boundaries=choice.boundaries,
            traces=options.trace is not None,
        )
    draft: Any = None
    if options.checkpoint is not None:
        draft = load_draft(options.checkpoint, target)
    elif options.draft_model is not None:
        draft = load_draft_model(options.draft_model, target, tokenizer)
    connect = LocalPipeline if cluster is None else cluster.connect
    engine = Engine(target, tokenizer, config, draft, connect=connect)
    stream = Stream(tokenizer)
    result = engine.decode(encode(tokenizer, text, options.raw), on_token=stream)
    stream.finish(result.text)
    if not options.quiet:
        print_figures(config, result, "one process" if cluster is None else "these processes")
    if cluster is not None:
        report_processes(engine.pipeline.reports(), options)


def print_figures(config: Any, result: Any, where: str) -> None:
    elapsed = result.token_times_s[-1] - result.prefill_s
    rate = f"{result.draft_acceptance_rate:.2f}" if result.num_tested else "-"
    print(
        f"[{config.schedule.name}, n = {result.num_stages}] {result.num_tokens} tokens after the "
        f"first in {result.num_steps} steps: equivalent acceptance length "
        f"{result.equivalent_acceptance_length:.2f}, acceptance rate "
        f"{rate}; {result.num_tokens / max(elapsed, 1e-9):.0f} "
        f"tokens/s in {where}, {result.prefill_s * 1e3:.0f} ms to the first token "
        f"({result.stop_reason})",
        file=sys.stderr,
    )


def report_processes(reports: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from pipedraft.inference.timeline import chrome_trace

    if not options.quiet:
        for report in reports:
            parts = ", ".join(
                f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in report["seconds"].items()
            )
            print(f"{report['name']}: {parts}; {report['peak_rss_mb']:.0f} MB", file=sys.stderr)
    if options.trace is not None:
        options.trace.write_text(json.dumps(chrome_trace(reports)))


def main(words: Sequence[str] | None = None) -> None:
    """``words``: of the command line; None: this process's."""
    words = sys.argv[1:] if words is None else words
    first = words[0] if words else ""
    is_edge = first == "edge"
    if first == "serve":
        from pipedraft.inference.transport import serve

        serve.run(words[1:])
        return
    if first and not first.startswith("-") and not is_edge:
        raise UsageError(f"command: {first!r} is unknown; give {' or '.join(SUBCOMMANDS)}")
    options = build_parser().parse_args(words[is_edge:])
    if is_edge and options.server is None:
        raise UsageError("--server: missing; give HOST:PORT of `pipedraft inference serve`")
    remote_command.check_options(options)
    if options.server is not None:
        remote_command.run(options, settings_of(options))
        return
    with backend_of(options) as cluster:
        if cluster is None or cluster.is_controller:
            run(options, cluster)
        else:
            cluster.serve()


if __name__ == "__main__":
    run_command(main)
