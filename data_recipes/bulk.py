"""Sample thousands of conversations in lock-step, without padding or attention mask.

Every row starts at position 0 and advances one token per forward pass. Prompts are forced token by
token, so rows with different lengths need no padding and attention needs no mask. Caches are
allocated once and written in place. Finished rows are removed once they are a quarter of the batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# B rows, T positions, V vocabulary, J key heads, D head size

ENDED_SHARE = 1 / 4
"""Share of finished rows that triggers their removal. A removal copies the caches once."""
CHECK_EVERY = 16
"""Forward passes between two checks for finished rows: each check waits for the device."""


class PreallocatedLayer(DynamicLayer):
    """Cache layer with keys and values [B, J, T, D], views into buffers for the longest sequence.

    The transformers layer concatenates, so it copies all earlier tokens for every new token.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if self.buffers is None:
            size = (*key_states.shape[:2], self.max_length, key_states.shape[3])
            self.buffers = (key_states.new_empty(size), value_states.new_empty(size))
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.buffers is not None:
            end = self.get_seq_length()
            self.buffers = (self.buffers[0][indices], self.buffers[1][indices])
            self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)


def preallocate(cache: DynamicCache, max_length: int) -> None:
    """Preallocate the cache layers that grow, but not sliding windows and recurrent states."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = PreallocatedLayer(max_length)


@dataclass(frozen=True)
class Opening:
    """First tokens of a row to sample, and the role that continues the row.

    The model writes the answer after ``ids``. With ``writes_user`` the model first writes the user
    turn (Magpie, arXiv:2406.08464). The assistant's opening tokens and the answer follow.
    """

    ids: tuple[int, ...]
    is_greedy: bool = False
    """Answer greedily instead of sampling at temperature 1; a user turn is always sampled."""
    writes_user: bool = False


@dataclass(frozen=True)
class SampledRow:
    ids: np.ndarray
    """int32 [T]: opening and answer, including the end token if there is one."""
    answer_start: int
    """Tokens before the answer."""
    has_ended: bool
    """False if the answer was cut at the maximum length."""
    opening: Opening
    place: int
    """Index of the row's opening."""


@dataclass
class _Rows:
    """Rows being sampled. Every tensor has one entry per row, in cache order."""

    place_B: Tensor
    """Row numbers in opening order."""
    ids_BT: Tensor
    forced_BT: Tensor
    """Forced token at each position, -1 where the model decides."""
    start_B: Tensor
    """First answer position, -1 while the user turn is being written."""
    is_greedy_B: Tensor
    end_B: Tensor
    """Tokens in a finished row, 0 until then."""

    def at(self, index: Tensor) -> "_Rows":
        return _Rows(**{name: x[index] for name, x in vars(self).items()})


def _first_rows(openings: Sequence[Opening], max_length: int, device: torch.device) -> _Rows:
    forced_BT = torch.full((len(openings), max_length), -1, dtype=torch.long)
    for row, opening in enumerate(openings):
        forced_BT[row, : len(opening.ids)] = torch.tensor(opening.ids)
    starts = [-1 if o.writes_user else len(o.ids) for o in openings]
    rows = _Rows(
        place_B=torch.arange(len(openings)),
        ids_BT=forced_BT.clamp(min=0),
        forced_BT=forced_BT,
        start_B=torch.tensor(starts),
        is_greedy_B=torch.tensor([o.is_greedy for o in openings]),
        end_B=torch.zeros(len(openings), dtype=torch.long),
    )
    return _Rows(**{name: x.to(device) for name, x in vars(rows).items()})


