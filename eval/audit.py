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
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from ..cli import (
    Failure,
    UsageError,
    leave_at_interrupts,
    make_folder,
    option,
    run_command,
)

if __name__ == "__main__":
    leave_at_interrupts()

import numpy as np
from jinja2 import Environment, StrictUndefined

from ..data_recipes.answers import AnswerSampling, RowFailed, TargetLost
from ..data_recipes.server import ChatServer, ChatServerOptions, TryAgain, read_choice
from ..files import Values, to_json, write_atomically
from .arguments import FewPromptsOptions
from .audit_tests import FEATURES, OF_THE_END, POWER, PairedTest, compare
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
LEVEL = 0.01
"""False-alarm probability over all tests together."""
NUM_LOGPROBS = 20


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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer from a server."""

    tokens: list[str]
    """Tokens as named by the log-probabilities; words, if a server returns none."""
    ended: bool
    """True if the answer ended by itself, not at --max-new-tokens."""
    logprobs: list[dict[str, float]] = field(default_factory=list)
    """Log-probabilities per position: the chosen token and the best others."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First differing token in two greedy answers."""

    prompt: str
    place: int
    token: str
    baseline: str
    """The baseline's token at this place; "" in ``token`` or here: that answer has ended."""
    margin: float | None
    """Gap between the baseline's log-probabilities for both tokens; None: unknown."""
    is_tie: bool


def read_answer(payload: Values) -> Answer:
    """Return the possibly empty answer in a chat completion.

    Raises:
        TryAgain: the payload is no complete chat completion.
    """
    text, reasoning, finish_reason = read_choice(payload, is_call=True)  # a call may have no text
    try:
        entries = (payload["choices"][0].get("logprobs") or {}).get("content") or []
        logprobs = [
            {one["token"]: one["logprob"] for one in [*entry.get("top_logprobs", []), entry]}
            for entry in entries
        ]
        tokens = [entry["token"] for entry in entries]
    except (AttributeError, KeyError, TypeError) as error:
        raise TryAgain(f"log-probabilities in another form ({error!r})") from error
    return Answer(
        tokens=tokens or re.findall(r"\s*\S+", reasoning + text),
        ended=finish_reason != "length",
        logprobs=logprobs,
    )


def first_difference(prompt: str, ours: Answer, theirs: Answer, tie: float) -> Difference | None:
    """Return the first difference of two greedy answers, or None. The baseline's is ``theirs``."""
    pairs = enumerate(zip_longest(ours.tokens, theirs.tokens, fillvalue=""))
    found = next(((place, a, b) for place, (a, b) in pairs if a != b), None)
    if found is None:
        return None
    place, token, other = found
    margin = None
    if place < min(len(theirs.logprobs), len(theirs.tokens)) and token:
        known = theirs.logprobs[place]
        # A token missing from the best ones is below all of them.
        margin = known[other] - known.get(token, min(known.values()))
    is_tie = margin is not None and margin <= tie
    return Difference(
        prompt=prompt, place=place, token=token, baseline=other, margin=margin, is_tie=is_tie
    )


# -- the servers ----------------------------------------------------------------------------


