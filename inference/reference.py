"""Speculative decoding on one page, with plain transformers models. Read this file first.

Without a cache, so it is slow. The engine returns the same tokens in the same number of steps.
"""

# V vocabulary

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

Uniform = Callable[[int, str, int], float]
"""Returns a random number in [0, 1) for a position, a purpose, and a verification round."""


def distribution(model: PreTrainedModel, tokens: list[int], temperature: float) -> Tensor:
    """Return the next token's distribution, float64 [V]. At temperature 0 the argmax has it all."""
    logits_V = model(torch.tensor([tokens])).logits[0, -1].double()
    if temperature == 0:
        return torch.zeros_like(logits_V).index_fill(0, logits_V.argmax(), 1.0)
    return torch.softmax(logits_V / temperature, -1)


def draw(p_V: Tensor, uniform: float) -> int:
    """Return the first token with cumulative probability above ``uniform``."""
    return int(torch.searchsorted(p_V.cumsum(0), uniform * p_V.sum(), right=True))


def verify(p_V: Tensor, q_V: Tensor, token: int, position: int, uniform: Uniform) -> int:
    """Return a sample from p: the draft token x ~ q with probability min(1, p(x) / q(x)).

    Otherwise sample from (p - q)+ / sum_v (p - q)+ (Leviathan et al. 2023, arXiv:2211.17192).
    Greedy decoding is the same rule: p and q are one token each, so x is accepted if they agree.
    """
    if uniform(position, "accept", 0) * q_V[token] < p_V[token]:
        return token
    return draw((p_V - q_V).clamp_min(0), uniform(position, "residual", 0))


def speculate(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int], *, num_new: int,
    num_stages: int, length: int | None, temperature: float, uniform: Uniform,
) -> tuple[list[int], float]:  # fmt: skip
    """Decode with a chain of draft tokens. Return the new tokens and L' = n N / K.

    N tokens follow the first one, in K pipeline steps. In one step every stage works once.

    Args:
        length: draft tokens per round. They enter with the root in one forward pass, and the stages
            wait for the draft (EAGLE). None: one draft token enters at every step (SPD).
    """
    first = draw(distribution(target, prompt, temperature), uniform(len(prompt), "target", 0))
    tokens, end, num_steps, num_rounds = [*prompt, first], len(prompt) + num_new, 0, 0

    def propose(chain: list[tuple[int, Tensor]]) -> tuple[int, Tensor]:
        text = [*tokens, *(token for token, _ in chain)]
        q_V = distribution(draft, text, temperature)
        return draw(q_V, uniform(len(text), "draft", num_rounds)), q_V

    while len(tokens) < end:
        chain: list[tuple[int, Tensor]] = []  # draft tokens in flight behind the root, with their q
        for _ in range(length or num_stages):
            chain.append(propose(chain))
        num_steps += num_stages  # the root, tokens[-1], crosses the stages
        is_accepted = True
        while is_accepted and len(tokens) < end:  # the oldest row returns from the last stage
            p_V, position = distribution(target, tokens, temperature), len(tokens)
            if not chain:  # all draft tokens were accepted, so the last row gives a token for free
                tokens.append(draw(p_V, uniform(position, "target", 0)))
                break
            token, q_V = chain.pop(0)
            tokens.append(verify(p_V, q_V, token, position, uniform))
            is_accepted = tokens[-1] == token
            if is_accepted and length is None and len(tokens) < end:
                chain.append(propose(chain))
                num_steps += 1
        num_rounds += 1  # a rejected token: what is in flight behind it is useless
    return tokens[len(prompt) :], num_stages * (num_new - 1) / num_steps
