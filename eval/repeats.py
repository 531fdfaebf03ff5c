"""Repeats of one method on the same prompts: what of its tokens per second is the machine's noise.

A repeat decodes with the same random numbers: its texts and steps are those of the first, its times
are not. Another seed at a temperature above 0 is something else, another text: see
docs/evaluation.md.
"""

# M repeats, P conversations
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipedraft.eval.metrics import ratio
from pipedraft.eval.paired import variance_parts
from pipedraft.eval.record import PromptRecord, RepeatsRecord
from pipedraft.inference.result import DecodeResult


def decode_seconds(
    conversations: Sequence[Hashable], results: Sequence[DecodeResult]
) -> dict[Hashable, float]:
    """First to last token of each turn, as tokens/s counts them, summed over a conversation."""
    seconds: dict[Hashable, float] = {}
    for conversation, result in zip(conversations, results, strict=True):
        times_s = result.token_times_s
        own_s = times_s[-1] - times_s[0] if times_s else 0.0
        seconds[conversation] = seconds.get(conversation, 0.0) + own_s
    return seconds


def unequal_turns(repeats: Sequence[Mapping[Any, DecodeResult]]) -> int:
    """Turns whose tokens or steps are not the same in every repeat."""

    def outcome(turns: Mapping[Any, DecodeResult], key: Any) -> Any:
        return (turns[key].token_ids, turns[key].num_steps) if key in turns else None

    keys = dict.fromkeys(key for turns in repeats for key in turns)
    first, *others = repeats
    return sum(any(outcome(o, key) != outcome(first, key) for o in others) for key in keys)


def repeats_record(
    rows: Sequence[PromptRecord], repeats: Sequence[Mapping[Any, DecodeResult]]
) -> RepeatsRecord:
    """Variance components of the conversations' tokens per second, for results.json.

    Args:
        rows: with ``decode_s_repeats`` of length M.
        repeats: the turns by name, M times.

    Returns:
        Without components where fewer than two conversations took any time.
    """
    tokens_P = np.array([row.tokens for row in rows], dtype=np.float64)
    seconds_MP = np.array([row.decode_s_repeats for row in rows], dtype=np.float64).T
    found = RepeatsRecord(
        repeats=len(repeats),
        unequal_turns=unequal_turns(repeats),
        tokens_per_s=[ratio(float(tokens_P.sum()), float(s.sum())) for s in seconds_MP],
    )
    timed_P = (seconds_MP > 0).all(0)
    if timed_P.sum() < 2:
        return found
    parts = variance_parts(tokens_P[timed_P] / seconds_MP[:, timed_P])
    components = {k: v for k, v in vars(parts).items() if k != "num_repeats"}
    return msgspec.structs.replace(found, **components, repeat_share=parts.repeat_share)
