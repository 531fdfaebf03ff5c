"""Run several sequences' draft forwards as one, with joined rows and separate attention.

Every sequence decodes in its own greenlet. Inside ``asking``, a draft source's network calls are
passed to a callback to be joined with other sequences' calls. Outside, each call runs immediately.
"""

# R rows of all sequences, Q queries among them, C cached rows per sequence, N query heads
# J key heads, D head size, H hidden, U draft vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ...files import Values
from ..stages.together import log_failed_pass
from ..transformer.layers import KeyValues

R = TypeVar("R")
ORDER = ("extend_rows", "rows", "step", "propose_rows", "logits")
"""Network methods in call order. A sequence that is further along waits until the others call the
same method."""
VISIBLE = "visible_RC"


@dataclass(eq=False)
class DraftCall:
    """One sequence's call to its draft."""

    function: MethodType
    """A network method named in ``ORDER``."""
    rows: tuple[Tensor, ...]
    options: Values
    _result: object = None
    _error: Exception | None = field(default=None, repr=False)

    @property
    def kind(self) -> tuple[int, int]:
        return ORDER.index(self.function.__name__), id(self.function.__self__)

    def make(self) -> None:
        """Run this call alone."""
        try:
            self._result = self.function(*self.rows, **self.options)
        except Exception as error:
            self._error = error

    def outcome(self) -> object:
        if self._error is not None:
            raise self._error
        return self._result

    def settle(self, result: object) -> None:
        self._result = result

    def caches(self) -> Sequence[KeyValues]:
        return self.options.get("caches", ())


_ask: ContextVar[Callable[[DraftCall], object] | None] = ContextVar("_ask", default=None)
"""Receives this sequence's calls, if set. A greenlet has a context of its own."""


@contextmanager
def asking(ask: Callable[[DraftCall], object] | None) -> Iterator[None]:
    """Pass this sequence's draft calls to ``ask``, which returns their outcomes.

    If ``ask`` is None, run each call immediately.
    """
    before = _ask.set(ask)
    try:
        yield
    finally:
        _ask.reset(before)


def call(function: Callable[..., R], *rows: Tensor, **options: object) -> R:
    """Call ``function(*rows, **options)``, perhaps joined with other sequences' rows.

    Args:
        function: draft method named in ``ORDER``. It computes row by row, except for attention
            through ``caches``.
        rows: tensors with this sequence's rows; each row has a result.
        options: other inputs by name: further tensors per row (or dicts with one per layer),
            ``caches``, and ``visible_RC``, the mask for attention through them.
    """
    ask = _ask.get()
    if ask is None:
        return function(*rows, **options)
    return cast(R, ask(DraftCall(cast(MethodType, function), rows, options)))


def make_first(calls: Sequence[DraftCall]) -> list[DraftCall]:
    """Join the calls to the earliest method in ``ORDER``, run them as one, and return them."""
    kind = min(one.kind for one in calls)
    chosen = [one for one in calls if one.kind == kind]
    if len(chosen) == 1 or not _are_made_together(chosen):
        for one in chosen:
            one.make()
    return chosen


def _are_made_together(calls: Sequence[DraftCall]) -> bool:
    """Run calls to one method as one. On failure, restore the caches and return False."""
    caches = [(cache, cache.num_rows) for one in calls for cache in one.caches()]
    join = _propose if calls[0].function.__name__ == "propose_rows" else _make_joined
    try:
        for one, result in zip(calls, join(calls), strict=True):
            one.settle(result)
    except Exception as error:  # The caller runs each alone to find the failing sequence.
        log_failed_pass("draft calls", error)
        for cache, num_rows in caches:
            cache.num_rows = num_rows
        return False
    return True


def _make_joined(calls: Sequence[DraftCall]) -> Sequence[Tensor | None]:
    """Join the rows sequence by sequence, run the method once, and split its result."""
    sizes = [len(one.rows[0] if one.rows else one.options["positions_R"]) for one in calls]
    ends = list(accumulate(sizes))
    places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    rows = [_joined(parts) for parts in zip(*(one.rows for one in calls), strict=True)]
    result = calls[0].function(*rows, **_joined_options(calls, places))
    return [None] * len(calls) if result is None else result.split(sizes)