class Endpoint:
    """Client for one of the two servers.

    If the server refuses log-probabilities, the client asks without them.
    """

    def __init__(self, name: str, address: str, model: str, options: AuditOptions) -> None:
        self.name, self.model, self.options = name, model, options
        self.client = ChatServer(address, options, AnswerSampling())
        self.has_logprobs = True
        self._free = asyncio.Semaphore(options.concurrency)

    async def ask(self, prompt: Prompt, seed: int | None = None) -> Answer:
        """Return a greedy answer if ``seed`` is None, else a sampled answer."""
        body: Values = {
            "model": self.model,
            "messages": prompt.messages(),
            "max_tokens": self.options.max_new_tokens,
            "temperature": 0.0,
        }
        if seed is not None:
            body |= {"temperature": self.options.temperature, "seed": seed, "top_p": 1.0}

        async def complete(attempt: int) -> Answer:
            more = {"logprobs": True, "top_logprobs": NUM_LOGPROBS} if self.has_logprobs else {}
            return read_answer(await self.client.complete(body | more))

        async with self._free:
            while True:
                had_logprobs = self.has_logprobs
                try:
                    return await self.client.retried(complete)
                except RowFailed as error:
                    if not had_logprobs:
                        raise Failure(f"{self.name}: {error}") from error
                self.has_logprobs = False

    async def answers(
        self, prompts: Sequence[Prompt], seed: int
    ) -> tuple[list[Answer], list[list[Answer]]]:
        """Return greedy answers [prompts] and sampled answers [prompts][samples]."""
        size = self.options.samples
        greedy = await asyncio.gather(*map(self.ask, prompts))
        # A seed for every answer: with one seed, answers to two prompts depend on each other, and
        # the tests would take one chance event for many.
        asked = [prompt for prompt in prompts for _ in range(size)]
        sampled = await asyncio.gather(
            *(self.ask(prompt, seed + number) for number, prompt in enumerate(asked))
        )
        return greedy, [sampled[i : i + size] for i in range(0, len(sampled), size)]


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


# -- the result -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Audit:
    """Answers from both servers, and the conclusions."""

    endpoint: str
    baseline: str
    prompts: list[Prompt]
    temperature: float
    greedy: list[tuple[Answer, Answer]]
    differences: list[Difference]
    tests: list[PairedTest]
    concentration: tuple[float, float]
    """Probability that two sampled answers to a prompt begin with the same token: endpoint,
    baseline."""
    ended: tuple[float, float]
    """Share of sampled answers ending before --max-new-tokens: endpoint, baseline."""
    has_logprobs: bool

    @property
    def faults(self) -> list[str]:
        """List the faults, one sentence each."""
        found = []
        wrong = [one for one in self.differences if not one.is_tie]
        if wrong:
            one = wrong[0]
            margin = "" if one.margin is None else f", {one.margin:.2f} nats apart"
            found.append(
                f"Greedy: {len(wrong)} of {len(self.greedy)} answers are not the model's. First "
                f"at {one.prompt}, token {one.place}: {one.token!r} for {one.baseline!r}{margin}. "
                "A correct verification cannot change them: look for wrong cached rows, positions "
                "or acceptance of tokens that were not verified."
            )
        for test in self.tests:
            if test.p_value <= LEVEL / len(self.tests):
                found.append(f"At temperature {self.temperature:g}: {self._said(test)}")
        return found

    def _said(self, test: PairedTest) -> str:
        said = f"{test.name} do not follow the model's distribution (p = {test.p_value:.2g}). "
        if test.name in OF_THE_END:
            share, usual = self.ended
            how = f"{share:.0%} of the answers end by themselves, {usual:.0%} in the baseline"
            return f"{said}{how}: look at how the end of a sequence is treated inside a draft."
        ours, theirs = self.concentration
        look = "the acceptance rule and its residual distribution"
        if max(ours, theirs) > 1.3 * min(ours, theirs):
            look = "temperature, filters, or an acceptance without q"
        return (
            f"{said}Two first tokens are the same with {ours:.2f}, {theirs:.2f} in the baseline: "
            f"look at {look}."
        )

    @property
    def verdict(self) -> str:
        if self.faults:
            return "FAULT: answers are not those of the model alone"
        return "no fault found"

    @property
    def scope(self) -> list[str]:
        """Describe the tested answers, and each test's smallest detectable fault."""
        num_ties = sum(one.is_tie for one in self.differences)
        equal = len(self.greedy) - len(self.differences)
        lines = [
            f"{len(self.greedy)} greedy answers: {equal} equal, {num_ties} differ by ties, "
            f"{len(self.differences) - num_ties} by faults"
        ]
        if not self.has_logprobs:
            lines.append("no log-probabilities: every difference counts as a fault; words compared")
        for test in self.tests:
            fault = "one without an end" if test.name in OF_THE_END else "the most frequent one"
            finds = f"is too weak to find a server that replaces its answers by {fault}"
            if share := test.detectable_share:
                finds = (
                    f"finds with {POWER:.0%} a server that replaces {share:.0%} of its answers by "
                    f"{fault}"
                )
            lines.append(
                f"{test.name}: p = {test.p_value:.2g}, {test.num_answers} answers of each server; "
                f"this test {finds}"
            )
        lines.append(f"chance of a false alarm: {LEVEL:.0%}, all tests together")
        return lines

    def to_dict(self) -> Values:
        return {
            "verdict": self.verdict,
            "faults": self.faults,
            "scope": self.scope,
            "endpoint": self.endpoint,
            "baseline": self.baseline,
            "prompts": [f"{one.task}/{one.id}" for one in self.prompts],
            "differences": [asdict(one) for one in self.differences],
            "tests": [asdict(one) for one in self.tests],
            "concentration": list(self.concentration),
        }


