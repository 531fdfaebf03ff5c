"""The speculation module beside the pipeline."""

# A newly committed rows, R rows in flight with spare ones, W of them of each depth, Q deepest ones
# P places of committed rows, C of all, U draft vocabulary, H hidden

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pipedraft.inference.sources.base import (
    DraftSource,
    Growth,
    Sampling,
    add_children,
    add_layer,
    deepest_rows,
)
from pipedraft.inference.sources.recorded_rows import CHUNK_ROWS, MAX_ROWS, Ask
from pipedraft.inference.sources.row_cache import NewText, RecordedText
from pipedraft.inference.tree import TokenTree
from pipedraft.models.cuda_graphs import Packing, lend, padded_rows
from pipedraft.models.spd import SPD
from pipedraft.models.target import Keep


class SPDSource(DraftSource):
    """Reads the states of the rows in flight, one layer of draft tokens at a time.

    Rows in flight are presented by their distance to the deepest ones: distance i at depth i. With
    no row pruned that is the true depth; after a prune that left a gap a row may be deeper than it
    is presented, never shallower, and the module sees an occupancy it was trained for.
    """

    grows: tuple[Growth, ...] = ("layers",)

    def __init__(self, draft: SPD, *, lead: int = 0) -> None:
        """
        Args:
            lead: stages that the deepest rows have passed when they are continued, more than in
                training. Rows before them are presented so much deeper; these stay the module's
                queries, at depth 0.
        """
        self.draft, self.lead = draft, lead
        self.taps = draft.taps
        self.num_forwards = 0
        self._caches = draft.new_caches()
        self._recorded: RecordedModule | None = None
        if draft.lm_head.weight.device.type == "cuda":
            self._recorded = lend(draft, self, "module", partial(RecordedModule, draft))

    def begin(self, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        self._caches = self.draft.new_caches()
        if self._recorded is not None:
            self._recorded.restart()
        self.observe(features, tokens[1:])

    def observe(self, features: Mapping[int, Tensor], next_tokens: list[int]) -> None:
        if self._recorded is not None:
            self._recorded.observe(features)
        else:
            self.draft.extend(self._caches, features, self._caches[0].num_rows)

    def keep(self, keep: Keep) -> None:
        """Nothing is kept per row: rows in flight are read anew at every step."""

    def grow_layer(
        self,
        tree: TokenTree,
        features: Mapping[int, Tensor],
        *,
        width: int,
        sampling: Sampling,
    ) -> int:
        if self._recorded is None or sampling.samples_chain:
            logits_QU = self.deepest_logits(tree, features)
            return add_layer(tree, logits_QU, self.draft, width=width, sampling=sampling)
        leaves, ask = deepest_rows(tree), Ask(width, sampling=sampling)
        width = min(width, len(self._recorded.ids_U))
        best_2WK = self._ask(self._recorded, tree, features, ask).cpu().view(2, -1, width)
        scores_Q1 = torch.tensor([tree.scores[leaf] for leaf in leaves])[:, None]
        best_2WK[1, : len(leaves)] += scores_Q1
        return add_children(tree, leaves, best_2WK[:, : len(leaves)], width, sampling)

    def _ask(
        self, recorded: "RecordedModule", tree: TokenTree, features: Mapping[int, Tensor], ask: Ask
    ) -> Tensor:
        self.num_forwards += 1
        deepest, count = tree.depths[-1], len(tree)
        noise = None
        if ask.sampling is not None:
            position = tree.root_position + deepest + 1
            noise = ask.sampling.rule.noise_rows(recorded.ids_U, [position])
        depths = [self._presented(deepest - depth) for depth in tree.depths]
        positions, visible = tree.positions(0, count), tree.visible(0, count)
        return recorded.grow(features, depths, positions, visible, ask, noise)

    def deepest_logits(self, tree: TokenTree, features: Mapping[int, Tensor]) -> Tensor:
        """Logits [Q, U] of the token after each of the deepest rows."""
        if self._recorded is not None:
            return self._ask(self._recorded, tree, features, Ask())
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
        """Depth under which the module reads a row so far before the deepest ones."""
        return distance + self.lead if distance else 0


class RecordedModule(RecordedText):
    """Takes committed rows in and proposes the next tokens, both in one graph.

    Every depth gets as many rows as the widest one has, so that one graph serves however many
    stages are busy. Rows in flight are written behind the committed ones, and forgotten.
    """

    def __init__(self, draft: SPD) -> None:
        super().__init__(len(draft.layers), draft.draft_ids)
        self.draft = draft

    def restart(self) -> None:
        super().restart()
        self._pending = NewText([], [])

    def observe(self, features: Mapping[int, Tensor]) -> None:
        """Newly committed rows, taken in with the next call."""
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
        ask: Ask,
        noise_1U: Tensor | None,
    ) -> Tensor:
        """Logits [Q, U] as of ``SPD.propose``, or the best children of each (on the device).

        Args:
            positions_R, visible_RR: in the host's memory.

        Returns:
            Of best children float64, tokens [W, K], then scores [W, K], of Q and of spare rows.
        """
        text, self._pending = self._pending, NewText([], [])
        while len(text.tokens) > MAX_ROWS:
            part = text.split(CHUNK_ROWS)
            packing, packed, sources = self._packed(part, {}, [], positions_R[:0], visible_RR)
            compute = partial(self._compute, packing, Ask(), (padded_rows(len(part.tokens)), 0))
            self.recordings.run((), packed, sources, compute, can_record=False)
        num_queries = sum(depth == 0 for depth in depths)
        packing, packed, sources = self._packed(
            text, features, depths, positions_R, visible_RR, noise_1U
        )
        width = padded_rows(max(map(depths.count, depths)))
        shape = (padded_rows(len(text.tokens)), width)
        compute = partial(self._compute, packing, ask, shape)
        can_record = ask.key is not None
        out = self.recordings.run((shape, ask.key), packed, sources, compute, can_record=can_record)
        return out if ask.width else out[:num_queries].clone()

    def _packed(
        self,
        text: NewText,
        features: Mapping[int, Tensor],
        depths: Sequence[int],
        positions_R: Tensor,
        visible_RR: Tensor,
        noise_1U: Tensor | None = None,
    ) -> tuple[Packing, Tensor, list[Tensor]]:
        """Inputs that change from call to call, on the host, and the hidden states read."""
        draft, first, count = self.draft, self._num_text, len(text.tokens)
        # Rounded up, so that few graphs serve all calls; every depth has the rows of the widest.
        deepest, A = draft.config.max_in_flight, padded_rows(count)
        W = padded_rows(max(map(depths.count, depths), default=0))
        R = (deepest + 1) * W
        self._reserve(first + A, R)
        self._num_text += count
        # Row -> its place among the rows of its depth, the deepest first.
        rows_of = {depth: [i for i, d in enumerate(depths) if d == depth] for depth in set(depths)}
        place = {
            row: (deepest - depth) * W + index
            for depth, rows in rows_of.items()
            for index, row in enumerate(rows)
        }
        # Hidden states are not copied to the host: rows are named by their place in the sources.
        text_places, sources = text.gathered(self._text_layers)
        num_sources = sum(map(len, sources))
        places = {layer: [0] * R for layer in draft.taps if W}
        for layer in places:
            readers = [
                row
                for depth, rows in rows_of.items()
                if layer in draft.feature_layers[depth]
                for row in rows
            ]
            if readers:
                sources.append(features[layer])
                for row in readers:
                    places[layer][place[row]] = num_sources + row
                num_sources += len(features[layer])
        # Spare rows see nothing, and nothing sees them.
        order = [place[row] for row in range(len(depths))]
        positions, visible = torch.zeros(R, dtype=torch.int64), torch.zeros(R, R, dtype=torch.bool)
        positions[order] = positions_R
        visible[torch.tensor(order, dtype=torch.int64)[:, None], order] = visible_RR
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
        return packing, packed, sources

    def _compute(
        self,
        packing: Packing,
        ask: Ask,
        shape: tuple[int, int],
        packed: Tensor,
        given_PH: Tensor | None,
    ) -> Tensor:
        """All of a call, from fixed buffers to a new one."""
        x, draft, (A, W) = packing.unpack(packed), self.draft, shape
        first, committed = x["counts"].split(1)
        assert given_PH is not None, "states of new rows or of rows in flight"
        columns_C = torch.arange(self._num_places + self._num_spare, device=packed.device)
        # New text first: the rows in flight look at its keys. Spare rows go past all places.
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
        # The deepest rows first, as training has them: a projection for each run of one depth.
        deepest = draft.config.max_in_flight
        depths = [depth for depth in range(deepest, -1, -1) for _ in range(W)]
        picked = given_PH.index_select(0, x["features"]).chunk(len(draft.taps))
        for cache in self._caches:
            cache.slots_R = self._num_places + columns_C[: len(depths)]
        # All rows see the whole text, and of each other what the tree says.
        committed_RP = (columns_C[: self._num_places] < committed).expand(len(depths), -1)
        own_RR = x["visible"].view(len(depths), -1).bool()
        own_RE = F.pad(own_RR, (0, self._num_spare - len(depths)))
        visible_RC = torch.cat([committed_RP, own_RE], 1)
        taps = dict(zip(draft.taps, picked, strict=True))
        logits_WU = draft.propose_rows(self._caches, taps, depths, x["positions"], visible_RC)
        if ask.sampling is None:
            return logits_WU
        # Only the best children come back, not the distributions.
        noise = x["noise"].view(torch.float64)[None] if len(x["noise"]) else None
        scores_WU = ask.sampling.child_scores(logits_WU, noise)
        best_WK, index_WK = scores_WU.topk(min(ask.width, scores_WU.shape[1]), -1)
        return torch.cat([draft.draft_ids[index_WK].double(), best_WK.double()]).flatten()
