"""Acceptance rules and their random numbers.

Each rule walks from the root through the rows whose logits have returned and ends with one more
token. The law of the emitted text is the target's, for every schedule.
"""

# V target vocabulary, R returned rows

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipedraft.inference.config import MIN_TEMPERATURE
from pipedraft.inference.tree import TokenTree

Purpose = Literal["target", "draft", "accept", "residual", "noise", "tail", "branch", "thin"]
"""noise: Gumbel's; tail, branch and thin: draws from a distribution that is known in parts."""


@dataclass(frozen=True)
class KeyedRandom:
    """Uniform numbers that are a function of (seed, prompt, position, purpose, attempt).

    Counter-based, so the numbers of a position do not depend on the schedule that reaches it, and
    no number serves two decisions.
    """

    seed: int
    prompt: int

    def uniform(self, position: int, purpose: Purpose, attempt: int = 0) -> float:
        """A number in [0, 1) with 53 random bits."""
        key = f"{self.seed}:{self.prompt}:{position}:{purpose}:{attempt}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53

    def uniforms(self, position: int, purpose: Purpose, count: int) -> np.ndarray:
        """float64 [count] in [0, 1); the same on every machine, as Philox is counter-based too."""
        key = f"{self.seed}:{self.prompt}:{position}:{purpose}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        philox = np.random.Philox(key=int.from_bytes(digest, "big"))
        return np.random.Generator(philox).random(count)


def probabilities(logits_V: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float64; sums over a large vocabulary stay exact.

    No temperature above 0 overflows: below the smallest one that commands take, the largest logit
    is subtracted first, which would change the last bits of all others.
    """
    logits_V = logits_V.double()
    if temperature < MIN_TEMPERATURE:
        logits_V = logits_V - logits_V.amax(-1, keepdim=True)
    return torch.softmax(logits_V / temperature, -1)


def draw(probabilities_V: Tensor, uniform: float) -> int:
    """Inverse-CDF sample: the first token whose cumulative probability exceeds ``uniform``.

    The weights need not add up to 1. A token of probability 0 is never returned: uniforms are at
    most 1 - 2^-53, and that times the sum is less than the sum after rounding, too.

    Raises:
        ValueError: the weights add up to 0, infinity or NaN.
    """
    cumulative = probabilities_V.numpy(force=True).cumsum()
    if not 0 < cumulative[-1] < np.inf:
        raise ValueError(
            f"probabilities: their sum is {cumulative[-1]:g}, so no token can be drawn; a weight "
            "of the target or the draft is NaN or infinite, load another checkpoint"
        )
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


@dataclass(frozen=True)
class Walk:
    """Outcome of one verification."""

    path: list[int]
    """Accepted rows, the root first; all of them had their logits."""
    next_token: int
    """Token after the path: a child in the tree whose logits are still in flight, or not in it."""
    tests: list[bool]
    """One entry for each token that was tested against guesses: whether a guess was right."""


class Verifier:
    """A rule in two parts: ``judge`` where the logits are, ``walk`` where the tree is.

    Between them lies the link from the last stage to the controller, so a rule whose verdicts are
    token ids sends nothing larger.
    """

    def __init__(self, temperature: float, random: KeyedRandom) -> None:
        self.temperature, self.random = temperature, random

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """What ``walk`` has to know of returned rows: [R, ...], on the CPU."""
        raise NotImplementedError

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        """Walk through the first R rows of the tree."""
        raise NotImplementedError

    def target_tokens(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """int64 [R]: the target's own draw x ~ p(. | row), argmax when greedy, after each row."""
        if self.temperature == 0:
            return logits_RV.argmax(-1).cpu()
        p_RV = probabilities(logits_RV, self.temperature)
        uniforms = [self.random.uniform(p + 1, "target") for p in positions_R.tolist()]
        return torch.tensor([draw(p_V, u) for p_V, u in zip(p_RV, uniforms, strict=True)])


class MatchVerifier(Verifier):
    """Draw x ~ p(. | node), argmax when greedy; go to child x if the tree has it.

    Exact for any tree that is a function of earlier draws only, whichever siblings were verified
    before: the draw at a node never looks at its children (EAGLE's sequential test with q = 1
    has the same law). A verdict is the drawn token.
    """

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


class RejectionVerifier(Verifier):
    """Speculative sampling on a chain of sampled guesses: accept x ~ q with min(1, p(x) / q(x)).

    On rejection the token comes from the residual (p - q)+ (Leviathan et al., arXiv:2211.17192).
    The acceptance probability is sum_v min(p, q), more than the match rule's sum_v p q. Only for
    chains whose guesses were sampled from the stored q: deterministic or several children would
    change the law. A verdict is the row's logits: the residual needs all of p.
    """

    def judge(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        return logits_RV.cpu()

    def walk(self, tree: TokenTree, verdicts_R: Tensor) -> Walk:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            position = tree.position(row) + 1
            p_V = probabilities(verdicts_R[row], self.temperature)
            children = tree.children(row)
            if not children:
                token = draw(p_V, self.random.uniform(position, "target"))
                return Walk(path, token, tests)
            (child,) = children
            token, q_V = tree.tokens[child], tree.draft_probabilities[child]
            assert q_V is not None, "the rejection rule needs the q that a guess was drawn from"
            accepted = self.random.uniform(position, "accept") * q_V[token] < p_V[token]
            tests.append(bool(accepted))
            if not accepted:
                residual_V = (p_V - q_V).clamp_min(0)
                uniform = self.random.uniform(position, "residual")
                return Walk(path, draw(residual_V, uniform), tests)
            if child >= len(verdicts_R):
                return Walk(path, token, tests)
            path.append(child)
