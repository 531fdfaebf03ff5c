"""Options for evaluations and decoding subcommands. Other subcommands define their own options."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ..errors import UsageError
from ..inference.arguments import (
    BackendOptions,
    Dtype,
    FilterOptions,
    FloatDtype,
    PlaceOptions,
    Rule,
    ScheduleOptions,
    TemplateOptions,
    check_draft_dtype,
    read_temperature,
)
from ..inference.schedules import SCHEDULES, known_schedule
from ..options import Options, option
from ..wings import commands_of, find_wings

EXAMPLE = """\
example:
  pipedraft eval --checkpoint assets/heads/eagle3 --benchmarks mt_bench,gsm8k,humaneval \\
      --limit 4 --max-new-tokens 64 --out out/eval
  pipedraft eval --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --benchmarks gsm8k \\
      --schedule pipeinfer,eagle --stages 4 --out out/draft_model

Prints a table and writes results.json, report.md, report.html, outputs.html, manifest.json and
charts/ into --out. The autoregressive baseline is always included. Without --data-dir the prompts
are this project's own; --data-dir hub: downloads the published benchmarks. OUT/traces keeps every
decoded turn: run the same command again to resume, or divide the work with --shard.

More commands, each with its own --help:
  eval compare     differences between runs on the same prompts
  eval report      one HTML page for several runs
  eval replay      the same runs on other hardware, computed from OUT/traces
  eval parity      why a head that trained well accepts nothing
"""
COMMANDS = commands_of(find_wings(__package__))
EXAMPLE += "".join(f"  eval {name:<12}{one.about}\n" for name, one in COMMANDS.items())
PARITY_EXAMPLE = """\
example:
  pipedraft eval parity --checkpoint assets/heads/eagle3
  pipedraft eval parity --checkpoint assets/heads/eagle3 --exported out/sglang --limit 8
  pipedraft eval parity --checkpoint assets/heads/spd_n4 --benchmarks chats.jsonl --json out/p.json
  pipedraft eval parity --checkpoint assets/heads/eagle3 --engine vllm --depth 3

For a draft that trained well and accepts nothing. The same prompts, first turns only, go through
the training's forward pass, greedy decoding with chains, and the files that serving engines load.

