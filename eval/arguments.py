"""Options of an evaluation and of the subcommands that decode; the others have their own."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pipedraft.cli import Options, option
from pipedraft.inference.arguments import (
    BackendOptions,
    Dtype,
    FilterOptions,
    PlaceOptions,
    Rule,
    ScheduleOptions,
    TemplateOptions,
    read_temperature,
)
from pipedraft.inference.config import RuleName
from pipedraft.inference.schedules import SCHEDULES

EXAMPLE = """\
example:
  python -m pipedraft.eval --checkpoint out/spd_tiny --benchmarks mt_bench,gsm8k,humaneval \\
      --limit 16 --max-new-tokens 128 --temperature 0,1 --out out/eval
  python -m pipedraft.eval --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B \\
      --benchmarks gsm8k --schedule pipeinfer,eagle --stages 4 --out out/draft_model

writes results.json, report.md, report.html, manifest.json and two plots into --out and prints the
table. What was decoded is kept in OUT/traces: the same command goes on after a kill, --shard shares
it out. The autoregressive baseline is always part of it. Without --data-dir the repository's own
small prompt files are used; --data-dir hub: downloads the published benchmarks.

  python -m pipedraft.eval compare out/eval out/other    what differs between runs; see its --help
  python -m pipedraft.eval report out/eval out/other     one HTML page of runs; see its --help
  python -m pipedraft.eval replay out/eval --cost h100   other hardware from OUT/traces
  python -m pipedraft.eval edge --help                   drafts on one side of a link
  python -m pipedraft.eval parity --checkpoint DIR       trained well, accepts nothing: why
  python -m pipedraft.eval table NAME --out OUT          a paper's table, ours beside it, or a
                                                         YAML file of rows
"""
EDGE_EXAMPLE = """\
example:
  python -m pipedraft.eval edge --draft-model out/draft_model/best --target assets/target \\
      --benchmarks gsm8k,mt_bench --links 5g,4g,wifi --temperature 0,1 --limit 4 --out out/edge

Networks and outputs are real, the clock is virtual: computing takes the constants of --times, every
message crosses the link as the bytes it is encoded to. Writes results.json, report.md and
manifest.json into --out and prints the tables; `eval report OUT` plots the latencies. The cloud
alone, co-located speculation, stop and wait and the edge alone are the baselines.
"""
TABLE_EXAMPLE = """\
example:
  python -m pipedraft.eval table --list
  python -m pipedraft.eval table spd1 --limit 4 --data-dir data/eval --out out/tables/spd1
  python -m pipedraft.eval table flowspec1 --target Qwen/Qwen3-8B --checkpoints heads.yaml \\
      --out out/tables/flowspec1

prints the table and writes table.md, table.json, manifest.json and the entries behind it
(results.json) into --out. A row whose checkpoint is missing names the command that makes it. What
a pipeline decoded is kept in OUT/traces: the same command goes on after a kill.
"""


PARITY_EXAMPLE = """\
example:
  python -m pipedraft.eval parity --checkpoint out/eagle3
  python -m pipedraft.eval parity --checkpoint out/eagle3 --exported out/sglang --limit 8
  python -m pipedraft.eval parity --checkpoint out/spd --benchmarks own.jsonl --json out/p.json
  python -m pipedraft.eval parity --checkpoint out/eagle3 --engine vllm --depth 3

A draft that trained well and accepts nothing: the same prompts go through the training's forward
pass, greedy decoding with chains, and the files that serving engines load. What differs is named at
the first place where it does, with status 1; 0: nothing does. The first turn of each prompt counts.
"""


ENGINES_EXAMPLE = """\
example:
  make engines                       vLLM's environment, heads of 60 steps, and all of this
  python -m pipedraft.eval engines --only whole,D1

