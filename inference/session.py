"""One prompt's decoding state, and the verbs that schedules call."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..models.target import KeepRows
from .auto_tree import ShapeMeter
from .cost_model import VirtualClock
from .demands import Demands, EndMask
from .meter import BatchMeter, DraftMeter
from .not_finite import report
from .pipelines import Ahead, Pipeline, Returned
from .result import DecodeResult, Observer
from .rules.base import Verifier
from .shapes import MOST_ROWS, Budget, RowCosts, TreeShape, segment_sizes
from .sources.base import DraftSampling, DraftSource, Expansion
from .tree import TokenTree
from .verdict import NO_TOKEN, NotFinite, Verdict


class DecodedTarget(Protocol):
    """What a session asks of a target, wherever its stages run."""

    @property
    def num_stages(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def recompute_length(self) -> int | None: ...


class Session:
    """One prompt's decoding state, and the methods ("verbs") for schedules."""

    def __init__(
        self,
        target: DecodedTarget,
        pipeline: Pipeline,
        source: DraftSource | None,
        verifier: Verifier,
        clock: VirtualClock,
        *,
        max_new_tokens: int,
        meter: DraftMeter | BatchMeter | None = None,
        shapes: ShapeMeter,
        on_token: Callable[[int], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """
        Args:
            pipeline: open for this sequence.
            source: None for autoregressive decoding.
            meter, shapes: timers of rounds, shared by an engine's sequences.
            on_token, observer: see ``Engine.decode``.
        """
        self.target, self.pipeline, self.source = target, pipeline, source
        self.verifier, self.clock = verifier, clock
        self.max_new_tokens, self.meter, self.shapes = max_new_tokens, meter, shapes
        self.on_token, self.observer = on_token, observer
        self.sampling = DraftSampling(verifier)
        self.demands = Demands() if observer is None else observer.demands
        self.num_rounds = 0
        self.round_length = 0
        self._noted = (0, 0)
        """Draft tokens and draft forwards in finished rounds."""
        self.pending_forwards = 0
        self.part = 1.0
        """Fraction of the draft in use, as chosen by ``DraftMeter``."""
        self._shape: TreeShape | None = None
        """Shape of the round, if ``ShapeMeter`` chose it."""

    def begin(self, prompt_ids: list[int]) -> None:
        """Commit the prompt, and emit the token after it."""
        self.started = self.pipeline.now()
        self.result = DecodeResult(
            prompt_ids=list(prompt_ids),
            token_ids=[],
            text="",
            stop_reason="",
            num_stages=self.num_stages,
        )
        masked = self.ends if self.demands.min_tokens else ()
        mask = EndMask(token_ids=masked, end=len(prompt_ids) + self.demands.min_tokens)
        self.pipeline.demand(mask, keeps_logits=self.demands.wants_logits)
        if self.observer is not None:
            self.observer.start()
        taps = self.source.taps if self.source else ()
        token, features = self.pipeline.prefill(torch.tensor(prompt_ids), taps, self.verifier)
        if token == NO_TOKEN:
            place = self.pipeline.find_not_finite(list(prompt_ids), [])
            raise NotFinite(report(len(prompt_ids), place))
        if self.source is not None:
            self.source.begin(features, [*prompt_ids, token])
        self.result.prefill_s = self.pipeline.now() - self.started
        self.tree = self._fresh_tree(token, len(prompt_ids))
        self._round_began = self.pipeline.now()
        if self.meter is not None:
            self.meter.begin(self.pipeline.now())
            self.part = self.meter.choose()
        self._emit(token, None, self.pipeline.first_logits)
        self._recompute_if_due()

    # -- verbs ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return bool(self.result.stop_reason)

    @property
    def num_stages(self) -> int:
        return self.target.num_stages

    @property
    def features(self) -> Mapping[int, Tensor]:
        """Current hidden states [r, H] for rows in flight, by layer."""
        return self.pipeline.features_with(self.tree.tokens[self.tree.num_injected :])

    @property
    def drafter(self) -> DraftSource:
        """This sequence's draft source. Only schedules with a growth verb have one."""
        assert self.source is not None, "the engine refuses such a schedule without a draft"
        return self.source

    def inject(self, num_segments: int = 1, max_rows: int | None = None) -> None:
        """Queue the unsent rows in segments (``segment_sizes``). One segment enters per step."""
        tree, start = self.tree, self.tree.num_injected
        for size in segment_sizes(len(tree) - start, num_segments, max_rows, has_root=not start):
            self.pipeline.inject(tree.segment(start, start + size))
            start += size
        tree.num_injected = len(tree)
        self.pipeline.start()

    def grow_layer(self, width: Budget) -> None:
        """Add up to ``width`` draft tokens below the deepest rows, from available hidden states."""
        if not self.drafts_pay(width):
            return
        # With auto the costs stop the growth; MOST_ROWS only bounds the work of ranking children.
        most = self._part_of(MOST_ROWS if width == "auto" else width)
        with self.drafting():
            self.drafter.grow_layer(
                self.tree, self.features, width=most, sampling=self.step_sampling(width)
            )

    def grow_tree(
        self, shape: TreeShape, costs: RowCosts | None = None, *, by_score: bool = False
    ) -> None:
        """Draft a fresh tree from the committed tokens and merge it below the root.

        Args:
            costs: for choosing the tree size.
            by_score: send the best draft tokens first instead of level by level.
        """
        if not self.drafts_pay("auto" if shape.is_auto else 1):
            return
        if shape.kind == "auto":
            shape = self._shape = self.shapes.shape
        if not shape.depth:
            return
        sampling = self._round_sampling(costs if shape.is_auto else None)
        # A static tree is a fixed set of paths: there is no depth to shrink.
        if self.part < 1 and shape.kind != "static":
            tokens = shape.num_tokens
            tokens = tokens if tokens == "auto" else self._part_of(tokens)
            shape = replace(shape, depth=self._part_of(shape.depth), num_tokens=tokens)
        with self.drafting():
            self.drafter.grow_tree(self.tree, shape, by_score=by_score, sampling=sampling)

    def deepen_tree(self, levels: int, num_tokens: int) -> None:
        """Let the draft extend its last fresh tree."""
        if not self.part:
            return
        with self.drafting():
            self.drafter.deepen_tree(self.tree, levels, num_tokens)

    def expand_tree(
        self, num_forwards: int, num_tokens: Budget, max_rows: int, by_score: bool
    ) -> None:
        """Extend the in-flight tree at its most probable leaves.

        Args:
            num_tokens: number of rows that one forward continues, and of tokens it adds.
            max_rows: maximum draft tokens added by all forwards.
        """
        if not self.drafts_pay(num_tokens):
            return
        sampling, num_forwards = self.step_sampling(num_tokens), self._part_of(num_forwards)
        width = math.ceil(max_rows / num_forwards) if num_tokens == "auto" else num_tokens
        expansion = Expansion(
            num_forwards=num_forwards, width=width, max_rows=max_rows, by_score=by_score
        )
        with self.drafting():
            self.drafter.expand_tree(self.tree, expansion, sampling)

    def drafts_pay(self, budget: Budget) -> bool:
        return bool(self.part) and (budget != "auto" or self.clock.drafts_pay())

    def _part_of(self, number: int) -> int:
        return max(1, round(number * self.part))

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Count the block's draft tokens, forwards and time."""
        source = self.drafter
        num_rows, num_forwards = len(self.tree), source.num_forwards
        started_s = self.pipeline.now()
        with self.pipeline.timeline.span("draft"):
            yield
        self.pipeline.drafted(len(self.tree) - num_rows, started_s)
        self.result.num_drafted += len(self.tree) - num_rows
        self.pending_forwards += source.num_forwards - num_forwards

    def _round_sampling(self, costs: RowCosts | None = None) -> DraftSampling:
        return replace(self.sampling, attempt=self.num_rounds, costs=costs)

    def step_sampling(self, budget: Budget) -> DraftSampling:
        """Return sampling settings for draft tokens entering at every step."""
        costs = self.clock.step_costs(self.result.num_tokens) if budget == "auto" else None
        return self._round_sampling(costs)

    def draft_alone(self, *, at_least: int = 0) -> None:
        """Charge pending draft forwards, at least ``at_least``, as time when all stages wait."""
        self.clock.serial_draft(max(self.pending_forwards, at_least))
        self.pending_forwards = 0

    def collect(self) -> Returned:
        """Step until the whole tree has returned, and join its segments' results."""
        parts: list[Returned] = []
        while sum(part.num_rows for part in parts) < len(self.tree):
            returned = self.step()
            if returned is not None:
                parts.append(returned)
        if len(parts) == 1:  # the common case needs no copy
            return parts[0]
        verdicts = torch.cat([part.verdicts for part in parts])
        kept = [part.logits for part in parts if part.logits is not None]
        return Returned(len(self.tree), verdicts, torch.cat(kept) if kept else None)

    def step(self, *, overlap: bool = False, ahead: bool = False) -> Returned | None:
        """Run one pipeline step.

        Args:
            overlap: True if the pending draft forwards run during this step, False if after it.
            ahead: send a waiting draft token as the next segment before this step's result is
                known. Stage processes may then start early.
        """
        returned = self.pipeline.tick(self._ahead() if ahead else None)
        if self.observer is not None:
            self.observer.step(self.pipeline.last_rows)
        self._count_step(overlap)
        self.pending_forwards = 0
        return returned

    def _count_step(self, overlap: bool) -> None:
        forwards = self.pending_forwards
        self.clock.step(self.pipeline.last_rows, draft_forwards=forwards, overlap=overlap)

    def _ahead(self) -> Ahead | None:
        """Return the waiting draft token if there is only one. Most of several would be pruned."""
        first, count = self.tree.num_injected, len(self.tree)
        if count - first != 1:
            return None
        return Ahead(self.tree.segment(first, count), lambda returned: self._verify(returned)[1])

    def _verify(self, returned: Returned) -> tuple[Verdict, KeepRows]:
        try:
            walk = self._up_to_recompute(self.pipeline.walk(self.verifier, self.tree, returned))
        except NotFinite as error:
            raise self._not_finite(error) from error
        # Commit the path alone: a retained child's own result would already be used up.
        if walk.restarts:
            return walk, KeepRows(tuple(walk.path), len(walk.path))
        return walk, self.tree.keep_for(walk.path, walk.next_token)

    def _not_finite(self, error: NotFinite) -> NotFinite:
        """Return the error about logits that choose no token, with the place of the first one."""
        ids = [*self.result.prompt_ids, *self.result.token_ids]
        ids += [self.tree.tokens[row] for row in error.path[1:]]
        # Hidden rows reach others, too: their weight is 0, but 0 * NaN is NaN.
        drafted, row = list[int](), error.path[-1] if error.path else 0
        while children := self.tree.children(row):
            row = children[0]
            drafted.append(self.tree.tokens[row])
        return NotFinite(report(len(ids), self.pipeline.find_not_finite(ids, drafted)))

    def _up_to_recompute(self, walk: Verdict) -> Verdict:
        """Cut a walk where all rows are computed again. No row in flight remains valid then."""
        length = self.target.recompute_length
        room = 0 if length is None else length - self.tree.position(walk.path[0]) - 1
        if not 0 < room <= len(walk.path):
            return walk
        path, beyond = walk.path[:room], walk.path[room:]
        token = self.tree.tokens[beyond[0]] if beyond else walk.next_token
        return Verdict(path, token, walk.tests[:room], restarts=True)

    def _recompute_if_due(self) -> None:
        """Compute all rows again once the text outgrows its frequencies, as `generate` does."""
        result, length = self.result, self.target.recompute_length
        if length == len(result.prompt_ids) + len(result.token_ids) and not self.done:
            text = [*result.prompt_ids, *result.token_ids[:-1]]
            self.pipeline.recompute(torch.tensor(text), self.verifier)

    def resolve(self, returned: Returned) -> bool:
        """Verify, emit, commit and prune. Return True if the round continues in this tree."""
        walk, keep = self._verify(returned)
        self.clock.verified(self.tree, walk)
        if self.observer is not None:
            self.observer.verified(self.tree, walk)
        emitted = [self.tree.tokens[row] for row in walk.path[1:]] + [walk.next_token]
        committed = self.pipeline.keep(keep)
        # A retained row is the next token's own row, so nothing has to restart.
        hit = len(keep.rows) > keep.num_committed
        if hit:
            self.tree = self.tree.reroot(keep)
        else:
            self.tree = self._fresh_tree(walk.next_token, self.tree.position(walk.path[-1]) + 1)
        # Emit after the commit: an observer may end the sequence at any token.
        accepted = None
        for index, token in enumerate(emitted):
            if self.done:
                break
            accepted = walk.tests[index] if index < len(walk.tests) else None
            if accepted is not None:
                self.result.count_test(self.round_length, accepted)
            # After count_test, which takes the index within the round.
            self.round_length += 1
            # The token after a path row comes from that row's logits.
            row = walk.path[index]
            self._emit(token, accepted, None if returned.logits is None else returned.logits[row])
        meter = self.meter
        if meter is not None:
            meter.count(len(emitted), self.pipeline.now())
        if not hit or self.done:
            self._end_round(accepted)
            self.part = 1.0 if meter is None else meter.choose()
        if self.source is not None and not self.done:
            with self.pipeline.timeline.span("draft"):
                self.source.keep(keep)
                self.source.observe(committed, emitted)
        self._recompute_if_due()
        return hit

    def finish(self) -> DecodeResult:
        """Close the pipeline, and return the result without its text."""
        result = self.result
        num_passes = self.pipeline.close()
        result.num_steps = self.clock.num_steps if num_passes is None else num_passes
        result.virtual_time = self.clock.time
        result.step_log = self.clock.log
        result.virtual_time_autoregressive = self.clock.autoregressive_time(result.num_tokens)
        result.num_draft_forwards = self.source.num_forwards if self.source else 0
        return result

    # -- bookkeeping ------------------------------------------------------------------------

    def _end_round(self, accepted: bool | None) -> None:
        """Record a round. ``accepted`` is its last position's test result, None if untested."""
        began, self._round_began = self._round_began, self.pipeline.now()
        # Left out: part of the draft (another shape), and the last round (cut at the output's end).
        if self._shape is not None and self.part == 1 and not self.done:
            time = self._round_began - began
            self.shapes.count(self._shape, self.round_length, time)
        self._shape = None
        result, num_forwards = self.result, self.source.num_forwards if self.source else 0
        result.round_lengths.append(self.round_length)
        result.round_ends += "u" if accepted is None else "a" if accepted else "r"
        drafted, forwards = self._noted
        result.round_drafted.append(result.num_drafted - drafted)
        result.round_forwards.append(num_forwards - forwards)
        # Totals so far: the next round's own counts are differences from them.
        self._noted = result.num_drafted, num_forwards
        self.round_length = 0
        self.num_rounds += 1

    def _fresh_tree(self, token: int, position: int) -> TokenTree:
        tree = TokenTree(token, position)
        tree.num_injected = int(self.pipeline.knows_root)
        return tree

    @property
    def ends(self) -> tuple[int, ...]:
        """Token ids that end the sequence. A remote target sends its own with the first token."""
        return self.demands.ends(self.target.eos_token_ids)

    def _emit(
        self, token: int, accepted: bool | None = None, logits_V: Tensor | None = None
    ) -> None:
        self.result.emit(
            token,
            self.pipeline.now() - self.started,
            eos_token_ids=self.ends,
            max_new_tokens=self.max_new_tokens,
            limit=self.target.max_positions,
        )
        if self.on_token is not None:
            self.on_token(token)
        if self.observer is not None:
            if logits_V is not None:
                self.observer.logits(token, logits_V)
            if self.observer.token(token, bool(accepted)):
                self.result.stop_reason = self.result.stop_reason or "stopped"
