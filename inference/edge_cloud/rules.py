"""Acceptance rules in two halves: the edge guesses and corrects, the cloud tests.

``CloudRule.test`` sees the target's logits and one guess, ``EdgeRule`` sees the draft's logits and,
after a rejection, a payload. Every random number is keyed by seed, prompt, position and purpose; a
position is decided once, so none serves two decisions.
"""

# V target vocabulary, U draft vocabulary, K top entries, M samples

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pipedraft.inference.edge_cloud.messages import Logits, Payload, Settings, Token, Top
from pipedraft.inference.verify import KeyedRandom, draw, probabilities


@dataclass(frozen=True)
class Guess:
    token: int
    q_V: Tensor | None = None
    """float64, over the target's vocabulary; None: not drawn at random."""

    @property
    def q(self) -> list[float]:
        """What the rule sends of it: nothing, or its own probability."""
        return [] if self.q_V is None else [float(self.q_V[self.token])]


class _Half:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.temperature = settings, settings.temperature
        self.random = KeyedRandom(settings.seed, settings.prompt)


def race(p_V: np.ndarray, random: KeyedRandom, position: int) -> int:
    """Token of the smallest E_v / p_v with E_v exponential: distributed as p (Gumbel's trick).

    Two distributions that race with the same noise mostly have the same winner.
    """
    uniform_V = random.uniforms(position, "noise", len(p_V))
    with np.errstate(divide="ignore"):
        return int((-np.log(uniform_V) / p_V).argmin())


# -- the cloud's half -----------------------------------------------------------------------


