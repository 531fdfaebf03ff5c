"""Controller side for a pipeline with one process per stage.

The controller tracks each row's place in the equivalent lock-step pipeline, so it counts the same
steps as ``LocalPipeline``. It waits only for needed data. Steps without a returning row cost no
time, and only the next verification result is on the critical path.
"""

# P prompt rows, R rows, H hidden

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from ...files import Values
from ...models.target import KeepRows, Segment, StagedTarget, prune_segment
from ..not_finite import name_layer
from ..ranks.codec import (
    AnyMessage,
    Cancel,
    Failed,
    MeasureRequest,
    Prefill,
    StageReport,
    StageResult,
    Step,
)
from ..ranks.links import Answers, Outbox
from ..rules.sampled import Verifier
from ..timeline import WAIT, Timeline
from . import Ahead, FeatureStore, Pipeline, Returned, pick_rows

MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 32, 512


@dataclass
class _Flight:
    """Segment from injection until none of its rows is speculative."""

    segment: Segment | None
    """Segment to send; None once sent."""
    alive: list[int]
    """Rows (numbered as sent) not pruned or committed yet, in tree order."""
    sequence: int = -1
    entered: int = -1
    """Number of the step in which the first stage processes the segment."""
    answered: set[int] = field(default_factory=set)
    """Stages that have returned hidden states for these rows."""
    verdicts: Tensor | None = None


class SequenceFailed(RuntimeError):
    """Raised if a stage failed on this sequence's rows. The message gives the reason."""


class _Features(Mapping[int, Tensor]):
    """Lazy mapping from layers to hidden states of rows in flight in the lock-step pipeline."""

    def __init__(self, pipeline: "ProcessPipeline") -> None:
        self._pipeline = pipeline

    def __getitem__(self, layer: int) -> Tensor:
        return self._pipeline.rows_past(layer)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pipeline.taps)

    def __len__(self) -> int:
        return len(self._pipeline.taps)


