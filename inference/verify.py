"""Acceptance rules.

A rule has two halves, ``judge`` where the logits are and ``walk`` where the tree is, with the link
from the last stage to the controller between them: a rule whose verdicts are token ids sends
nothing larger. Across a network the target tests draft tokens itself (``test``), and the draft's
side draws what stands in their place (``correct``). Emitted tokens are distributed as the target's,
for every schedule, unless ``caveat`` says otherwise.
"""

# V target vocabulary, U draft vocabulary, R returned rows, Q leaves, K top entries, M samples

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pipedraft.inference.config import RuleName
from pipedraft.inference.draws import (
    DraftToken,
    KeyedRandom,
    Logits,
    Payload,
    SharedNoise,
    Token,
    Top,
    draw,
    probabilities,
)
from pipedraft.inference.tree import TokenTree


@dataclass(frozen=True)
class Walk:
    """Outcome of one verification."""

    path: list[int]
    """Accepted rows, the root first; all of them had their logits."""
    next_token: int
    """Token after the path: a child in the tree whose logits are still in flight, or not in it."""
    tests: list[bool]
    """One entry for each token that was tested against draft tokens: whether one was right."""
    restarts: bool = False
    """Nothing of the tree is left, whatever follows the path."""


# -- the rules ------------------------------------------------------------------------------


class Verifier(ABC):
    """An acceptance rule at one temperature, with the random numbers of one prompt."""

    name: ClassVar[RuleName]
    needs_q: ClassVar[bool] = False
    """Draft tokens are drawn from q, which the test compares with p; chains only."""
    caveat: ClassVar[str] = ""
    """Why emitted tokens are not distributed as the target's; "": they are."""

    def __init__(
        self, temperature: float, random: KeyedRandom, *, top_k: int = 10, tail_samples: int = 4
    ) -> None:
        """
        Args:
            top_k: tokens of a ``Top``.
            tail_samples: draws in the first ``Top`` of a rejection.
        """
        self.temperature, self.random = temperature, random
        self.top_k, self.tail_samples = top_k, tail_samples

    # Where the draft is.

    def propose(
        self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int
    ) -> DraftToken:
        """The draft's next token: its most likely one.

        Args:
            ids_U: target token of each entry.
            attempt: number of the round; a position is drafted once in each.
        """
        return DraftToken(int(ids_U[self.rank(logits_U[None], ids_U, [position])[0].argmax()]))

    def rank(self, logits_QU: Tensor, ids_U: Tensor, positions_Q: Sequence[int]) -> Tensor:
        """Logits by which children are chosen at some positions: the draft's own."""
        return logits_QU

    def child_scores(self, logits_QU: Tensor, ids_U: Tensor, positions_Q: Sequence[int]) -> Tensor:
        """Log-probabilities [Q, U] by which children are chosen and trees ordered.

        Those of the draft. Where the rule shares the target's noise, those after the noise: a token
        that the noise favors is more likely the target's own token, too.
        """
        return torch.log_softmax(self.rank(logits_QU, ids_U, positions_Q).float(), -1)

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        """Walk through the first R rows of the tree."""
        raise NotImplementedError

    def correct(
        self, draft_token: DraftToken, position: int, payloads: Sequence[Payload]
    ) -> int | None:
        """The token instead of a rejected draft token; None: ask for more.

        Args:
            payloads: of this rejection so far.

        Raises:
            ValueError: payloads that this rule cannot read.
        """
        match payloads:
            case [Token(id=token)]:
                return token
        raise self._wrong(payloads)

    def _wrong(self, payloads: Sequence[Payload]) -> ValueError:
        names = ", ".join(type(payload).__name__ for payload in payloads)
        return ValueError(
            f"payload: {names} after a rejection by rule {self.name!r}; both sides must run the "
            "same version"
        )

    # Where the logits are.

    def draw(self, logits_V: Tensor, position: int) -> int:
        """The target's own token at a position: argmax when greedy."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        uniform = self.random.uniform(position, "target")
        return draw(probabilities(logits_V, self.temperature), uniform)

    def target_tokens(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """int64 [R]: the target's own token after each row."""
        if self.temperature == 0:
            return logits_RV.argmax(-1).cpu()
        rows = zip(logits_RV, positions_R.tolist(), strict=True)
        return torch.tensor([self.draw(logits_V, position + 1) for logits_V, position in rows])

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """What ``walk`` has to know of returned rows: [R, ...], on the CPU."""
        raise NotImplementedError

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        """None: the draft token at this position is accepted."""
        raise NotImplementedError

    def more(self, logits_V: Tensor, position: int, first: int, count: int) -> Payload:
        """
        Raises:
            ValueError: no payload of this rule has samples.
        """
        raise ValueError(f"more: rule {self.name!r} sends no samples; do not ask for more")

    def payload_bytes(self, vocab_size: int) -> int:
        """What a rejection adds to a verdict, about."""
        return 4


