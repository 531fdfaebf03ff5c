"""Latency of decoding across a link: `python -m pipedraft.eval edge --help`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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


def run(argv: Sequence[str]) -> None:
    """
    Args:
        argv: the words after ``edge``.
    """
    options = EdgeOptions.read(argv)
    from pipedraft.eval.runner import decode_links  # needs torch, which --help does not

    print(decode_links(options, argv))
