"""PEARL keeps drafting while the target verifies a batch, and reads results between batches."""

import math
from dataclasses import dataclass
from typing import ClassVar

from ...schedules.base import Schedule
from ..draft_length import DraftLengthPolicy, Estimates, parse_policy
from .stop_and_wait import LinkSchedule


@dataclass(frozen=True, kw_only=True)
class PEARL(LinkSchedule):
    """PEARL's pre-verify and post-verify.

    The schedule reads verification results only between batches. After a rejection, the first draft
    token is sent as a batch of its own, and the remaining ones as the next batch. The draft length
    is T_v / t_d tokens, or chosen by a policy.
    """

    name: ClassVar[str] = "pearl"
    own_rule = "tail_escape"

    policy: str = "ratio"
    """Draft length policy: ratio (T_v / t_d), fixed:K, eq11, alg2 or geometric."""

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        if self.policy != "ratio":
            super().__post_init__()

    @property
    def early(self) -> bool:
        return True

    @property
    def drafts_on(self) -> bool:
        return True

    def make_policy(self, estimates: Estimates) -> DraftLengthPolicy:
        if self.policy != "ratio":
            return super().make_policy(estimates)
        ratio = estimates.verify_s / estimates.draft_s if estimates.draft_s else math.inf
        length = max(1, round(min(ratio, self.max_length)))
        return parse_policy(f"fixed:{length}", max_length=max(length, self.max_length))

    def batch_size(self, chosen: int, num_batches: int) -> int:
        # Pre-verify: the first token is tested while the remaining ones are still drafted.
        return {0: 1, 1: chosen - 1}.get(num_batches, chosen) if chosen > 1 else chosen

    def reads(self, is_complete: bool) -> bool:
        return is_complete