class MatchVerifier(Verifier):
    """Draw x ~ p(. | node), argmax when greedy; go to child x if the tree has it.

    Exact for any tree that is a function of earlier draws only, whichever siblings were verified
    before: the draw at a node never looks at its children (EAGLE's sequential test with q = 1
    has the same distribution). A verdict is the drawn token.
    """

    name: ClassVar[RuleName] = "match"

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return self.target_tokens(logits_RV, positions_R)

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        tokens = verdicts_R.tolist()
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            child = tree.child(row, tokens[row])
            if tree.children(row):
                tests.append(child is not None)
            if child is None or child >= len(tokens):
                return Walk(path, tokens[row], tests)
            path.append(child)

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        own = self.draw(logits_V, position)
        return None if own == token else Token(id=own)


class GumbelVerifier(MatchVerifier):
    """As ``match``; target and draft draw with the same noise, so they agree more often.

    The emitted token never depends on the tree, so the output is plain decoding's by this rule.
    """

    name: ClassVar[RuleName] = "gumbel"

    def __init__(self, temperature: float, random: KeyedRandom, **settings: int) -> None:
        super().__init__(temperature, random, **settings)
        self.noise = SharedNoise(random)

    def draw(self, logits_V: Tensor, position: int) -> int:
        if self.temperature == 0:
            return super().draw(logits_V, position)
        p_V = probabilities(logits_V, self.temperature).numpy(force=True)
        with np.errstate(divide="ignore"):
            return int((self.noise.exponential(position, len(p_V)) / p_V).argmin())

    def rank(self, logits_QU: Tensor, ids_U: Tensor, positions_Q: Sequence[int]) -> Tensor:
        """log q plus the target's noise at the position: the largest entry is the draft's draw."""
        if self.temperature == 0:
            return logits_QU
        size, ids = int(ids_U.max()) + 1, ids_U.numpy(force=True)
        with np.errstate(divide="ignore"):
            noise_QU = [
                -np.log(self.noise.exponential(position, size)[ids]) for position in positions_Q
            ]
        perturbed_QU = torch.log_softmax(logits_QU.double().cpu() / self.temperature, -1)
        return (perturbed_QU + torch.from_numpy(np.stack(noise_QU))).to(logits_QU.device)


class ArgmaxVerifier(Verifier):
    """FlexSpec's Algorithm 2 at T > 0: a draft token must be the target's most likely one.

    A verdict is that token and the target's own draw, which stands where the test fails.
    """

    name: ClassVar[RuleName] = "argmax"
    caveat: ClassVar[str] = "biased: accepts the target's argmax at T > 0"

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return torch.stack(
            [logits_RV.argmax(-1).cpu(), self.target_tokens(logits_RV, positions_R)], dim=-1
        )

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            best, own = verdicts_R[path[-1]].tolist()
            child = tree.child(path[-1], best)
            if tree.children(path[-1]):
                tests.append(child is not None)
            if child is None:
                return Walk(path, own, tests)
            if child >= len(verdicts_R):
                return Walk(path, best, tests)
            path.append(child)

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        if int(logits_V.argmax()) == token:
            return None
        return Token(id=self.draw(logits_V, position))


