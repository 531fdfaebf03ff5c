"""The engine: one target, one draft, one schedule; decodes prompts exactly as the target would."""

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from pipedraft.inference.clock import CostModel, VirtualClock
from pipedraft.inference.pipelines.local import Ahead, LocalPipeline, Returned
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.inference.shapes import Expansion, MicroBatch, TreeShape, segment_sizes
from pipedraft.inference.sources import DraftSource, Growth, Sampling, make_source
from pipedraft.inference.sources.micro_batch import grow_micro_batch
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verify import (
    KeyedRandom,
    MatchVerifier,
    RejectionVerifier,
    Verifier,
    Walk,
)
from pipedraft.models.target import Keep, StagedTarget


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    schedule: str = "spd"
    num_stages: int = 4
    boundaries: tuple[int, ...] = ()
    """Where the target is cut, (0, b1, .., L); empty: near-even, or as the draft was trained."""
    temperature: float = 0.0
    """0 is greedy."""
    verifier: Literal["auto", "match", "rejection"] = "auto"
    """auto: rejection for sampled chains (temperature > 0, tree width 1), else match."""
    tree_width: int | None = None
    """Guesses per step of the schedules that grow layers; more than 1 keeps every branch
    consistent with the text. None: 16 for pipedec, else 1."""
    tree: TreeShape = field(default_factory=TreeShape)
    """What a round proposes, for the schedules that grow whole trees."""
    micro_batches: int | None = None
    """Segments that a tree is cut into for naive_pp, pruned_pp and flowspec; None: stages + 1."""
    timing: Literal["input_states", "output_states"] = "input_states"
    """What a speculation module reads. output_states: the states after the step, one stage deeper,
    so that the stages wait for it (the SPD paper's ablation)."""
    max_segment_rows: int = 16
    """A tree that does not fit that many segments of this size is cut into more of them."""
    expansion: Expansion = field(default_factory=Expansion)
    micro_batch: MicroBatch = field(default_factory=MicroBatch)
    """What pipeinfer drafts in one step; ``micro_batches`` are something else, FlowSpec's."""
    seed: int = 0
    max_new_tokens: int = 128
    """New tokens at most, the one drawn from the prefill included."""
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            near = difflib.get_close_matches(self.schedule, SCHEDULES, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"schedule: {self.schedule!r} is unknown; {hint}known: {', '.join(SCHEDULES)}"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature: {self.temperature} is not a temperature; give 0 (greedy) or more"
            )
        if self.boundaries and len(self.boundaries) != self.num_stages + 1:
            raise ValueError(
                f"boundaries: {list(self.boundaries)} do not make {self.num_stages} stages; give "
                f"{self.num_stages + 1} ascending layer numbers, 0 first"
            )
        if self.tree_width is None:
            width = SCHEDULES[self.schedule].default_width
            object.__setattr__(self, "tree_width", width)
        for name in ("num_stages", "tree_width", "max_new_tokens", "max_segment_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1; give at least 1")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches: {self.micro_batches} is below 1; give at least 1")
        if self.timing != "input_states" and self.grows is not None and self.schedule != "spd":
            raise ValueError(
                f"timing: {self.timing!r} is for schedule 'spd', not {self.schedule!r}; "
                "leave it out"
            )
        if self.verifier == "rejection" and (self.temperature == 0 or not self.can_sample):
            raise ValueError(
                "verifier: 'rejection' needs a sampled chain (temperature above 0 and tree width "
                "1, or a chain as the tree's kind); use 'match', which is exact for every tree"
            )

    @property
    def grows(self) -> Growth | None:
        """Verb of the draft source that the schedule uses."""
        return SCHEDULES[self.schedule].grows

    @property
    def width(self) -> int:
        """Guesses per layer, children of the root of a whole tree, or a micro-batch's branches."""
        if self.grows == "micro_batches":
            return self.micro_batch.branches
        return self.tree.width if self.grows == "trees" else (self.tree_width or 1)

    @property
    def shape_label(self) -> str | None:
        """What is drafted at once, for tables; None: a layer of ``width`` guesses."""
        labels = {"trees": self.tree.label, "micro_batches": self.micro_batch.label}
        return labels.get(self.grows or "layers")

    @property
    def is_chain(self) -> bool:
        """Every row of the token tree has one child at most."""
        if self.grows == "micro_batches" and self.micro_batch.restart:
            return False  # a root that is continued again may get another guess
        if self.grows != "trees":
            return self.width == 1
        expands = SCHEDULES[self.schedule].expands and self.expansion.enabled
        return self.tree.is_chain and not expands

    @property
    def can_sample(self) -> bool:
        """Guesses may be drawn from the draft: a chain, and not PipeInfer's, which is greedy."""
        return self.is_chain and self.grows != "micro_batches"

    @property
    def uses_rejection(self) -> bool:
        if self.verifier == "auto":
            return self.temperature > 0 and self.can_sample
        return self.verifier == "rejection"


