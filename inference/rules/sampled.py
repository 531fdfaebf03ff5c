"""Rules for draft tokens sampled from q, and the table with all rules."""

# V target vocabulary, U draft vocabulary, R returned rows or nodes, W children per row, K top
# entries, M samples

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..tree import TokenTree
from ..verdict import Verdict
from . import RuleName
from .base import ArgmaxVerifier, GumbelVerifier, MatchVerifier, SampledVerifier, Verifier
from .filters import TokenFilters
from .random import (
    UNFILTERED,
    DraftToken,
    KeyedRandom,
    Logits,
    Payload,
    Top,
    draw,
)


@dataclass
class _Node:
    """Path node under test, updated as its children are rejected."""

    row: int
    children: Iterator[int]
    """Rows not tested yet."""
    weight: float
    """Probability that the output passes through this node."""
    p_V: Tensor
    """Distribution of the token after this node, if the output passes through it."""
    q_V: Tensor
    """Distribution used to sample the next child."""


class BlockVerifier(SampledVerifier):
    """Block verification for chains (Sun et al., arXiv:2403.10444, Algorithm 2).

    With X_i ~ q(. | X_<i), w_0 = 1 and w_i = min(w_{i-1} p(X_i | X_<i) / q(X_i | X_<i), 1), the
    first i of M draft tokens pass with probability h_i. Each i has its own uniform number. The
    probabilities are h_M = w_M and

        h_i = S_i / (S_i + 1 - w_i),  S_i = sum_v (w_i p(v | X_<=i) - q(v | X_<=i))+  for i < M.

    The rule accepts the longest prefix that passes, then samples the next token from (w p - q)+, or
    from p after all M. On average it accepts at least as many tokens as ``rejection``.

    Tokens behind the accepted prefix were tested and are drafted again, so the root's position is
    part of the random-number key for tests.
    """

    name: ClassVar[RuleName] = "block"

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
        """Verify the whole returned tree from the leaves up, as in ``TraversalVerifier``."""
        path = [self._open(tree, 0, 1.0, verdicts_R)]
        while True:
            node = path[-1]
            child = next(node.children, None)
            # Go down to a leaf first: a node is tested only after everything below it was rejected.
            if child is not None and node.q_V[tree.tokens[child]]:  # else q is used up
                token = tree.tokens[child]
                weight = self.weigh(node.weight, float(node.p_V[token] / node.q_V[token]))
                path.append(self._open(tree, child, weight, verdicts_R))
                continue
            uniform = self.random.uniform(tree.root_position, "accept", node.row)
            if len(path) == 1 or uniform < node.weight:
                break
            path.pop()
            self.reject(path[-1], tree.tokens[node.row])
        uniform = self.random.uniform(tree.position(node.row) + 1, "residual")
        tests = [True] * (len(path) - 1) + [False] * bool(tree.children(node.row))
        # Restart: the token may be an untested child, whose row has returned already.
        return Verdict([each.row for each in path], draw(node.p_V, uniform), tests, restarts=True)

    def _open(self, tree: TokenTree, row: int, weight: float, verdicts_R: Tensor) -> _Node:
        p_V, children = self.probabilities(verdicts_R[row]), tree.children(row)
        # All children of a node were drawn from one q, stored with each.
        q_V = self.q_of(tree, children[0]) if children else p_V
        return _Node(row, iter(children), weight, p_V, q_V)

    def weigh(self, weight: float, ratio: float) -> float:
        """Return a child's weight from its parent's weight and p / q."""
        return min(weight * ratio, 1.0)

    def reject(self, parent: _Node, token: int) -> None:
        """Replace a node's distribution by the residual after its child ``token`` is rejected."""
        # S / (S + 1 - w), with S the mass of (w p - q)+; min avoids 0 / 0 when w = 1 and S = 0.
        rest_V = (parent.weight * parent.p_V - parent.q_V).clamp_min(0)
        gain = float(rest_V.sum())
        parent.weight = gain / max(gain + 1 - parent.weight, sys.float_info.min)
        parent.p_V = rest_V / max(gain, sys.float_info.min)
        # q is shared with the tree and with siblings: change a copy.
        parent.q_V = parent.q_V.clone()
        parent.q_V[token] = 0
        parent.q_V /= parent.q_V.sum().clamp_min(sys.float_info.min)