class RejectionVerifier(Verifier):
    """Speculative sampling on a chain of sampled draft tokens: accept x ~ q with min(1, p / q).

    On rejection the token comes from the residual (p - q)+ (Leviathan et al., arXiv:2211.17192).
    The acceptance probability is sum_v min(p, q), more than the match rule's sum_v p q. Only for
    chains whose tokens were sampled from the stored q: deterministic or several children would
    change the distribution. A verdict is the row's logits: the residual needs all of p.
    """

    name: ClassVar[RuleName] = "rejection"
    needs_q = True

    def propose(
        self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int
    ) -> DraftToken:
        q_V = logits_U.new_zeros(int(ids_U.max()) + 1, dtype=torch.float64)
        q_V[ids_U] = probabilities(logits_U, self.temperature)
        return DraftToken(draw(q_V, self.random.uniform(position, "draft", attempt)), q_V)

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return logits_RV.cpu()

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            position, children = tree.position(row) + 1, tree.children(row)
            if not children:
                return Walk(path, self.draw(verdicts_R[row], position), tests)
            (child,) = children
            q_V = tree.draft_probabilities[child]
            assert q_V is not None, "the rule needs the q that a draft token was drawn from"
            draft_token = DraftToken(tree.tokens[child], q_V.cpu())
            payload = self.test(verdicts_R[row], position, draft_token.token, draft_token.q)
            tests.append(payload is None)
            if payload is not None:
                token = self._corrected(draft_token, verdicts_R[row], position, payload)
                return Walk(path, token, tests)
            if child >= len(verdicts_R):
                return Walk(path, draft_token.token, tests)
            path.append(child)

    def _corrected(
        self, draft_token: DraftToken, logits_V: Tensor, position: int, payload: Payload
    ) -> int:
        """``correct`` until it has what it needs, in one place."""
        payloads, num_samples = [payload], self.tail_samples
        while (token := self.correct(draft_token, position, payloads)) is None:
            count = self.next_samples(len(payloads))
            payloads.append(self.more(logits_V, position, num_samples, count))
            num_samples += count
        return token

    def next_samples(self, num_payloads: int) -> int:
        """Samples to ask for after so many payloads; 0: all of the distribution."""
        return 4 * self.tail_samples if num_payloads == 1 else 0

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        p_V = probabilities(logits_V, self.temperature)
        if self.random.uniform(position, "accept") * q < float(p_V[token]):
            return None
        return self.payload(logits_V, position)

    def payload(self, logits_V: Tensor, position: int) -> Payload:
        """What a correction at a position needs of the target."""
        return Logits(values=logits_V.float().cpu())

    def payload_bytes(self, vocab_size: int) -> int:
        return 4 * vocab_size

    def correct(
        self, draft_token: DraftToken, position: int, payloads: Sequence[Payload]
    ) -> int | None:
        match payloads:
            case [Logits(values=values)]:
                return self._from_all(draft_token, position, values, attempt=0)
        raise self._wrong(payloads)

    def _from_all(
        self, draft_token: DraftToken, position: int, logits_V: Tensor, *, attempt: int
    ) -> int:
        p_V = probabilities(logits_V, self.temperature)
        residual_V = (p_V - _padded(draft_token, len(p_V))).clamp_min(0)
        return draw(residual_V, self.random.uniform(position, "residual", attempt))


class TopKVerifier(RejectionVerifier):
    """PicoSpec's separate rejection sampling as published: only the K most likely tokens come down.

    The correction is drawn from (p - q)+ among them. The distribution of a tested position is off
    by the sum of (p - q)+ outside them (total variation), ``top_k_bias``; at most the others' mass
    under p.
    """

    name: ClassVar[RuleName] = "topk"
    caveat: ClassVar[str] = "approximate: never corrects to a token outside the top K"

    def payload(self, logits_V: Tensor, position: int) -> Payload:
        return self._top(logits_V, position, 0, 0)

    def payload_bytes(self, vocab_size: int) -> int:
        return 12 * self.top_k

    def correct(
        self, draft_token: DraftToken, position: int, payloads: Sequence[Payload]
    ) -> int | None:
        match payloads:
            case [Top() as top]:
                ids_K, residual_K = self._residual(draft_token, top)
                if not residual_K.any():  # not published; the K tokens themselves stand in
                    residual_K = top.p[: top.num_top]
                uniform = self.random.uniform(position, "residual")
                return int(ids_K[draw(residual_K, uniform)])
        raise self._wrong(payloads)

    def _top(self, logits_V: Tensor, position: int, first: int, count: int) -> Top:
        p_V = probabilities(logits_V, self.temperature)
        ids_K = p_V.topk(min(self.top_k, len(p_V))).indices
        tail_V = p_V.clone()
        tail_V[ids_K] = 0
        tail_mass = float(tail_V.sum())
        attempts = range(first, first + count) if tail_mass else range(0)
        uniforms = [self.random.uniform(position, "tail", attempt) for attempt in attempts]
        samples_M = ids_K.new_tensor([draw(tail_V, u) for u in uniforms])
        ids = torch.cat([ids_K, samples_M])
        return Top(
            ids=ids.int().cpu(),
            p=p_V[ids].cpu(),
            num_top=len(ids_K),
            tail_mass=min(tail_mass, 1.0),
        )

    def _residual(self, draft_token: DraftToken, top: Top) -> tuple[Tensor, Tensor]:
        """Tokens [K] and (p - q)+ [K]."""
        ids_K, p_K = top.ids[: top.num_top], top.p[: top.num_top]
        return ids_K, (p_K - _entries(draft_token, ids_K)).clamp_min(0)


