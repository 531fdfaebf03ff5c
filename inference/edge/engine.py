"""Engine for a target behind a network."""

from __future__ import annotations

from typing import Any, ClassVar

from ..config import DecodeConfig
from ..engine import DraftNetwork, Engine
from ..session import Session
from ..sources.base import DraftSource
from .pipeline import LinkedPipeline, RemoteTarget, check_draft
from .schedules.stop_and_wait import LinkSchedule
from .session import LinkSession
from .session_messages import Settings


class LinkEngine(Engine):
    """Decodes prompts one at a time. The draft is here, the target behind a ``LinkedPipeline``."""

    kind: ClassVar[str] = "link"
    refusal: ClassVar[str] = "does not decode across a link"
    session_class: ClassVar[type[Session]] = LinkSession
    target: RemoteTarget  # type: ignore[assignment]  # it stands for one stage
    pipeline: LinkedPipeline

    def __init__(
        self,
        pipeline: LinkedPipeline,
        tokenizer: Any,
        config: DecodeConfig,
        draft: DraftNetwork | None = None,
        *,
        source: DraftSource | None = None,
    ) -> None:
        """
        Raises:
            ValueError: the schedule does not decode across a link, needs a draft, or the draft
                reads the target's hidden states.
        """
        target: Any = pipeline.target
        super().__init__(
            target, tokenizer, config, draft, source=source, connect=lambda _: pipeline
        )

    def _stage(self, target: Any) -> Any:
        return target

    def _check_growth(self) -> None:
        super()._check_growth()
        if (source := self.make_source()) is not None:
            check_draft(source)

    @property
    def draft_cost(self) -> float:
        return self.config.cost.draft_forward or 0.0

    def open_pipeline(self, prompt_index: int) -> None:
        config, schedule = self.config, self.config.schedule
        settings = Settings(
            rule=config.rule,
            temperature=config.temperature,
            seed=config.seed,
            prompt=prompt_index,
            filters=config.filters,
            payload_tokens=config.payload_tokens,
            tail_samples=config.tail_samples,
            # The next batch is drafted already: a bonus token would make it stale.
            has_bonus=not isinstance(schedule, LinkSchedule) or not schedule.drafts_on,
            pre_verifies=isinstance(schedule, LinkSchedule) and schedule.early,
            max_new_tokens=config.max_new_tokens,
        )
        self.pipeline.open_link(settings, streams=schedule.grows is None)
