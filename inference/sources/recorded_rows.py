"""A draft's rows in buffers of one size: a recorded graph forwards them and chooses their children.

On a GPU a draft forward is a few hundred launches of little work, and reading its best tokens waits
for all of them. Here one graph takes in committed text, forwards rows of a tree, ranks the children
of some rows, and goes on with the best of them for as many levels as are asked for; the host sends
one tensor before it and reads one behind it.
"""

# A rows of the text, R rows of a tree, G of both that read the target's states, Q leaves
# K rows of a further level, W children of each, S columns: rows behind O, the leading text
# C all places of the buffers, M rows that move, U draft vocabulary, H hidden, X.. axes of a state

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pipedraft.inference.sources.base import Sampling
from pipedraft.inference.sources.row_cache import MIN_PLACES, NOBODY, TEXT, NewText, RowCache
from pipedraft.inference.tree import TokenTree
from pipedraft.models.cuda_graphs import Packing, Recordings, hidden_columns, lend, padded_rows
from pipedraft.models.layers import FixedKeyValues, KeyValues

MAX_ROWS = 64
"""More rows are forwarded without a graph."""
CHUNK_ROWS = 512
"""Rows of a long text that are forwarded at once; bounds their mask."""
MIN_COLUMNS = 64


class RecordableDraft(Protocol):
    """Forwards the rows of a draft, by tensors of fixed shapes alone."""

    @property
    def num_caches(self) -> int: ...
    @property
    def state_shape(self) -> tuple[int, ...]: ...
    @property
    def shift(self) -> int:
        """Distance of a row's rotary position before that of its token."""

    @property
    def reads_rows(self) -> bool:
        """Rows of a tree read the target's states, not the draft's own of the row before."""

    @property
    def draft_ids(self) -> Tensor: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    def feature(self, taps: Mapping[int, Tensor]) -> Tensor: ...
    def logits(self, state_X: Tensor) -> Tensor: ...

    def step(
        self,
        tokens_R: Tensor,
        states_RX: Tensor,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        *,
        in_order: bool,
    ) -> Tensor:
        """States [R, X..] of rows, from those of the rows before them.

        Args:
            in_order: each row stands before the next one.
        """


@dataclass(frozen=True)
class Ask:
    """A question about the children of some leaves; a graph is made for it."""

    width: int = 0
    """Best children of each; 0: the leaves' logits."""
    levels: int = 0
    """Further levels, of the best ``beams`` children of the one before that are no rows yet."""
    beams: int = 0
    then: int = 0
    """Best children of each at further levels."""
    split: float | None = None
    """Each row goes on by its best child, and by others of a probability above this, the first
    ones, while there are beams for them; None: by the best of all."""
    sampling: Sampling | None = None
    """How children are scored."""

    @property
    def key(self) -> tuple[object, ...] | None:
        """Key of what a question launches; None: it depends on what the device finds."""
        rule = () if self.sampling is None else self.sampling.recorded_as
        if rule is None:
            return None
        return self.width, self.levels, self.beams, self.then, self.split is None, *rule


@dataclass(frozen=True)
class _Shape:
    num_text: int
    num_rows: int
    num_leaves: int
    num_parents: int
    """Leaves whose children are continued."""
    num_taken: int
    """Children that one of these has already, at most."""
    num_columns: int
    num_features: int
    num_noise: int
    """Rows of noise: one for each position."""

    def packing(self, vocab_size: int) -> Packing:
        new, S = self.num_text + self.num_rows, self.num_columns
        return Packing(
            counts=4,
            split=1,
            text_S=S,
            new=3 * new,  # tokens, positions, places
            features=self.num_features,
            parents_R=self.num_rows,
            visible_RS=self.num_rows * S,
            leaves_Q=self.num_leaves,
            leaf_positions_Q=self.num_leaves,
            leaf_scores_Q=self.num_leaves,
            leaf_visible_QS=self.num_parents * S,
            taken_QT=self.num_parents * self.num_taken,
            noise_places_Q=self.num_leaves,
            noise=self.num_noise * vocab_size,
        )


@dataclass
class Level:
    """Best children of some rows, in the host's memory."""

    best_2QW: Tensor
    """As of ``best_children``."""
    beams: list[int]
    """Those that the next level continues, counted over all."""


