"""Decode one prompt: text is streamed as it becomes certain, then the figures."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pipedraft.errors import UsageError, leave_at_interrupts, run_command

if __name__ == "__main__":
    leave_at_interrupts()

from pipedraft.files import make_place, write_atomically
from pipedraft.inference import remote_command
from pipedraft.inference.arguments import (
    BackendOptions,
    FilterOptions,
    Rule,
    ScheduleOptions,
    Stream,
    backend_of,
    encode,
    place_of,
    read_temperature,
)
from pipedraft.inference.costs import read_cost
from pipedraft.inference.remote_command import ServerOptions
from pipedraft.options import Values, option, subcommand

if TYPE_CHECKING:
    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.result import DecodeResult
    from pipedraft.inference.timeline import Report
    from pipedraft.inference.transport.cluster import Cluster
    from pipedraft.models.draft import Draft
    from pipedraft.models.language_model import LanguageModelDraft
    from pipedraft.models.lookup import Lookup

EXAMPLE = """example:
  python -m pipedraft.inference --checkpoint out/spd --prompt "What is 12 + 30?"
  python -m pipedraft.inference --checkpoint out/eagle3 --schedule flowspec --stages 4 --prompt "Hi"
  python -m pipedraft.inference --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --stages 4 \\
      --prompt "Hi"
  python -m pipedraft.inference --target assets/target --schedule autoregressive --prompt "Hi"
  python -m pipedraft.inference --target assets/target --draft suffix --stages 4 --prompt "Hi"
  python -m pipedraft.inference --checkpoint out/spd --backend process --processes 4 \\
      --prompt "Hi"

  python -m pipedraft.inference serve --target assets/target   the target for drafts elsewhere
  python -m pipedraft.inference --server 127.0.0.1:50051 --checkpoint out/flexspec --prompt "Hi"
  python -m pipedraft.inference --server cloud.example:50051 --draft-model out/draft_model \\
      --schedule picospec --tls-ca server.pem --token-file token --prompt "Hi"
  python -m pipedraft.inference --server 127.0.0.1:50051 --status

With --server and without a draft give --tokenizer, a folder or Hub id with the target's tokenizer.
`inference edge` is another name for `inference` with --server.
"""
MAX_PROMPT_BYTES = 2**24
SUBCOMMANDS = {
    "edge": "pipedraft.inference.__main__",
    "serve": "pipedraft.inference.transport.serve",
}
"""First word of the command line -> module with the parser of the words after it."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ServerOptions, BackendOptions, FilterOptions, ScheduleOptions):
    """Decode one prompt: text is streamed as it becomes certain, then the figures."""

    PROG: ClassVar[str] = "pipedraft inference"
    EXAMPLE: ClassVar[str] = EXAMPLE
    ONE_OF = (("prompt", "status"),)
    AT_MOST_ONE = (("checkpoint", "draft_model", "draft"), ("draft_model", "beside"))

    prompt: str | None = None
    """the user's message; - reads stdin"""
    checkpoint: str | None = None
    """folder or Hub id of a trained draft"""
    draft_model: str | None = None
    """folder or Hub id of a language model with the target's tokenizer, as the draft (its own
    schedule is pipeinfer)"""
    draft: Literal["ngram", "suffix"] | None = None
    """a draft without a network: what followed the same tokens before in the text"""
    beside: Literal["ngram", "suffix"] | None = None
    """such a draft's chain as one more branch of the checkpoint's trees"""
    target: str | None = None
    """folder or Hub id; default: the one the draft names"""
    raw: bool = False
    """do not apply the chat template"""
    schedule: str | None = None
    """name of a schedule; default: the draft's own"""
    stages: int | None = None
    """pipeline stages; default: the draft's"""
    temperature: float = option(0.0, metavar="T", parse=read_temperature)
    """0 is greedy"""
    verifier: Rule = "auto"
    """acceptance rule at temperatures above 0"""
    payload_tokens: int = option(10, metavar="K")
    """the target's best tokens in a rejection, by topk and tail_escape"""
    tail_samples: int = option(4, metavar="M")
    """drawn tokens in a rejection, by tail_escape"""
    max_new_tokens: int = 128
    """tokens of the answer at most"""
    seed: int = 0
    """of all that is random"""
    bitwise: bool = False
    """the target computes each row as plain decoding would, to the last bit: in bfloat16, too, the
    text is then plain decoding's; slower"""
    cost: str | None = option(None, metavar="PRESET|FILE")
    """cost model by which automatic budgets are chosen: h100, a100, rtx4090, jetson_orin, this_cpu,
    or a file of eval --calibrate; default: rows, links and verification free"""
    trace: Path | None = option(None, metavar="FILE")
    """write what every process did (Chrome trace; with --backend process)"""
    quiet: bool = False
    """only the text, no figures"""

    def read_prompt(self) -> str:
        text = self.prompt or ""
        if text == "-":
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
        """Settings of the schedule, and those that every schedule has."""
        shared = {name: getattr(self, name) for name in SHARED_SETTINGS}
        cost = {} if self.cost is None else {"cost": read_cost(self.cost)}
        return shared | self.filters | cost | self.settings


SHARED_SETTINGS = (
    "temperature",
    "verifier",
    "payload_tokens",
    "tail_samples",
    "seed",
    "bitwise",
    "max_new_tokens",
)
build_parser = DecodeOptions.parser


