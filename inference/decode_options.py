"""Options of `pipedraft inference`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..files import Values
from ..options import Options, option
from ..wings import find_wings, options_of
from .arguments import EngineOptions, FilterOptions, read_temperature

WINGS = find_wings(__package__)
if TYPE_CHECKING:

    class WingOptions(Options): ...
else:
    WingOptions = options_of(WINGS)

EXAMPLE = """example:
  pipedraft inference --checkpoint assets/heads/spd_n4 --prompt "What is 12 + 30?"
  pipedraft inference --checkpoint assets/heads/eagle3 --schedule flowspec --stages 4 --prompt "Hi"
  pipedraft inference --target assets/target --draft suffix --stages 4 --prompt "Hi"
  pipedraft inference --target assets/target --schedule autoregressive --prompt "Hi"
  pipedraft inference --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --stages 4 \\
      --prompt "Hi"
  pipedraft inference --checkpoint assets/heads/spd_n4 --backend process --processes 4 \\
      --prompt "Hi"
"""
MAX_PROMPT_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(WingOptions, EngineOptions, FilterOptions):
    """Decode one prompt: stream the text as tokens are accepted, then print the figures."""

    PROG: ClassVar[str] = "pipedraft inference"
    EXAMPLE: ClassVar[str] = EXAMPLE + "".join(wing.example for wing in WINGS)
    ONE_OF: ClassVar[Sequence[Sequence[str]]] = (
        ["prompt", *(name for wing in WINGS for name in wing.needs_no_prompt)],
    )

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
    conformance: Path | None = option(None, metavar="FILE")
    """write every verified row for `python -m pipedraft.inference.conformance`"""
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
