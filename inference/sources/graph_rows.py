"""``RowCache`` with CUDA graphs. One graph forwards rows and ranks their children.

On a GPU a draft forward is a few hundred launches with little work, and reading its best tokens
waits for all of them. Here one graph takes in committed text, forwards tree rows, ranks children,
and continues with the best ones for as many levels as requested. The host sends one tensor before
the graph runs and reads one after it.
"""

# A text rows, R tree rows, G rows reading the target's states, Q leaves
# K rows in a further level, W children per row, S columns: rows behind O, the leading text
# C all buffer places, M moving rows, U draft vocabulary, H hidden, X.. axes of a state

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...models.speed.cuda_graphs import Graphs, Packing, borrow_for, hidden_columns, padded_rows
from ...models.transformer.layers import FixedKeyValues
from .base import DraftSampling
from .graph_call import (
    CallShape,
    ChildQuery,
    GraphCall,
    GraphDraft,
    Level,
    Places,
)
from .row_cache import MIN_PLACES, NOBODY, TEXT, RowCache

MAX_ROWS = 64
"""Maximum rows in a graph; larger calls run without one."""
CHUNK_ROWS = 512
"""Maximum text rows per forward; this bounds the size of their mask."""
MIN_COLUMNS = 64


class GraphRows(RowCache):
    """``RowCache`` with buffers and graphs that outlive a sequence.

    Dropping or renaming a row takes no time, because rows move only when the next ones arrive.
    """

    def __init__(self, draft: GraphDraft, like: Tensor) -> None:
        """``like`` has the draft's device and dtype."""
        self.draft, self.graphs = draft, Graphs(like.device)
        self.buffers = [FixedKeyValues(0) for _ in range(draft.num_caches)]
        self._states_CX = like.new_zeros(0, *draft.state_shape)
        self._num_places = 0
        self._ids_U = draft.draft_ids.cpu()
        super().__init__(0)

    def restart(self) -> None:
        super().restart()
        self._slots: list[int] = []
        """Places for the rows after the leading text rows."""

    @property
    def known(self) -> set[int]:
        return set(self._names) - {TEXT, NOBODY}

    def rename(self, names: Mapping[int, int]) -> None:
        names = {**names, TEXT: TEXT}
        kept = [pair for pair in zip(self._names, self._slots, strict=True) if pair[0] in names]
        self._names, self._slots = [names[name] for name, _ in kept], [slot for _, slot in kept]

    def extend(self, names: list[int]) -> None:
        """Append the rows of further levels, which a graph has already forwarded."""
        first = self._num_leading + len(self._names)
        self._names += names
        self._slots += range(first, first + len(names))

    def grow(self, call: GraphCall) -> Tensor:
        """Take in text, forward tree rows, and rank some rows' children.

        Returns:
            Logits [Q, U] or the input to ``levels``, on the device.
        """
        while len(call.text.tokens) > MAX_ROWS:
            part = call.text.split(CHUNK_ROWS)
            self._run(GraphCall(tree=call.tree, text=part, name=call.name))
        return self._run(call)

    def _run(self, call: GraphCall) -> Tensor:
        query, num_leaves = call.query, len(call.leaves)
        most = max(len(call.text.tokens), len(call.rows), num_leaves)
        can_capture = query.key is not None and 0 < most <= MAX_ROWS
        at = self._place(call)
        shape, packing, packed, sources = self._pack(call, at, padded_rows if can_capture else int)
        compute = partial(self._compute, shape, packing, query)
        key = (shape, query.key)
        out = self.graphs.run(key, packed, sources, compute, can_capture=can_capture)
        self._slots = at.slots
        self._count_leading()
        self._slots = self._slots[len(at.slots) - len(self._names) :]
        return out if query.width else out[:num_leaves].clone()

    def _place(self, call: GraphCall) -> Places:
        """Close the gaps between cached rows, and assign places after these rows to new rows."""
        first, leading, num_text = len(self._names), self._num_leading, self.num_text
        new = [*[TEXT] * len(call.text.tokens), *map(call.name, call.rows)]
        names = self._names = [*self._names, *new]
        self._reserve(leading + len(names) + call.query.levels * call.query.beams)
        slots = [*range(leading, leading + len(names))]
        self._move([x for x in zip(self._slots, slots, strict=False) if x[0] != x[1]])
        # The last text row is the last row named TEXT.
        before = dict(zip(names[:first], slots, strict=False)).get(TEXT, leading - 1)
        zeros = self._num_places + MAX_ROWS
        return Places(
            num_text=num_text,
            leading=leading,
            first=first,
            slots=slots,
            before=before if before >= 0 else zeros,
            slot_of=dict(zip(names, slots, strict=True)),
        )

    def _pack(
        self, call: GraphCall, at: Places, pad: Callable[[int], int]
    ) -> tuple[CallShape, Packing, Tensor, list[Tensor]]:
        """Pack the call's host data into one tensor. Hidden states are not copied."""
        tree, query, rows, leaves = call.tree, call.query, call.rows, call.leaves
        tokens, first, end = call.text.tokens, at.first, len(at.slots)
        A, num_text, num_rows = len(tokens), pad(len(tokens)), pad(len(rows))
        features, sources = self._features(call, num_text, num_rows)
        first_noise, noise = self._noise(call)
        # Only a query with levels continues children.
        parents = leaves if query.levels else []
        taken = [[tree.tokens[row] for row in tree.children(leaf)] for leaf in parents]
        num_taken = max(map(len, taken), default=0)
        S = padded_rows(max(end + query.levels * query.beams, MIN_COLUMNS))
        shape = CallShape(
            num_text=num_text,
            num_rows=num_rows,
            num_leaves=len(leaves) if query.levels else pad(len(leaves)),
            num_parents=len(parents),
            num_taken=num_taken,
            num_columns=S,
            num_features=len(features),
            num_noise=0 if noise is None else padded_rows(len(noise) - query.levels) + query.levels,
        )
        packing = shape.packing(len(self._ids_U))
        positions = [tree.position(row) - self.draft.shift for row in rows]
        text_positions = [*range(at.num_text, at.num_text + A)]
        slots, spare = at.slots[first:], self._num_places
        packed = packing.pack(
            counts=[at.leading, first, end, at.before],
            text_S=[x == TEXT for x in self._names[:first]],
            new=[
                *_joined(tokens, num_text, [tree.tokens[row] for row in rows], num_rows),
                *_joined(text_positions, num_text, positions, num_rows),
                *_joined(slots[:A], num_text, slots[A:], num_rows, spare),
            ],
            features=features,
            parents_R=[at.of(call.name(tree.parents[row])) for row in rows],
            visible_RS=self._visible(call, rows, S),
            leaves_Q=[at.of(call.name(row)) for row in leaves],
            leaf_positions_Q=[tree.position(row) - self.draft.shift for row in leaves],
            leaf_scores_Q=torch.tensor([tree.scores[row] for row in leaves], dtype=torch.float64),
            leaf_visible_QS=self._visible(call, parents, S),
            taken_QT=[token for own in taken for token in own + [-1] * (num_taken - len(own))],
            noise_places_Q=[tree.position(row) - first_noise for row in leaves],
            noise=[] if noise is None else noise,
        )
        return shape, packing, packed, sources

    def levels(self, flat: Tensor, num_leaves: int, query: ChildQuery) -> list[Level]:
        """Unpack the result from ``grow``. The host waits here, once."""
        numbers, found = flat.cpu(), []
        width, then = (min(width, len(self._ids_U)) for width in (query.width, query.then))
        if not query.levels:  # the leaves were padded
            return [Level(numbers.view(2, -1, width)[:, :num_leaves], [])]
        for level in range(query.levels + 1):
            size = num_leaves * width
            num_beams = min(query.beams, size) if level < query.levels else 0
            # The layout _children writes: tokens, scores, then places of the beams.
            best, beams, numbers = numbers.split(
                [2 * size, num_beams, len(numbers) - 2 * size - num_beams]
            )
            found.append(Level(best.view(2, num_leaves, width), beams.long().tolist()))
            num_leaves, width = num_beams, then
        return found

    # -- in the host's memory ---------------------------------------------------------------

    def _visible(self, call: GraphCall, rows: list[int], num_columns: int) -> Tensor:
        """Return bool [R, S], True for the text, a row's ancestors and the row itself."""
        text_O = torch.tensor([cached == TEXT for cached in self._names], dtype=torch.bool)
        seen_RO = text_O | call.tree.ancestors(rows, [call.name(cached) for cached in self._names])
        return torch.nn.functional.pad(seen_RO, (0, num_columns - len(text_O)))

    def _features(
        self, call: GraphCall, num_text: int, num_rows: int
    ) -> tuple[list[int], list[Tensor]]:
        """Return each row's index into the hidden states, layer after layer, and these states."""
        layers = self.draft.taps
        found, sources = call.text.gathered(layers)
        first = sum(map(len, sources))
        for layer in layers:
            found[layer] += [0] * (num_text - len(found[layer]))
            if self.draft.reads_rows:
                if call.given is not None:
                    sources.append(call.given[layer])
                    found[layer] += [first + row for row in call.rows]
                    first += len(call.given[layer])
                found[layer] += [0] * (num_text + num_rows - len(found[layer]))
        return [place for layer in layers for place in found[layer]], sources

    def _noise(self, call: GraphCall) -> tuple[int, Tensor | None]:
        """Return the first leaf's position, and float64 noise for the positions after each leaf."""
        positions, query = [call.tree.position(leaf) for leaf in call.leaves], call.query
        if query.sampling is None:
            return min(positions, default=0), None
        wanted = range(min(positions) + 1, max(positions) + 2 + query.levels)
        return min(positions), query.sampling.rule.noise_rows(self._ids_U, wanted)

    def _reserve(self, num_places: int) -> None:
        if num_places <= self._num_places:
            return
        used = len(self._states_CX)
        self._num_places = padded_rows(max(num_places, MIN_PLACES))
        # Behind them: places for spare rows, and one that stays zero.
        size = self._num_places + MAX_ROWS + 1
        small_CX = self._states_CX
        self._states_CX = small_CX.new_zeros(size, *small_CX.shape[1:])
        if used:
            self._states_CX[: used - 1].copy_(small_CX[: used - 1])
        for buffer in self.buffers:
            buffer.grow(size)
        # Captured graphs hold addresses in the old buffers.
        self.graphs.clear()

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Move rows, outside of graphs, because capturing runs a graph's code several times."""
        if moves:
            from_M, to_M = torch.tensor(moves).T.contiguous().to(self._states_CX.device)
            for buffer in self.buffers:
                buffer.move(from_M, to_M)
            self._states_CX.index_copy_(0, to_M, self._states_CX.index_select(0, from_M))

    # -- on the device ----------------------------------------------------------------------

    def _compute(
        self,
        shape: CallShape,
        packing: Packing,
        query: ChildQuery,
        packed: Tensor,
        given_PH: Tensor | None,
    ) -> Tensor:
        """Run the whole call on fixed input buffers, and return a new buffer."""
        x, A, S = packing.unpack(packed), shape.num_text, shape.num_columns
        leading, first, end, before = x["counts"].split(1)
        features_GX = None
        if given_PH is not None and shape.num_features:
            picked = given_PH.index_select(0, x["features"]).chunk(len(self.draft.taps))
            features_GX = self.draft.feature(dict(zip(self.draft.taps, picked, strict=True)))
        new = x["new"].view(3, -1)
        if A:
            # A text row sees the text before it, including this call's earlier rows.
            columns_S = torch.arange(S, device=packed.device)
            own_AS = (columns_S >= first) & (columns_S - first <= columns_S[:A, None])
            states_AX = self._states_CX.index_select(0, before.expand(A))
            if features_GX is not None:
                states_AX = features_GX[:A]
            visible_AS = x["text_S"].bool() | own_AS
            self._forward(new[:, :A], states_AX, leading, visible_AS, in_order=True)
        if shape.num_rows:
            states_RX = self._states_CX.index_select(0, x["parents_R"])
            if self.draft.reads_rows and features_GX is not None:
                states_RX = features_GX[A:]
            visible_RS = x["visible_RS"].view(-1, S)
            self._forward(new[:, A:], states_RX, leading, visible_RS, in_order=False)
        states_QX = self._states_CX.index_select(0, x["leaves_Q"])
        if query.sampling is None:
            return self.draft.logits(states_QX)
        return self._children(x, states_QX, leading, end, query, query.sampling)

    def _children(
        self,
        x: dict[str, Tensor],
        states_QX: Tensor,
        leading: Tensor,
        end: Tensor,
        query: ChildQuery,
        sampling: DraftSampling,
    ) -> Tensor:
        """Rank the leaves' best children, then children of the best, level by level, in float64."""
        columns_S = torch.arange(len(x["text_S"]), device=states_QX.device)
        positions_Q = x["leaf_positions_Q"]
        scores_Q = x["leaf_scores_Q"].view(torch.float64).float()
        visible_QS = x["leaf_visible_QS"].view(-1, len(columns_S)).bool()
        noise_PU, out = None, []
        if len(x["noise"]):
            noise_PU = x["noise"].view(torch.float64).view(-1, len(self._ids_U))
        noise_places_Q, width = x["noise_places_Q"], query.width
        for level in range(query.levels + 1):
            noise_QU = None if noise_PU is None else noise_PU.index_select(0, noise_places_Q)
            scores_QU = sampling.child_scores(self.draft.logits(states_QX), noise_QU)
            best_QW, index_QW = scores_QU.topk(min(width, scores_QU.shape[1]), -1)
            total_QW = best_QW + scores_Q[:, None]  # scores add up along a path
            tokens_QW = self.draft.draft_ids[index_QW]
            out += [tokens_QW.flatten().double(), total_QW.flatten().double()]
            if level == query.levels:
                break
            ranked_QW = total_QW  # taken children are returned, not continued
            if not level and len(x["taken_QT"]):
                taken_Q1T = x["taken_QT"].view(len(tokens_QW), 1, -1)
                is_taken_QW = (tokens_QW[:, :, None] == taken_Q1T).any(-1)
                ranked_QW = ranked_QW.masked_fill(is_taken_QW, -torch.inf)
            # The best children over all leaves become the next level's leaves.
            place_K = ranked_QW.flatten().topk(min(query.beams, ranked_QW.numel())).indices
            scores_Q = total_QW.flatten().index_select(0, place_K)
            out.append(place_K.double())
            parent_K, columns_K = place_K // total_QW.shape[1], end + columns_S[: len(place_K)]
            noise_places_Q, width = noise_places_Q.index_select(0, parent_K) + 1, query.then
            end = end + len(place_K)  # they see their parents' visible rows, and themselves
            positions_Q = positions_Q.index_select(0, parent_K) + 1
            visible_QS = visible_QS.index_select(0, parent_K) | (columns_S == columns_K[:, None])
            tokens_K = tokens_QW.flatten().index_select(0, place_K)
            new = torch.stack([tokens_K, positions_Q, leading + columns_K])
            states_QX = states_QX.index_select(0, parent_K)
            states_QX = self._forward(new, states_QX, leading, visible_QS, in_order=False)
        return torch.cat(out)

    def _forward(
        self,
        new_3R: Tensor,
        states_RX: Tensor,
        leading: Tensor,
        visible_RS: Tensor,
        *,
        in_order: bool,
    ) -> Tensor:
        """Forward rows, and write keys, values and states to the rows' places in the buffers.

        Args:
            new_3R: the rows' tokens, rotary positions and places.
        """
        tokens_R, positions_R, slots_R = new_3R
        for buffer in self.buffers:
            buffer.slots_R = slots_R
        visible_RC = ~hidden_columns(leading, visible_RS, len(self._states_CX))
        out_RX = self.draft.step(
            tokens_R, states_RX, positions_R, self.buffers, visible_RC, in_order=in_order
        )
        self._states_CX.index_copy_(0, slots_R, out_RX)
        return out_RX


def _joined(
    text: list[int], num_text: int, rows: list[int], num_rows: int, unused: int = 0
) -> list[int]:
    return text + [unused] * (num_text - len(text)) + rows + [unused] * (num_rows - len(rows))


def make_rows(draft: GraphDraft, holder: object, like: Tensor) -> RowCache:
    """Create a draft's row cache, on a GPU with CUDA graphs that later sequences reuse."""
    if like.device.type != "cuda":
        return RowCache(draft.num_caches)
    assert isinstance(draft, torch.nn.Module)
    rows = borrow_for(draft, holder, "rows", lambda: GraphRows(draft, like))
    rows.restart()
    return rows
