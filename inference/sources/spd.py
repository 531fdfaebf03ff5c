"""SPD head at decode time, running next to the pipeline."""

# A newly committed rows, R rows in flight with spare ones, W rows per depth, Q deepest ones
# P places for committed rows, C all places, U draft vocabulary, H hidden

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pipedraft.inference.sources.base import (
    DraftSampling,
    DraftSource,
    Growth,
    add_children,
    add_layer,
    deepest_rows,
)
from pipedraft.inference.sources.graph_call import ChildQuery
from pipedraft.inference.sources.graph_rows import CHUNK_ROWS, MAX_ROWS
from pipedraft.inference.sources.row_cache import GraphText, NewText
from pipedraft.inference.tree import TokenTree
from pipedraft.models.cuda_graphs import Packing, borrow_for, padded_rows
from pipedraft.models.spd import SPD
from pipedraft.models.target import KeepRows


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

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._caches = self.draft.new_caches()
        if self._module is not None:
            self._module.restart()
        self.observe(features, tokens[1:])

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        if self._module is not None:
            self._module.observe(features)
        else:
            self.draft.extend(self._caches, features, self._caches[0].num_rows)

    def keep(self, keep: KeepRows) -> None:
        """Do nothing: rows in flight are read again at every step."""

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: DraftSampling,
    ) -> int:
        if self._module is None or sampling.samples_chain:
            logits_QU = self.deepest_logits(tree, features)
            return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)
        leaves, query = deepest_rows(tree), ChildQuery(width, sampling=sampling)
        width = min(width, len(self._module.ids_U))
        best_2WK = self._query(self._module, tree, features, query).cpu().view(2, -1, width)
        scores_Q1 = torch.tensor([tree.scores[leaf] for leaf in leaves])[:, None]
        best_2WK[1, : len(leaves)] += scores_Q1
        return add_children(tree, leaves, best_2WK[:, : len(leaves)], width, sampling)

    def _query(
        self,
        module: "GraphModule",
        tree: TokenTree,
        features: Mapping[int, Tensor],
        query: ChildQuery,
    ) -> Tensor:
        self.num_forwards += 1
        deepest, count = tree.depths[-1], len(tree)
        noise = None
        if query.sampling is not None:
            position = tree.root_position + deepest + 1
            noise = query.sampling.rule.noise_rows(module.ids_U, [position])
        depths = [self._presented(deepest - depth) for depth in tree.depths]
        positions, visible = tree.positions(0, count), tree.visible(0, count)
        return module.grow(features, depths, positions, visible, query, noise)

    def deepest_logits(self, tree: TokenTree, features: Mapping[int, Tensor]) -> Tensor:
        """Return logits [Q, U] for the token after each of the deepest rows."""
        if self._module is not None:
            return self._query(self._module, tree, features, ChildQuery())
        deepest = tree.depths[-1]
        device = self.draft.lm_head.weight.device
        self.num_forwards += 1
        return self.draft.propose(
            self._caches,
            features,
            depths=[self._presented(deepest - depth) for depth in tree.depths],
            positions=tree.positions(0, len(tree)).to(device),
            visible_RR=tree.visible(0, len(tree)).to(device),
        )

    def _presented(self, distance: int) -> int:
        """Return the depth given to the head for a row at this distance from the deepest ones."""
        # The deepest rows are the queries in training; no lead may move them from depth 0.
        return distance + self.lead if distance else 0


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

    def observe(self, features: Mapping[int, Tensor]) -> None:
        """Queue newly committed rows for the next call."""
        self._pending.features.append(features)
        self._pending.tokens += [0] * len(features[self._text_layers[0]])

    @property
    def _text_layers(self) -> tuple[int, ...]:
        return self.draft.feature_layers[self.draft.config.max_in_flight]

    def grow(
        self,
        features: Mapping[int, Tensor],
        depths: Sequence[int],
        positions_R: Tensor,
        visible_RR: Tensor,
        query: ChildQuery,
        noise_1U: Tensor | None,
    ) -> Tensor:
        """Return logits [Q, U] as in ``SPD.propose``, or each row's best children (on the device).

        Args:
            positions_R, visible_RR: on the host.

        Returns:
            Best children are a float64 tensor: tokens [W, K], then scores [W, K], for Q and spare
            rows.
        """
        text, self._pending = self._pending, NewText([], [])
        while len(text.tokens) > MAX_ROWS:
            part = text.split(CHUNK_ROWS)
            self._run(
                part,
                {},
                [],
                positions_R[:0],
                visible_RR[:0, :0],
                ChildQuery(),
                noise_1U=None,
                captures=False,
            )
        captures = query.key is not None
        out = self._run(
            text,
            features,
            depths,
            positions_R,
            visible_RR,
            query,
            noise_1U=noise_1U,
            captures=captures,
        )
        return out if query.width else out[: depths.count(0)].clone()

    def _run(
        self,
        text: NewText,
        features: Mapping[int, Tensor],
        depths: Sequence[int],
        positions_R: Tensor,
        visible_RR: Tensor,
        query: ChildQuery,
        *,
        noise_1U: Tensor | None,
        captures: bool,
    ) -> Tensor:
        # Round up, so few graphs serve all calls; every depth has the widest one's rows.
        first, count = self._num_text, len(text.tokens)
        A, W = padded_rows(count), padded_rows(max(map(depths.count, depths), default=0))
        self._reserve(first + A, (self.draft.config.max_in_flight + 1) * W)
        self._num_text += count
        place = self._place(depths, W)
        text_places, places, sources = self._gather(text, features, depths, place, W)
        packing, packed = self._pack(
            (first, count, A),
            text_places,
            places,
            place,
            positions_R,
            visible_RR,
            noise_1U=noise_1U,
        )
        compute = partial(self._compute, packing, query, (A, W))
        key = ((A, W), query.key)
        return self.graphs.run(key, packed, sources, compute, can_capture=captures)

    def _place(self, depths: Sequence[int], width: int) -> list[int]:
        """Place each row in flight: deepest rows first, ``width`` places per depth."""
        deepest, taken = self.draft.config.max_in_flight, Counter[int]()
        places = []
        for depth in depths:
            places.append((deepest - depth) * width + taken[depth])
            taken[depth] += 1
        return places

    def _gather(
        self,
        text: NewText,
        features: Mapping[int, Tensor],
        depths: Sequence[int],
        place: Sequence[int],
        width: int,
    ) -> tuple[dict[int, list[int]], dict[int, list[int]], list[Tensor]]:
        """Index all rows' hidden states by place in the sources, without copying them.

        Returns:
            Layer -> index for each text row; layer -> index for each place of rows in flight;
                sources.
        """
        draft = self.draft
        text_places, sources = text.gathered(self._text_layers)
        num_sources = sum(map(len, sources))
        num_rows = (draft.config.max_in_flight + 1) * width
        places = {layer: [0] * num_rows for layer in draft.taps if width}
        for layer in places:
            readers = [r for r, depth in enumerate(depths) if layer in draft.feature_layers[depth]]
            if readers:
                sources.append(features[layer])
                for row in readers:
                    places[layer][place[row]] = num_sources + row
                num_sources += len(features[layer])
        return text_places, places, sources

    def _pack(
        self,
        text: tuple[int, int, int],
        text_places: Mapping[int, list[int]],
        places: Mapping[int, list[int]],
        place: list[int],
        positions_R: Tensor,
        visible_RR: Tensor,
        *,
        noise_1U: Tensor | None,
    ) -> tuple[Packing, Tensor]:
        """Pack the call's host data into one tensor.

        Args:
            text: first new text row, number of new rows, and this number with spare rows.
        """
        first, count, A = text
        R = max(map(len, places.values()), default=0)
        # Spare rows see nothing, and nothing sees them.
        positions, visible = torch.zeros(R, dtype=torch.int64), torch.zeros(R, R, dtype=torch.bool)
        positions[place] = positions_R
        visible[torch.tensor(place, dtype=torch.int64)[:, None], place] = visible_RR
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
        return packing, packed

    def _compute(
        self,
        packing: Packing,
        query: ChildQuery,
        shape: tuple[int, int],
        packed: Tensor,
        given_PH: Tensor | None,
    ) -> Tensor:
        """Run the whole call: read fixed buffers, return a new one."""
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
