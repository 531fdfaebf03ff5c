"""Decoder layers with plain causal attention: whole texts in training, cached rows in decoding."""

# B batch, T positions, R rows of a decode call, C cached rows, H hidden, D head size

from collections.abc import Sequence

from torch import Tensor

from pipedraft.models.documents import causal_attention
from pipedraft.models.key_values import KeyValues
from pipedraft.models.layers import DecoderLayer


def causal_layer(
    layer: DecoderLayer,
    stream_BTH: Tensor,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    lengths: Sequence[int] | None,
) -> Tensor:
    """Rows of whole texts, each seeing those up to itself.

    Args:
        lengths: of the documents in a packed row [1, T].
    """
    normed_BTH, attention = layer.input_layernorm(stream_BTH), layer.self_attn
    query_BTND = attention.query(normed_BTH, cos_T1D, sin_T1D)
    keys_BTJD, values_BTJD = attention.key_value(normed_BTH, cos_T1D, sin_T1D)
    attended_BTND = causal_attention(query_BTND, keys_BTJD, values_BTJD, lengths)
    return layer.finish(stream_BTH, attended_BTND)


def cached_layer(
    layer: DecoderLayer,
    stream_RH: Tensor,
    cos_R1D: Tensor,
    sin_R1D: Tensor,
    *,
    cache: KeyValues,
    visible_RC: Tensor,
) -> Tensor:
    """Some more rows, whose keys and values are appended to the cache.

    Args:
        visible_RC: bool, rows of the cache (these R ones included) that each row may see.
    """
    normed_RH, attention = layer.input_layernorm(stream_RH), layer.self_attn
    keys_RJD, values_RJD = attention.key_value(normed_RH, cos_R1D, sin_R1D)
    cache.append(keys_RJD.transpose(0, 1), values_RJD.transpose(0, 1))
    query_RND = attention.query(normed_RH, cos_R1D, sin_R1D)
    return layer.finish(stream_RH, cache.attend(query_RND, visible_RC))