class TailEscapeVerifier(TopKVerifier):
    """The K most likely tokens come down, the others' mass and some draws from these; exact.

    r mass of (p - q)+ among the K tokens, t mass of p outside them. Again and again: with
    probability r / (r + t) draw among the K from (p - q)+; else take the next sample y ~ p outside
    them with probability (p(y) - q(y))+ / p(y). Each turn ends at a token v with probability
    (p(v) - q(v))+ / (r + t), wherever v is.
    """

    name: ClassVar[RuleName] = "tail_escape"
    caveat: ClassVar[str] = ""

    def payload(self, logits_V: Tensor, position: int) -> Payload:
        return self._top(logits_V, position, 0, self.tail_samples)

    def payload_bytes(self, vocab_size: int) -> int:
        return 12 * (self.top_k + self.tail_samples)

    def more(self, logits_V: Tensor, position: int, first: int, count: int) -> Payload:
        if count == 0:
            return Logits(values=logits_V.float().cpu())
        return self._top(logits_V, position, first, count)

    def correct(
        self, draft_token: DraftToken, position: int, payloads: Sequence[Payload]
    ) -> int | None:
        *tops, last = payloads
        logits_V = last.values if isinstance(last, Logits) else None
        if logits_V is None:
            tops.append(last)
        parts = [top for top in tops if isinstance(top, Top)]
        if not parts or len(parts) < len(tops):
            raise self._wrong(payloads)
        ids_K, residual_K = self._residual(draft_token, parts[0])
        sample_M = torch.cat([part.ids[part.num_top :] for part in parts])
        p_M = torch.cat([part.p[part.num_top :] for part in parts])
        inside, outside = float(residual_K.sum()), parts[0].tail_mass
        q_M = _entries(draft_token, sample_M)
        samples = iter(zip(sample_M.tolist(), p_M.tolist(), q_M.tolist(), strict=True))
        turn = 0
        while True:
            # `not <` so that an empty remainder (rounding alone) ends among the K.
            if not self.random.uniform(position, "branch", turn) * (inside + outside) >= inside:
                uniform = self.random.uniform(position, "residual")
                return int(ids_K[draw(residual_K, uniform)])
            sample = next(samples, None)
            if sample is None:
                break
            token, p, q = sample
            if self.random.uniform(position, "thin", turn) * p < p - q:
                return token
            turn += 1
        # All turns so far ended without a token, so what is left is the whole residual again.
        if logits_V is None:
            return None
        return self._from_all(draft_token, position, logits_V, attempt=1)


RULES: dict[RuleName, type[Verifier]] = {
    rule.name: rule
    for rule in (
        MatchVerifier,
        GumbelVerifier,
        RejectionVerifier,
        TailEscapeVerifier,
        TopKVerifier,
        ArgmaxVerifier,
    )
}


def make_verifier(
    name: RuleName, temperature: float, random: KeyedRandom, *, top_k: int, tail_samples: int
) -> Verifier:
    """At temperature 0 all rules are ``match``."""
    rule = RULES[name if temperature else "match"]
    return rule(temperature, random, top_k=top_k, tail_samples=tail_samples)


def top_k_bias(p_V: Tensor, q_V: Tensor, top_k: int) -> float:
    """Total variation by which ``topk`` misses p at a tested position: (p - q)+ outside the top K.

    Not if (p - q)+ is 0 on all of the K; then it is larger.
    """
    residual_V = (p_V - q_V).clamp_min(0)
    inside = residual_V[p_V.topk(min(top_k, len(p_V))).indices].sum()
    return float(residual_V.sum() - inside)


def _padded(draft_token: DraftToken, size: int) -> Tensor:
    """q over the whole vocabulary; 0 behind the draft's last token."""
    q_V = draft_token.q_V
    assert q_V is not None, "only tokens that were drawn from q are tested against it"
    return torch.nn.functional.pad(q_V, (0, size - len(q_V)))


def _entries(draft_token: DraftToken, ids: Tensor) -> Tensor:
    """q of some tokens; 0 behind the draft's last token, however large an id is."""
    q_V = draft_token.q_V
    assert q_V is not None, "only tokens that were drawn from q are tested against it"
    known = ids < len(q_V)
    return torch.where(known, q_V[torch.where(known, ids, 0).long()], 0.0)