class Engine:
    """Decodes prompts one at a time on a ``LocalPipeline`` with a virtual clock."""

    def __init__(
        self,
        target: Any,
        tokenizer: Any,
        config: EngineConfig,
        draft: Any | None = None,
        *,
        source: DraftSource | None = None,
        connect: Callable[[StagedTarget], Any] = LocalPipeline,
    ) -> None:
        """
        Args:
            target: causal LM as returned by ``load_target``.
            draft: from ``load_draft`` or ``load_draft_model``; None only for the autoregressive
                schedule.
            source: where guesses come from instead of a network, for example a simulated draft.
            connect: makes the pipeline: ``LocalPipeline``, or a ``Cluster``'s.

        Raises:
            ValueError: no draft for a schedule that needs one, or a draft for another n.
        """
        needs_draft = config.grows is not None
        if needs_draft and draft is None and source is None:
            raise ValueError(
                f"draft: schedule {config.schedule!r} needs one; give --checkpoint DIR or "
                "--draft-model"
            )
        self.config, self.tokenizer = config, tokenizer
        self.draft = draft if needs_draft else None
        self._source = source
        self.target = self._stage(target)
        self.pipeline = connect(self.target)
        self._check_growth()

    def _stage(self, target: Any) -> StagedTarget:
        """Cut the target; a draft that reads the stages' outputs says where."""
        config, trained = self.config, None
        if self.draft is not None:
            trained = self.draft.num_stages
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
        """Refuse trees on a recurrent target, and a schedule whose verb the draft lacks."""
        config, grows = self.config, self.config.grows
        source = self.make_source()
        draft_is_chain_only = source is not None and source.is_chain_only
        if (self.target.is_chain_only or draft_is_chain_only) and not config.is_chain:
            given = f"tree_width: {config.tree_width}"
            if grows == "trees":
                given = f"tree: {config.tree.label} under {config.schedule}"
            elif grows == "micro_batches":
                batch = config.micro_batch
                given = f"micro_batch: branches {batch.branches}, restart {batch.restart}"
            owner = "target" if self.target.is_chain_only else "draft"
            raise ValueError(
                f"{given}, but this {owner} has recurrent layers, which carry one state per "
                "sequence; give --tree-width 1, --tree chain:7 with eagle, naive_pp or pruned_pp, "
                "or pipeinfer without --branches and --restart"
            )
        if source is not None and grows is not None and grows not in source.grows:
            known = [name for name, s in SCHEDULES.items() if s.grows in source.grows]
            raise ValueError(
                f"schedule: {config.schedule!r} grows {grows}, which this draft cannot; "
                f"choose {' or '.join(known)}"
            )

    def make_source(self) -> DraftSource | None:
        if self._source is not None:
            return self._source
        return make_source(self.draft, self.config.timing) if self.draft is not None else None

    @property
    def draft_cost(self) -> float:
        """Modelled time of one draft forward, in target passes of one token."""
        if self.config.cost.draft_forward is not None or self.draft is None:
            return self.config.cost.draft_forward or 0.0
        return self.draft.relative_cost(self.target)

    @torch.inference_mode()
    def decode(
        self,
        prompt_ids: list[int],
        *,
        prompt_index: int = 0,
        on_token: Callable[[int], None] | None = None,
    ) -> DecodeResult:
        """Decode one prompt to its end.

        Args:
            prompt_ids: token ids, chat template applied.
            prompt_index: part of the key of the random numbers.
            on_token: called with each new token as soon as it is certain.

        Raises:
            ValueError: the prompt is empty or does not fit the target's positions.
        """
        if not prompt_ids:
            raise ValueError("prompt: empty; give at least one token of text")
        if len(prompt_ids) >= self.target.max_positions:
            raise ValueError(
                f"prompt: {len(prompt_ids)} tokens leave no room in the target's "
                f"{self.target.max_positions} positions; shorten it"
            )
        session = Session(self, prompt_ids, prompt_index, on_token)
        SCHEDULES[self.config.schedule].run(session)
        return session.finish()


