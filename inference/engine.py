"""Decode prompts with a target, a draft and a schedule. The output is the target's own."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ..machine_load import load_average
from ..models.heads.draft import Draft
from ..models.heads.language_model import LanguageModelDraft
from ..models.target import StagedTarget
from ..responses import format_marks, marked_text
from .auto_tree import ShapeMeter
from .config import DecodeConfig, check_prompt
from .meter import BatchMeter, DraftMeter
from .pipelines import Pipeline
from .pipelines.local import LocalPipeline
from .result import DecodeResult, Observer
from .rules.sampled import KeyedRandom, make_verifier
from .schedules import SCHEDULES
from .schedules.spd import SPDSchedule
from .session import Session
from .sources import default_schedule, make_source
from .sources.base import DraftSource
from .sources.lookup import Lookup

DraftNetwork = Draft | LanguageModelDraft | Lookup


class Engine:
    """Decodes one prompt at a time on a ``LocalPipeline`` with a virtual clock."""

    kind: ClassVar[str] = "pipeline"
    """This engine runs the schedules with this value of ``Schedule.engine``."""
    refusal: ClassVar[str] = "needs another engine"
    """Error text for a schedule of another kind that has no ``elsewhere`` text."""
    session_class: ClassVar[type[Session]] = Session

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: Any,
        config: DecodeConfig,
        draft: DraftNetwork | None = None,
        *,
        source: DraftSource | None = None,
        connect: Callable[[Any], Pipeline] = LocalPipeline,
    ) -> None:
        """
        Args:
            target: causal LM from ``load_target``.
            draft: from ``load_draft`` or ``load_draft_model``; None for autoregressive decoding.
            source: replaces the neural network, for example by a simulated draft.
            connect: builds the pipeline: ``LocalPipeline``, or a method of a ``Cluster``.

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
        """Timer that chooses draft shapes for ``--tree auto``."""
        self._check_growth()

    def _stage(self, target: PreTrainedModel) -> StagedTarget:
        """Split the target into stages, at the draft's boundaries if it reads stage outputs."""
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
        """Raise ValueError if this engine or the draft does not support the schedule."""
        schedule, source = self.config.schedule, self.make_source()
        fitting = [name for name, other in SCHEDULES.items() if other.engine == self.kind]
        if schedule.name not in (*fitting, "autoregressive"):
            fix = f"choose one of {', '.join([*fitting, 'autoregressive'])}"
            reason = schedule.elsewhere or f"{self.refusal}; {fix}"
            raise ValueError(f"schedule: {schedule.name!r} {reason}")
        if source is not None and schedule.grows is not None and schedule.grows not in source.grows:
            known = [name for name in fitting if SCHEDULES[name].grows in source.grows]
            own = None if self.draft is None else default_schedule(self.draft.draft_type)
            # The sort is stable. It puts the draft's own schedule first.
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
        # Only SPD heads depend on the timing. Other sources use make_source's defaults.
        own = ("timing", "tokens_per_step") if isinstance(schedule, SPDSchedule) else ()
        return make_source(self.draft, **{name: getattr(schedule, name) for name in own})

    @property
    def draft_cost(self) -> float:
        """Modeled time of a draft forward, in units of a target pass over one token."""
        known = self.config.cost.draft_forward
        if known is not None or self.draft is None:
            return known or 0.0
        return self.draft.relative_cost(self.target)

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
            prompt_index: selects the prompt's random numbers.
            on_token: called with each verified token.
            observer: receives every token and step, and can end the sequence.

        Raises:
            ValueError: the prompt is empty or longer than the target's maximum length.
        """
        check_prompt(prompt_ids, self.target.max_positions)
        try:
            session = self.open_session(prompt_index, on_token, observer)
            session.begin(prompt_ids)
            self.config.schedule.run(session)
            result = session.finish()
        except BaseException:
            # Reset the pipeline for the next prompt, also after an interrupt.
            self.pipeline.abandon()
            raise
        marks = format_marks(self.tokenizer)
        result.text = marked_text(self.tokenizer, result.token_ids, marks)
        result.load_average = load_average()
        return result

    def open_session(
        self,
        prompt_index: int,
        on_token: Callable[[int], None] | None = None,
        observer: Observer | None = None,
    ) -> Session:
        """Open the pipeline for a sequence. See ``decode`` for the arguments."""
        config = self.config
        self.open_pipeline(prompt_index)
        verifier = make_verifier(
            config.rule,
            config.temperature,
            KeyedRandom(config.seed, prompt_index),
            filters=config.filters,
            payload_tokens=config.payload_tokens,
            tail_samples=config.tail_samples,
        )
        return self.session_class(
            self.target,
            self.pipeline,
            self.make_source(),
            verifier,
            self.pipeline.make_clock(config.cost, self.target.boundaries, self.draft_cost),
            max_new_tokens=config.max_new_tokens,
            meter=self.meter,
            shapes=self.shapes,
            on_token=on_token,
            observer=observer,
        )

    def open_pipeline(self, prompt_index: int) -> None:
        self.pipeline.open(self.config.max_new_tokens, bitwise=self.config.bitwise)
