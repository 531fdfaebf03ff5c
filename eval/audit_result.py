"""Compare the answers of an audit's two servers, and conclude."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Literal

import numpy as np

from ..files import Values
from .audit_answers import Answer, Heard
from .audit_forced import Judged, end_of, place_of
from .audit_tests import FEATURES, OF_THE_END, POWER, PairedTest, compare
from .tasks import Prompt

LEVEL = 0.01
"""False-alarm probability over all tests together."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Place in a greedy answer where the baseline has another token or word."""

    prompt: str
    place: int
    token: str
    baseline: str
    """The baseline's token at this place; "" in ``token`` or here: that answer has ended."""
    margin: float | None
    """Gap between the baseline's log-probabilities for both tokens; None: unknown."""
    is_exact: bool
    """False if ``margin`` is only a lower bound."""
    kind: Literal["tie", "fault", "unknown"]
    """unknown: the margin is not known well enough to tell a tie from a fault."""

    @property
    def said(self) -> str:
        """Return the margin for people to read."""
        if self.margin is None:
            return "unknown"
        return f"{self.margin:.3f}" if self.is_exact else f"at least {self.margin:.3f}"


def difference_at(prompt: str, found: Judged, tie: float) -> Difference:
    """Return a judged place as a difference."""
    is_known = found.gap != float("inf")
    kind: Literal["tie", "fault", "unknown"] = "unknown"
    if found.is_tie(tie):
        kind = "tie"
    elif is_known and (found.is_exact or found.gap > tie):
        kind = "fault"
    return Difference(
        prompt=prompt,
        place=found.place,
        token=found.token,
        baseline=found.best,
        margin=found.gap if is_known else None,
        is_exact=found.is_exact,
        kind=kind,
    )


def first_difference(
    prompt: str, ours: Answer, theirs: Answer, tie: float, *, by_tokens: bool = True
) -> Difference | None:
    """Return the first difference of two greedy answers, or None. The baseline's is ``theirs``."""
    sides = ours.parts(by_tokens), theirs.parts(by_tokens)
    pairs = enumerate(zip_longest(*sides, fillvalue=""))
    found = next(((place, a, b) for place, (a, b) in pairs if a != b), None)
    if found is None:
        return None
    place, token, other = found
    known = theirs.logprobs[place] if by_tokens and place < len(theirs.logprobs) else {}
    if not known:
        judged = Judged(place=place, token=token, best=other, gap=float("inf"), is_exact=False)
    elif token:
        judged = place_of(place, token, known, other if other in known else None)
    else:
        judged = end_of(place, known, has_ended=False)
    return difference_at(prompt, judged, tie)


@dataclass(frozen=True, kw_only=True)
class JudgedAnswer:
    """A greedy answer, compared with the baseline's."""

    differences: list[Difference]
    """The first difference, and those behind it that are no ties."""
    num_parts: int
    """Tokens or words in the answer."""
    num_judged: int
    """Of these: equal to the baseline's, the first difference, or judged after it."""

    @property
    def kind(self) -> str:
        """Return "equal", or the worst kind among the differences."""
        kinds = {one.kind for one in self.differences}
        return next((kind for kind in ("fault", "unknown", "tie") if kind in kinds), "equal")


def judge_answer(
    prompt: str,
    pair: tuple[Answer, Answer],
    forced: Sequence[Judged] | None,
    tie: float,
    *,
    by_tokens: bool,
) -> JudgedAnswer:
    """Compare two greedy answers, the endpoint's and the baseline's.

    Args:
        forced: the endpoint's tokens, judged given the tokens before them; None: not judged.
    """
    first = first_difference(prompt, *pair, tie, by_tokens=by_tokens)
    size = len(pair[0].parts(by_tokens))
    if first is None:
        return JudgedAnswer(differences=[], num_parts=size, num_judged=size)
    if not forced:
        return JudgedAnswer(differences=[first], num_parts=size, num_judged=first.place + 1)
    judged = [difference_at(prompt, one, tie) for one in forced]
    wrong = [one for one in judged if one.kind != "tie"]
    # A word's place says nothing about its tokens': then the tie with the widest margin is shown.
    shown = judged[0] if by_tokens else max(judged, key=lambda one: one.margin or 0.0)
    is_first = not by_tokens or shown.place == first.place
    ties = (
        [shown if is_first else first] if shown.kind == "tie" and (by_tokens or not wrong) else []
    )
    # Parts of characters may be missing in ``forced``, and an answer's end is one place more.
    num_judged = min(first.place + len(forced), size) if by_tokens else size
    return JudgedAnswer(differences=[*ties, *wrong], num_parts=size, num_judged=num_judged)