class RecordedRows(RowCache):
    """A ``RowCache`` whose buffers and graphs outlive a text.

    A row that is dropped or renamed costs nothing: rows move when the next ones come.
    """

    def __init__(self, draft: RecordableDraft, like: Tensor) -> None:
        """``like`` has the draft's device and dtype."""
        self.draft, self.recordings = draft, Recordings(like.device)
        self.buffers = [FixedKeyValues(0) for _ in range(draft.num_caches)]
        self._states_CX = like.new_zeros(0, *draft.state_shape)
        self._num_places = 0
        self._ids_U = draft.draft_ids.cpu()
        super().__init__(0)

    def restart(self) -> None:
        super().restart()
        self._slots: list[int] = []
        """Where the rows behind the leading ones are."""

    @property
    def known(self) -> set[int]:
        return set(self._names) - {TEXT, NOBODY}

    def rename(self, names: Mapping[int, int]) -> None:
        names = {**names, TEXT: TEXT}
        kept = [pair for pair in zip(self._names, self._slots, strict=True) if pair[0] in names]
        self._names, self._slots = [names[name] for name, _ in kept], [slot for _, slot in kept]

    def extend(self, names: list[int]) -> None:
        """Rows of further levels, which a graph has forwarded."""
        first = self._num_leading + len(self._names)
        self._names += names
        self._slots += range(first, first + len(names))

    def grow(
        self,
        tree: TokenTree,
        text: NewText,
        rows: list[int],
        leaves: list[int],
        ask: Ask,
        *,
        name: Callable[[int], int] = int,
        given: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Take in text, forward rows of a tree, and look at the children of some rows.

        Args:
            rows: as of ``compute``.
            leaves: their rows are cached, or among ``rows``; the root that is no row of its own is
                the end of the text.
            given: hidden states of all of the tree's rows, for a draft that reads them.

        Returns:
            Logits [Q, U], or what ``levels`` reads; on the device.
        """
        while len(text.tokens) > MAX_ROWS:
            part = text.split(CHUNK_ROWS)
            self._call(tree, part, [], [], Ask(), name=name)
        return self._call(tree, text, rows, leaves, ask, name=name, given=given)

    def _call(
        self,
        tree: TokenTree,
        text: NewText,
        rows: list[int],
        leaves: list[int],
        ask: Ask,
        *,
        name: Callable[[int], int],
        given: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        A, R, Q, draft = len(text.tokens), len(rows), len(leaves), self.draft
        first, leading, num_text = len(self._names), self._num_leading, self.num_text
        names = self._names = [*self._names, *[TEXT] * A, *(name(row) for row in rows)]
        end = len(names)
        self._reserve(leading + end + ask.levels * ask.beams)
        slots = [*range(leading, leading + end)]
        self._move([x for x in zip(self._slots, slots, strict=False) if x[0] != x[1]])
        # The last row of the text is the last one of this name.
        zeros = self._num_places + MAX_ROWS
        before = dict(zip(names[:first], slots, strict=False)).get(TEXT, leading - 1)
        places = dict(zip(names, slots, strict=True))
        end_of_text = places.get(TEXT, leading - 1)

        def place(row: int) -> int:
            return places.get(name(row), end_of_text)

        can_record = ask.key is not None and 0 < max(A, R, Q) <= MAX_ROWS
        pad = padded_rows if can_record else int
        features, sources = self._features(text, rows, given, pad(A), pad(R))
        num_leaves = Q if ask.levels else pad(Q)
        first_noise, noise = self._noise(tree, leaves, ask)
        taken = [[tree.tokens[row] for row in tree.children(leaf)] for leaf in leaves]
        num_taken = max(map(len, taken), default=0) if ask.levels else 0
        S = padded_rows(max(end + ask.levels * ask.beams, MIN_COLUMNS))
        shape = _Shape(
            num_text=pad(A),
            num_rows=pad(R),
            num_leaves=num_leaves,
            num_parents=Q if ask.levels else 0,
            num_taken=num_taken,
            num_columns=S,
            num_features=len(features),
            num_noise=0 if noise is None else padded_rows(len(noise) - ask.levels) + ask.levels,
        )
        packing = shape.packing(len(self._ids_U))
        positions = [tree.position(row) - draft.shift for row in rows]
        packed = packing.pack(
            counts=[leading, first, end, before if before >= 0 else zeros],
            split=torch.tensor([ask.split or 0.0], dtype=torch.float64),
            text_S=[x == TEXT for x in names[:first]],
            new=[
                *_joined(text.tokens, pad(A), [tree.tokens[row] for row in rows], pad(R)),
                *_joined([*range(num_text, num_text + A)], pad(A), positions, pad(R)),
                *_joined(
                    slots[first : first + A], pad(A), slots[first + A :], pad(R), self._num_places
                ),
            ],
            features=features,
            parents_R=[place(tree.parents[row]) for row in rows],
            visible_RS=self._visible(tree, rows, name, S),
            leaves_Q=[place(row) for row in leaves],
            leaf_positions_Q=[tree.position(row) - draft.shift for row in leaves],
            leaf_scores_Q=torch.tensor([tree.scores[row] for row in leaves], dtype=torch.float64),
            leaf_visible_QS=self._visible(tree, leaves if ask.levels else [], name, S),
            taken_QT=[
                token for own in taken for token in own + [-1] * (num_taken - len(own)) if num_taken
            ],
            noise_places_Q=[tree.position(row) - first_noise for row in leaves],
            noise=[] if noise is None else noise,
        )
        compute = partial(self._compute, shape, packing, ask)
        key = (shape, ask.key)
        out = self.recordings.run(key, packed, sources, compute, can_record=can_record)
        self._slots = slots
        self._count_leading()
        self._slots = self._slots[end - len(self._names) :]
        return out if ask.width else out[:Q].clone()

    def levels(self, flat: Tensor, num_leaves: int, ask: Ask) -> list[Level]:
        """Read what ``grow`` gives; the host waits here, once."""
        numbers, found = flat.cpu(), []
        width, then = (min(width, len(self._ids_U)) for width in (ask.width, ask.then))
        if not ask.levels:  # the leaves were padded
            return [Level(numbers.view(2, -1, width)[:, :num_leaves], [])]
        for level in range(ask.levels + 1):
            size = num_leaves * width
            num_beams = min(ask.beams, size) if level < ask.levels else 0
            best, beams, numbers = numbers.split(
                [2 * size, num_beams, len(numbers) - 2 * size - num_beams]
            )
            found.append(Level(best.view(2, num_leaves, width), beams.long().tolist()))
            num_leaves, width = num_beams, then
        return found

    # -- in the host's memory ---------------------------------------------------------------

    def _visible(
        self, tree: TokenTree, rows: list[int], name: Callable[[int], int], num_columns: int
    ) -> Tensor:
        """bool [R, S]: the text, and ancestors-or-self."""
        text_O = torch.tensor([cached == TEXT for cached in self._names], dtype=torch.bool)
        seen_RO = text_O | tree.ancestors(rows, [name(cached) for cached in self._names])
        return torch.nn.functional.pad(seen_RO, (0, num_columns - len(text_O)))

    def _features(
        self,
        text: NewText,
        rows: list[int],
        given: Mapping[int, Tensor] | None,
        num_text: int,
        num_rows: int,
    ) -> tuple[list[int], list[Tensor]]:
        """Where each row finds its hidden states, layer after layer, and these."""
        layers = self.draft.taps
        found, sources = text.gathered(layers)
        first = sum(map(len, sources))
        for layer in layers:
            found[layer] += [0] * (num_text - len(found[layer]))
            if self.draft.reads_rows:
                if given is not None:
                    sources.append(given[layer])
                    found[layer] += [first + row for row in rows]
                    first += len(given[layer])
                found[layer] += [0] * (num_text + num_rows - len(found[layer]))
        return [place for layer in layers for place in found[layer]], sources

    def _noise(self, tree: TokenTree, leaves: list[int], ask: Ask) -> tuple[int, Tensor | None]:
        """Position of the first leaf, and float64 rows for what follows it and each after it."""
        positions = [tree.position(leaf) for leaf in leaves]
        if ask.sampling is None:
            return min(positions, default=0), None
        wanted = range(min(positions) + 1, max(positions) + 2 + ask.levels)
        return min(positions), ask.sampling.rule.noise_rows(self._ids_U, wanted)

    def _reserve(self, num_places: int) -> None:
        if num_places <= self._num_places:
            return
        used = len(self._states_CX)
        self._num_places = padded_rows(max(num_places, MIN_PLACES))
        # Behind them: places of spare rows, and one that stays zero.
        size = self._num_places + MAX_ROWS + 1
        small_CX = self._states_CX
        self._states_CX = small_CX.new_zeros(size, *small_CX.shape[1:])
        if used:
            self._states_CX[: used - 1].copy_(small_CX[: used - 1])
        for buffer in self.buffers:
            buffer.grow(size)
        self.recordings.clear()

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Not in a graph: one that is recorded runs several times, which must change nothing."""
        if moves:
            from_M, to_M = torch.tensor(moves).T.contiguous().to(self._states_CX.device)
            for buffer in self.buffers:
                buffer.move(from_M, to_M)
            self._states_CX.index_copy_(0, to_M, self._states_CX.index_select(0, from_M))

    # -- on the device ----------------------------------------------------------------------

    def _compute(
        self, shape: _Shape, packing: Packing, ask: Ask, packed: Tensor, given_PH: Tensor | None
    ) -> Tensor:
        """All of a call, from fixed buffers to a new one."""
        x, A, S = packing.unpack(packed), shape.num_text, shape.num_columns
        leading, first, end, before = x["counts"].split(1)
        features_GX = None
        if given_PH is not None and shape.num_features:
            picked = given_PH.index_select(0, x["features"]).chunk(len(self.draft.taps))
            features_GX = self.draft.feature(dict(zip(self.draft.taps, picked, strict=True)))
        new = x["new"].view(3, -1)
        if A:
            # A row of the text sees the text before it, which has grown by those before it.
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
        if ask.sampling is None:
            return self.draft.logits(states_QX)
        return self._children(x, states_QX, leading, end, ask, ask.sampling)

    def _children(
        self,
        x: dict[str, Tensor],
        states_QX: Tensor,
        leading: Tensor,
        end: Tensor,
        ask: Ask,
        sampling: Sampling,
    ) -> Tensor:
        """Best children of the leaves, and of the best of these, level by level; float64."""
        columns_S = torch.arange(len(x["text_S"]), device=states_QX.device)
        positions_Q = x["leaf_positions_Q"]
        scores_Q = x["leaf_scores_Q"].view(torch.float64).float()
        visible_QS = x["leaf_visible_QS"].view(-1, len(columns_S)).bool()
        noise_PU, out = None, []
        if len(x["noise"]):
            noise_PU = x["noise"].view(torch.float64).view(-1, len(self._ids_U))
        noise_places_Q, width = x["noise_places_Q"], ask.width
        begun_Q = scores_Q.isfinite()  # spare leaves have minus infinity and lead nowhere
        for level in range(ask.levels + 1):
            noise_QU = None if noise_PU is None else noise_PU.index_select(0, noise_places_Q)
            scores_QU = sampling.child_scores(self.draft.logits(states_QX), noise_QU)
            best_QW, index_QW = scores_QU.topk(min(width, scores_QU.shape[1]), -1)
            total_QW = best_QW + scores_Q[:, None]  # scores add up along a path
            tokens_QW = self.draft.draft_ids[index_QW]
            out += [tokens_QW.flatten().double(), total_QW.flatten().double()]
            if level == ask.levels:
                break
            ranked_QW = total_QW  # those taken, or that must not fork, are told, not followed
            if not level and len(x["taken_QT"]):
                taken_Q1T = x["taken_QT"].view(len(tokens_QW), 1, -1)
                is_taken_QW = (tokens_QW[:, :, None] == taken_Q1T).any(-1)
                ranked_QW = ranked_QW.masked_fill(is_taken_QW, -torch.inf)
            if ask.split is not None:
                is_fork_QW = best_QW.double().exp() > x["split"].view(torch.float64)
                goes_on_QW = _branches(begun_Q, is_fork_QW, ask.beams)
                ranked_QW = ranked_QW.masked_fill(~goes_on_QW, -torch.inf)
            # The best of all leaves' children together are the next level's leaves.
            ranked_K, place_K = ranked_QW.flatten().topk(min(ask.beams, ranked_QW.numel()))
            scores_Q, begun_Q = total_QW.flatten().index_select(0, place_K), ranked_K.isfinite()
            out.append(place_K.double())
            parent_K, columns_K = place_K // total_QW.shape[1], end + columns_S[: len(place_K)]
            noise_places_Q, width = noise_places_Q.index_select(0, parent_K) + 1, ask.then
            end = end + len(place_K)  # they see what their parents see, and themselves
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
        """Forward rows, whose keys, values and states go to their places in the buffers.

        Args:
            new_3R: tokens, rotary positions and places of the rows.
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


def _branches(begun_Q: Tensor, is_fork_QW: Tensor, most: int) -> Tensor:
    """bool [Q, W]: children by which rows go on: their best, and the first forks.

    Args:
        begun_Q: other rows are of no branch.
    """
    is_first_W = torch.arange(is_fork_QW.shape[1], device=begun_Q.device) == 0
    forks_QW = is_fork_QW & begun_Q[:, None] & ~is_first_W
    rank_QW = forks_QW.flatten().cumsum(0).view_as(forks_QW)
    return (is_first_W & begun_Q[:, None]) | (forks_QW & (rank_QW <= most - begun_Q.sum()))


def _joined(
    text: list[int], num_text: int, rows: list[int], num_rows: int, unused: int = 0
) -> list[int]:
    return text + [unused] * (num_text - len(text)) + rows + [unused] * (num_rows - len(rows))


def make_rows(draft: RecordableDraft, holder: object, like: Tensor) -> RowCache:
    """Rows of a draft: on a GPU forwarded by recorded graphs, which later texts take over."""
    if like.device.type != "cuda":
        return RowCache(draft.num_caches)
    assert isinstance(draft, torch.nn.Module)
    rows = lend(draft, holder, "rows", lambda: RecordedRows(draft, like))
    rows.restart()
    return rows
