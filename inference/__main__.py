"""Decode one prompt: `pipedraft inference --help`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..endings import leave_at_interrupts, run_command
from ..options import option, subcommand

if __name__ == "__main__":
    leave_at_interrupts()

from ..files import Values, make_place, write_atomically
from .arguments import (
    EngineOptions,
    FilterOptions,
    RemoteOptions,
    backend_of,
    read_temperature,
)
from .result import DecodeResult, shown

if TYPE_CHECKING:
    from .ranks.cluster import Cluster
    from .timeline import TimelineReport

EXAMPLE = """example:
  pipedraft inference --checkpoint assets/heads/spd_n4 --prompt "What is 12 + 30?"
  pipedraft inference --checkpoint assets/heads/eagle3 --schedule flowspec --stages 4 --prompt "Hi"
  pipedraft inference --target assets/target --draft suffix --stages 4 --prompt "Hi"
  pipedraft inference --target assets/target --schedule autoregressive --prompt "Hi"
  pipedraft inference --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --stages 4 \\
      --prompt "Hi"
  pipedraft inference --checkpoint assets/heads/spd_n4 --backend process --processes 4 \\
      --prompt "Hi"

The target on a server, the draft here:
  pipedraft inference serve --target assets/target
  pipedraft inference --server 127.0.0.1:50051 --tokenizer assets/target --prompt "Hi"
  pipedraft inference --server 127.0.0.1:50051 --checkpoint out/flexspec --prompt "Hi"
  pipedraft inference --server cloud.example:50051 --draft-model out/draft_model \\
      --schedule picospec --tls-ca server.pem --token-file token --prompt "Hi"
  pipedraft inference --server 127.0.0.1:50051 --status

Without a draft, --server needs --tokenizer: a folder or Hub id with the target's tokenizer.
"""
MAX_PROMPT_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(RemoteOptions, EngineOptions, FilterOptions):
    """Decode one prompt: stream the text as tokens are accepted, then print the figures."""

    PROG: ClassVar[str] = "pipedraft inference"
    EXAMPLE: ClassVar[str] = EXAMPLE
    ONE_OF = (("prompt", "status"),)

    prompt: str | None = option(None, metavar="TEXT")
    """the user's message; - reads stdin"""
    raw: bool = False
    """do not apply the chat template"""
    temperature: float = option(0.0, metavar="T", parse=read_temperature)
    """0 is greedy"""
    max_new_tokens: int = 128
    """maximum tokens in the answer"""
    seed: int = 0
    """random seed"""
    trace: Path | None = option(None, metavar="FILE")
    """with --backend process: write every process's timeline as a Chrome trace"""
    quiet: bool = False
    """print only the answer: no thinking, no figures"""

    def read_prompt(self) -> str:
        text = self.prompt or ""
        if text == "-":
            if sys.stdin is None:
                raise ValueError("--prompt: - reads standard input, which is closed; give the text")
            content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
            if len(content) > MAX_PROMPT_BYTES:
                raise ValueError(f"--prompt: more than {MAX_PROMPT_BYTES} bytes; shorten it")
            text = content.decode(errors="surrogateescape")
        if not text.strip():
            raise ValueError(f"--prompt: {text[:40]!r} is empty; give at least one word")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"--prompt: {text[:40]!r} is not UTF-8 text; convert it") from error
        return text

    def decode_settings(self) -> Values:
        """Return the schedule's settings and the settings common to all schedules."""
        sampling = {name: getattr(self, name) for name in ("temperature", "seed", "max_new_tokens")}
        return self.engine_settings() | sampling | self.filters


build_parser = DecodeOptions.parser


def run(options: DecodeOptions, cluster: "Cluster | None") -> None:
    text = options.read_prompt()
    traces = options.trace is not None
    if options.trace is not None:
        if cluster is None:
            raise ValueError(f"--trace: {str(options.trace)!r} needs --backend process")
        make_place("--trace", options.trace, b'{"traceEvents": ')
    from .command import encode, load_engine, printed_answer

    engine = load_engine(options, cluster, options.decode_settings(), traces=traces)
    ids = encode(engine.tokenizer, text, options.raw)
    stream = printed_answer(engine.tokenizer, ids, options)
    result = engine.decode(ids, on_token=stream)
    stream.finish_line()
    if not options.quiet:
        where = "these processes"
        if cluster is None:
            after = ", which runs the stages one after the other" * (result.num_stages > 1)
            where = f"one process{after}"
        print_figures(engine.config.schedule.name, result, where)
    if cluster is not None:
        report_processes(engine.pipeline.reports(), options)


def print_figures(name: str, result: DecodeResult, where: str) -> None:
    elapsed = result.token_times_s[-1] - result.prefill_s
    print(
        f"[{name}, n = {result.num_stages}] {result.num_tokens} tokens after the "
        f"first in {result.num_steps} steps: equivalent acceptance length "
        f"{shown(result.equivalent_acceptance_length)}, acceptance rate "
        f"{shown(result.draft_acceptance_rate)}; {result.num_tokens / max(elapsed, 1e-9):.0f} "
        f"tokens/s in {where}, {result.prefill_s * 1e3:.0f} ms to the first token "
        f"({result.stop_reason})",
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
    if words and not words[0].startswith("-"):
        subcommand(words[0], ["serve"])
        from .edge import serve

        serve.run(words[1:])
        return
    options = DecodeOptions.read(words)
    if options.server is not None:
        from .command import decode_remotely

        decode_remotely(options)
        return
    with backend_of(options) as cluster:
        if cluster is None or cluster.is_controller:
            run(options, cluster)
        else:
            cluster.serve()


if __name__ == "__main__":
    run_command(main)
