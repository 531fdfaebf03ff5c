"""What every schedule is made of: checked settings, ``run``, a label, its steps on other stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.shapes import MOST_ROWS, Budget, TreeShape, segment_sizes

if TYPE_CHECKING:
    from pipedraft.inference.config import RuleName
    from pipedraft.inference.engine import Session

Growth = Literal["layers", "trees", "micro_batches"]
"""Growing verbs of a draft source."""
TEXT_DRAFTS = {"language_model", "flexspec"}
"""Their draft token is a function of the tokens before it, whenever it is made."""
TREE_DRAFTS = TEXT_DRAFTS | {"eagle", "eagle3", "mtp", "dflash", "dspark", "ngram", "suffix"}
"""A tree that is drafted between rounds is a function of the committed tokens."""


class Refusal(Exception):
    """One line: why a recorded run says nothing about another pipeline."""


@dataclass(frozen=True)
class Round:
    """A recorded round, from one restart to the next."""

    length: int
    """Tokens emitted."""
    end: str
    """As in ``DecodeResult.round_ends``."""
    drafted: int
    forwards: int


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Who drafts and injects when. The fields of a subclass are its settings and its options."""

    name: ClassVar[str]
    grows: ClassVar[Growth | None] = None
    """Verb of the draft source that it needs; None: no draft."""
    needs_link: ClassVar[bool] = False
    """Made for a target behind a network: it decides by time and by what is away."""

    verifies_whole: ClassVar[bool] = False
    """A round is drafted as a whole, and verified once all of it is back."""

    @abstractmethod
    def run(self, session: Session) -> None:
        """Decode one sequence by the session's verbs."""

    # -- what it drafts ---------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Draft tokens of a layer, children of the root of a tree, or branches."""
        return 1

    @property
    def label(self) -> str | None:
        """Name of what is drafted at once, for tables; None: a layer of ``width`` draft tokens."""
        return None

    @property
    def is_chain(self) -> bool:
        """Every row of the token tree has one child at most."""
        return self.width == 1

    @property
    def can_sample(self) -> bool:
        """Draft tokens may be drawn from the draft's distribution."""
        return self.is_chain

    @property
    def auto_rule(self) -> RuleName:
        """Acceptance rule above temperature 0 where none is asked for."""
        return "rejection" if self.can_sample else "gumbel"

    # -- recorded runs on other pipelines ---------------------------------------------------

    def replay(self, clock: VirtualClock, found: Round) -> None:
        """Give the clock the steps of a recorded round on the clock's number of stages.

        Raises:
            Refusal: no rule says how many steps it would take.
        """
        raise Refusal(f"nothing is known of {self.name}'s steps on other stages")

    def replay_basis(self, draft_type: str | None, num_stages: int, cost: CostModel) -> str:
        """ "exact" or "assumed": what figures on another number of stages rest on.

        assumed: draft tokens depend on n, and those on another n are taken to be right as often.

        Args:
            num_stages, cost: of the recorded run.

        Raises:
            Refusal: there is no such basis.
        """
        if not self.is_chain:
            raise Refusal(
                "rows of a tree are pruned before they are verified, and which ones depends on n; "
                "only chains, and trees of eagle and naive_pp, are replayed on other stages"
            )
        return "exact" if draft_type in TEXT_DRAFTS else "assumed"

    def cost_conflict(self, recorded: CostModel, cost: CostModel) -> str:
        """Why a run under another cost model would have drafted other tokens; "": it would not."""
        return ""


