"""SPD's multi-depth speculation head (arXiv:2605.30852).

In a pipeline with n stages, the newest token has passed 0 stages, the token before it 1 stage, and
so on. So each token's known depth depends on its distance from the newest token. For every earlier
position the head reads features of exactly this depth. The head predicts the token to enter next,
so the pipeline never runs empty.
"""

# B batch, T positions, H hidden, N query heads, J key heads, D head size, U draft vocabulary
# S sequences (examples at a depth), C key and value blocks of all layers, A = C J D
# R rows per decode call, P committed positions, Q query rows

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..speed import cpu
from ..speed.head_layers import cached_layer, finish
from ..transformer.layers import (
    DecoderLayer,
    KeyValues,
    LayerConfig,
    initialize_matrices,
    positions_of,
    rotate,
)
from .configs import SPDConfig
from .draft import StagedDraft, TargetReference, initialize_head
from .draft_calls import call
from .structural import Fill, structural_attention


def feature_layers(config: SPDConfig) -> list[tuple[int, ...]]:
    """Return the layers whose hidden states form the feature at each distance 0..max_in_flight.

    Distances count from the newest token. With one token per step the distance gives the depth,
    which is 0..n, or 1..n with output states. With m tokens per step, distance i uses the depth
    max((i - m + 1) // m, 0). In the last of a step's m forwards this is the row's true depth. In
    the earlier forwards the row may be deeper.
    Index 0 is the embedding, index i the raw output of layer i - 1. Only ``normed_last`` applies
    the final norm, to index L.
    Let l be the last layer index passed at depth k:
      paper    (0, l // 2, l)                              Eq. 1
      anchors  0 and every anchor <= l, as in the authors' later release.
      listed   the indices in ``depth_layers``.
    """
    depths: list[tuple[int, ...]] = []
    for depth, last in enumerate(config.cut):
        if config.features == "paper":
            chosen = {0, last // 2, last}
        elif config.features == "anchors":
            chosen = {0, *(anchor for anchor in config.anchors if anchor <= last)}
        else:
            chosen = set(config.depth_layers[depth - 1]) if depth else {0}
        depths.append(tuple(sorted(chosen)))
    depths, m = depths[config.lead :], config.tokens_per_step
    return [depths[max((i - m + 1) // m, 0)] for i in range(config.max_in_flight + 1)]


class SPD(StagedDraft):
    """SPD head with one feature per depth, Ls decoder layers, and its own LM head.

    In training, ``forward`` computes every position in a sequence at a given occupancy. In
    decoding, ``extend`` and ``propose`` compute the same function for one moment in a running
    pipeline.
    """

    draft_type: ClassVar[str] = "spd"
    config_class: ClassVar[type] = SPDConfig
    config: SPDConfig

    def __init__(self, config: SPDConfig, layer: LayerConfig, reference: TargetReference) -> None:
        super().__init__(config, layer, reference)
        hidden = layer.hidden_size
        self.feature_layers = feature_layers(config)
        # Depths reading the same layers share one projection and one key block.
        own = range if config.layer_projections else lambda count: [0] * count
        names = list(zip(own(config.max_in_flight + 1), self.feature_layers, strict=True))
        shared = {name: place for place, name in enumerate(dict.fromkeys(names))}
        # Depth 0 is the query stream; it keeps its own block even if depth 1 reads the same layers.
        self.block_of_depth = [shared[name] for name in names]
        self.projections = nn.ModuleList(
            nn.Linear(len(layers) * hidden, hidden, bias=False) for _, layers in shared
        )
        self.layer_projections = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(hidden, hidden, bias=False) for _ in range(config.max_in_flight)
            )
            for _ in range(config.num_layers * config.layer_projections)
        )
        self.make_layers(config.num_layers)
        self.norm.requires_grad_(False)  # stays the target's: ``normed_last`` features pass it, too

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted(set().union(*self.feature_layers)))

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Copy the target's final norm and LM head, and start features as the deepest state.

        Each projection starts as the identity on its deepest layer and zero on the others, so the
        residual stream starts in the space known to the norm and the LM head.
        """
        initialize_head(self, target, draft_ids)
        hidden = self.layer_config.hidden_size
        for projection in self.projections:
            projection.weight.zero_()
            # Layer indices ascend, so the last H columns read the deepest one.
            projection.weight[:, -hidden:] = torch.eye(hidden)
        for of_depths in self.layer_projections:
            for projection in cast(list[nn.Linear], of_depths):
                nn.init.eye_(projection.weight)
        initialize_matrices(self.layers, len(self.layers))

    def feature(self, taps: Mapping[int, Tensor], depth: int) -> Tensor:
        """Return g^k = FC_k(concatenated hidden states of the depth-k feature), [..., H].

        Applies FC_k piece by piece, so no concatenation is written or saved for backward.
        """
        weight = self.projections[self.block_of_depth[depth]].weight
        pieces = weight.split(self.layer_config.hidden_size, 1)
        first, *others = map(cpu.linear, self._states(taps, depth), pieces)
        return sum(others, start=first)

    def _decoded_feature(self, taps: Mapping[int, Tensor], depth: int) -> Tensor:
        """Return ``feature`` by one product, which is faster for few rows and may be rounded."""
        projection = self.projections[self.block_of_depth[depth]]
        return projection(torch.cat(self._states(taps, depth), -1))

    def _states(self, taps: Mapping[int, Tensor], depth: int) -> list[Tensor]:
        last = self.config.num_target_layers if self.config.normed_last else None
        return [
            self.norm(taps[index]) if index == last else taps[index]
            for index in self.feature_layers[depth]
        ]

    def _of_layer(self, index: int, rows_RH: Tensor, depths: Sequence[int]) -> Tensor:
        """Return a layer's input, given non-increasing depths. Rows at depth 0 stay unchanged."""
        if not self.config.layer_projections:
            return rows_RH
        projections, parts = cast(list[nn.Linear], self.layer_projections[index]), []
        # Rows are sorted by depth, so each depth is one slice and one product.
        for depth, run in groupby(range(len(depths)), depths.__getitem__):
            part_RH = rows_RH[..., list(run), :]
            parts.append(projections[depth - 1](part_RH) if depth else part_RH)
        return torch.cat(parts, -2)

    # -- training ---------------------------------------------------------------------------

    def forward(
        self,
        taps: Mapping[int, Tensor],
        occupancy: Sequence[int],
        lengths: Sequence[int] | None = None,
        places_M: Tensor | None = None,
    ) -> Tensor:
        """Compute the depth-0 output stream for every position at once (structural attention).

        Args:
            taps: target hidden states [B, T, H] by layer index.
            occupancy: tokens in flight per example, 1..max_in_flight (simulated pipeline fill).
                Descending order is fastest, because later examples' missing depths are not
                computed.
            lengths: document lengths in a packed row [1, T]. The documents are then the examples.
            places_M: int64, positions b T + t to compute, on any device; default all.

        Returns:
            [M, H], or [B, T, H] for all positions, before the final norm. Row t predicts the token
            at position t + 1.
        """
        examples, some = Fill(occupancy, lengths, self.config.max_in_flight), taps[self.taps[0]]
        if self.config.query == "all":
            stream_BTH = self._forward_all(taps, examples)
            return stream_BTH if places_M is None else stream_BTH.flatten(0, 1)[places_M]
        # Only the newest token's stream changes between layers. Deeper rows come from target states
        # alone, so one product gives keys and values for all layers.
        B, T, _ = some.shape
        rotation = self.rotary.of_heads(positions_of(T, lengths, some.device), some.dtype)
        keys, values, block_of_depth = self._static_key_values(taps, examples, rotation)
        # No stream sees another one, so only the rows asked for need theirs.
        rows_M = torch.arange(B * T, device=some.device) if places_M is None else places_M
        turn = [x_T1D.index_select(0, rows_M % T) for x_T1D in rotation]

        def spread(x_MND: Tensor) -> Tensor:
            x_PND = x_MND.new_zeros(B * T, *x_MND.shape[1:]).index_copy(0, rows_M, x_MND)
            return x_PND.unflatten(0, (B, T)).transpose(1, 2)

        def advance(index: int, layer: DecoderLayer, stream_MH: Tensor) -> Tensor:
            heads = layer.self_attn.project(layer.input_layernorm(stream_MH), *turn)
            query_BNTD, key_BJTD, value_BJTD = map(spread, heads)
            # Each earlier position is seen at the depth it has in a filled pipeline.
            attended_BNTD = structural_attention(
                query_BNTD,
                [key_BJTD, *keys[index]],
                [value_BJTD, *values[index]],
                occupancy=occupancy,
                block_of_depth=block_of_depth,
                lengths=lengths,
            )
            attended_PND = attended_BNTD.transpose(1, 2).flatten(0, 1)
            return layer.finish(stream_MH, attended_PND.index_select(0, rows_M))

        own = {
            index: taps[index].flatten(0, 1).index_select(0, rows_M)
            for index in self.feature_layers[0]
        }
        stream_MH = self.feature(own, 0)
        for index, layer in enumerate(self.decoder_layers):
            stream_MH = self.compute(advance, index, layer, stream_MH)
        return stream_MH.unflatten(0, (B, T)) if places_M is None else stream_MH

    def _static_key_values(
        self, taps: Mapping[int, Tensor], examples: Fill, rotation: tuple[Tensor, Tensor]
    ) -> tuple[list[list[Tensor]], list[list[Tensor]], list[int]]:
        """Compute keys and values for depths 1..n, whose rows are the same for every layer.

        Layer norms differ only in their weights. Folding these into the projections leaves one
        normalization and one product per block for all layers.

        Returns:
            keys, values: [B_r, J, T_r, D] by layer and block.
            block_of_depth: block index for depths 0..n. Block 0 is the query stream.
        """
        layers = self.decoder_layers
        projections = [
            (projection, layer.input_layernorm)
            for layer in layers
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        ]
        # W (n * w) = (W w) n: norms without weights are the same for all layers.
        weight_AH = torch.cat([projection.weight * norm.weight for projection, norm in projections])
        bias_A = None
        if self.layer_config.has_attention_bias:
            bias_A = torch.cat([projection.bias for projection, _ in projections])
        depths_of: dict[int, list[int]] = {}
        for depth in range(1, self.config.max_in_flight + 1):
            depths_of.setdefault(self.block_of_depth[depth], []).append(depth)
        # Depths with equal features share a block; it has the rows of the deepest fill.
        keys: list[list[Tensor]] = [[] for _ in layers]
        values: list[list[Tensor]] = [[] for _ in layers]
        for depths in depths_of.values():
            count = max(examples.count(depth) for depth in depths)
            rows = examples.first(taps, count)
            heads = self.compute(self._block, rows, depths[0], weight_AH, bias_A, rotation)
            for index in range(len(layers)):
                keys[index].append(heads[2 * index])
                values[index].append(heads[2 * index + 1])
        place = {block: 1 + i for i, block in enumerate(depths_of)}
        return keys, values, [0] + [place[block] for block in self.block_of_depth[1:]]

    def _block(
        self,
        taps: Mapping[int, Tensor],
        depth: int,
        weight_AH: Tensor,
        bias_A: Tensor | None,
        rotation: tuple[Tensor, Tensor],
    ) -> list[Tensor]:
        """Return one depth's keys and values, 2 Ls tensors [B, J, T, D] in layer order."""
        attention, layers = self.layers[0].self_attn, self.decoder_layers
        shape = (2 * len(layers), attention.num_key_value_heads, attention.head_size)
        # One norm and one product for all layers' keys and values.
        rows_BTH = self.feature(taps, depth)
        cos, sin = (x[: rows_BTH.shape[1]] for x in rotation)
        if self.config.layer_projections:
            heads = []
            for index, layer in enumerate(layers):
                own_BTH = self._of_layer(index, rows_BTH, [depth] * rows_BTH.shape[1])
                normed_BTH = layer.input_layernorm(own_BTH)
                heads += [
                    x.transpose(1, 2) for x in layer.self_attn.key_value(normed_BTH, cos, sin)
                ]
            return heads
        normed_BTH = F.rms_norm(rows_BTH, rows_BTH.shape[-1:], None, self.norm.eps)
        heads_CBTJD = cpu.linear(normed_BTH, weight_AH, bias_A).unflatten(-1, shape).unbind(-3)
        heads = []
        for index, layer in enumerate(layers):
            key_BTJD, value_BTJD = heads_CBTJD[2 * index : 2 * index + 2]
            key_BTJD = rotate(layer.self_attn.k_norm(key_BTJD), cos, sin)
            heads += [key_BTJD.transpose(1, 2), value_BTJD.transpose(1, 2)]
        return heads

    def _forward_all(self, taps: Mapping[int, Tensor], examples: Fill) -> Tensor:
        """Run a forward with every depth as a stream.

        The row of depth d and position t is position t's view if the newest token is at t + d.

        All depths' streams pass the layers as one batch of S sequences, or in a packed row as one
        long row. All examples' rows at depth 0 come first, then existing rows at depth 1, and so
        on.
        """
        # Examples are sorted by occupancy: a depth ends at the last example in flight there.
        depths, axis = range(self.config.max_in_flight + 1), examples.axis
        counts = [examples.count(depth) for depth in depths]
        stream_STH = torch.cat(
            [
                self.feature(examples.first(taps, count), depth)
                for depth, count in zip(depths, counts, strict=True)
            ],
            axis,
        )
        positions_T = positions_of(taps[self.taps[0]].shape[1], examples.lengths, stream_STH.device)
        if axis == 1:
            positions_T = torch.cat([positions_T[:count] for count in counts])
        rotation = self.rotary.of_heads(positions_T, stream_STH.dtype)

        def advance(layer: DecoderLayer, is_last: bool, stream_STH: Tensor) -> Tensor:
            # Only depth 0 is needed from the last layer.
            num_queries = counts[0] if is_last else stream_STH.shape[axis]
            normed_STH = layer.input_layernorm(stream_STH)
            asked_STH = normed_STH.narrow(axis, 0, num_queries)
            turn = [x[: asked_STH.shape[1]] for x in rotation]
            query_SNTD = layer.self_attn.query(asked_STH, *turn).transpose(1, 2)
            key_value = layer.self_attn.key_value(normed_STH, *rotation)
            keys, values = (x.transpose(1, 2) for x in key_value)
            attended_SNTD = structural_attention(
                query_SNTD,
                keys.split(counts, 2 * axis),
                values.split(counts, 2 * axis),
                occupancy=examples.occupancy,
                depth=0 if is_last else depths,
                lengths=examples.lengths,
            )
            stream_STH = stream_STH.narrow(axis, 0, num_queries)
            return layer.finish(stream_STH, attended_SNTD.transpose(1, 2))

        for index, layer in enumerate(self.decoder_layers):
            stream_STH = self.compute(advance, layer, index == len(self.layers) - 1, stream_STH)
        return stream_STH

    # -- decoding ---------------------------------------------------------------------------

    def new_caches(self) -> list[KeyValues]:
        """Create empty key-value caches for committed positions, one per layer."""
        return [KeyValues() for _ in self.layers]

    def extend(
        self, caches: Sequence[KeyValues], taps: Mapping[int, Tensor], first_position: int
    ) -> None:
        """Append committed positions (depth n) to the caches.

        Args:
            taps: hidden states [r, H] for consecutive positions from ``first_position``.
        """
        rows_RH = taps[self.feature_layers[-1][0]]  # any tapped layer has as many rows
        num_rows, num_before = len(rows_RH), caches[0].num_rows
        positions_R = torch.arange(num_rows, device=rows_RH.device) + first_position
        # A new row sees all earlier committed positions, and new ones up to itself.
        visible_RC = rows_RH.new_ones(num_rows, num_before + num_rows, dtype=torch.bool)
        rows = {"positions_R": positions_R, "visible_RC": visible_RC.tril_(num_before)}
        call(self.extend_rows, caches=caches, taps=taps, **rows)

    def extend_rows(
        self,
        caches: Sequence[KeyValues],
        taps: Mapping[int, Tensor],
        positions_R: Tensor,
        visible_RC: Tensor,
    ) -> None:
        """Run ``extend`` on tensors only. The C cache rows include the R new rows."""
        stream_RH = self._decoded_feature(taps, self.config.max_in_flight)
        cos, sin = self.rotary.of_heads(positions_R, stream_RH.dtype)
        for index, (layer, cache) in enumerate(zip(self.decoder_layers, caches, strict=True)):
            if self.is_read_only(index):
                depths = [self.config.max_in_flight] * len(stream_RH)
                normed_RH = layer.input_layernorm(self._of_layer(index, stream_RH, depths))
                cache.append_rows(*layer.self_attn.key_value(normed_RH, cos, sin))
            else:
                stream_RH = cached_layer(
                    layer, stream_RH, cos, sin, cache=cache, visible_RC=visible_RC
                )

    def is_read_only(self, index: int) -> bool:
        """Return True if depths other than 0 need only keys and values from this layer."""
        return self.config.query == "newest" or index == len(self.layers) - 1

    def propose(
        self,
        caches: Sequence[KeyValues],
        taps: Mapping[int, Tensor],
        *,
        depths: Sequence[int],
        positions: Tensor,
        visible_RR: Tensor,
    ) -> Tensor:
        """Return logits [Q, U] for the tokens after the Q rows at depth 0, which come last.

        Args:
            caches: committed positions, left unchanged.
            taps: hidden states [r, H] for the first r rows, by layer index. A row at depth k needs
                only the layers for depth k, so deeper layers may have fewer rows.
            depths: depth used for each of the R rows in flight, oldest first, non-increasing. A
                depth may be smaller than the row's real depth.
            positions: absolute positions [R].
            visible_RR: bool, each row's ancestors and itself among the rows in flight.
        """
        # Every row in flight sees all committed positions.
        visible_RC = torch.cat(
            [visible_RR.new_ones(len(depths), caches[0].num_rows), visible_RR], 1
        )
        rows = {"depths": depths, "positions": positions, "visible_RC": visible_RC}
        return call(self.propose_rows, caches=caches, taps=taps, **rows)

    def propose_rows(
        self,
        caches: Sequence[KeyValues],
        taps: Mapping[int, Tensor],
        depths: Sequence[int],
        positions: Tensor,
        visible_RC: Tensor,
    ) -> Tensor:
        """Run ``propose`` with explicit visibility over cached rows and rows in flight."""
        # One product per run of equal depths: they share a projection.
        blocks = []
        starts = [i for i in range(len(depths)) if i == 0 or depths[i] != depths[i - 1]]
        for start, stop in pairwise([*starts, len(depths)]):
            rows = {index: taps[index][start:stop] for index in self.feature_layers[depths[start]]}
            blocks.append(self._decoded_feature(rows, depths[start]))
        rows_RH = torch.cat(blocks)
        num_queries = sum(1 for depth in depths if depth == 0)
        cos, sin = self.rotary.of_heads(positions, rows_RH.dtype)
        for index, (layer, cache) in enumerate(zip(self.decoder_layers, caches, strict=True)):
            normed_RH = layer.input_layernorm(self._of_layer(index, rows_RH, depths))
            own_RJD = layer.self_attn.key_value(normed_RH, cos, sin)
            first = len(depths) - num_queries if self.is_read_only(index) else 0
            query_QND = layer.self_attn.query(normed_RH[first:], cos[first:], sin[first:])
            attended_QND = cache.attend_with(query_QND, *own_RJD, visible_RC[first:])
            moved_QH = finish(layer, rows_RH[first:], attended_QND)
            rows_RH = torch.cat([rows_RH[:first], moved_QH])
        return self.logits(rows_RH[len(rows_RH) - num_queries :])
