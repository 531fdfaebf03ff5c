"""A pipelined target in one process: stages step together, one segment each."""

from collections import deque

import torch
from torch import Tensor

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.pipelines import Ahead, Pipeline, Returned, pick_rows
from pipedraft.inference.timeline import Timeline
from pipedraft.inference.verify import Verifier
from pipedraft.models.target import Keep, Segment, StagedTarget, prune_segment


class FeatureStore:
    """Hidden states of the rows in flight, per layer index, in the order of the token tree.

    Rows enter and leave the stages first-in first-out, so the rows that have passed a layer are
    always a prefix of the tree's rows, and a Keep acts on them as on a stage's cache.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.rows: dict[int, Tensor | None] = dict.fromkeys(layers)

    def append(self, layer: int, hidden_RH: Tensor) -> None:
        stored = self.rows[layer]
        self.rows[layer] = hidden_RH if stored is None else torch.cat([stored, hidden_RH])

    def view(self) -> dict[int, Tensor]:
        """Layer index -> [r, H] for the first r rows of the tree, r falling with the layer."""
        return {layer: rows for layer, rows in self.rows.items() if rows is not None}

    def keep(self, keep: Keep) -> dict[int, Tensor]:
        """Prune; returns the committed rows [a, H] of every layer."""
        committed = {}
        for layer, rows in self.rows.items():
            if rows is None:
                continue
            kept = pick_rows(rows, keep.cached(len(rows)))
            committed[layer] = kept[: keep.num_committed]
            self.rows[layer] = kept[keep.num_committed :]
        return committed


class LocalPipeline(Pipeline):
    """All stages of a target in this process; one ``tick`` is one pipeline step."""

    def __init__(self, target: StagedTarget) -> None:
        self.target = target
        self.timeline = Timeline("one process", device=target.device)
        self.taps: tuple[int, ...] = ()
        self._num_expected = 0
        self._features = FeatureStore(())
        self._verifier: Verifier | None = None
        self._entrance: deque[Segment] = deque()
        self._waiting: list[Segment | None] = [None] * target.num_stages
        self.last_rows: list[int] = [0] * target.num_stages
        """Rows that each stage processed in the last tick."""

    @property
    def num_stages(self) -> int:
        return self.target.num_stages

    def open(self, config: DecodeConfig, prompt_index: int) -> None:
        self._num_expected = config.max_new_tokens
        self.target.set_bitwise(config.bitwise)

    def prefill(
        self, input_ids: Tensor, taps: tuple[int, ...], verifier: Verifier
    ) -> tuple[int, dict[int, Tensor]]:
        """Commit a prompt; returns the target's next token and the tapped hidden states [P, H]."""
        self.taps, self._verifier = taps, verifier
        self._features = FeatureStore(taps)
        self._entrance.clear()
        self._waiting = [None] * self.num_stages
        self.target.reserve(len(input_ids) + self._num_expected)
        logits_V, features = self.target.prefill(input_ids, taps)
        last = torch.tensor([len(input_ids) - 1])
        return int(verifier.target_tokens(logits_V[None], last)), features

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids)

    def features(self) -> dict[int, Tensor]:
        return self._features.view()

    def inject(self, segment: Segment) -> None:
        """Queue rows at the first stage; one segment enters per step."""
        self._entrance.append(segment)
        if 0 in self._features.rows:
            assert segment.ids is not None
            self._features.append(0, self.embed(segment.ids))

    def tick(self, ahead: Ahead | None = None) -> Returned | None:
        """Every stage processes what waits at its input; returns what leaves the last one.

        Args:
            ahead: nothing can be done about it before the verdict here.
        """
        returned = None
        if self._entrance:
            self._waiting[0] = self._entrance.popleft()
        deeper = [layer for layer in self.taps if layer > 0]
        for index in reversed(range(self.num_stages)):
            segment, self._waiting[index] = self._waiting[index], None
            self.last_rows[index] = 0 if segment is None else segment.num_rows
            if segment is None:
                continue
            with self.timeline.span("stage", segment.num_rows):
                output = self.target.stages[index].forward(segment, deeper)
            start, end = self.target.boundaries[index : index + 2]
            for layer in deeper:
                if start < layer <= end:
                    self._features.append(layer, output.taps[layer])
            if index == self.num_stages - 1:
                returned = self._judge(output)
            else:
                self._waiting[index + 1] = output
        return returned

    def keep(self, keep: Keep) -> dict[int, Tensor]:
        """Commit, prune, roll back or flush everywhere; returns the committed rows' features."""
        for index, segment in enumerate(self._waiting):
            if segment is not None:
                self._waiting[index] = prune_segment(segment, keep, segment.lo)
        pruned = [prune_segment(segment, keep, segment.lo) for segment in self._entrance]
        self._entrance = deque(segment for segment in pruned if segment is not None)
        for stage in self.target.stages:
            stage.keep(keep)
        return self._features.keep(keep)

    def _judge(self, segment: Segment) -> Returned:
        assert segment.hidden is not None and self._verifier is not None
        with self.timeline.span("verify", segment.num_rows):
            logits_RV = self.target.logits(segment.hidden)
            verdicts = self._verifier.judge(logits_RV, segment.positions)
        return Returned(segment.num_rows, verdicts)