@dataclass(kw_only=True)
class Audit:
    """Answers from both servers, and the conclusions."""

    endpoint: str
    baseline: str
    prompts: list[Prompt]
    temperature: float
    greedy: list[JudgedAnswer]
    by_tokens: bool
    """False: words are compared, because a server did not name all its tokens."""
    way: str | None
    """How the baseline judged tokens behind a first difference; None: it did not."""
    remarks: list[str]
    """What the servers do otherwise than asked, one sentence each."""
    is_sampled: bool
    """False if one server gives the same text with every seed."""
    tests: list[PairedTest]
    concentration: tuple[float, float]
    """Probability that two sampled answers to a prompt begin with the same token: endpoint,
    baseline."""
    ended: tuple[float, float]
    """Share of sampled answers ending before --max-new-tokens: endpoint, baseline."""
    differences: list[Difference] = field(init=False)

    def __post_init__(self) -> None:
        self.differences = [one for judged in self.greedy for one in judged.differences]

    @property
    def faults(self) -> list[str]:
        """List the faults, one sentence each."""
        found = []
        wrong = [one for one in self.differences if one.kind == "fault"]
        count = sum(judged.kind == "fault" for judged in self.greedy)
        if wrong:
            found.append(
                f"Greedy: {count} of {len(self.greedy)} answers are not the model's. First "
                f"at {self._shown(wrong[0])}. "
                "A correct verification cannot change them: look for wrong cached rows, positions "
                "or acceptance of tokens that were not verified."
            )
        unknown = [one for one in self.differences if one.kind == "unknown"]
        count = sum(judged.kind == "unknown" for judged in self.greedy)
        if count:
            found.append(
                f"Greedy: {count} of {len(self.greedy)} answers differ, and a tie cannot be told "
                f"from a fault. First at {self._shown(unknown[0])}. The baseline's "
                "log-probabilities lack one of the two: use a baseline that lists more of them, "
                "or --target."
            )
        for test in self.tests:
            if test.p_value <= LEVEL / len(self.tests):
                found.append(f"At temperature {self.temperature:g}: {self._said(test)}")
        return found

    def _shown(self, one: Difference) -> str:
        part = "token" if self.by_tokens or self.way else "word"
        margin = "" if one.margin is None else f", {one.said} nats apart"
        other = f"{one.token or '(end)'!r} for {one.baseline or '(end)'!r}"
        return f"{one.prompt}, {part} {one.place}: {other}{margin}"

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
    def num_unjudged(self) -> int:
        return sum(judged.num_parts - judged.num_judged for judged in self.greedy)

    @property
    def verdict(self) -> str:
        if self.faults:
            return "FAULT: answers are not those of the model alone"
        is_whole = self.by_tokens and self.is_sampled and not self.num_unjudged
        return "no fault found" if is_whole else "no fault found in what could be judged"

    @property
    def scope(self) -> list[str]:
        """Describe the tested answers, and each test's smallest detectable fault."""
        count = {k: sum(one.kind == k for one in self.greedy) for k in ("equal", "tie", "fault")}
        unknown = len(self.greedy) - sum(count.values())
        said = (
            f"{len(self.greedy)} greedy answers: {count['equal']} equal, {count['tie']} differ by "
            f"ties, {count['fault']} by faults"
        )
        lines = [f"{said}, {unknown} by unknown margins" if unknown else said]
        if not self.by_tokens:
            lines.append("words compared: a server did not name the tokens of all its answers")
        lines += self._of_forcing()
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

    def _of_forcing(self) -> list[str]:
        parts = "tokens" if self.by_tokens else "words"
        total = sum(judged.num_parts for judged in self.greedy)
        if all(judged.kind == "equal" for judged in self.greedy):
            return []
        if not self.num_unjudged:
            way = self.way or "comparison"
            return [f"all {total} {parts} of these answers were judged, by {way}"]
        why = "the baseline cannot judge given tokens"
        if self.way:
            why = f"their text has other tokens for the baseline, or {self.way} failed"
        return [
            f"{self.num_unjudged} of {total} {parts} are behind a first difference and were not "
            f"judged: {why}"
        ]

    def to_dict(self) -> Values:
        return {
            "verdict": self.verdict,
            "faults": self.faults,
            "remarks": self.remarks,
            "scope": self.scope,
            "endpoint": self.endpoint,
            "baseline": self.baseline,
            "prompts": [f"{one.task}/{one.id}" for one in self.prompts],
            "compared": "tokens" if self.by_tokens else "words",
            "teacher_forced": self.way,
            "differences": [asdict(one) for one in self.differences],
            "tests": [asdict(one) for one in self.tests],
            "concentration": list(self.concentration),
        }


def concentration(sampled: Sequence[Sequence[Answer]], by_tokens: bool) -> float:
    """Return the mean probability that two answers to a prompt begin with the same part."""
    shares = []
    for answers in sampled:
        firsts = [answer.parts(by_tokens)[:1] for answer in answers]
        pairs = len(firsts) * (len(firsts) - 1)
        shares.append(sum(firsts.count(one) - 1 for one in firsts) / pairs)
    return float(np.mean(shares))


def ended_share(sampled: Sequence[Sequence[Answer]]) -> float:
    return float(np.mean([[answer.ended for answer in answers] for answers in sampled]))


def compares_tokens(ours: Heard, theirs: Heard) -> bool:
    """Return True if all answers of both servers name their tokens, in the text's form."""
    answers = [*ours.answers, *theirs.answers]
    return all(answer.names_tokens and answer.is_spelled for answer in answers)


def run_tests(ours: Heard, theirs: Heard, by_tokens: bool, seed: int) -> list[PairedTest]:
    """Test both servers' sampled answers for equal distributions."""
    rng, tests = np.random.default_rng(seed), []
    sides = [
        [[(one.parts(by_tokens), one.ended) for one in answers] for answers in heard.sampled]
        for heard in (ours, theirs)
    ]
    longest = max((parts for side in sides for a in side for parts, _ in a), key=len)
    for name, read in FEATURES.items():
        features = [[[read(*one) for one in answers] for answers in side] for side in sides]
        wrong = read(longest, False) if name in OF_THE_END else None
        level = LEVEL / len(FEATURES)
        tests.append(compare(name, *features, level=level, rng=rng, wrong=wrong))
    return tests