def _joined_options(
    calls: Sequence[DraftCall], places: Sequence[slice | Tensor], *, leaving: Sequence[str] = ()
) -> Values:
    options = [one.options for one in calls]
    visible = [own[VISIBLE] for own in options if VISIBLE in own]
    found: Values = {}
    for name in options[0].keys() - {*leaving}:
        parts = [own[name] for own in options]
        if name == VISIBLE:
            found[name] = parts[0]  # Each sequence's own mask is applied where its rows attend.
        elif name == "caches":
            layers = zip(*parts, strict=True)
            found[name] = [_SeparateKeyValues(layer, places, visible) for layer in layers]
        else:
            found[name] = _joined(parts)
    return found


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}


def _propose(calls: Sequence[DraftCall]) -> Sequence[Tensor]:
    """Run the SPD head's rows together, sorted by depth so that depth-0 queries come last."""
    options = [one.options for one in calls]
    draft: Any = calls[0].function.__self__
    depths = [own["depths"] for own in options]
    first = [0, *accumulate(map(len, depths))]
    order = sorted(
        ((s, row) for s, own in enumerate(depths) for row in range(len(own))),
        key=lambda at: -depths[at[0]][at[1]],  # Stable sort: order within a sequence is unchanged.
    )
    rows_of: list[list[int]] = [[] for _ in calls]
    for place, (s, _) in enumerate(order):
        rows_of[s].append(place)
    joined = _joined_options(
        calls, [torch.tensor(own) for own in rows_of], leaving=("depths", "positions", "taps")
    )
    positions_R = torch.cat([own["positions"] for own in options])
    logits_QU = draft.propose_rows(
        **joined,
        taps=_ordered_taps(draft, options, order),
        depths=[depths[s][row] for s, row in order],
        positions=positions_R[[first[s] + row for s, row in order]],
    )
    return logits_QU.split([sum(depth == 0 for depth in own) for own in depths])


def _ordered_taps(
    draft: Any, options: Sequence[Values], order: Sequence[tuple[int, int]]
) -> dict[int, Tensor]:
    """Return hidden states in the joint row order.

    If a row has not passed a layer, its state there is arbitrary and never read.
    """
    found: dict[int, dict[int, Tensor]] = {}
    for s, own in enumerate(options):
        for layer in {layer for depth in own["depths"] for layer in draft.feature_layers[depth]}:
            found.setdefault(layer, {})[s] = own["taps"][layer]
    taps = {}
    for layer, parts in found.items():
        first = dict(zip(parts, [0, *accumulate(map(len, parts.values()))], strict=False))
        places = [first[s] + row if s in parts and row < len(parts[s]) else 0 for s, row in order]
        taps[layer] = torch.cat(list(parts.values()))[places]
    return taps


class _SeparateKeyValues(KeyValues):
    """Cache stand-in that lets each sequence in a batch attend only to its own keys and values."""

    def __init__(
        self,
        caches: Sequence[KeyValues],
        places: Sequence[slice | Tensor],
        visible: Sequence[Tensor],
    ) -> None:
        """
        Args:
            places: for each sequence, the ascending places of its rows in the call.
            visible: for each sequence, a bool mask [.., C].
        """
        super().__init__()
        self._own = list(zip(caches, places, visible, strict=True))

    def append_rows(self, keys_RJD: Tensor, values_RJD: Tensor) -> None:
        for cache, place, _ in self._own:
            cache.append_rows(keys_RJD[place], values_RJD[place])

    def attend(self, query_RND: Tensor, visible_RP: Tensor) -> Tensor:
        out_RND = torch.empty_like(query_RND)
        for cache, place, own_lP in self._own:
            out_RND[place] = cache.attend(query_RND[place], own_lP)
        return out_RND

    def attend_with(
        self, query_RND: Tensor, keys_KJD: Tensor, values_KJD: Tensor, visible_RC: Tensor
    ) -> Tensor:
        """Attend with ``query_RND``, the last rows in the call."""
        out_QND, first = torch.empty_like(query_RND), len(keys_KJD) - len(query_RND)
        for cache, place, own_lC in self._own:
            asks = cast(Tensor, place)[place >= first] - first  # queries are the last rows
            out_QND[asks] = cache.attend_with(
                query_RND[asks], keys_KJD[place], values_KJD[place], own_lC[-len(asks) :]
            )
        return out_QND
