"""SPD head at decode time, running next to the pipeline."""

# A newly committed rows, R rows in flight with spare ones, W rows per depth, Q deepest ones
# P places for committed rows, C all places, U draft vocabulary, H hidden

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.heads.spd import SPD
from ...models.speed.cuda_graphs import Packing, borrow_for, padded_rows
from ...models.target import KeepRows
from ..tree import TokenTree
from .base import (
    DraftSampling,
    DraftSource,
    Features,
    Growth,
    add_children,
    add_layer,
    deepest_rows,
)
from .graph_call import ChildQuery
from .graph_rows import CHUNK_ROWS, MAX_ROWS
from .row_cache import GraphText, NewText


class SPDSource(DraftSource):
    """Reads the states of rows in flight and drafts one layer at a time.

    The head is told that a row in flight is at depth i if it is at distance i from the deepest
    rows. Without pruning this is the true depth. If pruning leaves a gap, a row may be deeper than
    the head is told, never shallower, and the head still sees an occupancy that occurs in training.
    """

    grows: tuple[Growth, ...] = ("layers",)

    def __init__(self, draft: SPD, *, lead: int = 0) -> None:
        """
        Args:
            lead: number of extra stages passed by the deepest rows, compared with training. The
                depth given to the head is larger by ``lead`` for all other rows. The deepest rows
                remain the head's queries, at depth 0.
        """
        self.draft, self.lead = draft, lead
        self.taps = draft.taps
        self.num_forwards = 0
        self._caches = draft.new_caches()
        self._module: GraphModule | None = None
        if draft.lm_head.weight.device.type == "cuda":
            self._module = borrow_for(draft, self, "module", partial(GraphModule, draft))

    def begin(self, features: Features, tokens: list[int]) -> None:
        self._caches = self.draft.new_caches()
        if self._module is not None:
            self._module.restart()
        self.observe(features, tokens[1:])

    def observe(self, features: Features, next_tokens: list[int]) -> None:
        if self._module is not None:
            self._module.observe(features)
        else:
            self.draft.extend(self._caches, features, self._caches[0].num_rows)

    def keep(self, keep: KeepRows) -> None:
        """Do nothing, because rows in flight are read again at every step."""

    def grow_layer(
        self, tree: TokenTree, features: Features, *, width: int, sampling: DraftSampling
    ) -> int:
        if self._module is None or sampling.samples_chain:
            logits_QU = self.deepest_logits(tree, features)
            return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)
        leaves, query = deepest_rows(tree), ChildQuery(width, sampling=sampling)
        width = min(width, len(self._module.ids_U))
        best_2WK = self._module.grow(self._in_flight(tree, features), query).cpu()
        best_2QK = best_2WK.view(2, -1, width)[:, : len(leaves)]
        best_2QK[1] += torch.tensor([tree.scores[leaf] for leaf in leaves])[:, None]
        return add_children(tree, leaves, best_2QK, width, sampling)

    def deepest_logits(self, tree: TokenTree, features: Features) -> Tensor:
        """Return logits [Q, U] for the token after each of the deepest rows."""
        rows = self._in_flight(tree, features)
        if self._module is not None:
            return self._module.grow(rows, ChildQuery())
        device = self.draft.lm_head.weight.device
        return self.draft.propose(
            self._caches,
            features,
            depths=rows.depths,
            positions=rows.positions_R.to(device),
            visible_RR=rows.visible_RR.to(device),
        )

    def _in_flight(self, tree: TokenTree, features: Features) -> "RowsInFlight":
        """Return the input for one draft forward, and count this forward."""
        self.num_forwards += 1
        deepest, count = tree.depths[-1], len(tree)
        return RowsInFlight(
            features=features,
            depths=[self._presented(deepest - depth) for depth in tree.depths],
            positions_R=tree.positions(0, count),
            visible_RR=tree.visible(0, count),
            next_position=tree.root_position + deepest + 1,
        )

    def _presented(self, distance: int) -> int:
        """Return the depth given to the head for a row at this distance from the deepest ones."""
        # The deepest rows are the queries in training; no lead may move them from depth 0.
        return distance + self.lead if distance else 0


