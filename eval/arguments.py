"""Command line of an evaluation; subcommands have parsers of their own."""

from pathlib import Path

from pipedraft.errors import Parser
from pipedraft.eval.scores import add_score_arguments
from pipedraft.eval.traces import add_trace_arguments
from pipedraft.inference.arguments import (
    add_backend_arguments,
    add_schedule_arguments,
    listed,
    positive,
    temperature,
)
from pipedraft.inference.config import RULE_NAMES
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
  python -m pipedraft.eval replay out/eval --stages 2,8  other pipelines from OUT/traces
  python -m pipedraft.eval edge --help                   drafts on one side of a link
  python -m pipedraft.eval table NAME --out OUT          a paper's table, ours beside it, or a
                                                         YAML file, as drafts on tuned targets
"""
DEFAULT_STAGES = 4


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m pipedraft.eval",
        description="Decode benchmarks with drafts and compare them with autoregressive decoding.",
        epilog=EXAMPLE,
    )
    drafts = parser.add_mutually_exclusive_group(required=True)
    drafts.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="DIR",
        help="checkpoint folder or Hub repository of a draft; may be given several times",
    )
    drafts.add_argument(
        "--draft-model",
        metavar="DIR",
        help="folder or Hub name of a language model with the target's tokenizer, as the draft "
        "(its own schedule is pipeinfer); needs --target",
    )
    add = parser.add_argument
    add("--target", help="folder or Hub name of the target; default: the one the draft names")
    add(
        "--benchmarks",
        type=listed(str),
        required=True,
        metavar="NAMES",
        help="comma list of mt_bench, gsm8k, humaneval, alpaca, spec_bench, its parts cnn_dm, "
        "natural_questions (nq), wmt14_de_en, rag, or paths of .jsonl files with rows of prompt, "
        "turns or messages",
    )
    add(
        "--data-dir",
        metavar="D",
        help="folder with mt_bench/question.jsonl, gsm8k/test.jsonl, humaneval/HumanEval.jsonl[.gz]"
        ", alpaca/alpaca_data.json[l], spec_bench/question.jsonl, or hub: or hub:owner/name; "
        "default: the repository's own prompts of the first three",
    )
    _add_decoding_arguments(parser)
    _add_measuring_arguments(parser)
    add_backend_arguments(parser)
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help="cost model (JSON, as --calibrate writes it) for the modeled speed-up S; default: "
        "links and verification free, a draft forward by its layers",
    )
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="write the cost model that this run's measurements make: the time of a row more, a "
        "hop, a verification, a draft forward",
    )
    add("--out", type=Path, required=True, metavar="OUT", help="folder of the results")
    add_trace_arguments(parser)
    add_score_arguments(parser)
    return parser


def _add_decoding_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--schedule",
        type=listed(str),
        metavar="NAMES",
        help=f"comma list of {', '.join(SCHEDULES)} (default: each draft's own)",
    )
    add(
        "--stages",
        type=positive,
        metavar="N",
        help="pipeline stages of the target; default: those the draft was trained for, else "
        f"{DEFAULT_STAGES}",
    )
    add(
        "--temperature",
        type=listed(temperature),
        default=[0.0],
        metavar="T",
        help="comma list; 0 is greedy (default: 0)",
    )
    add_schedule_arguments(parser, are_lists=True)
    add(
        "--verifier",
        choices=["auto", *RULE_NAMES],
        default="auto",
        help="acceptance rule at temperatures above 0 (default: auto)",
    )


def _add_measuring_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--limit",
        type=positive,
        metavar="P",
        help="the first P prompts of each benchmark (default: all)",
    )
    add(
        "--repeats",
        type=positive,
        default=1,
        metavar="R",
        help="decode everything R times with the same random numbers: the same texts, other times, "
        "which tell the machine's noise from the prompts' (default: 1)",
    )
    add(
        "--max-new-tokens",
        type=positive,
        default=128,
        metavar="M",
        help="new tokens of each turn (default: 128)",
    )
    add("--seed", type=int, default=0, help="of the sampling and the bootstrap (default: 0)")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of target and draft (default: float32, for which greedy output is exact)",
    )
    add("--device", default="auto", help="e.g. cpu, cuda:0 (default: the accelerator if any)")
    add(
        "--no-lossless",
        action="store_true",
        help="leave out the comparison of greedy texts with transformers, and the acceptance by "
        "entropy: what takes the whole target once more",
    )
