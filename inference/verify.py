"""Rules that test draft tokens by the q they were drawn from, and the table of all rules."""

# V target vocabulary, U draft vocabulary, R returned rows, K top entries, M samples

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from pipedraft.inference.comparison_rules import (
    BlockVerifier,
    RecursiveVerifier,
    TraversalVerifier,
)
from pipedraft.inference.config import RuleName
from pipedraft.inference.draws import (
    UNFILTERED,
    DraftToken,
    KeyedRandom,
    Logits,
    Payload,
    Top,
    draw,
)
from pipedraft.inference.filters import Filters
from pipedraft.inference.rules import (
    ArgmaxVerifier,
    GumbelVerifier,
    MatchVerifier,
    SampledVerifier,
    Verifier,
    Walk,
)
from pipedraft.inference.tree import TokenTree


class RejectionVerifier(SampledVerifier):
    """Speculative sampling on a chain of sampled draft tokens: accept x ~ q with min(1, p / q).

    On rejection the token comes from the residual (p - q)+ (Leviathan et al., arXiv:2211.17192).
    The acceptance probability is sum_v min(p, q), more than the match rule's sum_v p q. Only for
    chains whose tokens were sampled from the stored q: deterministic or several children would
    change the distribution. A verdict is the row's logits: the residual needs all of p.
    """

    name: ClassVar[RuleName] = "rejection"

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            position, children = tree.position(row) + 1, tree.children(row)
            if not children:
                return Walk(path, self.draw(verdicts_R[row], position), tests)
            (child,) = children
            draft_token = DraftToken(tree.tokens[child], self.q_of(tree, child))
            payload = self.test(verdicts_R[row], position, draft_token.token, draft_token.q)
            tests.append(payload is None)
            if payload is not None:
                token = self._corrected(draft_token, verdicts_R[row], position, payload)
                # An approximate rule may draw the rejected token again: its verdict is spent.
                return Walk(path, token, tests, restarts=True)
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
        p_V = self.probabilities(logits_V)
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
        p_V = self.probabilities(logits_V)
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
        return 12 * self.payload_tokens

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
        p_V = self.probabilities(logits_V)
        ids_K = p_V.topk(min(self.payload_tokens, len(p_V))).indices
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
        return 12 * (self.payload_tokens + self.tail_samples)

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
        BlockVerifier,
        RecursiveVerifier,
        TraversalVerifier,
    )
}


def make_verifier(
    name: RuleName,
    temperature: float,
    random: KeyedRandom,
    *,
    filters: Filters = UNFILTERED,
    payload_tokens: int,
    tail_samples: int,
) -> Verifier:
    """At temperature 0 all rules are ``match``."""
    rule = RULES[name if temperature else "match"]
    return rule(
        temperature,
        random,
        filters=filters,
        payload_tokens=payload_tokens,
        tail_samples=tail_samples,
    )


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
