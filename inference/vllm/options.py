"""Options of the command that starts vLLM with guesses in flight."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...options import Options, option

EXAMPLE = """example:
  pipedraft vllm out/smollm2 --pipeline-parallel-size 2 --draft ngram
  pipedraft vllm out/smollm2 --draft suffix --run --port 8000 --max-model-len 4096

Options that are not listed here go to vLLM. docs/engines.md says what is refused and when it pays.
"""


@dataclass(frozen=True, kw_only=True)
class VllmOptions(Options):
    """Start vLLM so that one request's draft tokens fill its pipeline, or print how."""

    PROG: ClassVar[str] = "pipedraft vllm"
    EXAMPLE: ClassVar[str] = EXAMPLE

    model: str
    """target's folder or Hub id; may also be the first word, without --model"""
    pipeline_parallel_size: int = option(2, least=2)
    """pipeline stages"""
    draft: str = "ngram"
    """ngram, suffix, head:FOLDER (an EAGLE or MTP head on the last rank), model:FOLDER (a small
    causal LM with the target's tokenizer), or oracle:FILE:RATE to measure what a draft with this
    acceptance rate gains"""
    trace: Path | None = option(None, metavar="FILE")
    """write every computed token for `python -m pipedraft.inference.conformance`"""
    engine_python: Path | None = option(None, metavar="FILE")
    """python executable in the environment with vLLM; default: `vllm` on the PATH"""
    untested: bool = False
    """accept another version of vLLM, and settings that were not tried"""
    run: bool = False
    """start vLLM instead of printing the command"""
