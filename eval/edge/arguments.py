"""Options for `eval edge`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...inference.arguments import Dtype, FilterOptions, PlaceOptions, read_temperature
from ...inference.edge.channel import split_links
from ...inference.rules import RuleName
from ...options import option
from ..arguments import DraftOptions

EXAMPLE = """\
example:
  pipedraft eval edge --draft ngram --target assets/target --benchmarks gsm8k,mt_bench \\
      --links 5g,4g,wifi --temperature 0,1 --limit 4 --out out/edge

Networks and outputs are real, the clock is virtual: computing takes the constants from --times, and
every message crosses the link at its encoded size. Prints the tables and writes results.json,
report.md and manifest.json into --out; `pipedraft eval report OUT` plots the latencies. Baselines:
the cloud alone, co-located speculation, stop and wait, and the edge alone.
"""


@dataclass(frozen=True, kw_only=True)
class EdgeOptions(DraftOptions, PlaceOptions, FilterOptions):
    """Decode benchmarks across virtual links with several methods."""

    PROG: ClassVar[str] = "pipedraft eval edge"
    EXAMPLE: ClassVar[str] = EXAMPLE

    checkpoint: str | None = option(None, metavar="DIR")
    """FlexSpec draft's folder or Hub name"""
    benchmarks: tuple[str, ...] = option(metavar="NAMES")
    """comma list of benchmarks, as in eval"""
    data_dir: str | None = option(None, metavar="D")
    """see eval --help"""
    limit: int | None = option(None, metavar="P", least=1)
    """first P prompts per benchmark; default: all"""
    methods: tuple[str, ...] = option((), metavar="NAMES")
    """comma list of methods; default: all"""
    links: tuple[str, ...] = option(("5g", "4g", "wifi"), metavar="LINKS", split=split_links)
    """comma list of 5g, 4g, wifi, TRACE.csv, 5g:TRACE.csv, or your link's numbers from rtt on:
    rtt=60,up=2,down=10,loss=0.005,jitter=5 (rtt, jitter: ms; up, down: Mbit/s; loss: fraction of
    packets). Left out, down is up, and loss and jitter are 0"""
    temperature: tuple[float, ...] = option((0.0,), metavar="T", parse=read_temperature)
    """comma list of temperatures"""
    times: str = option("picospec", metavar="TIMES")
    """picospec, picospec_llama, flexspec, flexspec_145ms, flexspec_12ms, flexspec_10.5ms, or a JSON
    file with draft_s, verify_s, cloud_draft_s and optionally verify_row_s, alone_s, edge_layer_s,
    prompt_row_s, jitter"""
    draft_length: int = option(4, metavar="K", least=1)
    """draft length for stop_and_wait and dssd"""
    rule: RuleName | None = None
    """acceptance rule at T > 0; default: each method's own"""
    policy: str = "geometric"
    """draft length policy: fixed:K, eq11, alg2 or geometric; stop_and_wait, dssd and pearl have
    their own"""
    token_bytes: int = option(0, metavar="B", least=0)
    """extra bytes sent to the target with each draft token, in addition to its id"""
    payload_tokens: int = option(10, metavar="K", least=1)
    """number of the target's most likely tokens that topk and tail_escape send with a rejection"""
    tail_samples: int = option(4, metavar="M", least=1)
    """number of sampled tokens that tail_escape sends with a rejection"""
    max_new_tokens: int = option(128, metavar="M", least=1)
    """new tokens per answer"""
    dtype: Dtype = "float32"
    """dtype for target and draft; greedy output is exact in float32"""
    seed: int = option(0, metavar="N", least=0)
    """random seed"""
    no_lossless: bool = False
    """do not compare outputs with autoregressive decoding"""
    out: Path = option(metavar="OUT")
    """results folder"""
