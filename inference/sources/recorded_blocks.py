"""DFlash blocks in buffers of one size: recorded graphs fill them and rank their tokens.

The marginals of all depths are there after one forward pass, so the host reads them together.
"""

# A rows of the text with spare ones, R rows of a block, S draft tokens of it, C places of a cache
# D depths that are read, W best tokens of each, U draft vocabulary, H hidden

from functools import partial

import torch
from torch import Tensor

from pipedraft.inference.sources.base import Sampling
from pipedraft.inference.sources.recorded_rows import CHUNK_ROWS, MAX_ROWS, MIN_PLACES
from pipedraft.inference.sources.row_cache import NewText
from pipedraft.models.dflash import DFlash
from pipedraft.models.layers import FixedKeyValues
from pipedraft.models.recorded import Packing, Recordings, padded_rows


class RecordedBlocks:
    """Proposes DFlash's blocks by recorded graphs.

    Rows of the block are written behind those of the text, and forgotten.
    """

    def __init__(self, draft: DFlash) -> None:
        self.draft, self.recordings = draft, Recordings(draft.fc.weight.device)
        self._caches = [FixedKeyValues(0) for _ in draft.layers]
        self._num_places = 0
        self._ids_U = draft.draft_ids.cpu()
        self._num_depths = self._width = 0
        """Most that were ever asked for: they are read at once from then on."""
        self.restart()

    def restart(self) -> None:
        """A new text."""
        self._num_text = 0

    def propose(self, text: NewText, token: int, num_rows: int) -> Tensor:
        """Hidden states of a block, as ``DFlash.propose``: a buffer [S, H] that calls reuse."""
        while len(text.tokens) > MAX_ROWS:
            self._call(text.split(CHUNK_ROWS), token, 1)
        return self._call(text, token, num_rows)

    def _call(self, text: NewText, token: int, num_rows: int) -> Tensor:
        first, count = self._num_text, len(text.tokens)
        A, end = padded_rows(count), first + count
        self._reserve(end + num_rows)
        self._num_text = end
        places, sources = text.gathered(self.draft.taps)
        packing = Packing(counts=2, token=1, features=A * len(places), slots=A)
        packed = packing.pack(
            counts=[first, end],
            token=[token],
            features=[x for part in places.values() for x in part + [0] * (A - count)],
            slots=[*range(first, end)] + [self._num_places] * (A - count),
        )
        compute = partial(self._compute, packing, A, num_rows)
        can_record = num_rows > 1
        return self.recordings.run((A, num_rows), packed, sources, compute, can_record=can_record)

    def _reserve(self, num_places: int) -> None:
        if num_places <= self._num_places:
            return
        self._num_places = padded_rows(max(num_places, MIN_PLACES))
        for cache in self._caches:
            cache.grow(self._num_places + 1)  # the last one is of spare rows
        self.recordings.clear()

    def _compute(
        self, packing: Packing, A: int, R: int, packed: Tensor, given_PH: Tensor | None
    ) -> Tensor:
        """All of a call, from fixed buffers to a new one."""
        x, draft = packing.unpack(packed), self.draft
        first, end = x["counts"].split(1)
        columns_C = torch.arange(self._num_places + 1, device=packed.device)
        block_R = end + columns_C[:R]
        feature_AH = draft.fc.weight.new_zeros(0, len(draft.fc.weight))
        if given_PH is not None and A:
            picked = given_PH.index_select(0, x["features"]).chunk(len(draft.taps))
            feature_AH = draft.feature(dict(zip(draft.taps, picked, strict=True)))
        for cache in self._caches:
            cache.slots_R = torch.cat([x["slots"], block_R])
        return draft.fill_block(
            x["token"],
            R,
            feature_AH,
            positions=torch.cat([first + columns_C[:A], block_R]),
            caches=self._caches,
            visible_RC=(columns_C < end + R).expand(R, -1),
        )

    def best(
        self, states_SH: Tensor, num_depths: int, width: int, position: int, sampling: Sampling
    ) -> Tensor:
        """Best tokens behind each depth: float64 [2, D, W] on the CPU, perhaps of more.

        Tokens and log-probabilities; the host waits here, once.

        Args:
            position: of the first of them.
        """
        self._num_depths = max(self._num_depths, num_depths)
        self._width = max(self._width, width)
        states_DH, W = states_SH[: self._num_depths], min(self._width, len(self._ids_U))
        D = len(states_DH)
        noise_DU = sampling.rule.noise_rows(self._ids_U, range(position, position + D))
        packed = torch.zeros(1, dtype=torch.int64)
        if noise_DU is not None:
            packed = noise_DU.view(torch.int64).flatten()
        key = sampling.recorded_as
        compute = partial(self._ranked, D, W, sampling, noise_DU is not None)
        found = self.recordings.run(
            (D, W, key), packed, [states_DH], compute, can_record=key is not None
        )
        return found.cpu()

    def _ranked(
        self,
        D: int,
        W: int,
        sampling: Sampling,
        has_noise: bool,
        packed: Tensor,
        states_PH: Tensor | None,
    ) -> Tensor:
        assert states_PH is not None, "every depth has one"
        noise_DU = packed.view(torch.float64).view(D, -1) if has_noise else None
        scores_DU = sampling.child_scores(self.draft.logits(states_PH[:D]), noise_DU)
        best_DW, index_DW = scores_DU.topk(W, -1)
        return torch.stack([self.draft.draft_ids[index_DW].double(), best_DW.double()])
