"""Decode with a target, a draft and a schedule, exactly as the target alone would decode."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.draft import Draft
from ..models.language_model import LanguageModelDraft
from ..models.target import KeepRows, StagedTarget
from ..responses import format_marks, marked_text
from .auto_tree import ShapeMeter
from .config import DecodeConfig, check_prompt
from .demands import Demands, EndMask
from .edge.linked import LinkedPipeline, RemoteTarget, check_draft
from .meter import BatchMeter, DraftMeter
from .pipelines import Ahead, Pipeline, Returned
from .pipelines.local import LocalPipeline
from .result import DecodeResult, Observer
from .rules.sampled import DraftToken, KeyedRandom, Verdict, make_verifier
from .schedules import SCHEDULES
from .schedules.spd import SPDSchedule
from .shapes import MOST_ROWS, Budget, RowCosts, TreeShape, segment_sizes
from .sources import default_schedule, make_source
from .sources.base import DraftSampling, DraftSource, Expansion
from .sources.lookup import Lookup
from .tree import TokenTree

DraftNetwork = Draft | LanguageModelDraft | Lookup


class Engine:
    """Decodes prompts one at a time on a ``LocalPipeline`` with a virtual clock."""

    def __init__(
        self,
        target: PreTrainedModel | RemoteTarget,
        tokenizer: Any,
        config: DecodeConfig,
        draft: DraftNetwork | None = None,
        *,
        source: DraftSource | None = None,
        connect: Callable[[Any], Pipeline] = LocalPipeline,
    ) -> None:
        """
        Args:
            target: causal LM from ``load_target``, or a ``RemoteTarget`` for a target on another
                machine.
            draft: from ``load_draft`` or ``load_draft_model``; None for autoregressive decoding.
            source: draft source to use instead of a neural network, for example a simulated draft.
            connect: builds the pipeline (``LocalPipeline``, or a method of a ``Cluster``).

        Raises:
            ValueError: the schedule needs a draft, or the draft was trained for another number of
                stages.
        """
        needs_draft = config.schedule.grows is not None
        if needs_draft and draft is None and source is None:
            raise ValueError(
                f"draft: schedule {config.schedule.name!r} needs one; give --checkpoint DIR or "
                "--draft-model"
            )
        self.config, self.tokenizer = config, tokenizer
        self.draft = draft if needs_draft else None
        self._source = source
        self.target = self._stage(target)
        self.pipeline = connect(self.target)
        self.meter: DraftMeter | BatchMeter | None = None
        if config.never_slower:
            self.meter = DraftMeter()
        self.shapes = ShapeMeter()
        """Times rounds for ``--tree auto``."""
        self._check_growth()

    def _stage(self, target: PreTrainedModel | RemoteTarget) -> StagedTarget | RemoteTarget:
        """Split the target into stages, at the draft's boundaries if it reads stage outputs."""
        if isinstance(target, RemoteTarget):
            return target
        config = self.config
        trained = None if self.draft is None else self.draft.num_stages
        if self.draft is None or trained is None:
            return StagedTarget(target, config.boundaries or config.num_stages)
        if trained != config.num_stages:
            raise ValueError(
                f"num_stages: {config.num_stages}, but this draft was trained for {trained}; "
                f"give --stages {trained} or another draft"
            )
        staged = StagedTarget(target, self.draft.boundaries or trained)
        if config.boundaries not in ((), staged.boundaries):
            raise ValueError(
                f"boundaries: {list(config.boundaries)}, but this draft was trained for "
                f"{list(staged.boundaries)}; leave them out"
            )
        return staged

    def _check_growth(self) -> None:
        """Reject a schedule that does not fit the pipeline, or that the draft does not support."""
        schedule, source, is_link = self.config.schedule, self.make_source(), self.pipeline.is_link
        fitting = [name for name, other in SCHEDULES.items() if other.needs_link == is_link]
        if schedule.needs_link and not is_link:
            raise ValueError(
                f"schedule: {schedule.name!r} decodes across a link; give --server HOST:PORT, use "
                "eval edge, or choose another schedule"
            )
        if is_link and schedule.name not in (*fitting, "autoregressive"):
            raise ValueError(
                f"schedule: {schedule.name!r} does not decode across a link; choose one of "
                f"{', '.join(fitting)}, autoregressive"
            )
        if source is None:
            return
        if is_link:
            check_draft(source)
        if schedule.grows is not None and schedule.grows not in source.grows:
            known = [name for name in fitting if SCHEDULES[name].grows in source.grows]
            own = None if self.draft is None else default_schedule(self.draft.draft_type)
            # A stable sort: the draft's own schedule is named first.
            known.sort(key=lambda name: name != own)
            raise ValueError(
                f"schedule: {schedule.name!r} grows {schedule.grows}, which this draft cannot; "
                f"choose {' or '.join(known)}"
            )

    def make_source(self) -> DraftSource | None:
        if self._source is not None:
            return self._source
        if self.draft is None:
            return None
        schedule = self.config.schedule
        # Only SPD heads are trained for a timing; other sources keep the defaults of make_source.
        own = ("timing", "tokens_per_step") if isinstance(schedule, SPDSchedule) else ()
        return make_source(self.draft, **{name: getattr(schedule, name) for name in own})

    @property
    def draft_cost(self) -> float:
        """Modeled time per draft forward, in target passes over one token."""
        known, target = self.config.cost.draft_forward, self.target
        if known is not None or self.draft is None or isinstance(target, RemoteTarget):
            return known or 0.0
        return self.draft.relative_cost(target)

    @torch.inference_mode()
    def decode(
        self,
        prompt_ids: list[int],
        *,
        prompt_index: int = 0,
        on_token: Callable[[int], None] | None = None,
        observer: Observer | None = None,
    ) -> DecodeResult:
        """Decode one prompt to its end.

        Args:
            prompt_ids: token ids, chat template applied.
            prompt_index: part of the random-number key.
            on_token: called with each new token once verified.
            observer: notified about tokens and steps; may end the sequence.

        Raises:
            ValueError: the prompt is empty or longer than the target's maximum length.
        """
        check_prompt(prompt_ids, self.target.max_positions)
        try:
            session = Session(self, prompt_ids, prompt_index, on_token, observer)
            self.config.schedule.run(session)
            return session.finish()
        except BaseException:
            # An interrupt, too, must leave the pipeline ready for another prompt.
            self.pipeline.abandon()
            raise


