"""Options for `eval --endpoint`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...data_recipes.chat_client import ChatServerOptions, is_address
from ...errors import UsageError
from ...inference.arguments import TemplateOptions, read_temperature
from ...options import option
from ..arguments import PromptOptions

EXAMPLE = """\
example:
  vllm serve Qwen/Qwen3-8B --per-request-spec-decode-metrics detailed \\
      --speculative-config '{"method": "eagle3", "model": "out/head", "num_speculative_tokens": 3}'
  pipedraft eval --endpoint http://127.0.0.1:8000 --tokenizer Qwen/Qwen3-8B \\
      --benchmarks mt_bench,gsm8k,humaneval --out out/endpoint

Acceptance comes from the answers of `pipedraft serve` and of vLLM (with that flag), else from
vLLM's counters around single requests. Times come from `pipedraft serve`, and from vLLM with
--enable-per-request-metrics. Writes the files of `pipedraft eval` into --out, for `eval compare`
and `eval report`. To resume, run the same command again.
"""


@dataclass(frozen=True, kw_only=True)
class EndpointOptions(PromptOptions, TemplateOptions, ChatServerOptions):
    """Ask a running server the benchmarks, and count its draft tokens by kind of text."""

    PROG: ClassVar[str] = "pipedraft eval --endpoint"
    EXAMPLE: ClassVar[str] = EXAMPLE

    endpoint: str = option(metavar="URL")
    """OpenAI-compatible server that decodes with a draft"""
    tokenizer: str = option(metavar="DIR")
    """folder or Hub name with the served model's tokenizer, which renders the prompts and splits
    the answers"""
    model: str | None = None
    """model name on the server; default: the only one that it lists"""
    concurrency: int = option(1, least=1)
    """requests at a time; above 1, times are left out"""
    temperature: tuple[float, ...] = option((0.0,), metavar="T", parse=read_temperature)
    """comma list of temperatures; 0 is greedy"""
    max_new_tokens: int = option(128, metavar="M", least=1)
    """new tokens per turn"""
    seed: int = option(0, metavar="N", least=0)
    """seed for sampling and bootstrap"""
    out: Path = option(metavar="OUT")
    """results folder"""
    fresh: bool = False
    """ask again despite the answers in OUT/traces"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_address(self.endpoint):
            raise UsageError(
                f"--endpoint: {self.endpoint!r} is no address; give for example "
                "http://127.0.0.1:8000"
            )
