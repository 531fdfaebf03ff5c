"""Acceptance rules and their random numbers.

Each rule walks from the root through the rows whose logits have returned and ends with one more
token. The law of the emitted text is the target's, for every schedule.
"""

# V target vocabulary, R returned rows

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from pipedraft.inference.tree import TokenTree

Purpose = Literal["target", "draft", "accept", "residual"]


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


def probabilities(logits_V: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float64; sums over a large vocabulary stay exact."""
    return torch.softmax(logits_V.double() / temperature, -1)


def draw(probabilities_V: Tensor, uniform: float) -> int:
    """Inverse-CDF sample: the first token whose cumulative probability exceeds ``uniform``.

    The weights need not add up to 1. A token of probability 0 is never returned: uniforms are at
    most 1 - 2^-53, and that times the sum is less than the sum after rounding, too.
    """
    cumulative = probabilities_V.numpy(force=True).cumsum()
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


class Verifier(Protocol):
    def walk(self, tree: TokenTree, logits_RV: Tensor) -> Walk: ...


class MatchVerifier:
    """Draw x ~ p(. | node), argmax when greedy; go to child x if the tree has it.

    Exact for any tree that is a function of earlier draws only, whichever siblings were verified
    before: the draw at a node never looks at its children (PIPELINES 1.6; EAGLE's sequential test
    with q = 1 has the same law).
    """

    def __init__(self, temperature: float, random: KeyedRandom) -> None:
        self.temperature, self.random = temperature, random

    def walk(self, tree: TokenTree, logits_RV: Tensor) -> Walk:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            token = self._token(logits_RV[row], tree.position(row) + 1)
            child = tree.child(row, token)
            if tree.children(row):
                tests.append(child is not None)
            if child is None or child >= len(logits_RV):
                return Walk(path, token, tests)
            path.append(child)

    def _token(self, logits_V: Tensor, position: int) -> int:
        if self.temperature == 0:
            return int(logits_V.argmax())
        uniform = self.random.uniform(position, "target")
        return draw(probabilities(logits_V, self.temperature), uniform)


class RejectionVerifier:
    """Speculative sampling on a chain of sampled guesses: accept x ~ q with min(1, p(x) / q(x)).

    On rejection the token comes from the residual (p - q)+ (Leviathan et al., arXiv:2211.17192).
    The acceptance probability is sum_v min(p, q), more than the match rule's sum_v p q. Only for
    chains whose guesses were sampled from the stored q: deterministic or several children would
    change the law.
    """

    def __init__(self, temperature: float, random: KeyedRandom) -> None:
        self.temperature, self.random = temperature, random

    def walk(self, tree: TokenTree, logits_RV: Tensor) -> Walk:
        path: list[int] = [0]
        tests: list[bool] = []
        while True:
            row = path[-1]
            position = tree.position(row) + 1
            p_V = probabilities(logits_RV[row], self.temperature)
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
            if child >= len(logits_RV):
                return Walk(path, token, tests)
            path.append(child)
