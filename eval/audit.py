"""Audit a server with speculative decoding against the same model without it.

Greedy answers must equal the baseline's, apart from ties within rounding. Sampled answers must
follow the same distribution. The baseline is another server, or with --target this project's own
autoregressive decoding.
"""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from ..endings import leave_at_interrupts, run_command
from ..errors import Failure, UsageError, make_folder
from ..options import option

if __name__ == "__main__":
    leave_at_interrupts()

from jinja2 import Environment, StrictUndefined

from ..data_recipes.answers import TargetLost
from ..data_recipes.chat_client import ChatServerOptions
from ..files import to_json, write_atomically
from .arguments import FewPromptsOptions
from .audit_answers import Endpoint, Heard
from .audit_forced import Judged, ServerJudge, TargetJudge
from .audit_result import (
    Audit,
    compares_tokens,
    concentration,
    ended_share,
    first_difference,
    judge_answer,
    run_tests,
)
from .tasks import Prompt, load_tasks

EXAMPLE = """\
example:
  pipedraft audit --endpoint http://127.0.0.1:8000 --baseline http://127.0.0.1:8001 \\
      --model Qwen/Qwen3-8B --out out/audit
  pipedraft serve --checkpoint assets/heads/spd_n4 --port 8000      # in another terminal, then:
  pipedraft audit --endpoint http://127.0.0.1:8000 --target assets/target --model spd_n4

Prints the result and writes audit.json and audit.html into --out. Only each prompt's first turn
counts.

Exit status 0: no fault found. 1: a fault. 2: bad input.
"""
NUM_TRIES = 3
"""Answers of a baseline by which to find a way to judge given tokens."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions(FewPromptsOptions, ChatServerOptions):
    """Compare a server with speculative decoding to the same model without it."""

    PROG: ClassVar[str] = "pipedraft audit"
    EXAMPLE: ClassVar[str] = EXAMPLE
    ONE_OF = (("baseline", "target"),)

    endpoint: str = option(metavar="URL")
    """OpenAI-compatible server to audit"""
    baseline: str | None = option(None, metavar="URL")
    """the same model served without speculation"""
    baseline_model: str | None = option(None, metavar="NAME")
    """model name on the baseline server; default: --model"""
    target: str | None = option(None, metavar="DIR")
    """decode this model here instead of --baseline, autoregressively, in float32"""
    limit: int = option(4, metavar="P", least=1)
    """first P prompts per benchmark"""
    samples: int = option(32, metavar="N", least=2)
    """sampled answers per server and prompt"""
    temperature: float = option(1.0, metavar="T")
    """sampling temperature"""
    max_new_tokens: int = option(48, metavar="M", least=2)
    """new tokens per answer"""
    tie: float = option(0.25, metavar="NATS")
    """largest log-probability gap that rounding may flip: 0.25 suits bfloat16, 0.001 float32"""
    seed: int = 0
    """seed for sampling and tests"""
    out: Path = option(Path("out/audit"), metavar="OUT")
    """folder for audit.json and audit.html"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise UsageError("--model: missing; name the model as the server calls it")
        if self.temperature <= 0:
            raise UsageError(f"--temperature: {self.temperature:g}; give a number above 0")