class RecursiveVerifier(SampledVerifier):
    """Recursive rejection for children sampled without replacement (Jeon et al., arXiv:2402.14160).

    Gumbel top-k samples a node's children x_1, x_2, ..., each ~ q without the ones before it. With
    p_1 = p and q_1 = q, x_j is accepted with probability min(1, p_j(x_j) / q_j(x_j)). Otherwise

        p_{j+1} = (p_j - q_j)+ / sum_v (p_j - q_j)+,  q_{j+1} = q_j without x_j, renormalized.

    After the last of k children, the token comes from p_{k+1}. The output stays exact only if x_j
    itself has no influence on the existence of a j-th child. EAGLE-2 breaks this rule by ordering
    children by their own probability. Here a tree's shape depends on ranks alone (``score``).
    """

    name: ClassVar[RuleName] = "recursive"
    accepts: ClassVar[tuple[float, float]] = (0.8, 0.35)
    """Assumed acceptance rates, of first children and of later children that are tested."""

    def draw_children(
        self, logits_RU: Tensor, ids_U: Tensor, position: int, width: int, *, attempt: int
    ) -> tuple[Tensor, Tensor]:
        """Sample children for R nodes. Return tokens [R, W] in sampling order, and q [R, V'].

        Args:
            position: of all the children. Call once per round and position, so two nodes never
                share a number.
        """
        q_RU = self.probabilities(logits_RU).cpu()
        ids = ids_U.cpu()
        uniforms = self.random.uniforms(position, "draft", q_RU.numel(), attempt)
        # The smallest E / q is q's sample, the next one is a sample without it, and so on.
        # log1p(-u) is finite for u in [0, 1); log(u) is not at 0.
        exponential_RU = torch.from_numpy(-np.log1p(-uniforms)).view_as(q_RU)
        drawn_RW = (exponential_RU / q_RU).topk(min(width, len(ids)), largest=False).indices
        q_RV = q_RU.new_zeros(len(q_RU), int(ids.max()) + 1)
        q_RV[:, ids] = q_RU
        return ids[drawn_RW], q_RV

    def score(self, rank: int) -> float:
        """Return a child's assumed log-probability of acceptance, by rank."""
        first, other = self.accepts
        return math.log(first if rank == 0 else (1 - first) * other * (1 - other) ** (rank - 1))

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
        """Verify top-down, after the whole tree has returned."""
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            position, p_V = tree.position(row) + 1, self.probabilities(verdicts_R[row])
            children, accepted = tree.children(row), None
            q_V = self.q_of(tree, children[0]).clone() if children else p_V
            for attempt, child in enumerate(children):
                token = tree.tokens[child]
                if not q_V[token]:  # not drawn: q is used up
                    break
                if self.random.uniform(position, "accept", attempt) * q_V[token] < p_V[token]:
                    accepted = child
                    break
                p_V = self.residual(p_V, q_V)
                q_V[token] = 0
                q_V /= q_V.sum().clamp_min(sys.float_info.min)
            if children:
                tests.append(accepted is not None)
            if accepted is None:
                token = draw(p_V, self.random.uniform(position, "residual"))
                # Restart: the token may be an untested child, whose row has returned already.
                return Verdict(path, token, tests, restarts=True)
            path.append(accepted)

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        rest_V = (p_V - q_V).clamp_min(0)
        return rest_V / rest_V.sum()


class TraversalVerifier(BlockVerifier, RecursiveVerifier):
    """Traversal verification for trees, leaves first (Weng et al., arXiv:2505.12398).

    Children are sampled as in ``recursive``. A node's weight w is the probability that the output
    passes through the node, given its token and earlier rejections. The root's weight is 1. Child
    x_1 ~ q gets weight min(w p(x_1) / q(x_1), 1) and is tested with all its descendants. If none of
    them is accepted, the node continues with its next child and

        w' = S / (S + 1 - w),  p' = (w p - q)+ / S,  q' = q without x_1, renormalized,

    with S = sum_v (w p(v) - q(v))+. After the last child, a uniform accepts the node with
    probability w', together with the path to it and a token from p'. Otherwise the node is
    rejected, and its parent goes on without this child.

    The output is exact. By induction a node is in the output with probability w, and the next token
    then follows p. A child x uses up q(x) min(w p(x) / q(x), 1) = min(w p(x), q(x)) from w p(x) and
    leaves (w p(x) - q(x))+, in total S. The child is rejected with probability 1 - w + S, so w' =
    S / (1 - w + S). On a chain, the rule is block verification.
    """

    name: ClassVar[RuleName] = "traversal"
    accepts: ClassVar[tuple[float, float]] = (0.7, 0.3)