def concentration(sampled: Sequence[Sequence[Answer]]) -> float:
    """Return the mean probability that two answers to a prompt begin with the same token."""
    shares = []
    for answers in sampled:
        firsts = [answer.tokens[:1] for answer in answers]
        pairs = len(firsts) * (len(firsts) - 1)
        shares.append(sum(firsts.count(one) - 1 for one in firsts) / pairs)
    return float(np.mean(shares))


def ended_share(sampled: Sequence[Sequence[Answer]]) -> float:
    return float(np.mean([[answer.ended for answer in answers] for answers in sampled]))


async def audit(options: AuditOptions, prompts: list[Prompt], place: tuple[str, str]) -> Audit:
    """Query both servers, and compare their answers."""
    ours = Endpoint("--endpoint", options.endpoint, str(options.model), options)
    theirs = Endpoint("--baseline", *place, options)
    async with ours.client, theirs.client:
        try:
            # Use other seeds for the baseline: equal seeds could sample equal answers.
            half = 2**30
            greedy_a, sampled_a = await ours.answers(prompts, options.seed)
            greedy_b, sampled_b = await theirs.answers(prompts, options.seed + half)
        except TargetLost as error:
            raise Failure(str(error)) from error
    named = [f"{one.task}/{one.id}" for one in prompts]
    pairs = list(zip(greedy_a, greedy_b, strict=True))
    found = [
        first_difference(name, a, b, options.tie) for name, (a, b) in zip(named, pairs, strict=True)
    ]
    rng, tests = np.random.default_rng(options.seed), []
    longest = max((a.tokens for s in (sampled_a, sampled_b) for p in s for a in p), key=len)
    for name, read in FEATURES.items():
        sides = [[[read(a.tokens, a.ended) for a in p] for p in s] for s in (sampled_a, sampled_b)]
        wrong = read(longest, False) if name in OF_THE_END else None
        level = LEVEL / len(FEATURES)
        tests.append(compare(name, *sides, level=level, rng=rng, wrong=wrong))
    return Audit(
        endpoint=options.endpoint,
        baseline=options.baseline or str(options.target),
        prompts=prompts,
        temperature=options.temperature,
        greedy=pairs,
        differences=[one for one in found if one is not None],
        tests=tests,
        concentration=(concentration(sampled_a), concentration(sampled_b)),
        ended=(ended_share(sampled_a), ended_share(sampled_b)),
        has_logprobs=ours.has_logprobs and theirs.has_logprobs,
    )


def run(argv: Sequence[str]) -> None:
    """Run the whole command."""
    options = AuditOptions.read(argv)
    tasks = load_tasks(options.benchmarks, options.data_dir, options.limit)
    make_folder("--out", options.out)
    with baseline_address(options) as place:
        done = asyncio.run(audit(options, [p for task in tasks.values() for p in task], place))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = Path(__file__).with_name("audit.html.jinja").read_text()
    page = environment.from_string(template).render(audit=done, differences=done.differences)
    write_atomically(options.out / "audit.html", page.encode(errors="replace"))
    write_atomically(options.out / "audit.json", to_json(done.to_dict()))
    print(done.verdict, *done.faults, *done.scope, f"written: {options.out}/audit.html", sep="\n")
    sys.exit(1 if done.faults else 0)


def main() -> None:
    run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