@contextmanager
def baseline_address(options: AuditOptions) -> Iterator[tuple[str, str]]:
    """Yield the baseline's address and model. Serve --target, if given, until the block ends."""
    if options.target is None:
        yield str(options.baseline), options.baseline_model or str(options.model)
        return
    command = [sys.executable, "-m", "pipedraft", "serve", "--target", options.target]
    command += ["--schedule", "autoregressive", "--stages", "1", "--port", "0"]
    command += ["--dtype", "float32", "--served-model-name", "baseline"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            found = None
            while found is None and (line := server.stdout.readline()):  # type: ignore[union-attr]
                found = re.search(r"http://\S+?:\d+", line)
            if found is None:
                raise Failure(f"--target: {options.target!r} could not be served; see above")
            yield found[0], "baseline"
        finally:
            server.terminate()
            server.communicate()  # its last line, too, needs a reader


# -- the audit ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """Answers from both servers, and what the baseline says about the endpoint's."""

    ours: Heard
    theirs: Heard
    by_tokens: bool
    remarks: list[str]
    forced: dict[int, list[Judged]] = field(default_factory=dict)
    """Index of a prompt with different greedy answers -> the endpoint's answer, judged."""
    way: str | None = None

    def different(self, options: AuditOptions) -> dict[int, int]:
        """Return the prompts' indices with different answers, and where to judge from."""
        pairs = enumerate(zip(self.ours.greedy, self.theirs.greedy, strict=True))
        found = {
            i: first_difference("", *pair, options.tie, by_tokens=self.by_tokens)
            for i, pair in pairs
        }
        # Words are not tokens: then all of them are judged.
        return {i: one.place if self.by_tokens else 0 for i, one in found.items() if one}


async def hear(options: AuditOptions, prompts: list[Prompt], place: tuple[str, str]) -> Hearing:
    """Query both servers. A --baseline also judges the endpoint's answers."""
    most = options.max_new_tokens
    ours = Endpoint("--endpoint", options.endpoint, str(options.model), options, most)
    name = "--baseline" if options.target is None else "--target"
    theirs = Endpoint(name, *place, options, most)
    how = options.temperature, options.samples
    async with ours.client, theirs.client:
        try:
            # Use other seeds for the baseline: equal seeds could sample equal answers.
            heard = await ours.answers(prompts, *how, options.seed)
            usual = await theirs.answers(prompts, *how, options.seed + 2**30)
        except TargetLost as error:
            raise Failure(str(error)) from error
        found = Hearing(
            ours=heard,
            theirs=usual,
            by_tokens=compares_tokens(heard, usual),
            remarks=[
                *ours.remarks(heard, options.temperature, options.tie),
                *theirs.remarks(usual, options.temperature, options.tie),
            ],
        )
        different = found.different(options)
        if options.target is not None or not different:
            return found
        judge = ServerJudge(theirs, options.tie)
        for number in list(different)[:NUM_TRIES]:
            if judge.way is None:
                await judge.find_way(prompts[number], usual.greedy[number])
        judged = {
            i: await judge.judge(prompts[i], heard.greedy[i], first)
            for i, first in different.items()
        }
    forced = {i: places for i, places in judged.items() if places is not None}
    return replace(found, forced=forced, way=judge.way)


def judge_by_target(found: Hearing, options: AuditOptions, prompts: list[Prompt]) -> Hearing:
    """Judge the endpoint's differing answers with --target."""
    different = found.different(options)
    if not different:
        return found
    judge = TargetJudge(str(options.target))
    judged = {
        i: judge.judge(prompts[i], found.ours.greedy[i], first) for i, first in different.items()
    }
    forced = {i: places for i, places in judged.items() if places is not None}
    return replace(found, forced=forced, way=judge.way)


def conclude(found: Hearing, options: AuditOptions, prompts: list[Prompt]) -> Audit:
    """Compare all answers."""
    ours, theirs, by_tokens = found.ours, found.theirs, found.by_tokens
    pairs = zip(prompts, ours.greedy, theirs.greedy, strict=True)
    greedy = [
        judge_answer(
            f"{prompt.task}/{prompt.id}",
            (a, b),
            found.forced.get(i),
            options.tie,
            by_tokens=by_tokens,
        )
        for i, (prompt, a, b) in enumerate(pairs)
    ]
    return Audit(
        endpoint=options.endpoint,
        baseline=options.baseline or str(options.target),
        prompts=prompts,
        temperature=options.temperature,
        greedy=greedy,
        by_tokens=by_tokens,
        way=found.way,
        remarks=found.remarks,
        is_sampled=ours.is_sampled and theirs.is_sampled,
        tests=run_tests(ours, theirs, by_tokens, options.seed),
        concentration=(
            concentration(ours.sampled, by_tokens),
            concentration(theirs.sampled, by_tokens),
        ),
        ended=(ended_share(ours.sampled), ended_share(theirs.sampled)),
    )


def run(argv: Sequence[str]) -> None:
    """Run the whole command."""
    options = AuditOptions.read(argv)
    tasks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    prompts = [prompt for task in tasks.values() for prompt in task]
    make_folder("--out", options.out)
    with baseline_address(options) as place:
        found = asyncio.run(hear(options, prompts, place))
    if options.target is not None:
        found = judge_by_target(found, options, prompts)  # the server's memory is free by now
    done = conclude(found, options, prompts)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = Path(__file__).with_name("audit.html.jinja").read_text()
    page = environment.from_string(template).render(audit=done, differences=done.differences)
    write_atomically(options.out / "audit.html", page.encode(errors="replace"))
    write_atomically(options.out / "audit.json", to_json(done.to_dict()))
    said = [done.verdict, *done.faults, *done.remarks, *done.scope]
    print(*said, f"written: {options.out}/audit.html", sep="\n")
    sys.exit(1 if done.faults else 0)


def main() -> None:
    run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