class ProcessPipeline(Pipeline):
    """Pipeline with stages in other processes. Only the first stage may be in this process."""

    def __init__(
        self,
        target: StagedTarget,
        first_stage: Outbox,
        answers: Answers,
        timeline: Timeline,
        *,
        cancels: Sequence[Outbox] = (),
    ) -> None:
        """
        Args:
            target: only its embedding and its description are used.
            answers: answers from the stages, for all sequences in the pipeline.
            cancels: direct links to every stage outside this process.
        """
        self.target, self.timeline = target, timeline
        self.taps: tuple[int, ...] = ()
        self.first_stage, self.answers, self.cancels = first_stage, answers, cancels
        self._mailbox = answers.open()
        self.last_rows: list[int] = [0] * target.num_stages
        self.runs_ahead = True
        """True to send a segment before the verification result it depends on."""
        self._sequence, self._is_bitwise = 0, False
        self._forget()

    def _forget(self) -> None:
        self._now = 0
        self._has_started = False
        self._flights: list[_Flight] = []
        self._states = FeatureStore()
        """Hidden states for live rows, including the segment ahead."""
        self._keeps: list[KeepRows] = []
        self._ahead: _Flight | None = None
        """Segment sent before its step. It joins the flights once injected."""
        self._keep_after: Callable[[Returned], KeepRows] | None = None
        """``Ahead.keep_after`` while the segment is sent, or computed by a first stage in this
        process."""

    @property
    def num_stages(self) -> int:
        return self.target.num_stages

    def open(self, max_new_tokens: int, *, bitwise: bool = False) -> None:
        self._is_bitwise = bitwise
        self.target.set_bitwise(bitwise)  # refuses a target here, not in another process

    # -- prompt -----------------------------------------------------------------------------

    def recompute(self, input_ids: Tensor, verifier: Verifier) -> None:
        self.prefill(input_ids, self.taps, verifier, length=len(input_ids) + 1)

    def prefill(
        self,
        input_ids: Tensor,
        taps: tuple[int, ...],
        verifier: Verifier,
        *,
        length: int | None = None,
    ) -> tuple[int, dict[int, Tensor]]:
        """Commit a prompt in chunks following each other through the stages.

        Args:
            length: as in ``Stage.prefill``, for a text computed again.
        """
        # An earlier sequence may have ended with rows in flight: do not wait for them.
        self._cancel_all()
        self._forget()
        self.taps = taps
        message = Prefill(
            rows=input_ids,
            first_position=0,
            is_last=False,
            taps=taps,
            temperature=verifier.temperature,
            filters=verifier.filters,
            rule=verifier.name,
            seed=verifier.random.seed,
            prompt=verifier.random.prompt,
            is_bitwise=self._is_bitwise,
            length=length or len(input_ids),
            reserved_rows=self._reserved_rows(len(input_ids)),
        )
        size = self._chunk_rows(len(input_ids))
        chunks = input_ids.split(size)
        parts: dict[int, list[Tensor]] = {layer: [] for layer in taps}
        first_sequence = self._sequence
        token = -1
        # Chunk k is at stage index - k: take its results num_stages iterations after sending it.
        for index in range(len(chunks) + self.num_stages):
            if index < len(chunks):
                is_last = index == len(chunks) - 1
                chunk = replace(message, rows=chunks[index], is_last=is_last)
                chunk.first_position = index * size
                self._send(chunk)
                self._flights.append(_Flight(None, list(range(len(chunk.rows))), entered=index))
            # As many steps as LocalPipeline takes; the last iteration only receives.
            if index < len(chunks) + self.num_stages - 1:
                self._step_prompt()
            done = index - self.num_stages
            if done >= 0:
                token = self._take_chunk(first_sequence + done, chunks[done], parts)
        self._forget()
        return token, {layer: torch.cat(part) for layer, part in parts.items()}

    def _chunk_rows(self, num_rows: int) -> int:
        """Return rows per prompt chunk."""
        usual = min(max(-(-num_rows // self.num_stages), MIN_CHUNK_ROWS), MAX_CHUNK_ROWS)
        return self.target.prompt_rows or usual

    def _reserved_rows(self, num_prompt: int) -> int:
        """Return the cache rows to allocate at once."""
        return 0

    def _step_prompt(self) -> None:
        """Advance in-flight chunks by one stage in the lock-step pipeline."""
        self._now += 1

    def _take_chunk(self, sequence: int, ids: Tensor, parts: dict[int, list[Tensor]]) -> int:
        """Receive a chunk's hidden states. Return the next token, or -1 before the last chunk."""
        token = -1
        for stage in self._answering():
            is_last_stage = stage == self.num_stages - 1
            is_last_chunk = sequence == self._sequence - 1
            # A stage without tapped layers sends no answer, so a wait for it would never end.
            if not self._layers(stage) and not (is_last_stage and is_last_chunk):
                continue
            result = self._receive_answer(stage, sequence)
            assert isinstance(result, StageResult)
            for layer, rows in result.taps.items():
                parts[layer].append(rows.to(self.target.device))
            if result.verdicts is not None:
                token = int(result.verdicts)
        if 0 in parts:
            parts[0].append(self.embed(ids))
        return token

    # -- steps ------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def inject(self, segment: Segment) -> None:
        if self._ahead is not None:
            flight, self._ahead = self._ahead, None
            flight.entered, self._has_started = self._now, True
        else:
            flight = self._flight_of(segment)
        self._flights.append(flight)

    def _flight_of(self, segment: Segment) -> _Flight:
        assert segment.ids is not None
        flight = _Flight(segment, list(range(segment.num_rows)))
        if 0 in self.taps:
            self._states.append({0: self.embed(segment.ids)})
        return flight

    def start(self) -> None:
        """Send the next step's input now, so drafting overlaps with the stages."""
        if self._has_started:
            return
        self._has_started = True
        # One segment per step, the oldest, as in the lock-step pipeline.
        flight = next((f for f in self._flights if f.segment is not None), None)
        if flight is None:
            return
        flight.entered = self._now
        self._send_step(flight)

    def _send_step(self, flight: _Flight) -> None:
        assert flight.segment is not None
        flight.sequence, segment, keeps = self._sequence, flight.segment, self._keeps
        # KeepRows travel with the next segment, so a prune costs no message of its own.
        flight.segment, self._keeps = None, []
        self._send(Step.of(keeps, segment))

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        """Run one step of the lock-step pipeline. Wait only for rows returning in this step.

        If ``ahead`` is sent, the first stage need not wait for the last one, even if stage times
        vary. If the result drops that segment, stages stop computing it before their next layer.
        """
        self.start()
        self._has_started = False
        self.last_rows = self.next_rows
        self._now += 1
        if ahead is not None and self.runs_ahead:
            self._start_ahead(ahead)
        due = self._due()
        return None if due is None else self._returned(due)

    def _due(self) -> _Flight | None:
        """Return the flight with a result due in the current step."""
        for flight in self._flights:
            has_entered = flight.segment is None
            if has_entered and flight.alive and flight.entered + self.num_stages == self._now:
                return flight
        return None

    def _returned(self, due: _Flight) -> Returned:
        self._fetch(self.num_stages - 1, due)
        assert due.verdicts is not None
        # The last stage judged all rows as sent; those pruned since then do not count.
        return Returned(len(due.alive), due.verdicts[due.alive])

    def _start_ahead(self, ahead: Ahead) -> None:
        """Send the next step's segment early, unless another one waits or the result is here."""
        # With the result here, the next segment can be exact, so a guess would be wasted.
        is_late = self._due() is not None and self.verdict_waits()
        if is_late or any(flight.segment is not None for flight in self._flights):
            return
        self._ahead, self._keep_after = self._flight_of(ahead.segment), ahead.keep_after
        self._send_step(self._ahead)
        self._keep_after = None

    def is_wanted(self) -> bool:
        """Return False once a verification result has made the first stage's segment useless."""
        due = self._due()
        if self._keep_after is None or due is None or not self.verdict_waits():
            return True
        # Asked once: the result is final, and a segment it keeps stays wanted.
        keep, self._keep_after = self._keep_after(self._returned(due)), None
        return self._keeps_ahead(keep)

    def _keeps_ahead(self, keep: KeepRows) -> bool:
        return sum(len(flight.alive) for flight in self._flights) in keep.rows

    @property
    def next_rows(self) -> list[int]:
        """Return the rows of each stage in the next step. Only sent segments count."""
        rows = [0] * self.num_stages
        for flight in self._flights:
            stage = self._now - flight.entered
            if flight.segment is None and stage < self.num_stages:
                rows[stage] = len(flight.alive)
        return rows

    def features(self) -> Mapping[int, Tensor]:
        return _Features(self)

    def verdict_waits(self) -> bool:
        """Return True if the oldest rows in flight have returned, so drafting would delay them."""
        last = self.num_stages - 1
        while self._mailbox.has_arrived(last):
            self._take_answer(last)
        oldest = self._flights[0] if self._flights else None
        return oldest is not None and oldest.verdicts is not None

    def keep(self, keep: KeepRows) -> dict[int, Tensor]:
        """Apply ``keep`` in the controller. The stages receive it with the next segment."""
        self._keeps.append(keep)
        lost: list[_Flight] = []
        if self._ahead is not None and not self._keeps_ahead(keep):
            lost, self._ahead = [self._ahead], None
        # Fetch committed rows' states first: after the pruning below a flight may be gone.
        ends = accumulate((len(flight.alive) for flight in self._flights), initial=0)
        places = list(zip(self._flights, pairwise(ends), strict=True))
        for flight, (first, _) in places:
            if keep.num_committed and first <= keep.rows[keep.num_committed - 1]:
                for stage in self._answering():
                    self._fetch(stage, flight)
        committed = self._states.keep(keep)
        for flight, (first, end) in places:
            kept = keep.segment_rows(first, end)
            if flight.segment is not None:
                flight.segment = prune_segment(flight.segment, keep, first)
                flight.alive = list(range(len(kept)))
            else:
                num_committed = sum(first <= i < end for i in keep.rows[: keep.num_committed])
                flight.alive = [flight.alive[row] for row in kept[num_committed:]]
        self._drop_finished(lost)
        return committed

    def _drop_finished(self, lost: list[_Flight]) -> None:
        """Drop flights without speculative rows, and cancel the ones stages still compute."""
        gone = [flight for flight in self._flights if not flight.alive] + lost
        self._flights = [flight for flight in self._flights if flight.alive]
        under_way = [f.sequence for f in gone if f.verdicts is None and f.sequence >= 0]
        wanted = [f.sequence for f in self._flights if f.segment is None]
        if self._ahead is not None:
            wanted.append(self._ahead.sequence)
        # Cancel works by sequence number, so it may only cover messages older than every live one.
        if under_way and (not wanted or max(under_way) < min(wanted)):
            self._cancel(max(under_way))

    def _cancel(self, last: int) -> None:
        for link in self.cancels:
            link.send(Cancel(sequence=last, slot=self._mailbox.slot))

    def _cancel_all(self) -> None:
        waits = any(f.segment is None and f.verdicts is None for f in self._flights)
        if waits or self._ahead is not None:
            self._cancel(self._sequence - 1)

    def rows_past(self, layer: int) -> Tensor:
        """Return the live rows [r, H] that have passed a layer in the lock-step pipeline."""
        if layer not in self.taps:
            raise KeyError(layer)
        stage = next((k for k in range(self.num_stages) if layer <= self._end(k)), 0)
        num_rows = 0
        for flight in self._flights:
            # Count rows by lock-step time, not by arrival, as `LocalPipeline` does.
            if layer and (flight.segment is not None or flight.entered + stage >= self._now):
                break
            if layer:
                self._fetch(stage, flight)
            num_rows += len(flight.alive)
        if not num_rows:
            raise KeyError(layer)
        return self._states.view()[layer][:num_rows]

    # -- answers ----------------------------------------------------------------------------

    def _end(self, stage: int) -> int:
        return self.target.boundaries[stage + 1]

    def _layers(self, stage: int) -> list[int]:
        """Return the tapped layers whose hidden states a stage sends."""
        start, end = self.target.boundaries[stage : stage + 2]
        return [layer for layer in self.taps if start < layer <= end]

    def _answering(self) -> list[int]:
        last = self.num_stages - 1
        return [k for k in range(self.num_stages) if k == last or self._layers(k)]

    def _send(self, message: AnyMessage) -> None:
        message.sequence, message.slot = self._sequence, self._mailbox.slot
        self._sequence += 1
        self.first_stage.send(message)

    def _receive(self, stage: int) -> AnyMessage:
        with self.timeline.span(WAIT):
            message = self._mailbox.receive(stage)
        if isinstance(message, Failed):
            raise SequenceFailed(message.reason)
        return message

    def _receive_answer(self, stage: int, sequence: int) -> AnyMessage:
        """Return the answer to one message, skipping answers about the previous sequence."""
        while (message := self._receive(stage)).sequence != sequence:
            pass
        return message

    def _take_answer(self, stage: int) -> None:
        """Receive one answer and store it in its flight, unless the flight was pruned."""
        message = self._receive(stage)
        assert isinstance(message, StageResult)
        under_way = self._flights if self._ahead is None else [*self._flights, self._ahead]
        for flight in under_way:
            if flight.sequence == message.sequence:
                flight.answered.add(stage)
                device = self.target.device  # A frame's states arrive in host memory.
                taps = {i: rows.to(device) for i, rows in message.taps.items()}
                alive = {i: pick_rows(rows, flight.alive) for i, rows in taps.items()}
                self._states.append(alive)
                if message.verdicts is not None:
                    flight.verdicts = message.verdicts

    def _fetch(self, stage: int, flight: _Flight) -> None:
        """Receive a stage's answers until the answer for this live flight has arrived."""
        while stage not in flight.answered:
            self._take_answer(stage)

    def find_not_finite(self, ids: list[int], drafted: list[int]) -> str:
        if self._mailbox.slot:  # one of several sequences: each stage has a cache for each
            return super().find_not_finite(ids, drafted)
        return name_layer([report["layer"] for report in self._ask_all("find")])

    def reports(self) -> list[Values]:
        """Return times and counts for every stage since the last ``clear``, in stage order."""
        found = self._ask_all("report")
        if found[0]["name"] == self.timeline.name:  # the first stage is in this process
            return found
        return [self.timeline.report(), *found]

    def _ask_all(self, action: Literal["report", "find"]) -> list[Values]:
        sequence, found = self._sequence, []
        self._send(MeasureRequest(action=action))
        for stage in range(self.num_stages):
            message = self._receive_answer(stage, sequence)
            assert isinstance(message, StageReport)
            found.append(json.loads(message.json))
        return found

    def clear(self) -> None:
        """Restart the measurement here and at every stage."""
        self.timeline.clear()
        self._send(MeasureRequest(action="clear"))