class CloudRule(_Half):
    needs_q: ClassVar[bool] = False

    @staticmethod
    def payload_bytes(settings: Settings, vocab_size: int) -> int:
        """What a rejection adds to a verdict, about."""
        return 4

    def draw(self, logits_V: Tensor, position: int) -> int:
        """The target's own token: first, bonus or streamed."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        uniform = self.random.uniform(position, "target")
        return draw(probabilities(logits_V, self.temperature), uniform)

    def test(self, logits_V: Tensor, position: int, guess: int, q: float) -> Payload | None:
        """None: the guess is text."""
        raise NotImplementedError

    def more(self, logits_V: Tensor, position: int, first: int, count: int) -> Top | Logits:
        """
        Raises:
            ValueError: no payload of this rule has samples.
        """
        raise ValueError(f"more: rule {self.settings.rule!r} sends no samples; do not ask for more")


class MatchCloud(CloudRule):
    """The guess must be the token that the target draws itself; exact."""

    def test(self, logits_V: Tensor, position: int, guess: int, q: float) -> Payload | None:
        token = self.draw(logits_V, position)
        return None if token == guess else Token(id=token)


class GumbelCloud(MatchCloud):
    """As ``match``; target and draft draw with the same noise, so they agree more often."""

    def draw(self, logits_V: Tensor, position: int) -> int:
        if self.temperature == 0:
            return super().draw(logits_V, position)
        p_V = probabilities(logits_V, self.temperature).numpy(force=True)
        return race(p_V, self.random, position)


class ArgmaxCloud(CloudRule):
    """FlexSpec's Algorithm 2 at T > 0: the guess must be the target's most likely token.

    Biased: that token is emitted whenever the draft agrees, and the others' share is too small.
    """

    def test(self, logits_V: Tensor, position: int, guess: int, q: float) -> Payload | None:
        if int(logits_V.argmax()) == guess:
            return None
        return Token(id=self.draw(logits_V, position))


class RejectionCloud(CloudRule):
    """Accept x ~ q with min(1, p(x) / q(x)); the edge draws the correction from (p - q)+."""

    needs_q = True

    @staticmethod
    def payload_bytes(settings: Settings, vocab_size: int) -> int:
        return 4 * vocab_size

    def test(self, logits_V: Tensor, position: int, guess: int, q: float) -> Payload | None:
        p_V = probabilities(logits_V, self.temperature)
        if self.random.uniform(position, "accept") * q < float(p_V[guess]):
            return None
        return self.payload(logits_V, position)

    def payload(self, logits_V: Tensor, position: int) -> Payload:
        return Logits(values=_pack(logits_V, "<f4"))


class TopKCloud(RejectionCloud):
    """Only the K most likely tokens come down (PicoSpec's separate rejection sampling)."""

    @staticmethod
    def payload_bytes(settings: Settings, vocab_size: int) -> int:
        samples = settings.tail_samples if settings.rule == "tail_escape" else 0
        return 12 * (settings.top_k + samples)

    def payload(self, logits_V: Tensor, position: int) -> Payload:
        return self._top(logits_V, position, 0, 0)

    def _top(self, logits_V: Tensor, position: int, first: int, count: int) -> Top:
        p_V = probabilities(logits_V, self.temperature)
        p_K, ids_K = p_V.topk(min(self.settings.top_k, len(p_V)))
        tail_V = p_V.clone()
        tail_V[ids_K] = 0
        tail_mass = float(tail_V.sum())
        attempts = range(first, first + count) if tail_mass else range(0)
        uniforms = [self.random.uniform(position, "tail", attempt) for attempt in attempts]
        samples_M = torch.tensor([draw(tail_V, u) for u in uniforms], dtype=torch.int64)
        return Top(
            ids=_pack(ids_K, "<i4"),
            p=_pack(p_K, "<f8"),
            tail_mass=min(tail_mass, 1.0),
            sample_ids=_pack(samples_M, "<i4"),
            sample_p=_pack(p_V.cpu()[samples_M], "<f8"),
        )


class TailEscapeCloud(TopKCloud):
    """The K most likely tokens, the others' mass and some draws from these; exact."""

    def payload(self, logits_V: Tensor, position: int) -> Payload:
        return self._top(logits_V, position, 0, self.settings.tail_samples)

    def more(self, logits_V: Tensor, position: int, first: int, count: int) -> Top | Logits:
        if count == 0:
            return Logits(values=_pack(logits_V, "<f4"))
        return self._top(logits_V, position, first, count)


# -- the edge's half ------------------------------------------------------------------------


class EdgeRule(_Half):
    def guess(self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int) -> Guess:
        """The draft's most likely token.

        Args:
            ids_U: target token of each entry.
            attempt: number of the epoch; a position is guessed once in each.
        """
        return Guess(int(ids_U[logits_U.argmax()]))

    def correct(self, guess: Guess, position: int, payloads: Sequence[Payload]) -> int | None:
        """The token instead of a rejected guess; None: ask for more.

        Args:
            payloads: of this rejection so far.

        Raises:
            ValueError: payloads that this rule cannot read.
        """
        match payloads:
            case [Token(id=token)]:
                return token
        raise _wrong(self.settings, payloads)


class GumbelEdge(EdgeRule):
    def guess(self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int) -> Guess:
        q_V = np.zeros(int(ids_U.max()) + 1)
        q_V[ids_U.numpy(force=True)] = probabilities(logits_U, self.temperature).numpy(force=True)
        return Guess(race(q_V, self.random, position))


class RejectionEdge(EdgeRule):
    """Guesses are drawn from q, corrections from the residual."""

    def guess(self, logits_U: Tensor, ids_U: Tensor, position: int, *, attempt: int) -> Guess:
        q_V = torch.zeros(int(ids_U.max()) + 1, dtype=torch.float64)
        q_V[ids_U.cpu()] = probabilities(logits_U, self.temperature).cpu()
        return Guess(draw(q_V, self.random.uniform(position, "draft", attempt)), q_V)

    def correct(self, guess: Guess, position: int, payloads: Sequence[Payload]) -> int | None:
        match payloads:
            case [Logits(values=values)]:
                return self._from_all(guess, position, values, attempt=0)
        raise _wrong(self.settings, payloads)

    def _from_all(self, guess: Guess, position: int, values: bytes, *, attempt: int) -> int:
        p_V = probabilities(torch.from_numpy(_unpack(values, "<f4")), self.temperature)
        residual_V = (p_V - _padded(guess, len(p_V))).clamp_min(0)
        return draw(residual_V, self.random.uniform(position, "residual", attempt))

    def _residual(self, guess: Guess, top: Top) -> tuple[np.ndarray, Tensor]:
        """Tokens [K] and (p - q)+ [K]."""
        ids_K = _unpack(top.ids, "<i4")
        p_K, q_K = torch.from_numpy(_unpack(top.p, "<f8")), _entries(guess, ids_K)
        if len(p_K) != len(ids_K) or not len(ids_K):
            raise ValueError(f"payload: {len(ids_K)} tokens with {len(p_K)} probabilities")
        return ids_K, (p_K - q_K).clamp_min(0)


class TopKEdge(RejectionEdge):
    """As published: from (p - q)+ among the K tokens alone.

    The law of a tested position is off by the sum of (p - q)+ outside them (total variation),
    ``top_k_bias``; at most the others' mass under p.
    """

    def correct(self, guess: Guess, position: int, payloads: Sequence[Payload]) -> int | None:
        match payloads:
            case [Top() as top]:
                ids_K, residual_K = self._residual(guess, top)
                if not residual_K.any():  # not published; the K tokens themselves stand in
                    residual_K = torch.from_numpy(_unpack(top.p, "<f8"))
                uniform = self.random.uniform(position, "residual")
                return int(ids_K[draw(residual_K, uniform)])
        raise _wrong(self.settings, payloads)


class TailEscapeEdge(RejectionEdge):
    """Exact, from a part of the distribution.

    r mass of (p - q)+ among the K tokens, t mass of p outside them. Again and again: with
    probability r / (r + t) draw among the K from (p - q)+; else take the next sample y ~ p outside
    them with probability (p(y) - q(y))+ / p(y). Each turn ends at a token v with probability
    (p(v) - q(v))+ / (r + t), wherever v is.
    """

    def correct(self, guess: Guess, position: int, payloads: Sequence[Payload]) -> int | None:
        *tops, last = payloads
        values = last.values if isinstance(last, Logits) else None
        if values is None:
            tops.append(last)
        parts = [top for top in tops if isinstance(top, Top)]
        if not parts or len(parts) < len(tops):
            raise _wrong(self.settings, payloads)
        ids_K, residual_K = self._residual(guess, parts[0])
        sample_M = np.concatenate([_unpack(part.sample_ids, "<i4") for part in parts])
        p_M = np.concatenate([_unpack(part.sample_p, "<f8") for part in parts])
        if len(sample_M) != len(p_M):
            raise ValueError(f"payload: {len(sample_M)} samples with {len(p_M)} probabilities")
        inside, outside = float(residual_K.sum()), parts[0].tail_mass
        q_M = _entries(guess, sample_M).tolist()
        samples = iter(zip(sample_M.tolist(), p_M.tolist(), q_M, strict=True))
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
        return None if values is None else self._from_all(guess, position, values, attempt=1)


def _pack(values: Tensor, kind: str) -> bytes:
    return values.numpy(force=True).astype(kind).tobytes()


def _unpack(values: bytes, kind: str) -> np.ndarray:
    if len(values) % np.dtype(kind).itemsize:
        raise ValueError(f"payload: {len(values)} bytes are no numbers of type {kind}")
    return np.frombuffer(values, kind).copy()


def _padded(guess: Guess, size: int) -> Tensor:
    """q over the whole vocabulary; 0 behind the draft's last token."""
    assert guess.q_V is not None, "only guesses that were drawn from q are tested against it"
    return torch.nn.functional.pad(guess.q_V, (0, size - len(guess.q_V)))


def _entries(guess: Guess, ids: np.ndarray) -> Tensor:
    """q of some tokens."""
    if len(ids) and ids.min() < 0:
        raise ValueError(f"payload: token {ids.min()} is negative")
    size = max(int(ids.max()) + 1 if len(ids) else 0, len(guess.q_V))  # type: ignore[arg-type]
    return _padded(guess, size)[torch.from_numpy(ids.astype(np.int64))]


def _wrong(settings: Settings, payloads: Sequence[Payload]) -> ValueError:
    names = ", ".join(type(payload).__name__ for payload in payloads)
    return ValueError(
        f"payload: {names} after a rejection by rule {settings.rule!r}; both sides must run the "
        "same version"
    )


@dataclass(frozen=True)
class Rule:
    edge: type[EdgeRule]
    cloud: type[CloudRule]
    caveat: str = ""
    """Why its text does not have the target's law; "": it has."""

    @property
    def is_exact(self) -> bool:
        return not self.caveat


RULES: dict[str, Rule] = {
    "match": Rule(EdgeRule, MatchCloud),
    "gumbel": Rule(GumbelEdge, GumbelCloud),
    "rejection": Rule(RejectionEdge, RejectionCloud),
    "tail_escape": Rule(TailEscapeEdge, TailEscapeCloud),
    "topk": Rule(TopKEdge, TopKCloud, "approximate: never corrects to a token outside the top K"),
    "alg2_argmax": Rule(EdgeRule, ArgmaxCloud, "biased: accepts the target's argmax at T > 0"),
}


def rule_of(settings: Settings) -> Rule:
    """At temperature 0 all rules are ``match``."""
    return RULES[settings.rule if settings.temperature else "match"]


def top_k_bias(p_V: Tensor, q_V: Tensor, top_k: int) -> float:
    """Total variation by which ``topk`` misses p at a tested position: (p - q)+ outside the top K.

    Not if (p - q)+ is 0 on all of the K; then it is larger.
    """
    residual_V = (p_V - q_V).clamp_min(0)
    inside = residual_V[p_V.topk(min(top_k, len(p_V))).indices].sum()
    return float(residual_V.sum() - inside)
