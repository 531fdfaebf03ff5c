"""Decode one prompt: `pipedraft inference --help`."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..endings import leave_at_interrupts, run_command
from ..options import subcommand

if __name__ == "__main__":
    leave_at_interrupts()

from ..files import make_place, write_atomically
from ..wings import chosen_decoder, commands_of
from .arguments import backend_of, check_paths
from .decode_options import WINGS, DecodeOptions
from .result import DecodeResult, shown

if TYPE_CHECKING:
    from .ranks.cluster import Cluster
    from .timeline import TimelineReport


build_parser = DecodeOptions.parser


def run(options: DecodeOptions, cluster: "Cluster | None") -> None:
    text = options.read_prompt()
    traces = options.trace is not None
    if options.trace is not None:
        if cluster is None:
            raise ValueError(f"--trace: {str(options.trace)!r} needs --backend process")
        make_place("--trace", options.trace, b'{"traceEvents": ')
    if options.conformance is not None:
        make_place("--conformance", options.conformance, b'{"request": ')
    from .command import encode, load_engine, printed_answer
    from .defaults import fastest, pipeline_note
    from .trace_rows import TraceRows

    engine = load_engine(options, cluster, options.decode_settings(), traces=traces)
    ids = encode(engine.tokenizer, text, options.raw)
    stream = printed_answer(engine.tokenizer, ids, options)
    observer = None if options.conformance is None else TraceRows("0")
    result = engine.decode(ids, on_token=stream, observer=observer)
    stream.finish_line()
    if options.conformance is not None and observer is not None:
        observer.write(options.conformance)
    if not options.quiet:
        where = "these processes"
        if cluster is None:
            after = ", which runs the stages one after the other" * (result.num_stages > 1)
            where = f"one process{after}"
        print_figures(engine.config.schedule.name, result, where)
        measured = fastest(engine.shapes)
        told = "" if measured is None else f"drafts: {measured.told}"
        for line in filter(None, (told, pipeline_note(options, engine.config))):
            print(line, file=sys.stderr)
    if cluster is not None:
        report_processes(engine.pipeline.reports(), options)


def print_figures(name: str, result: DecodeResult, where: str) -> None:
    elapsed = result.token_times_s[-1] - result.prefill_s
    print(
        f"[{name}, n = {result.num_stages}] {result.num_tokens} tokens after the "
        f"first in {result.num_steps} steps: equivalent acceptance length "
        f"{shown(result.equivalent_acceptance_length)}, acceptance rate "
        f"{shown(result.draft_acceptance_rate)}; {result.num_tokens / max(elapsed, 1e-9):.0f} "
        f"tokens/s in {where}, {result.prefill_s * 1e3:.0f} ms to the first "
        f"token; {result.ending}",
        file=sys.stderr,
    )


def report_processes(reports: "list[TimelineReport]", options: DecodeOptions) -> None:
    from .timeline import chrome_trace

    if not options.quiet:
        for report in reports:
            parts = ", ".join(
                f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in report["seconds"].items()
            )
            print(f"{report['name']}: {parts}; {report['peak_rss_mb']:.0f} MB", file=sys.stderr)
    if options.trace is not None:
        write_atomically(options.trace, json.dumps(chrome_trace(reports)).encode())


def main(words: Sequence[str] | None = None) -> None:
    """Decode the prompt given in ``words``, by default this process's command-line arguments."""
    words = sys.argv[1:] if words is None else words
    commands = commands_of(WINGS)
    if commands and words and not words[0].startswith("-"):
        commands[subcommand(words[0], [*commands])].start(words[1:])
        return
    options = DecodeOptions.read(words)
    if (decode := chosen_decoder(WINGS, options)) is not None:
        decode(options)
        return
    check_paths([options.checkpoint], options.target, options.draft_model)
    with backend_of(options) as cluster:
        if cluster is None or cluster.is_controller:
            run(options, cluster)
        else:
            cluster.serve()


if __name__ == "__main__":
    run_command(main)
