"""Compare one head's tokens per second here and in other engines, in turn, on one core.

    make engines
    OMP_NUM_THREADS=1 python benchmarks/engines_speed.py --json   # on an idle machine

Every engine decodes the same prompts in float32, greedily, without a draft and with the head in
chains. The time includes prompts but not loading: each run begins with an uncounted warm-up prompt.
The last line gives the median tokens per second over the repeats.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pipedraft.endings import leave_at_interrupts, run_command
from pipedraft.errors import UsageError
from pipedraft.options import option

if __name__ == "__main__":
    leave_at_interrupts()

import pipedraft
from pipedraft.eval.arguments import FewPromptsOptions
from pipedraft.eval.engine_parity import (
    ENGINES,
    OPENVINO,
    EngineKind,
    ask_engine,
    engine_failure,
    target_file,
)
from pipedraft.eval.tables import Table, align_columns
from pipedraft.eval.tasks import Prompt, encode_turn, load_tasks
from pipedraft.files import Values
from pipedraft.models.exchange.export import export
from pipedraft.models.exchange.llama_cpp import export_gguf
from pipedraft.models.target import load_tokenizer
from pipedraft.pretrained import quieten

OURS = "pipedraft"
Prompts = Sequence[tuple[list[int], Prompt]]
Run = tuple[list[list[int]], float]
"""Outputs, and their wall time in seconds."""
Decode = Callable[[bool], Run]
"""Decodes all prompts without or with the head."""

EXAMPLE = """\
example:
  make engines
  OMP_NUM_THREADS=1 python benchmarks/engines_speed.py --repeats 1
"""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(FewPromptsOptions):
    """Compare tokens per second of one head here and in other engines, in turn, on one core."""

    PROG: ClassVar[str] = "benchmarks/engines_speed.py"
    EXAMPLE: ClassVar[str] = EXAMPLE

    target: str = "assets/target"
    """target's folder"""
    head: str = "assets/heads/eagle3"
    """checkpoint of an EAGLE-3 head, for the target"""
    engines: tuple[str, ...] = option(("vllm", "openvino", "llama.cpp"), metavar="NAMES")
    """comma list of engines beside ours; one that is not installed is skipped"""
    depth: int = option(3, metavar="K", least=1)
    """draft tokens per chain"""
    max_new_tokens: int = option(64, metavar="M", least=2)
    """new tokens per answer"""
    core: int = option(0, metavar="N", least=0)
    """the processor core for all engines"""
    repeats: int = option(5, metavar="R", least=1)
    """runs of each engine, in turn"""
    json: bool = False
    """print only the last line"""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name for name, engine in ENGINES.items() if "eagle3" in engine.layouts]
        for name in self.engines:
            if name not in known:
                raise UsageError(
                    f"--engines: {name!r} runs no EAGLE-3 head; choose from {', '.join(known)}"
                )
        if self.core not in (cores := os.sched_getaffinity(0)):
            usable = ", ".join(map(str, sorted(cores)))
            raise UsageError(f"--core: {self.core} may not be used; choose from {usable}")


@dataclass(kw_only=True)
class Rates:
    """Tokens per second for one engine: without a draft, and with the head."""

    alone: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    num_equal: int = 0
    """Number of runs with the same outputs as ours."""

    def row(self, name: str) -> list[str]:
        cells = [f"{statistics.median(x):.1f} ({min(x):.1f}-{max(x):.1f})" for x in self.both]
        share = statistics.median(self.drafted) / statistics.median(self.alone)
        return [name, *cells, f"{share:.2f}", f"{self.num_equal}/{2 * len(self.alone)}"]

    @property
    def both(self) -> tuple[list[float], list[float]]:
        return self.alone, self.drafted


def files_of(engine: EngineKind, options: SpeedOptions, place: Path) -> tuple[str, str]:
    """Write the target and the head into ``place`` for this engine, and return their paths."""
    target, layout = str(Path(options.target).resolve()), engine.layouts["eagle3"]
    files = place / "head"
    if layout == "gguf":
        target = target_file(engine, engine.python, target, place)
        export_gguf(Path(options.head), files, target=target)
    else:
        export(Path(options.head), layout, files, target=options.target)
    if engine is not OPENVINO:
        return target, str(files)
    words = engine.command(engine.python, "convert", target, files, place)
    environment = engine.environment(engine.python)
    made = subprocess.run(words, env=environment, capture_output=True, text=True)
    if made.returncode:
        raise engine_failure(made.stderr, made.returncode, engine.name)
    return str(place / "target"), str(place / "draft")