class Session:
    """One prompt on its way: text, token tree, pipeline, draft, clock. Schedules call its verbs."""

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[int],
        prompt_index: int,
        on_token: Callable[[int], None] | None,
    ) -> None:
        config = engine.config
        self.engine, self.config, self.on_token = engine, config, on_token
        self.started = time.perf_counter()
        self.random = KeyedRandom(config.seed, prompt_index)
        rule = RejectionVerifier if config.uses_rejection else MatchVerifier
        self.verifier: Verifier = rule(config.temperature, self.random)
        self.sampling = Sampling(config.temperature, config.uses_rejection, self.random)
        self.source = engine.make_source()
        self.pipeline = engine.pipeline
        self.clock = VirtualClock(config.cost, engine.target.boundaries, engine.draft_cost)
        self.result = DecodeResult(
            prompt_ids=list(prompt_ids),
            token_ids=[],
            text="",
            stop_reason="",
            num_stages=engine.target.num_stages,
        )
        self.num_rounds = 0
        self.round_length = 0
        self.pending_forwards = 0
        taps = self.source.taps if self.source else ()
        token, features = self.pipeline.prefill(torch.tensor(prompt_ids), taps, self.verifier)
        if self.source is not None:
            self.source.begin(features, [*prompt_ids, token])
        self.result.prefill_s = time.perf_counter() - self.started
        self.tree = TokenTree(token, len(prompt_ids))
        self._emit(token)

    # -- verbs ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return bool(self.result.stop_reason)

    def inject(self, num_segments: int = 1) -> None:
        """Queue the rows that the pipeline has not seen yet; one segment enters per step.

        Args:
            num_segments: nearly equal parts, the longer ones last; more of them where a part would
                exceed ``max_segment_rows``.
        """
        tree, start = self.tree, self.tree.num_injected
        for size in segment_sizes(len(tree) - start, num_segments, self.config.max_segment_rows):
            self.pipeline.inject(tree.segment(start, start + size))
            start += size
        tree.num_injected = len(tree)
        self.pipeline.start()

    def grow_layer(self) -> None:
        """Let the draft add guesses below the deepest rows, from what is known now."""
        assert self.source is not None
        with self._drafting():
            self.source.grow_layer(
                self.tree,
                self.pipeline.features.view(),
                width=self.config.width,
                sampling=self._round_sampling(),
            )

    def grow_tree(self, shape: TreeShape, *, by_score: bool) -> None:
        """Let the draft merge a fresh tree below the root, from the committed text."""
        assert self.source is not None
        with self._drafting():
            self.source.grow_tree(
                self.tree, shape, by_score=by_score, sampling=self._round_sampling()
            )

    def deepen_tree(self, levels: int, num_tokens: int) -> None:
        """Let the draft extend its last fresh tree."""
        assert self.source is not None
        with self._drafting():
            self.source.deepen_tree(self.tree, levels, num_tokens)

    def expand_tree(self) -> None:
        """Let the draft continue the tree on its way where it is most likely right."""
        assert self.source is not None
        expansion = self.config.expansion
        with self._drafting():
            self.source.expand_tree(
                self.tree,
                self.expansion_forwards(),
                expansion.step_tokens,
                by_score=expansion.by_score,
            )

    def grow_micro_batch(self, start: int, shift: float, size: int) -> list[int]:
        """Let the draft guess on below one row, as far as it is sure.

        Args:
            shift: what is added to the thresholds of the micro-batch.
            size: guesses at most.

        Returns:
            The row of every guess; the tree may have had some of them before.
        """
        assert self.source is not None
        with self._drafting():
            return grow_micro_batch(
                self.source,
                self.tree,
                self.pipeline.features.view(),
                start=start,
                batch=replace(self.config.micro_batch, size=size),
                shift=shift,
                interrupted=self.verdict_waits,
            )

    def verdict_waits(self) -> bool:
        """Rows are back before they are due, and the draft keeps them waiting."""
        return self.pipeline.verdict_waits()

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        """Count what the draft does and adds, and its time."""
        assert self.source is not None
        num_rows, num_forwards = len(self.tree), self.source.num_forwards
        with self.pipeline.timeline.span("draft"):
            yield
        self.result.num_drafted += len(self.tree) - num_rows
        self.pending_forwards += self.source.num_forwards - num_forwards

    def _round_sampling(self) -> Sampling:
        return replace(self.sampling, attempt=self.num_rounds)

    def draft_alone(self, *, at_least: int = 0) -> None:
        """Spend the time of the drafting since the last step while every stage waits.

        Args:
            at_least: forwards that take their time even where their guesses are of no use.
        """
        self.clock.serial_draft(max(self.pending_forwards, at_least))
        self.pending_forwards = 0

    def expansion_forwards(self) -> int:
        """FlowSpec's draft forwards a step: by default what fits beside it under the cost model.

        At least one, and no more than a whole tree takes.
        """
        hidden = self.clock.hidden_forwards(max(self.pipeline.last_rows))
        return self.config.expansion.depth or min(self.config.tree.depth, hidden)

    def step(self, *, overlap: bool = False, ahead: bool = False) -> Returned | None:
        """One pipeline step, with the drafting since the last one beside it or after it.

        Args:
            ahead: what the pipeline has not seen yet is injected next, unless the verdict of this
                step prunes it, so that processes may begin with it before.
        """
        returned = self.pipeline.tick(self._ahead() if ahead else None)
        self.clock.step(
            self.pipeline.last_rows, draft_forwards=self.pending_forwards, overlap=overlap
        )
        self.pending_forwards = 0
        return returned

    def _ahead(self) -> Ahead | None:
        """A single guess: several would cost the stages more than those that a verdict leaves."""
        first, count = self.tree.num_injected, len(self.tree)
        if count - first != 1:
            return None
        return Ahead(self.tree.segment(first, count), lambda returned: self._verify(returned)[1])

    def _verify(self, returned: Returned) -> tuple[Walk, Keep]:
        walk = self.verifier.walk(self.tree, returned.verdicts)
        return walk, self.tree.keep_for(walk.path, walk.next_token)

    def resolve(self, returned: Returned) -> bool:
        """Verify a returned segment, emit, commit and prune.

        Returns:
            True when the next token is a row of the tree (nothing has to restart).
        """
        walk, keep = self._verify(returned)
        emitted = [self.tree.tokens[row] for row in walk.path[1:]] + [walk.next_token]
        committed = self.pipeline.keep(keep)
        next_position = self.tree.position(walk.path[-1]) + 1
        hit = len(keep.rows) > keep.num_committed
        self.tree = self.tree.reroot(keep) if hit else TokenTree(walk.next_token, next_position)
        accepted = None
        for index, token in enumerate(emitted):
            if self.done:
                break
            accepted = walk.tests[index] if index < len(walk.tests) else None
            if accepted is not None:
                self.result.count_test(self.round_length, accepted)
            self.round_length += 1
            self._emit(token)
        if not hit or self.done:
            self._end_round(accepted)
        if self.source is not None and not self.done:
            with self.pipeline.timeline.span("draft"):
                self.source.keep(keep)
                self.source.observe(committed, emitted)
        return hit

    def finish(self) -> DecodeResult:
        result = self.result
        result.text = self.engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        result.num_steps = self.clock.num_steps
        result.virtual_time = self.clock.time
        result.step_log = self.clock.log
        result.virtual_time_autoregressive = self.clock.autoregressive_time(result.num_tokens)
        result.num_draft_forwards = self.source.num_forwards if self.source else 0
        return result

    # -- bookkeeping ------------------------------------------------------------------------

    def _end_round(self, accepted: bool | None) -> None:
        """
        Args:
            accepted: outcome of the test of the round's last token; None: there was no guess.
        """
        result, num_forwards = self.result, self.source.num_forwards if self.source else 0
        result.round_lengths.append(self.round_length)
        result.round_ends += "u" if accepted is None else "a" if accepted else "r"
        result.round_drafted.append(result.num_drafted - sum(result.round_drafted))
        result.round_forwards.append(num_forwards - sum(result.round_forwards))
        self.round_length = 0
        self.num_rounds += 1

    def _emit(self, token: int) -> None:
        self.result.emit(
            token,
            time.perf_counter() - self.started,
            eos_token_ids=self.engine.target.eos_token_ids,
            max_new_tokens=self.config.max_new_tokens,
            limit=self.engine.target.max_positions,
        )
        if self.on_token is not None:
            self.on_token(token)
