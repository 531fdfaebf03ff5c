"""SPD's multi-depth speculation module (arXiv:2605.30852).

While a pipeline of n stages decodes, the token that entered last has passed 0 stages, the one
before it 1 stage, and so on: every token has the depth of what the pipeline knows about it. The
module reads, for each earlier position, the features of exactly that depth and predicts the token
that should enter next, so that the pipeline never runs empty.
"""

# B batch, T positions, H hidden, N query heads, J key heads, D head size, U draft vocabulary
# S sequences (of an example at a depth), C key and value blocks of all layers, A = C J D
# R rows of a decode call, P committed positions, Q query rows

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipedraft.models.draft import StagedDraft, StagedDraftConfig, TargetReference, initialize_head
from pipedraft.models.draft_calls import call
from pipedraft.models.layers import (
    DecoderLayer,
    KeyValues,
    LayerConfig,
    cached_layer,
    initialize_matrices,
    positions_of,
    rotate,
)
from pipedraft.models.structural import Fill, structural_attention


@dataclass(frozen=True, kw_only=True)
class SPDConfig(StagedDraftConfig):
    """Architecture of the module, which runs beside the stages."""

    num_layers: int = 2
    """Decoder layers of the module (Ls)."""
    features: Literal["paper", "thirds", "anchors", "listed"] = "paper"
    """Which hidden states make the feature of depth k; see feature_layers."""
    anchors: tuple[int, ...] = ()
    """Layer indices for ``features: anchors``, ascending."""
    depth_layers: tuple[tuple[int, ...], ...] = ()
    """Layer indices of depth 1, 2 .. n for ``features: listed``."""
    layer_projections: bool = False
    """Each layer has one more projection of the features of each depth 1 .. n, as in the authors'
    version 10; with ``query: newest``."""
    normed_last: bool = False
    """Index L is the state after the target's final norm, as in the authors' releases."""
    query: Literal["newest", "all"] = "newest"
    """newest: only the depth-0 stream passes the layers. all: every depth does."""
    timing: Literal["input_states", "output_states"] = "input_states"
    """The module reads the states before a step or, for decoding with the same timing, those after
    it: one stage deeper, with as many fewer depths."""
    tokens_per_step: int = 1
    """Draft tokens of a branch at every step, one forward each, for decoding with the same number:
    where Ls < L / n leaves room for several. Tokens that enter together have the same depth."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "anchors", tuple(self.anchors))
        object.__setattr__(self, "depth_layers", tuple(map(tuple, self.depth_layers)))
        if self.num_stages < 1 or self.num_layers < 1:
            raise ValueError(
                f"model.num_stages, model.num_layers: {self.num_stages}, {self.num_layers}; "
                "both must be at least 1"
            )
        layers = self.num_target_layers or self.tokens_per_step  # 0: not known yet
        if not 1 <= self.tokens_per_step <= (1 if self.lead else layers):
            raise ValueError(
                f"model.tokens_per_step: {self.tokens_per_step} with timing {self.timing!r}; give "
                "at least 1, at most as many as the target's layers, beside which they are drafted,"
                " and 1 with output states, where the stages wait for each forward"
            )
        if self.max_in_flight < 1:
            raise ValueError(
                "model.timing: 'output_states' with 1 stage, after which no token is in flight; "
                "give model.num_stages 2 or more"
            )
        if (self.features == "anchors") != bool(self.anchors):
            raise ValueError(
                f"model.anchors: {list(self.anchors)} with features {self.features!r}; anchors are "
                "given exactly when features is 'anchors'"
            )
        if len(self.depth_layers) != (self.num_stages if self.features == "listed" else 0):
            raise ValueError(
                f"model.depth_layers: {len(self.depth_layers)} depths with features "
                f"{self.features!r}; features 'listed' takes {self.num_stages}, others none"
            )
        if self.layer_projections and self.query != "newest":
            raise ValueError("model.layer_projections: True with query 'all'; give query newest")
        if list(self.anchors) != sorted(set(self.anchors)):
            raise ValueError(f"model.anchors: {list(self.anchors)} are not ascending and distinct")
        passed = (self.num_target_layers, *self.cut[1:]) if self.num_target_layers else ()
        for given, last in zip((self.anchors, *self.depth_layers), passed, strict=False):
            if not all(0 <= layer <= last for layer in given):
                name = "depth_layers" if self.depth_layers else "anchors"
                raise ValueError(f"model.{name}: {[*given]} are not in 0..{last}, passed by then")

    @property
    def lead(self) -> int:
        """Stages that the newest token has passed, whose depth is 0 to the module."""
        return int(self.timing == "output_states")

    @property
    def max_in_flight(self) -> int:
        """Rows that the newest one is the last of: m n + m - 1 with m tokens a step, of which m - 1
        have just been drafted; n - 1 after a step. Rows before them are committed."""
        return self.num_stages * self.tokens_per_step + self.tokens_per_step - 1 - self.lead


def feature_layers(config: SPDConfig) -> list[tuple[int, ...]]:
    """Layer indices whose raw hidden states make the feature of each distance 0..max_in_flight
    from the newest token: depth 0..n, with output states 1..n, as that token has passed a stage.

    With m tokens a step, distance i has depth max((i - m + 1) // m, 0): what is true of the last of
    a step's m forwards, and no more than is true of the others.
    Index 0 is the embedding, index i the raw output of layer i - 1, never the final norm's.
    With l the last layer index that a token of depth k has passed:
      paper    (0, l // 2, l)                              Eq. 1
      thirds   (0, l) and (0, lps, l) at depths 1 and 2, then (0, l // 3, 2 * (l // 3), l), as in
               the authors' first release. Deviation: they clamp l to L - 1 because their index L
               is post-norm; here index L is the raw output and is used.
      anchors  0 and every anchor <= l, as in the authors' later release.
      listed   what ``depth_layers`` says.
    """
    depths: list[tuple[int, ...]] = []
    for depth, last in enumerate(config.cut):
        if config.features == "paper":
            chosen = {0, last // 2, last}
        elif config.features == "anchors":
            chosen = {0, *(anchor for anchor in config.anchors if anchor <= last)}
        elif config.features == "listed":
            chosen = set(config.depth_layers[depth - 1]) if depth else {0}
        elif depth <= 2:
            chosen = set(config.cut[: depth + 1])
        else:
            chosen = {0, last // 3, 2 * (last // 3), last}
        depths.append(tuple(sorted(chosen)))
    depths, m = depths[config.lead :], config.tokens_per_step
    return [depths[max((i - m + 1) // m, 0)] for i in range(config.max_in_flight + 1)]


class SPD(StagedDraft):
    """Speculation module: features per depth, Ls decoder layers, an LM head of its own.

    Train and decode compute the same function: ``forward`` for every position of a sequence at a
    given occupancy, ``extend`` and ``propose`` for one moment of a running pipeline.
    """

    draft_type: ClassVar[str] = "spd"
    config_class: ClassVar[type] = SPDConfig
    config: SPDConfig

    def __init__(self, config: SPDConfig, layer: LayerConfig, reference: TargetReference) -> None:
        super().__init__(config, layer, reference)
        hidden = layer.hidden_size
        self.feature_layers = feature_layers(config)
        # Depths that read the same layers share one projection and one key block.
        own = range if config.layer_projections else lambda count: [0] * count
        names = list(zip(own(config.max_in_flight + 1), self.feature_layers, strict=True))
        shared = {name: place for place, name in enumerate(dict.fromkeys(names))}
        # Depth 0 is the query stream and keeps its own block even where depth 1 reads the same.
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
        self.norm.requires_grad_(False)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layer indices of the target that the module reads."""
        return tuple(sorted(set().union(*self.feature_layers)))

    @torch.no_grad()
    def initialize(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> None:
        """Start from the target: its final norm and LM head; features start as the deepest state.

        Each projection starts as the identity on its deepest checkpoint and zero on the others,
        so that the residual stream begins in the space the norm and the LM head know.
        """
        initialize_head(self, target, draft_ids)
        hidden = self.layer_config.hidden_size
        for projection in self.projections:
            projection.weight.zero_()
            projection.weight[:, -hidden:] = torch.eye(hidden)
        for of_depths in self.layer_projections:
            for projection in cast(list[nn.Linear], of_depths):
                nn.init.eye_(projection.weight)
        initialize_matrices(self.layers, len(self.layers))

    def feature(self, taps: Mapping[int, Tensor], depth: int) -> Tensor:
        """g^k = FC_k(concat of the hidden states at the checkpoints of depth k): [..., H].

        FC_k is applied piece by piece: no concatenation to write, and none to keep for backward.
        """
        weight = self.projections[self.block_of_depth[depth]].weight
        pieces = weight.split(self.layer_config.hidden_size, 1)
        last = self.config.num_target_layers if self.config.normed_last else None
        first, *others = (
            F.linear(self.norm(taps[index]) if index == last else taps[index], piece)
            for index, piece in zip(self.feature_layers[depth], pieces, strict=True)
        )
        return sum(others, start=first)

    def _of_layer(self, index: int, rows_RH: Tensor, depths: Sequence[int]) -> Tensor:
        """Input of a layer for rows of non-increasing depths; those of depth 0 are streams."""
        if not self.config.layer_projections:
            return rows_RH
        projections, parts = cast(list[nn.Linear], self.layer_projections[index]), []
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
    ) -> Tensor:
        """Output rows of the depth-0 stream for every position at once (structural attention).

        Args:
            taps: hidden states [B, T, H] of the target, by layer index.
            occupancy: for each example the tokens in flight, 1..n (simulated pipeline fill).
                Fastest in descending order: depths that no later example has are not computed.
            lengths: of the documents in a packed row [1, T]; these are then the examples.

        Returns:
            [B, T, H], before the final norm; row t predicts the token at position t + 1.
        """
        examples = Fill(occupancy, lengths, self.config.max_in_flight)
        if self.config.query == "all":
            return self._forward_all(taps, examples)
        # Only the newest token's stream changes from layer to layer; what deeper rows offer it is
        # made of the target's states alone, so that all layers' keys and values are one product.
        stream_BTH = self.feature(taps, 0)
        positions_T = positions_of(stream_BTH.shape[1], lengths, stream_BTH.device)
        rotation = self.rotary.of_heads(positions_T, stream_BTH.dtype)
        keys, values, block_of_depth = self._static_key_values(taps, examples, rotation)

        def advance(index: int, layer: DecoderLayer, stream_BTH: Tensor) -> Tensor:
            query_BNTD, key_BJTD, value_BJTD = self._project(layer, stream_BTH, rotation)
            # Each earlier position is looked at in the depth that it has in a filled pipeline.
            attended_BNTD = structural_attention(
                query_BNTD,
                [key_BJTD, *keys[index]],
                [value_BJTD, *values[index]],
                occupancy=occupancy,
                block_of_depth=block_of_depth,
                lengths=lengths,
            )
            return layer.finish(stream_BTH, attended_BNTD.transpose(1, 2))

        for index, layer in enumerate(self.decoder_layers):
            stream_BTH = self.compute(advance, index, layer, stream_BTH)
        return stream_BTH

    def _static_key_values(
        self, taps: Mapping[int, Tensor], examples: Fill, rotation: tuple[Tensor, Tensor]
    ) -> tuple[list[list[Tensor]], list[list[Tensor]], list[int]]:
        """Keys and values of the depths 1..n, whose rows are the same for every layer.

        The layers' norms differ by their weights only, which are folded into the projections, so
        one normalization and one product per block serve all layers while its rows are in cache.

        Returns:
            keys, values: [B_r, J, T_r, D] by layer and block.
            block_of_depth: of the depths 0..n, counting the query stream as block 0.
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
        # Depths with the same features share a block; its rows are those of the deepest fill.
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
        """Keys and values of one depth, layer after layer: 2 Ls of [B, J, T, D]."""
        attention, layers = self.layers[0].self_attn, self.decoder_layers
        shape = (2 * len(layers), attention.num_key_value_heads, attention.head_size)
        # One norm and one product for the keys and values of every layer.
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
        heads_CBTJD = F.linear(normed_BTH, weight_AH, bias_A).unflatten(-1, shape).unbind(-3)
        heads = []
        for index, layer in enumerate(layers):
            key_BTJD, value_BTJD = heads_CBTJD[2 * index : 2 * index + 2]
            key_BTJD = rotate(layer.self_attn.k_norm(key_BTJD), cos, sin)
            heads += [key_BTJD.transpose(1, 2), value_BTJD.transpose(1, 2)]
        return heads

    @staticmethod
    def _project(
        layer: DecoderLayer,
        stream_STH: Tensor,
        rotation: tuple[Tensor, Tensor],
        num_queries: int | None = None,
        axis: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads-first keys and values of all rows, and queries of the first ones along an axis."""
        normed = layer.input_layernorm(stream_STH)
        keys, values = layer.self_attn.key_value(normed, *rotation)
        asked = normed if num_queries is None else normed.narrow(axis, 0, num_queries)
        query = layer.self_attn.query(asked, *(x[: asked.shape[1]] for x in rotation))
        return query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def _forward_all(self, taps: Mapping[int, Tensor], examples: Fill) -> Tensor:
        """Every depth is a stream of its own: row (depth d, position t) is the module's view of
        position t while the newest token is d positions later.

        The streams of all depths pass the layers as one batch of S sequences (in a packed row: as
        one long row): the examples of depth 0, then those that have a depth 1, and so on.
        """
        # Examples are sorted by occupancy: a depth in flight ends with the last one that has it.
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
            # The last layer is asked for depth 0 only.
            num_queries = counts[0] if is_last else stream_STH.shape[axis]
            query_SNTD, keys, values = self._project(layer, stream_STH, rotation, num_queries, axis)
            attended_SNTD = structural_attention(
                query_SNTD,
                keys.split(counts, 2 * axis),
                values.split(counts, 2 * axis),
                occupancy=examples.occupancy,
                depth=0 if is_last else depths,
                lengths=examples.lengths,
            )
            asked_STH = stream_STH.narrow(axis, 0, num_queries)
            return layer.finish(asked_STH, attended_SNTD.transpose(1, 2))

        for index, layer in enumerate(self.decoder_layers):
            stream_STH = self.compute(advance, layer, index == len(self.layers) - 1, stream_STH)
        return stream_STH

    # -- decoding ---------------------------------------------------------------------------

    def new_caches(self) -> list[KeyValues]:
        """Keys and values of the committed positions, for each layer."""
        return [KeyValues() for _ in self.layers]

    def extend(
        self, caches: Sequence[KeyValues], taps: Mapping[int, Tensor], first_position: int
    ) -> None:
        """Append committed positions (depth n) to the caches.

        Args:
            taps: hidden states [r, H] of consecutive positions from ``first_position`` on.
        """
        rows_RH = taps[self.feature_layers[-1][0]]
        num_rows, num_before = len(rows_RH), caches[0].num_rows
        positions_R = torch.arange(num_rows, device=rows_RH.device) + first_position
        # A new row sees all positions committed before, and of the new ones those up to itself.
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
        """``extend`` by tensors alone; rows of the caches include these R ones."""
        stream_RH = self.feature(taps, self.config.max_in_flight)
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
        """Nobody reads what this layer makes of rows of other depths than 0, only their keys."""
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
        """Logits [Q, U] of the tokens that should follow the Q rows of depth 0, the last ones.

        Args:
            caches: of the committed positions; they stay as they are.
            taps: layer index -> hidden states [r, H] of the first r rows; a row of depth k needs
                the layers of depth k only, so deeper layers may hold fewer rows.
            depths: depth under which each of the R rows in flight is presented, oldest first,
                non-increasing. A row may be presented less deep than it is.
            positions: absolute positions [R].
            visible_RR: ancestors-or-self among the rows in flight.
        """
        # Committed positions are visible to every row in flight.
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
        """``propose`` by what each row sees of the caches and of the rows in flight."""
        # One product for each run of rows of equal depth: they share a projection.
        blocks = []
        starts = [i for i in range(len(depths)) if i == 0 or depths[i] != depths[i - 1]]
        for start, stop in pairwise([*starts, len(depths)]):
            rows = {index: taps[index][start:stop] for index in self.feature_layers[depths[start]]}
            blocks.append(self.feature(rows, depths[start]))
        rows_RH = torch.cat(blocks)
        num_queries = sum(1 for depth in depths if depth == 0)
        cos, sin = self.rotary.of_heads(positions, rows_RH.dtype)
        for index, (layer, cache) in enumerate(zip(self.decoder_layers, caches, strict=True)):
            normed_RH = layer.input_layernorm(self._of_layer(index, rows_RH, depths))
            own_RJD = layer.self_attn.key_value(normed_RH, cos, sin)
            first = len(depths) - num_queries if self.is_read_only(index) else 0
            query_QND = layer.self_attn.query(normed_RH[first:], cos[first:], sin[first:])
            attended_QND = cache.attend_with(query_QND, *own_RJD, visible_RC[first:])
            moved_QH = layer.finish(rows_RH[first:], attended_QND)
            rows_RH = torch.cat([rows_RH[:first], moved_QH])
        return self.logits(rows_RH[len(rows_RH) - num_queries :])