Status 1: a head does not agree with ours, or a planted fault is not named.
"""


def read_share(text: str) -> str:
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
        raise ValueError(f"--shard: {text!r} is no share; give for example 1/4, 2/4, 3/4 and 4/4")
    return text


@dataclass(frozen=True, kw_only=True)
class EvalOptions(TemplateOptions, BackendOptions, FilterOptions, ScheduleOptions):
    """Decode benchmarks with drafts and compare them with autoregressive decoding."""

    PROG: ClassVar[str] = "pipedraft eval"
    EXAMPLE: ClassVar[str] = EXAMPLE
    SETTINGS_ARE_LISTS: ClassVar[bool] = True
    ONE_OF = (("checkpoint", "draft_model", "draft"),)

    checkpoint: tuple[str, ...] = option((), metavar="DIR", repeated=True)
    """checkpoint folder or Hub repository of a draft; may be given several times"""
    draft_model: str | None = option(None, metavar="DIR")
    """folder or Hub name of a language model with the target's tokenizer, as the draft (its own
    schedule is pipeinfer); needs --target"""
    draft: Literal["ngram", "suffix"] | None = None
    """a draft without a network: what followed the same tokens before; needs --target"""
    target: str | None = None
    """folder or Hub name of the target; default: the one the draft names"""
    benchmarks: tuple[str, ...] = option(metavar="NAMES")
    """comma list of mt_bench, gsm8k, humaneval, alpaca, spec_bench, its parts cnn_dm,
    natural_questions (nq), wmt14_de_en, rag, or paths of .jsonl files with rows of prompt, turns or
    messages"""
    data_dir: str | None = option(None, metavar="D")
    """folder with mt_bench/question.jsonl, gsm8k/test.jsonl, humaneval/HumanEval.jsonl[.gz],
    alpaca/alpaca_data.json[l], spec_bench/question.jsonl, or hub: or hub:owner/name; default: the
    repository's own prompts of the first three"""
    schedule: tuple[str, ...] = option((), metavar="NAMES", known=tuple(SCHEDULES))
    """comma list of schedules; default: each draft's own"""
    stages: int | None = option(None, least=1)
    """pipeline stages of the target; default: those the draft was trained for, else 4"""
    temperature: tuple[float, ...] = option((0.0,), metavar="T", parse=read_temperature)
    """comma list; 0 is greedy"""
    verifier: Rule = "auto"
    """acceptance rule at temperatures above 0"""
    limit: int | None = option(None, metavar="P", least=1)
    """the first P prompts of each benchmark; default: all"""
    repeats: int = option(1, metavar="R", least=1)
    """decode everything R times with the same random numbers: the same outputs, other times, which
    tell the machine's noise from the prompts'"""
    sequences: int = option(1, metavar="N", least=1)
    """conversations decoded at once, sooner; each one's outputs and counts are those that it has
    alone, wall-clock times are left out"""
    max_new_tokens: int = option(128, metavar="M", least=1)
    """new tokens of each turn"""
    seed: int = option(0, metavar="N", least=0)
    """of the sampling and the bootstrap"""
    dtype: Dtype = "float32"
    """of target and draft; float32, for which greedy output is exact; auto: on a GPU as the target
    is stored"""
    bitwise: bool = False
    """the target computes each row as plain decoding would, to the last bit, and outputs are
    compared with plain decoding's instead of those of transformers; slower"""
    never_slower: bool = False
    """time the rounds with and without the draft, and shrink or pause it where it loses"""
    no_lossless: bool = False
    """leave out the comparison of greedy outputs with transformers, and the acceptance by entropy:
    what takes the whole target once more"""
    cost: str | None = option(None, metavar="PRESET|FILE")
    """cost model for the modeled speed-up S: h100, a100, rtx4090, jetson_orin, this_cpu, or a file
    as --calibrate writes it; default: rows, links and verification free, a draft forward by its
    layers"""
    score: bool = False
    """add gsm8k's accuracy (also of its part of spec_bench) to every method: the last number of an
    answer, or the one after ####, equals the reference"""
    save_answers: bool = False
    """write every method's answers into OUT/answers as JSON lines that evalplus (task_id, solution)
    and lm-evaluation-harness read"""
    calibrate: Path | None = None
    """write the cost model that this run's measurements make: the time of a row more, a hop, a
    verification, a draft forward"""
    shard: str | None = option(None, metavar="I/N", parse=read_share)
    """decode the I-th of N shares of the prompts into OUT/traces and write no report; afterwards
    the same command without --shard decodes what is left and reports all"""
    fresh: bool = False
    """decode again what OUT/traces has; with --shard what it has of that share, the other shares of
    the same N stay"""
    out: Path = option(metavar="OUT")
    """folder of the results"""

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
        if self.shard is not None and self.calibrate is not None:
            raise ValueError(
                f"--shard: {self.shard}, but --calibrate measures all prompts in one run; leave "
                "out --shard or --calibrate"
            )


