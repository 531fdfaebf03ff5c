"""Decode one prompt without and with a draft, side by side, and measure both runs."""

import os
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from statistics import median
from textwrap import TextWrapper
from typing import ClassVar

from ..endings import leave_at_interrupts, run_command
from ..options import option

if __name__ == "__main__":
    leave_at_interrupts()

from .arguments import EngineOptions, check_paths

EXAMPLE = """example:
  pipedraft demo
  pipedraft demo --prompt "What kinds of tea do you have today?"
  pipedraft demo --checkpoint assets/heads/spd_n4 --tree-width 4
  pipedraft demo --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --schedule eagle \\
      --tree chain:4

Decodes greedily in this process. A terminal shows both answers side by side at their measured
speed, with accepted draft tokens in green; elsewhere one follows the other.
"""
HEAD = "assets/heads/eagle3"
GAIN = 1.1
"""Below this ratio, the demo tells why and what to try."""
PROMPT = "Write a Python function that returns the sum of a list."
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
FRAME_S = 0.04


@dataclass(frozen=True, kw_only=True)
class DemoOptions(EngineOptions):
    """Decode one prompt without and with a draft, side by side, and measure the draft's gain."""

    PROG: ClassVar[str] = "pipedraft demo"
    EXAMPLE: ClassVar[str] = EXAMPLE

    prompt: str = option(PROMPT, metavar="TEXT")
    """the user's message"""
    max_new_tokens: int = option(64, least=2)
    """maximum tokens in the answer"""
    repeats: int = option(3, least=1)
    """number of measured runs without the draft and with it, in turn, after a warm-up"""

    def completed(self) -> "DemoOptions":
        """Return the options, with the shipped draft added if none is named."""
        if self.checkpoint or self.draft_model or self.draft:
            return self
        if self.target is not None:
            raise ValueError(
                f"--target: {self.target!r} without a draft; give --checkpoint DIR, --draft-model "
                "DIR or --draft suffix"
            )
        return replace(self, checkpoint=HEAD)


build_parser = DemoOptions.parser


@dataclass
class DemoRun:
    """One way to decode the prompt, with its output and times."""

    name: str
    pieces: list[str] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    """For each token, True if it is an accepted draft token."""
    times_s: list[float] = field(default_factory=list)
    """Seconds from the start to each token, in the last run."""
    rates: list[float] = field(default_factory=list)
    """Tokens per second after the prefill, one entry per measured run."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def title(self) -> str:
        return f"{self.name}: {median(self.rates):.0f} tokens/s"


# -- side by side --------------------------------------------------------------------------------

Cell = tuple[str, int]
"""A character and its token's index."""


def wrapped(pieces: list[str], width: int) -> list[list[Cell]]:
    """Break a text into lines with at most ``width`` characters, if possible at spaces."""
    wrapper = TextWrapper(width, expand_tabs=False, replace_whitespace=False, drop_whitespace=False)
    cells = ((c, token) for token, piece in enumerate(pieces) for c in piece)
    lines: list[list[Cell]] = []
    for text in "".join(pieces).split("\n"):
        # Nothing is dropped, so the wrapped characters are the text's own.
        lines += [list(islice(cells, len(line))) for line in wrapper.wrap(text) or [""]]
        next(cells, None)  # the newline
    return lines


def painted(cells: list[Cell], answer: DemoRun, shown: int, width: int) -> str:
    """Return a line with the first ``shown`` tokens, accepted draft tokens in green."""
    seen = [cell for cell in cells if cell[1] < shown]
    parts = []
    for is_accepted, group in groupby(seen, key=lambda cell: answer.accepted[cell[1]]):
        text = "".join(character for character, _ in group)
        parts.append(f"{GREEN}{text}{PLAIN}" if is_accepted else text)
    # Padded by characters: color codes take no width.
    return "".join(parts) + " " * (width - len(seen))


def play(answers: list[DemoRun]) -> None:
    """Replay both answers on a terminal, at their measured speed."""
    size = shutil.get_terminal_size()
    width = (size.columns - 3) // 2
    columns = [wrapped(answer.pieces, width) for answer in answers]
    height = max(map(len, columns))
    print(" | ".join(f"{answer.title[:width]:<{width}}" for answer in answers))
    # The cursor cannot go back above the top of the screen.
    moves = height < size.lines - 4
    began, end = time.monotonic(), max(answer.times_s[-1] for answer in answers)
    while True:
        elapsed = time.monotonic() - began if moves else end
        # Times count from each answer's own start, so both begin together.
        counts = [sum(at <= elapsed for at in answer.times_s) for answer in answers]
        for row in range(height):
            found = [column[row] if row < len(column) else [] for column in columns]
            parts = zip(found, answers, counts, strict=True)
            print(" | ".join(painted(*part, width) for part in parts))
        if elapsed >= end:
            return
        time.sleep(FRAME_S)
        print(f"\x1b[{height}A", end="")


# -- the command ---------------------------------------------------------------------------------


