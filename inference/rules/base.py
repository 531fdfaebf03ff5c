"""Base class for acceptance rules, and the rules with token ids as verification results.

A rule has two halves: ``judge`` runs on the last stage's logits, and ``walk`` runs on the
controller's tree. Rules with token ids as results send only the ids from stage to controller.
Across a network the target tests draft tokens itself (``test``), and the draft side samples the
correction (``correct``). Under every schedule, emitted tokens follow the target's distribution
unless ``caveat`` says otherwise.
"""

# V target vocabulary, U draft vocabulary, R returned rows, Q leaves, D distinct positions

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...models.speed.cuda_graphs import TokenChoice
from ..tree import TokenTree
from ..verdict import NO_TOKEN, NotFinite, Verdict, checked
from . import RuleName
from .filters import TokenFilters
from .random import (
    ALL_LOGITS,
    GREEDY,
    UNFILTERED,
    DraftToken,
    KeyedRandom,
    Payload,
    SharedNoise,
    Token,
    draw,
    draw_on_device,
    greedy_tokens,
    probabilities,
    sampled_tokens,
    scaled,
)
from .temperature import MIN_TEMPERATURE

if TYPE_CHECKING:
    from ...models.target import StagedTarget

PENALTY = 8.0
"""Subtracted from the draft's log-probability for filtered tokens (docs/lab/drafting_trials.md)."""


# -- the rules ------------------------------------------------------------------------------