@dataclass(frozen=True)
class Choice:
    target: str
    revision: str | None
    schedule: str
    num_stages: int | None
    boundaries: tuple[int, ...]


def describe(options: DecodeOptions) -> Choice:
    """Which target and schedule the options and the checkpoint's description ask for."""
    from pipedraft.inference.sources import default_schedule
    from pipedraft.models.draft import read_description, resolve_folder

    stages, cut = options.stages, options.boundaries
    if options.checkpoint is None:
        if options.target is None:
            if options.draft_model is None:
                raise ValueError("--checkpoint: missing; give a trained draft, or --target for AR")
            raise ValueError(f"--target: missing; --draft-model {options.draft_model} names none")
        if options.draft_model is not None or options.draft is not None:
            kind = options.draft or "language_model"
            schedule = options.schedule or default_schedule(kind)
            return Choice(options.target, None, schedule, stages, cut)
        if options.schedule not in (None, "autoregressive"):
            raise ValueError(
                f"--schedule: {options.schedule!r} needs a draft; give --checkpoint DIR, "
                "--draft-model DIR, --draft ngram, or --schedule autoregressive"
            )
        return Choice(options.target, None, "autoregressive", stages, cut)
    description = read_description(resolve_folder(options.checkpoint))
    reference, architecture = description["target"], description["architecture"]
    return Choice(
        options.target or reference["name"],
        reference.get("revision") if options.target is None else None,
        options.schedule or default_schedule(description["draft_type"]),
        architecture.get("num_stages") if stages is None else stages,
        cut or tuple(architecture.get("boundaries") or ()),
    )


def run(options: DecodeOptions, cluster: "Cluster | None") -> None:
    text = options.read_prompt()
    if options.beside is not None and options.checkpoint is None:
        raise ValueError(f"--beside: {options.beside!r} without --checkpoint; give one, or --draft")
    if options.trace is not None and cluster is None:
        raise ValueError(f"--trace: {str(options.trace)!r} needs --backend process")
    if options.trace is not None:
        make_place("--trace", options.trace, b'{"traceEvents": ')
    from transformers.utils import logging

    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.pipelines.local import LocalPipeline
    from pipedraft.inference.sources import make_source
    from pipedraft.inference.sources.lookup import beside
    from pipedraft.models import load_draft
    from pipedraft.models.language_model import load_draft_model
    from pipedraft.models.lookup import make_lookup
    from pipedraft.models.placement import place_draft, resolve_dtype
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
        **options.decode_settings(),
    )
    if config.bitwise and cluster is not None:
        raise ValueError(
            "--bitwise: true with --backend process, whose stages have no such passes; leave it out"
        )
    tokenizer = load_tokenizer(choice.target, revision=choice.revision)
    device = place_of(options, cluster)
    dtype = resolve_dtype(options.dtype, device, choice.target, choice.revision)
    if cluster is None:
        target = load_target(choice.target, revision=choice.revision, dtype=dtype, device=device)
        choose_decoding_threads(target)
    else:
        target = cluster.load_target(
            choice.target,
            revision=choice.revision,
            num_stages=num_stages,
            boundaries=choice.boundaries,
            dtype=dtype,
            traces=options.trace is not None,
        )
    draft: Draft | LanguageModelDraft | Lookup | None = None
    if options.checkpoint is not None:
        draft = place_draft(load_draft(options.checkpoint, target), target)
    elif options.draft_model is not None:
        draft = load_draft_model(options.draft_model, target, tokenizer)
    elif options.draft is not None:
        draft = make_lookup(options.draft, target)
    source = None
    if options.beside is not None:
        source = beside(make_source(draft), options.beside)
    connect = LocalPipeline if cluster is None else cluster.connect
    engine = Engine(target, tokenizer, config, draft, source=source, connect=connect)
    stream = Stream(tokenizer)
    result = engine.decode(encode(tokenizer, text, options.raw), on_token=stream)
    stream.finish(result.text)
    if not options.quiet:
        print_figures(config, result, "one process" if cluster is None else "these processes")
    if cluster is not None:
        report_processes(engine.pipeline.reports(), options)


def print_figures(config: "DecodeConfig", result: "DecodeResult", where: str) -> None:
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


def report_processes(reports: "list[Report]", options: DecodeOptions) -> None:
    from pipedraft.inference.timeline import chrome_trace

    if not options.quiet:
        for report in reports:
            parts = ", ".join(
                f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in report["seconds"].items()
            )
            print(f"{report['name']}: {parts}; {report['peak_rss_mb']:.0f} MB", file=sys.stderr)
    if options.trace is not None:
        write_atomically(options.trace, json.dumps(chrome_trace(reports)).encode())


def main(words: Sequence[str] | None = None) -> None:
    """``words``: of the command line; None: this process's."""
    words = sys.argv[1:] if words is None else words
    first = words[0] if words and not words[0].startswith("-") else ""
    if first and subcommand(first, list(SUBCOMMANDS)) == "serve":
        from pipedraft.inference.transport import serve

        serve.run(words[1:])
        return
    options = DecodeOptions.read(words[bool(first) :])
    if first and options.server is None:
        raise UsageError("--server: missing; give HOST:PORT of `pipedraft inference serve`")
    if options.server is not None:
        remote_command.run(options)
        return
    with backend_of(options) as cluster:
        if cluster is None or cluster.is_controller:
            run(options, cluster)
        else:
            cluster.serve()


if __name__ == "__main__":
    run_command(main)