@dataclass(frozen=True, kw_only=True)
class EdgeOptions(PlaceOptions, FilterOptions):
    """Decode benchmarks across virtual links by several methods."""

    PROG: ClassVar[str] = "pipedraft eval edge"
    EXAMPLE: ClassVar[str] = EDGE_EXAMPLE
    ONE_OF = (("checkpoint", "draft_model", "draft"),)

    checkpoint: str | None = option(None, metavar="DIR")
    """folder or Hub name of a FlexSpec draft"""
    draft_model: str | None = option(None, metavar="DIR")
    """a language model with the target's tokenizer as the draft; needs --target"""
    draft: Literal["ngram", "suffix"] | None = None
    """a draft without a network, as of eval; needs --target"""
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
    """comma list of 5g, 4g, wifi, TRACE.csv, 5g:TRACE.csv"""
    temperature: tuple[float, ...] = option((0.0,), metavar="T", parse=read_temperature)
    """comma list"""
    times: str = option("picospec", metavar="TIMES")
    """picospec, picospec_llama, flexspec, flexspec_145ms, flexspec_12ms, flexspec_10.5ms, or a JSON
    file of draft_s, verify_s, cloud_draft_s and perhaps verify_row_s, alone_s, edge_layer_s"""
    draft_length: int = option(4, metavar="K", least=1)
    """of stop_and_wait and dssd"""
    rule: RuleName | None = None
    """acceptance at T > 0; default: each method's own"""
    policy: str = "geometric"
    """draft length, except of stop_and_wait, dssd and pearl, which have their own: fixed:K, eq11,
    alg2 or geometric"""
    token_bytes: int = option(0, metavar="B", least=0)
    """that go up with each draft token besides its id"""
    payload_tokens: int = option(10, metavar="K", least=1)
    """the target's best tokens in a rejection, by topk and tail_escape"""
    tail_samples: int = option(4, metavar="M", least=1)
    """drawn tokens in a rejection, by tail_escape"""
    max_new_tokens: int = option(128, metavar="M", least=1)
    """of each answer"""
    dtype: Dtype = "float32"
    """of target and draft; float32, for which greedy output is exact"""
    seed: int = option(0, metavar="N", least=0)
    """of all that is random"""
    no_lossless: bool = False
    """do not compare outputs with plain decoding"""
    out: Path = option(metavar="OUT")
    """folder of the results"""


@dataclass(frozen=True, kw_only=True)
class TableOptions(PlaceOptions):
    """Run a specification, as a paper's table is, with the drafts at hand."""

    PROG: ClassVar[str] = "pipedraft eval table"
    EXAMPLE: ClassVar[str] = TABLE_EXAMPLE

    name: str = option("", metavar="NAME", positional=True)
    """of the table (see --list), or a YAML file"""
    list: bool = False
    """name all tables, a line each, and end"""
    target: str | None = None
    """folder or Hub name; default: the specification's, else the embedded one"""
    checkpoints: tuple[str, ...] = option(("out",), metavar="PLACE", many=True)
    """folders of runs to find the drafts in, or YAML files of role: folder"""
    limit: int | None = option(None, metavar="P", least=1)
    """the first P prompts of each benchmark"""
    data_dir: str | None = option(None, metavar="D")
    """of the benchmarks' official files; see eval --help"""
    max_new_tokens: int | None = option(None, metavar="M", least=1)
    """a turn; default: 128"""
    dtype: Dtype | None = None  # type: ignore[assignment]  # None: the specification's
    """of target and draft; default: the specification's, float32"""
    seed: int | None = option(None, metavar="N", least=0)
    """of the sampling and the bootstrap; default: 0"""
    sequences: int = option(1, metavar="N", least=1)
    """conversations decoded at once; as of eval --help"""
    shard: str | None = option(None, metavar="I/N", parse=read_share)
    """decode the I-th of N shares of the prompts; as of eval --help"""
    fresh: bool = False
    """decode again what OUT/traces has; as of eval --help"""
    out: Path = option(Path(), metavar="OUT")
    """folder of the results"""