class Verifier(ABC):
    """Acceptance rule at one temperature, with one prompt's random numbers."""

    name: ClassVar[RuleName]
    needs_q: ClassVar[bool] = False
    """True if draft tokens are sampled from q (the draft's distribution) and the test compares q
    with p (the target's)."""
    caveat: ClassVar[str] = ""
    """Reason why emitted tokens deviate from the target's distribution; "" if they don't."""

    def __init__(
        self,
        temperature: float,
        random: KeyedRandom,
        *,
        filters: TokenFilters = UNFILTERED,
        payload_tokens: int = 10,
        tail_samples: int = 4,
    ) -> None:
        """
        Args:
            filters: applied to target and draft distributions alike.
            payload_tokens, tail_samples: tokens and samples in a rejection's first ``Top``.
        """
        self.temperature, self.random, self.filters = temperature, random, filters
        self.payload_tokens, self.tail_samples = payload_tokens, tail_samples
        self._ids: tuple[Tensor, Tensor] | None = None

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the distribution for target or draft logits, as float64 [..., V]."""
        return probabilities(logits_V, self.temperature, self.filters)

    # Where the draft is.

    def propose(
        self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int
    ) -> DraftToken:
        """Return the draft's most likely next token. ``attempt`` is the round number."""
        ranked_1U = self.rank(logits_U[None], self.noise_rows(ids_U, [position]))
        return DraftToken(int(ids_U[ranked_1U[0].argmax()]))

    def noise_rows(self, ids_U: Tensor, positions_Q: Sequence[int]) -> Tensor | None:
        """Return noise for the draft's log-probabilities, float64 [Q, U] on the CPU, or None."""
        return None

    def rank(self, logits_QU: Tensor, noise_QU: Tensor | None) -> Tensor:
        """Return the draft's logits, or with noise log q plus the target's noise.

        Children are the tokens with the largest values. With noise the largest value is the draft's
        sample. Filtered tokens move to the end but stay, because the target may keep them.
        """
        ranked_QU = logits_QU
        if noise_QU is not None:
            log_q_QU = torch.log_softmax(logits_QU.double() / self.temperature, -1)
            ranked_QU = log_q_QU + noise_QU.to(log_q_QU.device)
        if not self.filters.active:
            return ranked_QU
        is_removed_QU = scaled(logits_QU, self.temperature, self.filters).isneginf()
        return ranked_QU - PENALTY * is_removed_QU

    def child_scores(self, logits_QU: Tensor, noise_QU: Tensor | None) -> Tensor:
        """Return log-probabilities [Q, U] for choosing children and ordering trees.

        They are the draft's log-probabilities, with the noise added if the rule shares noise. A
        token favored by the noise is also more likely to be the target's own token.
        """
        return torch.log_softmax(self.rank(logits_QU, noise_QU).float(), -1)

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
        """Walk through the first R rows in the tree and return the verification result."""
        raise NotImplementedError

    def correct(
        self, draft_token: DraftToken, position: int, payloads: Sequence[Payload]
    ) -> int | None:
        """Return the token that replaces a rejected one, or None if more payloads are needed."""
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
        """Sample the target's own token at a position. Greedy decoding takes the argmax."""
        if self.temperature == 0:
            return checked(int(greedy_tokens(logits_V[None])))
        uniform = self.random.uniform(position, "target")
        return draw(self.probabilities(logits_V), uniform)

    def target_tokens(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """Return the target's own token after each row, int64 [R], or ``NO_TOKEN``.

        A row on a rejected branch may have no token: only a path of the output needs one.
        """
        if self.temperature == 0:
            return greedy_tokens(logits_RV).cpu()
        # Numbers are keyed by the position of the token they decide, one after its row.
        positions = [position + 1 for position in positions_R.tolist()]
        if logits_RV.device.type != "cpu":
            return self.draw_on_device(logits_RV, positions)
        rows = zip(logits_RV, positions, strict=True)
        return torch.tensor([self._try_draw(logits_V, position) for logits_V, position in rows])

    def _try_draw(self, logits_V: Tensor, position: int) -> int:
        try:
            return self.draw(logits_V, position)
        except NotFinite:
            return NO_TOKEN

    def draw_on_device(self, logits_RV: Tensor, positions: Sequence[int]) -> Tensor:
        """Run ``draw`` for each row above temperature 0, and copy only tokens [R] to the CPU."""
        uniforms = [self.random.uniform(position, "target") for position in positions]
        return draw_on_device(self.probabilities(logits_RV), uniforms)

    def host_ids(self, ids_U: Tensor) -> Tensor:
        """Return the draft vocabulary in host memory, copied once."""
        # Compared by identity: comparing values on a GPU would wait for all its pending work.
        if self._ids is None or self._ids[0] is not ids_U:
            self._ids = ids_U, ids_U.cpu()
        return self._ids[1]

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """Return all that ``walk`` needs for each returned row, [R, ...] on the CPU."""
        raise NotImplementedError

    def judge_states(
        self, target: StagedTarget, hidden_RH: Tensor, positions_R: Tensor, *, alone: bool = True
    ) -> Tensor:
        """Run ``judge`` on raw hidden states, with ``alone`` in one CUDA graph where possible."""
        if not alone or not target.can_choose(len(hidden_RH)):
            return self.judge(target.logits(hidden_RH), positions_R)
        choice = self.choice(positions_R)
        if choice is None:
            return self.judge(target.choose(hidden_RH, ALL_LOGITS), positions_R)
        return target.choose(hidden_RH, choice).cpu()

    def choice(self, positions_R: Tensor) -> TokenChoice | None:
        """Return ``judge`` for a CUDA graph, or None if it needs the host or returns no tokens."""
        return None

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        """Test a draft token. Return None if it is accepted, else a payload for the correction."""
        raise NotImplementedError

    def more(self, logits_V: Tensor, position: int, first: int, count: int) -> Payload:
        """Return further samples for a rejection."""
        raise ValueError(f"more: rule {self.name!r} sends no samples; do not ask for more")

    def payload_bytes(self, vocab_size: int) -> int:
        """Approximate number of bytes that a rejection adds to a verification result."""
        return 4


class SampledVerifier(Verifier):
    """Base of rules that sample draft tokens from q, store q with them, and return logits."""

    needs_q = True

    def propose(
        self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int
    ) -> DraftToken:
        ids = self.host_ids(ids_U)
        # Long enough for the draft's ids; add_sampled pads to the target's vocabulary.
        q_V = torch.zeros(int(ids.max()) + 1, dtype=torch.float64)
        q_V[ids] = self.probabilities(logits_U).cpu()
        return DraftToken(draw(q_V, self.random.uniform(position, "draft", attempt)), q_V)

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return logits_RV.cpu()

    def q_of(self, tree: TokenTree, row: int) -> Tensor:
        """Return the q that a row's draft token was sampled from, float64 [V] on the CPU."""
        q_V = tree.draft_probabilities[row]
        assert q_V is not None, "the rule needs the q that a draft token was drawn from"
        return q_V.cpu()


class MatchVerifier(Verifier):
    """Sample x ~ p(. | node), or take the argmax if greedy. Go to child x if it exists.

    The output is exact for any tree computed from earlier samples only, in whatever order siblings
    are verified, because sampling at a node never looks at its children. EAGLE's sequential test
    with q = 1 has the same distribution. The verification result is the sampled token.
    """

    name: ClassVar[RuleName] = "match"

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return self.target_tokens(logits_RV, positions_R)

    def choice(self, positions_R: Tensor) -> TokenChoice | None:
        if self.temperature == 0:
            return GREEDY
        if self.filters.reads_on_host or self.temperature < MIN_TEMPERATURE:
            return None
        numbers = [self.random.uniform(t + 1, "target") for t in positions_R.tolist()]
        return TokenChoice(
            self.filters,
            torch.tensor([self.temperature, *numbers], dtype=torch.float64),
            partial(sampled_tokens, self.filters),
        )

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
        tokens = verdicts_R.tolist()
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            child = tree.child(row, tokens[row])
            if tree.children(row):
                tests.append(child is not None)
            # A child in flight ends the walk, too: its own logits are not here yet.
            if child is None or child >= len(tokens):
                return Verdict(path, tokens[row], tests)
            path.append(child)

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        own = self.draw(logits_V, position)
        return None if own == token else Token(id=own)


class GumbelVerifier(MatchVerifier):
    """``match`` with noise that target and draft share, so they agree more often.

    Emitted tokens never depend on the tree, so the output equals autoregressive decoding.
    """

    name: ClassVar[RuleName] = "gumbel"

    def __init__(self, temperature: float, random: KeyedRandom, **settings: Any) -> None:
        super().__init__(temperature, random, **settings)
        self.noise = SharedNoise(random)

    def draw(self, logits_V: Tensor, position: int) -> int:
        if self.temperature == 0:
            return super().draw(logits_V, position)
        p_V = self.probabilities(logits_V).numpy(force=True)
        with np.errstate(divide="ignore"):
            # Exponential race: argmin of E / p is a sample of p, and p = 0 gives infinity.
            token = int((self.noise.exponential(position, len(p_V)) / p_V).argmin())
        return checked(token if np.isfinite(p_V[token]) else NO_TOKEN)

    def choice(self, positions_R: Tensor) -> TokenChoice | None:
        # A position's noise, one number per token of the vocabulary, comes from the host.
        return super().choice(positions_R) if self.temperature == 0 else None

    def draw_on_device(self, logits_RV: Tensor, positions: Sequence[int]) -> Tensor:
        # Tree rows share few positions; copy the noise to the device once per position.
        place = {position: index for index, position in enumerate(dict.fromkeys(positions))}
        noise = [self.noise.exponential(position, logits_RV.shape[1]) for position in place]
        noise_DV = torch.from_numpy(np.stack(noise)).to(logits_RV.device)
        place_R = torch.tensor([place[position] for position in positions]).to(logits_RV.device)
        ratio_RV = noise_DV.index_select(0, place_R) / self.probabilities(logits_RV)
        # Value and place in one buffer, so one copy tells NaN, too: it counts as the smallest.
        least_2R = torch.empty(2, len(ratio_RV), dtype=torch.int64, device=ratio_RV.device)
        torch.min(ratio_RV, -1, out=(least_2R[0].view(ratio_RV.dtype), least_2R[1]))
        values_R, tokens_R = least_2R.cpu()
        return torch.where(values_R.view(ratio_RV.dtype).isfinite(), tokens_R, NO_TOKEN)

    def noise_rows(self, ids_U: Tensor, positions_Q: Sequence[int]) -> Tensor | None:
        if self.temperature == 0:
            return None
        ids = self.host_ids(ids_U).numpy()
        size = int(ids.max()) + 1
        with np.errstate(divide="ignore"):
            rows = [
                # log q + Gumbel noise: the largest entry is the draft's sample.
                -np.log(self.noise.exponential(position, size)[ids])
                for position in positions_Q
            ]
        return torch.from_numpy(np.stack(rows))


class ArgmaxVerifier(Verifier):
    """FlexSpec's Algorithm 2 above temperature 0, which accepts only the target's argmax.

    The verification result is the target's argmax and its own sample. A rejection emits the sample.
    """

    name: ClassVar[RuleName] = "argmax"
    caveat: ClassVar[str] = "biased: accepts the target's argmax at T > 0"

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        # After the filters, which may remove the largest logit (typical_p).
        best_R = self.probabilities(logits_RV).argmax(-1).cpu()
        return torch.stack([best_R, self.target_tokens(logits_RV, positions_R)], dim=-1)

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            best, own = verdicts_R[path[-1]].tolist()
            child = tree.child(path[-1], best)
            if tree.children(path[-1]):
                tests.append(child is not None)
            if child is None or own == NO_TOKEN:
                drawn = tree.child(path[-1], own)
                # If the sampled child has returned already, its own result has been used up.
                spent = drawn is not None and drawn < len(verdicts_R)
                return Verdict(path, own, tests, restarts=spent)
            if child >= len(verdicts_R):
                return Verdict(path, best, tests)
            path.append(child)

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        own = self.draw(logits_V, position)  # before the test: it refuses NaN
        return None if int(self.probabilities(logits_V).argmax()) == token else Token(id=own)
