"""Attention of training-time test (TTT): the text, and the guesses made so far at one's own row."""

# B batch, T rows, N query heads, J key heads, D head size

from collections.abc import Sequence

from torch import Tensor

from pipedraft.models.banded_attention import EVERY, Band, Place, banded_attention


def ttt_attention(
    query_BNTD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Attention of step i, the last of the i + 1 steps whose keys are given.

    out_t = softmax over {K_0[T'] : T' <= t} and {K_j[t] : 1 <= j <= i}         EAGLE-3
            (arXiv:2503.01840), Section 3.2: causal attention plus i diagonals at distance 0

    Row t of step i is a draft that has made i guesses after position t: it sees the rows made of
    the target's features up to t, and of the guessed ones its own alone.
    For memory order and dtypes see `banded_attention`.

    Args:
        keys: of steps 0 .. i, [B, J, T, D] each.
        lengths: of the documents in a packed row.

    Returns:
        out_BNTD.
    """
    diagonals = tuple((step, 0) for step in range(1, len(keys)))
    documents = None if lengths is None else tuple(lengths)
    band = Band(Place(EVERY), Place(EVERY), diagonals, (0, 0), documents)
    return banded_attention([band], query_BNTD, keys, values)