Exit status 0: all agree. 1: they differ; you see the first place where. 2: bad input.
"""


def read_share(text: str) -> str:
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
        raise ValueError(f"--shard: {text!r} is no share; give for example 1/4, 2/4, 3/4 and 4/4")
    return text


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Options):
    """draft and target"""

    ONE_OF = (("checkpoint", "draft_model", "draft"),)

    draft_model: str | None = option(None, metavar="DIR")
    """use this language model (folder or Hub name, with the target's tokenizer) as the draft;
    needs --target"""
    draft: Literal["ngram", "suffix"] | None = None
    """draft by n-gram or suffix lookup instead of a neural network; needs --target"""
    target: str | None = None
    """target's folder or Hub name; default: the target that the draft was trained for"""


@dataclass(frozen=True, kw_only=True)
class DraftsOptions(DraftOptions):
    """trained drafts"""

    checkpoint: tuple[str, ...] = option((), metavar="DIR", repeated=True)
    """a draft's checkpoint folder or Hub repository; repeatable"""
    draft_dtype: Dtype = "auto"
    """dtype for the drafts; auto: as --dtype; on a CPU, int8 drafts faster, and greedy output
    stays the same"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_draft_dtype(self.draft_dtype, self.checkpoint or self.draft_model)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
    """prompts"""

    benchmarks: tuple[str, ...] = option(metavar="NAMES")
    """comma list of mt_bench, gsm8k, humaneval, alpaca, spec_bench, its parts cnn_dm,
    natural_questions (nq), wmt14_de_en, rag, or paths to .jsonl files whose rows have prompt, turns
    or messages"""
    data_dir: str | None = option(None, metavar="D")
    """folder with mt_bench/question.jsonl, gsm8k/test.jsonl, humaneval/HumanEval.jsonl[.gz],
    alpaca/alpaca_data.json, spec_bench/question.jsonl, or hub: (the published data sets); default:
    the repository's own prompts for mt_bench, gsm8k and humaneval"""
    limit: int | None = option(None, metavar="P", least=1)
    """first P prompts per benchmark; default: all"""


@dataclass(frozen=True, kw_only=True)
class TargetOptions(TemplateOptions, BackendOptions):
    """target"""

    stages: int | None = option(None, least=1)
    """number of pipeline stages; default: the number that the draft was trained for, else 1, or 4
    with --schedule or --boundaries"""
    dtype: Dtype = "float32"
    """dtype for target and draft; greedy output is exact in float32; on a CPU, the others round
    only the weights; auto: the target's stored dtype on a GPU"""
    no_lossless: bool = False
    """do not compare greedy outputs with transformers, nor measure acceptance by entropy: both load
    the whole target a second time"""


@dataclass(frozen=True, kw_only=True)
class MethodOptions(FilterOptions, ScheduleOptions):
    """decoding"""

    SETTINGS_ARE_LISTS: ClassVar[bool] = True

    schedule: tuple[str, ...] = option(
        (), metavar="NAMES", parse=known_schedule, known=tuple(SCHEDULES)
    )
    """comma list of schedules, with specpipe for pipedec; default: the one that each draft was
    designed for; for --draft-model pipeinfer, or eagle with one stage"""
    temperature: tuple[float, ...] = option((0.0,), metavar="T", parse=read_temperature)
    """comma list of temperatures; 0 is greedy"""
    verifier: Rule = "auto"
    """acceptance rule at temperatures above 0"""
    max_new_tokens: int = option(128, metavar="M", least=1)
    """new tokens per turn"""
    seed: int = option(0, metavar="N", least=0)
    """seed for sampling and bootstrap"""
    repeats: int = option(1, metavar="R", least=1)
    """decode everything R times with the same random numbers: outputs are equal, so differences in
    time show the machine's noise, not the prompts'"""
    sequences: int = option(1, metavar="N", least=1)
    """number of conversations decoded at once, which is faster; outputs and counts stay the same as
    alone, but wall-clock times are left out"""
    bitwise: bool = False
    """compute each token in the target bit for bit as autoregressive decoding would, and compare
    outputs with autoregressive decoding instead of transformers; slower"""
    never_slower: bool = False
    """time rounds with and without the draft, and shrink or pause the draft where it slows decoding
    down"""
    cost: str | None = option(None, metavar="PRESET|FILE")
    """cost model for the modeled speed-up S: h100, a100, rtx4090, jetson_orin, this_cpu, or a file
    written by --calibrate; default: extra tokens per pass, links and verification take no time, and
    a draft forward costs its layers' size relative to the target's"""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """results"""

    out: Path = option(metavar="OUT")
    """results folder"""
    score: bool = False
    """add every method's accuracy on gsm8k and on spec_bench's gsm8k part: an answer is correct if
    its last number, or the one after ####, equals the reference"""
    save_answers: bool = False
    """write every method's answers into OUT/answers, as JSON lines for evalplus (task_id, solution)
    and lm-evaluation-harness"""
    calibrate: Path | None = None
    """write a cost model from measurements of extra tokens per pass, links, verification and draft
    forwards; decodes every turn again, as with --fresh"""
    shard: str | None = option(None, metavar="I/N", parse=read_share)
    """decode share I of N into OUT/traces without a report; afterwards the same command without
    --shard decodes the rest and reports all"""
    fresh: bool = False
    """decode again despite OUT/traces; with --shard, replace only this share and keep the others"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard is not None and self.calibrate is not None:
            raise ValueError(
                f"--shard: {self.shard}, but --calibrate measures all prompts in one run; leave "
                "out --shard or --calibrate"
            )


@dataclass(frozen=True, kw_only=True)
class EvalOptions(OutputOptions, MethodOptions, TargetOptions, PromptOptions, DraftsOptions):
    """Decode benchmarks with drafts and compare them with autoregressive decoding."""

    PROG: ClassVar[str] = "pipedraft eval"
    EXAMPLE: ClassVar[str] = EXAMPLE
    RARE: ClassVar[Sequence[str]] = (
        *("score", "save_answers", "calibrate", "shard", "verifier", "repeats", "sequences"),
        *("bitwise", "never_slower", "cost", "no_lossless", "chat_template_kwargs", "draft_dtype"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        timed = {
            "--repeats": self.repeats > 1,
            "--calibrate": self.calibrate is not None,
            "--backend process": self.backend == "process",
        }
        for name in [name for name, is_given in timed.items() if is_given and self.sequences > 1]:
            raise ValueError(
                f"--sequences: {self.sequences}, but {name} is there for times, which several "
                f"conversations at once do not have; leave out --sequences or {name}"
            )


@dataclass(frozen=True, kw_only=True)
class FewPromptsOptions(Options):
    """prompts"""

    benchmarks: tuple[str, ...] = option(("mt_bench", "gsm8k", "humaneval"), metavar="NAMES")
    """comma list of benchmarks, as in eval"""
    data_dir: str | None = option(None, metavar="D")
    """see eval --help"""
    limit: int = option(2, metavar="P", least=1)
    """first P prompts per benchmark"""


@dataclass(frozen=True, kw_only=True)
class ParityOptions(FewPromptsOptions, PlaceOptions):
    """Compare a draft in training, in decoding and as exported; find the first difference."""

    PROG: ClassVar[str] = "pipedraft eval parity"
    EXAMPLE: ClassVar[str] = PARITY_EXAMPLE

    checkpoint: str = option(metavar="DIR")
    """a draft's checkpoint folder or Hub repository, or a head in the SafeAILab, SpecForge or
    speculators layout, which needs --target"""
    target: str | None = None
    """target's folder or Hub name; default: the target that the draft was trained for"""
    trained_tokenizer: str | None = option(None, metavar="DIR")
    """folder or Hub name for the tokenizer (with chat template) used for the training data;
    default: the target's"""
    exported: tuple[str, ...] = option((), metavar="DIR", repeated=True)
    """folder with exported files, or with a head in an exported layout; repeatable; default: export
    every layout that the draft supports"""
    depth: int = option(7, metavar="K", least=1)
    """draft tokens per chain, for drafts without a fixed number"""
    max_new_tokens: int = option(48, metavar="M", least=2)
    """new tokens per answer"""
    dtype: FloatDtype = "float32"
    """dtype for target and draft, also of what is computed; rounding hides small differences"""
    engine: Literal["vllm", "transformers", "openvino", "llama.cpp"] | None = None
    """also decode the prompts in this engine, and compare its draft tokens"""
    engine_python: Path | None = option(None, metavar="FILE")
    """python executable in the environment with the engine, or llama.cpp's llama-server; default:
    the one in out/engines/ENGINE/bin, and for transformers our own"""
    starts: int = option(1, metavar="N", least=1)
    """with --engine openvino: decode in N fresh pipelines; each must accept the same number of
    draft tokens"""
    json: Path | None = option(None, metavar="FILE")
    """also write counts and findings to this file"""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"--engine-python": self.engine_python, "--starts": self.starts}
        for flag, value in given.items():
            if self.engine is None and value not in (None, 1):
                raise UsageError(
                    f"{flag}: {str(value)!r} without --engine; name an engine, or leave it out"
                )