@torch.inference_mode()
def sample_rows(
    model: PreTrainedModel,
    openings: Sequence[Opening],
    *,
    assistant: Sequence[int],
    ends: Iterable[int],
    max_length: int,
    generator: torch.Generator,
) -> list[SampledRow]:
    """Sample one conversation for each opening, all in lock-step.

    Samples from the unmodified model distribution at temperature 1, without top-k or top-p.

    Args:
        assistant: tokens between a user turn's end token and the answer.
        ends: token ids that end a turn.
        max_length: tokens per row at most, opening included.
        generator: random generator on the model's device.

    Returns:
        Rows in opening order. Rows with an unfinished user turn are left out.
    """
    device = model.device
    longest, first = (f(len(o.ids) for o in openings) for f in (max, min))
    rows = _first_rows(openings, max_length, device)
    ends_E = torch.tensor(sorted(ends), device=device)
    bridge_C = torch.tensor(assistant, device=device)
    found: list[_Rows] = []
    cache = DynamicCache(config=model.config)
    preallocate(cache, max_length)
    for t in range(max_length - 1):
        # All rows are at one position, so they need neither padding nor a mask.
        logits_B1V = model(
            input_ids=rows.ids_BT[:, t, None], past_key_values=cache, logits_to_keep=1
        ).logits
        if t + 1 < first:
            continue
        _advance(rows, _draw(logits_B1V[:, 0], rows, generator), t + 1, ends_E, bridge_C)
        if t % CHECK_EVERY == CHECK_EVERY - 1 and t > longest:
            ended_B = rows.end_B > 0
            num_ended = int(ended_B.sum())
            if num_ended == len(ended_B):
                break
            if num_ended >= ENDED_SHARE * len(ended_B):
                index = (~ended_B).nonzero()[:, 0]
                found.append(rows.at(ended_B.nonzero()[:, 0]))
                rows = rows.at(index)
                cache.batch_select_indices(index)
    found.append(rows)
    return _collect(found, openings, max_length)


def _draw(logits_BV: Tensor, rows: _Rows, generator: torch.Generator) -> Tensor:
    """Sample a token per row, or take the argmax where the answer is greedy."""
    logits_BV = logits_BV.float()
    # argmax p / e with exponential e samples from p: one pass, and no wait for the device.
    noise_BV = torch.empty_like(logits_BV).exponential_(generator=generator)
    drawn_B = (logits_BV.softmax(-1) / noise_BV).argmax(-1)
    takes_best_B = rows.is_greedy_B & (rows.start_B >= 0)
    return torch.where(takes_best_B, logits_BV.argmax(-1), drawn_B)


def _advance(rows: _Rows, token_B: Tensor, t: int, ends_E: Tensor, bridge_C: Tensor) -> None:
    """Write the tokens at position t, and mark the turns that they end."""
    given_B = rows.forced_BT[:, t]
    is_own_B = (given_B < 0) & (rows.end_B == 0)
    rows.ids_BT[:, t] = torch.where(is_own_B, token_B, given_B.clamp(min=0))
    ends_turn_B = is_own_B & torch.isin(token_B, ends_E)
    is_answer_B = (rows.start_B >= 0) & (t >= rows.start_B)
    rows.end_B = torch.where(ends_turn_B & is_answer_B, t + 1, rows.end_B)
    # The user turn is over: the assistant's opening follows, as far as it fits.
    ends_user_B = ends_turn_B & (rows.start_B < 0)
    room = min(len(bridge_C), rows.ids_BT.shape[1] - t - 1)
    ahead = rows.forced_BT[:, t + 1 : t + 1 + room]
    ahead.copy_(torch.where(ends_user_B[:, None], bridge_C[:room], ahead))
    rows.start_B = torch.where(ends_user_B, t + 1 + len(bridge_C), rows.start_B)


def _collect(
    found: Sequence[_Rows], openings: Sequence[Opening], max_length: int
) -> list[SampledRow]:
    by_place: dict[int, SampledRow] = {}
    for rows in found:
        ids_BT, places = rows.ids_BT.cpu().numpy().astype(np.int32), rows.place_B.tolist()
        starts, ends = rows.start_B.tolist(), rows.end_B.tolist()
        for ids_T, place, start, end in zip(ids_BT, places, starts, ends, strict=True):
            if 0 <= start < max_length:
                kept_T = ids_T[: end or max_length].copy()
                by_place[place] = SampledRow(kept_T, start, end > 0, openings[place], place)
    return [by_place[place] for place in sorted(by_place)]


def repeats_itself(ids: np.ndarray, most: int = 12) -> bool:
    """Return True if any sequence of four tokens occurs more than ``most`` times."""
    if len(ids) < 4:
        return False
    wide = ids.astype(np.uint64)
    grams = wide[:-3]
    for shift in (1, 2, 3):
        grams = grams * np.uint64(1_000_003) + wide[shift : len(wide) - 3 + shift]
    return bool(np.unique(grams, return_counts=True)[1].max() > most)