@dataclass(frozen=True, kw_only=True)
class EnginesOptions(Options):
    """Decode with every exported head in vLLM and here, with old exports, and planted faults."""

    PROG: ClassVar[str] = "pipedraft eval engines"
    EXAMPLE: ClassVar[str] = ENGINES_EXAMPLE

    engine_python: Path = option(Path("out/engines/vllm/bin/python"), metavar="FILE")
    """python of the environment that has vLLM"""
    only: tuple[str, ...] = option((), metavar="NAMES")
    """comma list: the cases with one of these words in their names; default: all"""
    benchmarks: tuple[str, ...] = option(("mt_bench", "gsm8k", "humaneval"), metavar="NAMES")
    """as of an evaluation"""
    data_dir: str | None = option(None, metavar="D")
    """see eval --help"""
    limit: int = option(2, metavar="P", least=1)
    """the first P prompts of each"""
    depth: int = option(3, metavar="K", least=1)
    """draft tokens of a chain, for heads that have no number of their own"""
    max_new_tokens: int = option(64, metavar="M", least=2)
    """of each answer"""
    out: Path = option(Path("out/engines"), metavar="OUT")
    """folder of engines.json"""


@dataclass(frozen=True, kw_only=True)
class ParityOptions(PlaceOptions):
    """Find the first place where a draft's training, its decoding and its exported files part."""

    PROG: ClassVar[str] = "pipedraft eval parity"
    EXAMPLE: ClassVar[str] = PARITY_EXAMPLE

    checkpoint: str = option(metavar="DIR")
    """checkpoint folder or Hub repository of a draft, or of a head in the layouts of SafeAILab,
    SpecForge or speculators, which needs --target"""
    target: str | None = None
    """folder or Hub name of the target; default: the one the draft names"""
    trained_tokenizer: str | None = option(None, metavar="DIR")
    """folder or Hub name of the tokenizer, with its chat template, that the training data was made
    with; default: the target's"""
    exported: tuple[str, ...] = option((), metavar="DIR", repeated=True)
    """folder of exported files, or of a head in their layouts; may be given several times; default:
    exports made for this, in every layout that the draft has"""
    benchmarks: tuple[str, ...] = option(("mt_bench", "gsm8k", "humaneval"), metavar="NAMES")
    """as of an evaluation"""
    data_dir: str | None = option(None, metavar="D")
    """see eval --help"""
    limit: int = option(2, metavar="P", least=1)
    """the first P prompts of each"""
    depth: int = option(7, metavar="K", least=1)
    """draft tokens of a chain, for drafts that have no number of their own"""
    max_new_tokens: int = option(48, metavar="M", least=2)
    """of each answer"""
    dtype: Dtype = "float32"
    """of target and draft; in others rounding hides small differences"""
    engine: Literal["vllm"] | None = None
    """decode the prompts in this engine, too, and compare its draft tokens"""
    engine_python: Path = option(Path("out/engines/vllm/bin/python"), metavar="FILE")
    """python of the environment that has the engine"""
    engine_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """of the engine; default: --dtype"""
    json: Path | None = option(None, metavar="FILE")
    """write counts and findings there, too"""
