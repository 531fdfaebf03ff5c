"""Measure acceptance during training by decoding held-out prompts with the current head."""

import math
from collections.abc import Iterable

from torch import Tensor

from ..files import Values
from ..inference.config import DecodeConfig
from ..inference.custom_generate import NoText
from ..inference.engine import Engine
from ..inference.result import DecodeResult, Observer
from ..inference.shapes import TreeShape
from ..inference.sources import default_schedule
from ..models.heads.draft import Draft
from .objective import DraftObjective

NEW_TOKENS = 32
"""Maximum answer length."""
DECODED_TAU, DECODED_LENGTH = "decoded_acceptance_length", "decoded_equivalent_acceptance_length"
"""Log names for the decoded figures."""


def first_turns(rows: Iterable[Values], count: int, *, max_positions: int) -> list[list[int]]:
    """Return prompts from the first rows, each with the tokens before the first assistant turn.

    Rows without tokens before an assistant turn are skipped.

    Args:
        count: maximum prompt count.
        max_positions: the target's limit for a prompt and its answer. Longer prompts are skipped.
    """
    prompts: list[list[int]] = []
    for row in rows:
        if len(prompts) == count:
            break
        length = next((at for at, counted in enumerate(row["loss_mask"]) if counted), 0)
        # The prompt and its answer must fit into the target's context together.
        if 0 < length <= max_positions - NEW_TOKENS:
            prompts.append(list(row["input_ids"][:length]))
    return prompts


def decode_config(draft: Draft, num_steps: int) -> DecodeConfig:
    """Return settings to decode with the head's own schedule.

    EAGLE's schedule verifies chains instead of trees, as the teacher-forced figures assume.

    Args:
        num_steps: draft tokens per chain. Other schedules do not use this number.
    """
    schedule = default_schedule(draft.draft_type)
    settings: Values = {"tree": TreeShape(kind="chain", depth=num_steps)}
    if schedule != "eagle":
        trained = vars(draft.config)
        # Decode with the head's training-time timing.
        settings = {x: trained[x] for x in ("timing", "tokens_per_step") if x in trained}
    stages = {"num_stages": draft.num_stages or 1, "boundaries": draft.boundaries}
    return DecodeConfig.of(schedule, **stages, max_new_tokens=NEW_TOKENS, **settings)


def longest_round(objective: DraftObjective) -> float:
    """Return the tokens of a decoded round whose draft tokens are all accepted, or infinity."""
    has_chains = default_schedule(objective.draft.draft_type) == "eagle"
    return objective.num_steps + 1 if has_chains else math.inf


def decode_prompts(
    objective: DraftObjective,
    weights: dict[str, Tensor],
    prompts: list[list[int]],
    observer: Observer | None = None,
) -> list[DecodeResult]:
    """Decode the prompts in this process, with the head's own schedule."""
    draft = objective.draft_with(weights)
    config = decode_config(draft, objective.num_steps)
    engine = Engine(objective.target, NoText(), config, draft)
    return [engine.decode(ids, observer=observer) for ids in prompts]


def decode(
    objective: DraftObjective, weights: dict[str, Tensor], prompts: list[list[int]]
) -> dict[str, float]:
    """Decode the prompts, and return tau and L' over all of them."""
    results = decode_prompts(objective, weights, prompts)
    rounds = [length for result in results for length in result.round_lengths]
    num_steps = sum(result.num_steps for result in results)
    if not num_steps:  # every answer ended after the prefill token
        return {DECODED_TAU: 1.0, DECODED_LENGTH: 1.0}
    num_tokens = sum(result.num_tokens for result in results)
    return {
        DECODED_TAU: sum(rounds) / len(rounds),
        # L': in the baseline every token takes one step per stage.
        DECODED_LENGTH: results[0].num_stages * num_tokens / num_steps,
    }