def engine_run(engine: EngineKind, options: SpeedOptions, prompts: Prompts, place: Path) -> Decode:
    """Return a function for decoding in a fresh process, with or without the head."""
    target, head = files_of(engine, options, place)
    longest = max(len(ids) for ids, _ in prompts) + options.max_new_tokens
    asked = [*prompts[:1], *prompts]
    settings = {"method": "eagle3", "model": head, "num_speculative_tokens": options.depth}
    request: Values = {
        "target": target,
        "dtype": "float32",
        "max_model_len": longest + 2 * options.depth + 1,
        "max_new_tokens": options.max_new_tokens,
        "starts": 1,
        "threads": 1,
        "prompts": [{"prompt_ids": ids, "messages": one.messages()} for ids, one in asked],
    }

    def run(is_drafted: bool) -> Run:
        more = {"speculative_config": settings if is_drafted else None}
        runs = ask_engine(engine, engine.python, request | more).runs[1:]
        return [one.token_ids for one in runs], sum(one.seconds or 0 for one in runs)

    return run


def own_run(options: SpeedOptions, prompts: Prompts) -> Decode:
    """Return a function for decoding here, with or without the head."""
    loaded = pipedraft.load(options.target, dtype="float32", draft=options.head)
    ways = ({"schedule": "autoregressive"}, {"schedule": "eagle", "tree": f"chain:{options.depth}"})

    def run(is_drafted: bool) -> Run:
        settings: Values = {"max_new_tokens": options.max_new_tokens, "stages": 1}
        settings |= ways[is_drafted]
        loaded.generate(prompts[0][0], **settings)
        start = time.perf_counter()
        found = [loaded.generate(ids, **settings) for ids, _ in prompts]
        seconds = time.perf_counter() - start
        return [[token.id for token in one.tokens] for one in found], seconds

    return run


def chosen(options: SpeedOptions, prompts: Prompts, place: Path) -> Iterator[tuple[str, Decode]]:
    """Yield a decode function for us and for each installed engine, with its files in ``place``."""
    yield OURS, own_run(options, prompts)
    for name in options.engines:
        engine = ENGINES[name]
        if not os.access(engine.python, os.X_OK):
            print(f"{name} is skipped: no {engine.python}", file=sys.stderr)
            continue
        (place / name).mkdir()
        yield name, engine_run(engine, options, prompts, place / name)


def measured(options: SpeedOptions, runs: Mapping[str, Decode]) -> dict[str, Rates]:
    """Decode with all engines in turn, without and with the head."""
    rates = {name: Rates() for name in runs}
    expected, _ = runs[OURS](False)
    for repeat in range(options.repeats):
        for is_drafted in (False, True):
            for name, run in runs.items():
                outputs, seconds = run(is_drafted)
                rates[name].both[is_drafted].append(sum(map(len, outputs)) / seconds)
                rates[name].num_equal += outputs == expected
        print(f"repeat {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
    return rates


def main() -> None:
    options = SpeedOptions.read(sys.argv[1:])
    os.sched_setaffinity(0, {options.core})  # the engines' processes inherit it
    quieten()
    tokenizer = load_tokenizer(options.target)
    tasks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    prompts = [
        (encode_turn(tokenizer, one, []), one) for prompts in tasks.values() for one in prompts
    ]
    with tempfile.TemporaryDirectory() as place:
        rates = measured(options, dict(chosen(options, prompts, Path(place))))
    if not options.json:
        header = ["engine", "without a draft", "with the head", "ratio", "runs with our outputs"]
        print(align_columns(Table(header, [rate.row(name) for name, rate in rates.items()])))
    names = ("tokens_s", "tokens_s_draft")
    medians = {
        name: dict(zip(names, map(statistics.median, rate.both), strict=True))
        for name, rate in rates.items()
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    run_command(main)