class RejectionVerifier(SampledVerifier):
    """Speculative sampling on a chain, which accepts x ~ q with probability min(1, p / q).

    After a rejection the token comes from the residual (p - q)+ (Leviathan et al.,
    arXiv:2211.17192). A draft token is accepted with probability sum_v min(p, q), compared with
    sum_v p q for ``match``. Use the rule only for chains sampled from the stored q, because
    deterministic draft tokens or several children would change the distribution. The verification
    result is the row's logits, because the residual needs all of p.
    """

    name: ClassVar[RuleName] = "rejection"

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            position, children = tree.position(row) + 1, tree.children(row)
            if not children:
                return Verdict(path, self.draw(verdicts_R[row], position), tests)
            (child,) = children
            draft_token = DraftToken(tree.tokens[child], self.q_of(tree, child))
            payload = self.test(verdicts_R[row], position, draft_token.token, draft_token.q)
            tests.append(payload is None)
            if payload is not None:
                token = self._corrected(draft_token, verdicts_R[row], position, payload)
                # An approximate rule may resample the rejected token: its own result has been used
                # up.
                return Verdict(path, token, tests, restarts=True)
            if child >= len(verdicts_R):
                return Verdict(path, draft_token.token, tests)
            path.append(child)

    def _corrected(
        self, draft_token: DraftToken, logits_V: Tensor, position: int, payload: Payload
    ) -> int:
        """Add payloads until ``correct`` returns a token. Target and draft share this process."""
        payloads, num_samples = [payload], self.tail_samples
        while (token := self.correct(draft_token, position, payloads)) is None:
            count = self.next_samples(len(payloads))
            payloads.append(self.more(logits_V, position, num_samples, count))
            num_samples += count
        return token

    def next_samples(self, num_payloads: int) -> int:
        """Return the number of samples to request next, 0 for the whole distribution."""
        return 4 * self.tail_samples if num_payloads == 1 else 0

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        p_V = self.probabilities(logits_V)
        # u q < p instead of u < p / q: no division, and p = 0 never passes.
        if self.random.uniform(position, "accept") * q < float(p_V[token]):
            return None
        return self.payload(logits_V, position)

    def payload(self, logits_V: Tensor, position: int) -> Payload:
        """Return the target values needed for a correction at a position."""
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
        residual_V = (p_V - _entries(draft_token, torch.arange(len(p_V)))).clamp_min(0)
        return draw(residual_V, self.random.uniform(position, "residual", attempt))


class TopKVerifier(RejectionVerifier):
    """PicoSpec's separate rejection sampling as published, which sends the K most likely tokens.

    The correction is sampled from (p - q)+ among these K tokens. At a tested position the total
    variation from p is the sum of (p - q)+ outside the top K, which is at most p's mass there.
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
        # Filtered first: a sampling filter may leave fewer than K tokens with mass.
        ids_K = p_V.topk(min(self.payload_tokens, len(p_V))).indices
        tail_V = p_V.clone()
        tail_V[ids_K] = 0
        tail_mass = float(tail_V.sum())
        # Numbered from ``first``: a request for more must not repeat samples sent before.
        attempts = range(first, first + count) if tail_mass else range(0)
        uniforms = [self.random.uniform(position, "tail", attempt) for attempt in attempts]
        samples_M = ids_K.new_tensor([draw(tail_V, u) for u in uniforms])
        ids = torch.cat([ids_K, samples_M])
        return Top(
            ids=ids.int().cpu(), p=p_V[ids].cpu(), num_top=len(ids_K), tail_mass=min(tail_mass, 1.0)
        )

    def _residual(self, draft_token: DraftToken, top: Top) -> tuple[Tensor, Tensor]:
        """Return tokens [K] and (p - q)+ [K]."""
        ids_K, p_K = top.ids[: top.num_top], top.p[: top.num_top]
        return ids_K, (p_K - _entries(draft_token, ids_K)).clamp_min(0)


class TailEscapeVerifier(TopKVerifier):
    """Exact rule that sends the K most likely tokens, the mass outside, and samples from there.

    Let r be the mass of (p - q)+ among the K tokens and t the mass of p outside. In each turn, with
    probability r / (r + t), sample from (p - q)+ among the K. Otherwise take the next sample y ~ p
    outside and accept it with probability (p(y) - q(y))+ / p(y). Take turns until a token is
    accepted. Each turn ends at token v with probability (p(v) - q(v))+ / (r + t), inside or outside
    the K.
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
        # The target sampled tokens outside the top K in advance; thin them here by p - q.
        sample_M = torch.cat([part.ids[part.num_top :] for part in parts])
        p_M = torch.cat([part.p[part.num_top :] for part in parts])
        inside, outside = float(residual_K.sum()), parts[0].tail_mass
        q_M = _entries(draft_token, sample_M)
        samples = iter(zip(sample_M.tolist(), p_M.tolist(), q_M.tolist(), strict=True))
        turn = 0
        while True:
            # Use `not <` so an empty residual (rounding alone) ends among the K.
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
        # No turn returned a token, so the whole residual is left: sample from it.
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
    filters: TokenFilters = UNFILTERED,
    payload_tokens: int,
    tail_samples: int,
) -> Verifier:
    """Return the named rule, or ``match`` at temperature 0, where nothing is sampled."""
    rule = RULES[name if temperature else "match"]
    return rule(
        temperature,
        random,
        filters=filters,
        payload_tokens=payload_tokens,
        tail_samples=tail_samples,
    )


def _entries(draft_token: DraftToken, ids: Tensor) -> Tensor:
    """Return q for some tokens, with 0 for every id past the end of q."""
    q_V = draft_token.q_V
    assert q_V is not None, "only tokens that were drawn from q are tested against it"
    known = ids < len(q_V)
    return torch.where(known, q_V[torch.where(known, ids, 0).long()], 0.0)