def run(options: DemoOptions) -> None:
    """Decode without and with the draft in turn, show both answers, and compare them."""
    from ..machine_load import load_average
    from .auto_tree import FIRST
    from .command import encode, load_engine
    from .config import DecodeConfig
    from .defaults import measure_shape, with_shape
    from .engine import Engine
    from .generation import TextPieces, tokens_of

    if options.backend != "local":
        raise ValueError(f"--backend: {options.backend!r}; leave it out, this runs in one process")
    if not options.prompt.strip():
        raise ValueError(f"--prompt: {options.prompt!r} is empty; give at least one word")
    settings = options.engine_settings() | {"max_new_tokens": options.max_new_tokens}
    engine = load_engine(options, None, settings)
    config = engine.config
    if config.schedule.grows is None:
        raise ValueError("--schedule: autoregressive is what the demo compares with; give another")
    plain = DecodeConfig.of(
        "autoregressive", num_stages=config.num_stages, max_new_tokens=options.max_new_tokens
    )
    baseline = Engine(engine.target.model, engine.tokenizer, plain)  # type: ignore[union-attr]
    name = options.checkpoint or options.draft_model or options.draft
    ids = encode(engine.tokenizer, options.prompt, raw=False)
    measured = None
    if config.schedule.label == "auto":
        measured = measure_shape(engine, [ids])
        # One shape for all runs, so that their times differ by the machine alone.
        shape = FIRST if measured is None else measured.shape
        config = engine.config = with_shape(config, shape)
    label = ", ".join(filter(None, (config.schedule.name, config.schedule.label)))
    answers = [DemoRun("without a draft"), DemoRun(f"with {name} ({label})")]
    # In turn: if the machine slows down, it slows both. Turn 0 warms up.
    for turn in range(options.repeats + 1):
        for decoder, answer in zip((baseline, engine), answers, strict=True):
            pieces = TextPieces(engine.tokenizer, None)
            result = decoder.decode(ids, observer=pieces)
            answer.pieces = pieces.finish(result.text)
            answer.accepted = [token.accepted for token in tokens_of(result, answer.pieces)]
            answer.times_s = result.token_times_s
            if not result.num_tokens:
                raise ValueError(
                    f"--prompt: {options.prompt!r} is answered with one token, too few for a rate; "
                    "give another prompt"
                )
            if turn:
                answer.rates.append(result.tokens_per_second)
    print(f"prompt: {options.prompt}\n")
    if sys.stdout.isatty():
        play(answers)
    else:
        for answer in answers:
            print(f"{answer.title}\n{answer.text}\n")
    # ``result`` is the last one decoded, with the draft.
    print(verdict(answers, num_rounds=len(result.round_lengths), num_stages=config.num_stages))
    if gain(answers) < GAIN and config.num_stages == 1:
        told = None if measured is None else measured.told
        print(reason(load_average(), os.cpu_count() or 1, told))


def gain(answers: list[DemoRun]) -> float:
    """Return the draft's median gain: the ratio of neighboring runs, so that a drift cancels."""
    plain, drafted = answers
    return median(b / a for a, b in zip(plain.rates, drafted.rates, strict=True))


def reason(load: float | None, num_cores: int, measured: str | None) -> str:
    """Tell why the gain is small, and the next command.

    Args:
        load: the machine's load average.
        measured: the choice of a shape; None if the user gave one.
    """
    from ..machine_load import is_busy

    if is_busy(load, num_cores):
        return (
            f"the machine is busy (load average {load:.1f} on {num_cores} cores), and drafting "
            "needs its caches; when it is idle, try again: pipedraft demo"
        )
    if measured is None:
        return "this shape gains little here; to time all shapes, leave out --tree and --schedule"
    return (
        f"{measured}\na pass of this target takes so little time that drafting costs as much; a "
        "larger one gains more: make real, or pipedraft demo --target DIR --checkpoint DIR"
    )


def verdict(answers: list[DemoRun], *, num_rounds: int, num_stages: int) -> str:
    """Describe the draft's measured gain or cost."""
    plain, drafted = answers
    ratios = [b / a for a, b in zip(plain.rates, drafted.rates, strict=True)]
    ratio, count = gain(answers), len(drafted.pieces)
    same = "the same text" if plain.text == drafted.text else "not the same text: rounding"
    lines = [
        f"{sum(drafted.accepted)} of {count} tokens were accepted draft tokens: {num_rounds} "
        f"verification rounds instead of {count - 1} steps",
        f"with the draft {ratio:.2f} times as fast ({len(ratios)} runs of each in turn: "
        f"{min(ratios):.2f} to {max(ratios):.2f}), {same}",
    ]
    if ratio < 1:
        lines.append("here the draft costs more time than it saves")
    if num_stages > 1:
        lines.append(
            f"one process runs the {num_stages} stages one after the other; processes run them at "
            "once (docs/pipeline.md)"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the demo with this process's command line."""
    options = DemoOptions.read(sys.argv[1:]).completed()
    check_paths([options.checkpoint], options.target, options.draft_model)
    run(options)


if __name__ == "__main__":
    run_command(main)
