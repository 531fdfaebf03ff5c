"""What an acceptance rule is, and the rules whose verdicts are token ids.

A rule has two halves, ``judge`` where the logits are and ``walk`` where the tree is, with the link
from the last stage to the controller between them: a rule whose verdicts are token ids sends
nothing larger. Across a network the target tests draft tokens itself (``test``), and the draft's
side draws what stands in their place (``correct``). Emitted tokens are distributed as the target's,
for every schedule, unless ``caveat`` says otherwise.
"""

# V target vocabulary, U draft vocabulary, R returned rows, Q leaves

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pipedraft.inference.config import RuleName
from pipedraft.inference.rules.filters import TokenFilters
from pipedraft.inference.rules.random import (
    UNFILTERED,
    DraftToken,
    KeyedRandom,
    Payload,
    SharedNoise,
    Token,
    draw,
    draw_on_device,
    probabilities,
    scaled,
)
from pipedraft.inference.tree import TokenTree

PENALTY = 8.0
"""On the draft's log-probability of tokens that the filters remove from it (docs/methods.md)."""


@dataclass(frozen=True)
class Verdict:
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
    """Draft tokens are drawn from q, which the test compares with p."""
    caveat: ClassVar[str] = ""
    """Why emitted tokens are not distributed as the target's; "": they are."""

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
            filters: of the target's distribution and of the draft's alike.
            payload_tokens: tokens of a ``Top``.
            tail_samples: draws in the first ``Top`` of a rejection.
        """
        self.temperature, self.random, self.filters = temperature, random, filters
        self.payload_tokens, self.tail_samples = payload_tokens, tail_samples
        self._ids: tuple[Tensor, Tensor] | None = None

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """The distribution [..., V], float64, that logits of target or draft stand for."""
        return probabilities(logits_V, self.temperature, self.filters)

    # Where the draft is.

    def propose(
        self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int
    ) -> DraftToken:
        """The draft's next token: its most likely one.

        Args:
            ids_U: target token of each entry.
            attempt: number of the round; a position is drafted once in each.
        """
        ranked_1U = self.rank(logits_U[None], self.noise_rows(ids_U, [position]))
        return DraftToken(int(ids_U[ranked_1U[0].argmax()]))

    def noise_rows(self, ids_U: Tensor, positions_Q: Sequence[int]) -> Tensor | None:
        """What the rule adds to the draft's log-probabilities: float64 [Q, U] on the CPU."""
        return None

    def rank(self, logits_QU: Tensor, noise_QU: Tensor | None) -> Tensor:
        """Logits by which children are chosen: the draft's own, or log q plus the target's noise.

        With noise the largest entry is the draft's draw. What the filters remove from the draft
        comes at the end: the target may keep it.
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
        """Log-probabilities [Q, U] by which children are chosen and trees ordered.

        Those of the draft. Where the rule shares the target's noise, those after the noise: a token
        that the noise favors is more likely the target's own token, too.
        """
        return torch.log_softmax(self.rank(logits_QU, noise_QU).float(), -1)

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
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
        return draw(self.probabilities(logits_V), uniform)

    def target_tokens(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """The target's own token after each row, int64 [R]."""
        if self.temperature == 0:
            return logits_RV.argmax(-1).cpu()
        positions = [position + 1 for position in positions_R.tolist()]
        if logits_RV.device.type != "cpu":
            return self.draw_on_device(logits_RV, positions)
        rows = zip(logits_RV, positions, strict=True)
        return torch.tensor([self.draw(logits_V, position) for logits_V, position in rows])

    def draw_on_device(self, logits_RV: Tensor, positions: Sequence[int]) -> Tensor:
        """``draw`` of each row, above temperature 0; the tokens [R] alone come to the CPU."""
        uniforms = [self.random.uniform(position, "target") for position in positions]
        return draw_on_device(self.probabilities(logits_RV), uniforms)

    def host_ids(self, ids_U: Tensor) -> Tensor:
        """The draft vocabulary in the host's memory, copied once."""
        if self._ids is None or self._ids[0] is not ids_U:
            self._ids = ids_U, ids_U.cpu()
        return self._ids[1]

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """Verdicts on returned rows, all that ``walk`` has to know: [R, ...], on the CPU."""
        raise NotImplementedError

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        """None: the draft token at this position is accepted."""
        raise NotImplementedError

    def more(self, logits_V: Tensor, position: int, first: int, count: int) -> Payload:
        """Further samples of a rejection, for a draft that asks for them.

        Raises:
            ValueError: no payload of this rule has samples.
        """
        raise ValueError(f"more: rule {self.name!r} sends no samples; do not ask for more")

    def payload_bytes(self, vocab_size: int) -> int:
        """Approximate bytes that a rejection adds to a verdict."""
        return 4