class Session:
    """One prompt's decoding state, and the methods ("verbs") for schedules."""

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[int],
        prompt_index: int,
        on_token: Callable[[int], None] | None,
        observer: Observer | None,
    ) -> None:
        config = engine.config
        self.engine, self.config = engine, config
        self.on_token, self.observer = on_token, observer
        self.demands = Demands() if observer is None else observer.demands
        self.pipeline = engine.pipeline
        self.pipeline.open(config, prompt_index)
        self.started = self.pipeline.now()
        self.verifier = make_verifier(
            config.rule,
            config.temperature,
            KeyedRandom(config.seed, prompt_index),
            filters=config.filters,
            payload_tokens=config.payload_tokens,
            tail_samples=config.tail_samples,
        )
        self.sampling = DraftSampling(self.verifier)
        self.source = engine.make_source()
        boundaries, draft_cost = engine.target.boundaries, engine.draft_cost
        self.clock = self.pipeline.make_clock(config.cost, boundaries, draft_cost)
        self.result = DecodeResult(
            prompt_ids=list(prompt_ids),
            token_ids=[],
            text="",
            stop_reason="",
            num_stages=engine.target.num_stages,
        )
        self.num_rounds = 0
        self.round_length = 0
        self._noted = (0, 0)
        """Draft tokens and draft forwards in finished rounds."""
        self.pending_forwards = 0
        taps = self.source.taps if self.source else ()
        masked = self.ends if self.demands.min_tokens else ()
        mask = EndMask(token_ids=masked, end=len(prompt_ids) + self.demands.min_tokens)
        self.pipeline.demand(mask, keeps_logits=self.demands.wants_logits)
        if observer is not None:
            observer.start()
        token, features = self.pipeline.prefill(torch.tensor(prompt_ids), taps, self.verifier)
        if self.source is not None:
            self.source.begin(features, [*prompt_ids, token])
        self.result.prefill_s = self.pipeline.now() - self.started
        self.tree = self._fresh_tree(token, len(prompt_ids))
        self.part = 1.0
        """Fraction of the draft in use, as chosen by ``DraftMeter``."""
        self._shape: TreeShape | None = None
        """Shape of the round, if ``ShapeMeter`` chose it."""
        self._round_began = self.pipeline.now()
        if engine.meter is not None:
            engine.meter.begin(self.pipeline.now())
            self.part = engine.meter.choose()
        self._emit(token, None, self.pipeline.first_logits)

    # -- verbs ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return bool(self.result.stop_reason)

    @property
    def num_stages(self) -> int:
        return self.engine.target.num_stages

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
            shape = self._shape = self.engine.shapes.shape
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
        # Across a link real time counts; the virtual clock models stages only.
        if not self.pipeline.is_link:
            self.clock.step(
                self.pipeline.last_rows, draft_forwards=self.pending_forwards, overlap=overlap
            )
        self.pending_forwards = 0
        return returned

    def _ahead(self) -> Ahead | None:
        """Return the waiting draft token if there is only one. Most of several would be pruned."""
        first, count = self.tree.num_injected, len(self.tree)
        if count - first != 1:
            return None
        return Ahead(self.tree.segment(first, count), lambda returned: self._verify(returned)[1])

    def _verify(self, returned: Returned) -> tuple[Verdict, KeepRows]:
        walk = self.pipeline.walk(self.verifier, self.tree, returned)
        # Commit the path alone: a retained child's own result would already be used up.
        if walk.restarts:
            return walk, KeepRows(tuple(walk.path), len(walk.path))
        return walk, self.tree.keep_for(walk.path, walk.next_token)

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
        meter = self.engine.meter
        if meter is not None:
            meter.count(len(emitted), self.pipeline.now())
        if not hit or self.done:
            self._end_round(accepted)
            self.part = 1.0 if meter is None else meter.choose()
        if self.source is not None and not self.done:
            with self.pipeline.timeline.span("draft"):
                self.source.keep(keep)
                self.source.observe(committed, emitted)
        return hit

    def finish(self) -> DecodeResult:
        result = self.result
        tokenizer = self.engine.tokenizer
        result.text = marked_text(tokenizer, result.token_ids, format_marks(tokenizer))
        # A link reports its own passes; the virtual clock has counted none there.
        num_passes = self.pipeline.close()
        result.num_steps = self.clock.num_steps if num_passes is None else num_passes
        result.virtual_time = self.clock.time
        result.step_log = self.clock.log
        result.virtual_time_autoregressive = self.clock.autoregressive_time(result.num_tokens)
        result.num_draft_forwards = self.source.num_forwards if self.source else 0
        return result

    # -- across a link ----------------------------------------------------------------------

    @property
    def link(self) -> LinkedPipeline:
        assert isinstance(self.pipeline, LinkedPipeline), "the engine refuses other pipelines"
        return self.pipeline

    @property
    def end_is_drafted(self) -> bool:
        """Return True if the sequence ends within its draft tokens, provided all are accepted."""
        tree, length = self.tree, self.tree.position(len(self.tree) - 1) + 1
        longest = len(self.result.prompt_ids) + self.config.max_new_tokens
        is_longest = length >= min(longest, self.engine.target.max_positions)
        return is_longest or not {*self.ends}.isdisjoint(tree.tokens[1:])

    def send_batch(self, *, is_early: bool = False) -> None:
        """Send the rows that are new to the target. ``is_early`` says that the batch continues."""
        tree, first = self.tree, self.tree.num_injected
        # Row 0 is the root: no draft token, so it has no q.
        rows = range(max(first, 1), len(tree))
        drawn = [DraftToken(tree.tokens[row], tree.draft_probabilities[row]) for row in rows]
        q = [token.q for token in drawn] if self.verifier.needs_q else []
        tokens = [token.token for token in drawn]
        self.link.send(tree.tokens[first:1], tokens, q, is_early=is_early)
        tree.num_injected = len(tree)

    def stream(self) -> None:
        """Let the target decode alone to the end. Batches in flight still get their results."""
        self.tree.truncate(max(self.tree.num_injected, 1))  # The target never sees the other rows.
        while not self.done:
            if not self.link.is_streaming:
                self.link.stream(self.tree.tokens[self.tree.num_injected : 1])
                self.tree.num_injected = max(self.tree.num_injected, 1)
            self.resolve(self.link.tick())

    # -- bookkeeping ------------------------------------------------------------------------

    def _end_round(self, accepted: bool | None) -> None:
        """Record a round. ``accepted`` is its last position's test result, None if untested."""
        began, self._round_began = self._round_began, self.pipeline.now()
        # Left out: part of the draft (another shape), and the last round (cut at the output's end).
        if self._shape is not None and self.part == 1 and not self.done:
            time = self._round_began - began
            self.engine.shapes.count(self._shape, self.round_length, time)
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
        return self.demands.ends(self.engine.target.eos_token_ids)

    def _emit(
        self, token: int, accepted: bool | None = None, logits_V: Tensor | None = None
    ) -> None:
        self.result.emit(
            token,
            self.pipeline.now() - self.started,
            eos_token_ids=self.ends,
            max_new_tokens=self.config.max_new_tokens,
            limit=self.engine.target.max_positions,
        )
        if self.on_token is not None:
            self.on_token(token)
        if self.observer is not None:
            if logits_V is not None:
                self.observer.logits(token, logits_V)
            if self.observer.token(token, bool(accepted)):
                self.result.stop_reason = self.result.stop_reason or "stopped"