@dataclass(frozen=True, kw_only=True)
class RowsInFlight:
    """Rows in flight, in host memory except for their hidden states."""

    features: Features = field(default_factory=dict)
    depths: Sequence[int] = ()
    """Depth given to the head, per row."""
    positions_R: Tensor = torch.zeros(0, dtype=torch.int64)
    visible_RR: Tensor = torch.zeros(0, 0, dtype=torch.bool)
    next_position: int = 0
    """Position of the token after the deepest rows."""


class GraphModule(GraphText):
    """Takes in committed rows and proposes the next tokens, both in one CUDA graph.

    Every depth gets as many rows as the widest one, so one graph serves any number of busy stages.
    Rows in flight are written after the committed ones, and dropped after use.
    """

    def __init__(self, draft: SPD) -> None:
        super().__init__(len(draft.layers), draft.draft_ids)
        self.draft = draft

    def restart(self) -> None:
        super().restart()
        self._pending = NewText([], [])

    def observe(self, features: Features) -> None:
        """Queue newly committed rows for the next call."""
        self._pending.features.append(features)
        self._pending.tokens += [0] * len(features[self._text_layers[0]])

    @property
    def _text_layers(self) -> tuple[int, ...]:
        return self.draft.feature_layers[self.draft.config.max_in_flight]

    def grow(self, rows: RowsInFlight, query: ChildQuery) -> Tensor:
        """Return logits [Q, U] as in ``SPD.propose``, or each row's best children (on the device).

        Best children are float64, tokens [W, K] before scores [W, K], for Q and spare rows.
        """
        text, self._pending = self._pending, NewText([], [])
        while len(text.tokens) > MAX_ROWS:
            # Only fills the cache: nothing is in flight, so the call ends after the text.
            self._run(text.split(CHUNK_ROWS), RowsInFlight(), ChildQuery(), can_capture=False)
        out = self._run(text, rows, query, can_capture=query.key is not None)
        return out if query.width else out[: rows.depths.count(0)].clone()

    def _run(
        self, text: NewText, rows: RowsInFlight, query: ChildQuery, *, can_capture: bool
    ) -> Tensor:
        # Round up, so few graphs serve all calls; every depth has the widest one's rows.
        depths, first, count = rows.depths, self._num_text, len(text.tokens)
        A, W = padded_rows(count), padded_rows(max(map(depths.count, depths), default=0))
        self._reserve(first + A, (self.draft.config.max_in_flight + 1) * W)
        self._num_text += count
        place = self._place(depths, W)
        text_places, places, sources = self._gather(text, rows, place, W)
        noise_1U = None
        if query.sampling is not None:
            noise_1U = query.sampling.rule.noise_rows(self.ids_U, [rows.next_position])
        # Spare rows see nothing, and nothing sees them.
        R = max(map(len, places.values()), default=0)
        positions, visible = torch.zeros(R, dtype=torch.int64), torch.zeros(R, R, dtype=torch.bool)
        positions[place] = rows.positions_R
        visible[torch.tensor(place, dtype=torch.int64)[:, None], place] = rows.visible_RR
        packing = Packing(
            counts=2,
            text_features=A * len(self._text_layers),
            text_slots=A,
            features=R * len(places),
            positions=R,
            visible=R * R,
            noise=0 if noise_1U is None else noise_1U.numel(),
        )
        packed = packing.pack(
            counts=[first, first + count],
            text_features=[x for part in text_places.values() for x in part + [0] * (A - count)],
            text_slots=[*range(first, first + count)] + [self._num_places] * (A - count),
            features=[x for part in places.values() for x in part],
            positions=positions,
            visible=visible,
            noise=[] if noise_1U is None else noise_1U,
        )
        compute = partial(self._compute, packing, query, (A, W))
        return self.graphs.run(
            ((A, W), query.key), packed, sources, compute, can_capture=can_capture
        )

    def _place(self, depths: Sequence[int], width: int) -> list[int]:
        """Return a place for each row, by falling depth, with ``width`` places per depth."""
        deepest, taken = self.draft.config.max_in_flight, Counter[int]()
        places = []
        for depth in depths:
            places.append((deepest - depth) * width + taken[depth])
            taken[depth] += 1
        return places

    def _gather(
        self, text: NewText, rows: RowsInFlight, place: Sequence[int], width: int
    ) -> tuple[dict[int, list[int]], dict[int, list[int]], list[Tensor]]:
        """Index all rows' hidden states by place in the sources, without copying them.

        Returns:
            The indices by layer for text rows, the indices by layer for places of rows in flight,
            and the sources.
        """
        draft = self.draft
        text_places, sources = text.gathered(self._text_layers)
        num_sources = sum(map(len, sources))
        num_rows = (draft.config.max_in_flight + 1) * width
        places = {layer: [0] * num_rows for layer in draft.taps if width}
        for layer in places:
            depths = enumerate(rows.depths)
            readers = [row for row, depth in depths if layer in draft.feature_layers[depth]]
            if readers:
                sources.append(rows.features[layer])
                for row in readers:
                    places[layer][place[row]] = num_sources + row
                num_sources += len(rows.features[layer])
        return text_places, places, sources

    def _compute(
        self,
        packing: Packing,
        query: ChildQuery,
        shape: tuple[int, int],
        packed: Tensor,
        given_PH: Tensor | None,
    ) -> Tensor:
        """Run the whole call on fixed input buffers, and return a new buffer."""
        x, draft, (A, W) = packing.unpack(packed), self.draft, shape
        first, committed = x["counts"].split(1)
        assert given_PH is not None, "states of new rows or of rows in flight"
        columns_C = torch.arange(self._num_places + self._num_spare, device=packed.device)
        # New text first: rows in flight use its keys. Spare rows go past all places.
        if A:
            picked = given_PH.index_select(0, x["text_features"]).chunk(len(self._text_layers))
            positions_A = first + columns_C[:A]
            for cache in self._caches:
                cache.slots_R = x["text_slots"]
            visible_AC = columns_C <= positions_A[:, None]
            taps = dict(zip(self._text_layers, picked, strict=True))
            draft.extend_rows(self._caches, taps, positions_A, visible_AC)
        if not W:
            return packed
        # Deepest rows first, as in training: one projection per run of equal depth.
        deepest = draft.config.max_in_flight
        depths = [depth for depth in range(deepest, -1, -1) for _ in range(W)]
        picked = given_PH.index_select(0, x["features"]).chunk(len(draft.taps))
        for cache in self._caches:
            cache.slots_R = self._num_places + columns_C[: len(depths)]
        # All rows see the whole text, and each other as in the tree.
        committed_RP = (columns_C[: self._num_places] < committed).expand(len(depths), -1)
        own_RR = x["visible"].view(len(depths), -1).bool()
        own_RE = F.pad(own_RR, (0, self._num_spare - len(depths)))
        visible_RC = torch.cat([committed_RP, own_RE], 1)
        taps = dict(zip(draft.taps, picked, strict=True))
        logits_WU = draft.propose_rows(self._caches, taps, depths, x["positions"], visible_RC)
        if query.sampling is None:
            return logits_WU
        # Return only the best children, not the distributions.
        noise = x["noise"].view(torch.float64)[None] if len(x["noise"]) else None
        scores_WU = query.sampling.child_scores(logits_WU, noise)
        best_WK, index_WK = scores_WU.topk(min(query.width, scores_WU.shape[1]), -1)
        return torch.cat([draft.draft_ids[index_WK].double(), best_WK.double()]).flatten()