class SampledVerifier(Verifier):
    """Draft tokens are drawn from q, which is stored with them; a verdict is the row's logits."""

    needs_q = True

    def propose(
        self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int
    ) -> DraftToken:
        ids = self.host_ids(ids_U)
        q_V = torch.zeros(int(ids.max()) + 1, dtype=torch.float64)
        q_V[ids] = self.probabilities(logits_U).cpu()
        return DraftToken(draw(q_V, self.random.uniform(position, "draft", attempt)), q_V)

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return logits_RV.cpu()

    def q_of(self, tree: TokenTree, row: int) -> Tensor:
        """The distribution that a row's draft token was drawn from, float64 [V], on the CPU."""
        q_V = tree.draft_probabilities[row]
        assert q_V is not None, "the rule needs the q that a draft token was drawn from"
        return q_V.cpu()


class MatchVerifier(Verifier):
    """Draw x ~ p(. | node), argmax when greedy; go to child x if the tree has it.

    Exact for any tree that is a function of earlier draws only, whichever siblings were verified
    before: the draw at a node never looks at its children (EAGLE's sequential test with q = 1
    has the same distribution). A verdict is the drawn token.
    """

    name: ClassVar[RuleName] = "match"

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return self.target_tokens(logits_RV, positions_R)

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Verdict:
        tokens = verdicts_R.tolist()
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            child = tree.child(row, tokens[row])
            if tree.children(row):
                tests.append(child is not None)
            if child is None or child >= len(tokens):
                return Verdict(path, tokens[row], tests)
            path.append(child)

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        own = self.draw(logits_V, position)
        return None if own == token else Token(id=own)


class GumbelVerifier(MatchVerifier):
    """``match`` with shared noise: target and draft draw with the same, so they agree more often.

    The emitted token never depends on the tree, so the output is plain decoding's by this rule.
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
            return int((self.noise.exponential(position, len(p_V)) / p_V).argmin())

    def draw_on_device(self, logits_RV: Tensor, positions: Sequence[int]) -> Tensor:
        # Rows of a tree share few positions, whose noise is sent once.
        place = {position: index for index, position in enumerate(dict.fromkeys(positions))}
        noise = [self.noise.exponential(position, logits_RV.shape[1]) for position in place]
        noise_DV = torch.from_numpy(np.stack(noise)).to(logits_RV.device)
        place_R = torch.tensor([place[position] for position in positions]).to(logits_RV.device)
        return (noise_DV.index_select(0, place_R) / self.probabilities(logits_RV)).argmin(-1).cpu()

    def noise_rows(self, ids_U: Tensor, positions_Q: Sequence[int]) -> Tensor | None:
        if self.temperature == 0:
            return None
        ids = self.host_ids(ids_U).numpy()
        size = int(ids.max()) + 1
        with np.errstate(divide="ignore"):
            rows = [
                -np.log(self.noise.exponential(position, size)[ids]) for position in positions_Q
            ]
        return torch.from_numpy(np.stack(rows))


class ArgmaxVerifier(Verifier):
    """FlexSpec's Algorithm 2 at T > 0: a draft token must be the target's most likely one.

    A verdict is that token and the target's own draw, which stands where the test fails.
    """

    name: ClassVar[RuleName] = "argmax"
    caveat: ClassVar[str] = "biased: accepts the target's argmax at T > 0"

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
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
            if child is None:
                drawn = tree.child(path[-1], own)
                # A child that failed the test and is drawn all the same: its verdict is spent.
                spent = drawn is not None and drawn < len(verdicts_R)
                return Verdict(path, own, tests, restarts=spent)
            if child >= len(verdicts_R):
                return Verdict(path, best, tests)
            path.append(child)

    def test(self, logits_V: Tensor, position: int, token: int, q: float) -> Payload | None:
        if int(self.probabilities(logits_V).argmax()) == token:
            return None
        return Token(id=self.draw(logits_V, position))