@dataclass(frozen=True, kw_only=True)
class LayerSchedule(Schedule):
    """A schedule that adds layers of draft tokens below the deepest ones."""

    grows: ClassVar[Growth | None] = "layers"

    tree_width: Budget = 1
    """Draft tokens per step; more than 1 keeps every branch that agrees with the output; auto: as
    many as pay under the cost model, 1 to 16."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tree_width")

    @property
    def width(self) -> int:
        return MOST_ROWS if self.tree_width == "auto" else self.tree_width

    @property
    def label(self) -> str | None:
        return "width:auto" if self.tree_width == "auto" else None

    def cost_conflict(self, recorded: CostModel, cost: CostModel) -> str:
        return auto_conflict(self.name) if self.tree_width == "auto" else ""


@dataclass(frozen=True, kw_only=True)
class TreeSchedule(Schedule):
    """A schedule that drafts whole trees."""

    grows: ClassVar[Growth | None] = "trees"

    tree: TreeShape = TreeShape()
    """What a round proposes: chain:M, static, or dynamic[:LEVELS:BEAMS:TOKENS]; TOKENS of auto are
    as many as pay under the cost model."""

    @property
    def width(self) -> int:
        return self.tree.width

    @property
    def label(self) -> str | None:
        return self.tree.label

    @property
    def is_chain(self) -> bool:
        return self.tree.is_chain

    def cost_conflict(self, recorded: CostModel, cost: CostModel) -> str:
        return auto_conflict(self.name) if self.tree.is_auto else ""

    def replay_basis(self, draft_type: str | None, num_stages: int, cost: CostModel) -> str:
        if draft_type not in TREE_DRAFTS:
            raise Refusal(
                f"nothing is known of what the draft tokens of a {draft_type} draft depend on"
            )
        return "exact"


@dataclass(frozen=True, kw_only=True)
class SegmentSchedule(TreeSchedule):
    """A schedule whose trees travel in segments."""

    micro_batches: int | None = None
    """Segments that a tree is cut into; None: stages + 1."""
    max_segment_rows: int = 16
    """Draft tokens of a segment (FlowSpec's L_max); the root comes on top. A tree that does not fit
    ``micro_batches`` segments of this size is cut into more of them."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "micro_batches", "max_segment_rows")

    def num_segments(self, num_stages: int) -> int:
        return self.micro_batches or num_stages + 1

    def replay_chain(self, clock: VirtualClock, found: Round) -> None:
        """A chain: the round ends with the segment that holds the row before its last token."""
        num_segments = self.num_segments(clock.num_stages)
        sizes = segment_sizes(found.drafted + 1, num_segments, self.max_segment_rows)
        last, returned = 0, sizes[0]
        while returned < found.length:
            last += 1
            returned += sizes[last]
        clock.serial_draft(found.forwards)
        travel(clock, sizes, clock.num_stages + last, forwards=0, overlap=True)


def check_at_least(settings: Any, least: float, *names: str) -> None:
    """Refuse settings below a number, or not finite; None is left alone."""
    for name in names:
        value = getattr(settings, name)
        if value not in (None, "auto") and not least <= value < float("inf"):
            below = "negative" if least == 0 else f"below {least:g}"
            problem = below if value < least else "not finite"
            raise ValueError(f"{name}: {value} is {problem}; give at least {least:g}")


def auto_conflict(name: str) -> str:
    return f"{name} chose its budget (auto) by its own cost model; record a run under this one"


def check_probability(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: {value} is no probability; give 0 to 1")


def travel(
    clock: VirtualClock, sizes: Sequence[int], num_steps: int, *, forwards: int, overlap: bool
) -> None:
    """Give the clock the steps in which segments of these sizes enter, one per step."""
    for step in range(num_steps):
        entered = [step - stage for stage in range(clock.num_stages)]
        rows = [sizes[e] if 0 <= e < len(sizes) else 0 for e in entered]
        clock.step(rows, draft_forwards=forwards, overlap=overlap)


def travel_whole(
    clock: VirtualClock, found: Round, num_segments: int, max_rows: int | None
) -> None:
    """Give the clock a tree that is verified once all of it is back: n + segments - 1 steps."""
    sizes = segment_sizes(found.drafted + 1, num_segments, max_rows)
    clock.serial_draft(found.forwards)
    num_steps = clock.num_stages + len(sizes) - 1
    travel(clock, sizes, num_steps, forwards=0, overlap=False)
