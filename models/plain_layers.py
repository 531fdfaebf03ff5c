"""A target's layers for few rows on a CPU: transformers' arithmetic in a third of its calls.

One product makes queries, keys and values, another gate and up. Their weights are joined in memory
once; the modules keep views of them, so nothing is stored twice and both ways see every change.
"""

# R rows, H hidden, N query heads, J key heads, D head size, G joined outputs, I intermediate size

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedraft.files import Values
from pipedraft.models.cpu import MOST_ROWS, LaidOutLinear
from pipedraft.models.families import PLAIN
from pipedraft.models.int8 import JOINED, Int8Linear, Int8Part

Attend: TypeAlias = Callable[..., Tensor]
"""(query [1, N, R, D], keys [1, J, C, D], values, scale=) -> [1, N, R, D]."""


class PlainLayer:
    """One layer with joined weights."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention: Any = layer.self_attn
        self.mlp: Any = layer.mlp
        self.norms: Any = layer.input_layernorm, layer.post_attention_layernorm
        self._projections, self._gates = _parts(layer)
        self.head_size: Any = self.attention.head_dim
        self.num_values: int = self._projections[2].out_features // self.head_size
        self.has_head_norms = hasattr(self.attention, "q_norm")
        # Decoding runs in inference mode; a weight made there could not be trained or read later.
        with torch.inference_mode(False), torch.no_grad():
            self.query_key_value: Any = _join(self._projections)
            self.gate_up: Any = _join(self._gates)

    @property
    def is_current(self) -> bool:
        """False once a module was given another weight: moved, merged or loaded."""
        if isinstance(self.query_key_value, Int8Linear):
            return True
        joined = (self.query_key_value, self._projections), (self.gate_up, self._gates)
        return all(
            part.weight.data_ptr() == place.data_ptr()
            for whole, parts in joined
            for part, place in zip(parts, _split(whole.weight, parts), strict=True)
        )

    def __call__(
        self,
        hidden_1RH: Tensor,
        *,
        turn: tuple[Tensor, Tensor],
        cache: Any,
        attend: Attend,
    ) -> Tensor:
        """Return the layer's output [1, R, H], as transformers' layer does.

        Args:
            turn: from ``_turning``.
            cache: ``update(keys, values, layer_idx)`` returns all keys and values.
        """
        (first, second), (cos_R1D, sin_R1D), rows_RH = self.norms, turn, hidden_1RH[0]
        heads = self.query_key_value(_norm(first, rows_RH)).unflatten(-1, (-1, self.head_size))
        turned, values_RJD = heads.tensor_split([heads.shape[1] - self.num_values], 1)
        if self.has_head_norms:
            parts = turned.tensor_split([turned.shape[1] - self.num_values], 1)
            norms = self.attention.q_norm, self.attention.k_norm
            turned = torch.cat([_norm(n, x) for n, x in zip(norms, parts, strict=True)], 1)
        # rotate([l, r]) = [l, r] cos + [-r, l] sin: the halves change places, the sign is in sin.
        turned = torch.addcmul(turned * cos_R1D, turned.roll(self.head_size // 2, -1), sin_R1D)
        query_RND, keys_RJD = turned.tensor_split([turned.shape[1] - self.num_values], 1)
        query, keys, values = (x.transpose(0, 1)[None] for x in (query_RND, keys_RJD, values_RJD))
        keys, values = cache.update(keys, values, self.attention.layer_idx)
        attended_1NRD = attend(query, keys, values, scale=self.attention.scaling)
        rows_RH = rows_RH + self.attention.o_proj(attended_1NRD[0].transpose(0, 1).flatten(1))
        gate_RI, up_RI = self.gate_up(_norm(second, rows_RH)).chunk(2, -1)
        return (rows_RH + self.mlp.down_proj(F.silu(gate_RI) * up_RI))[None]


def _turning(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [R, 1, D], from transformers' tables [1, R, D]."""
    cos_RD, sin_RD = (x[0] for x in position_embeddings)
    left, right = sin_RD.chunk(2, -1)
    return cos_RD[:, None], torch.cat([-left, right], -1)[:, None]


_plain: "WeakKeyDictionary[nn.Module, PlainLayer]" = WeakKeyDictionary()


def plain_calls(
    layers: Sequence[nn.Module],
    kinds: Sequence[str],
    num_rows: int,
    *,
    places: Mapping[str, Values],
    cache: Any,
    attends: Mapping[str, Attend],
) -> list[Callable[[Tensor], Tensor]] | None:
    """Return each layer as a function of hidden states [1, R, H]; None: transformers' must run.

    Args:
        places: by layer kind, from ``LayerPositions``.
        attends: attention by layer kind.
    """
    if not all(map(_is_plain, layers)):
        return None
    if num_rows > MOST_ROWS and not isinstance(layers[0].self_attn.q_proj, Int8Part):
        return None
    for layer in layers:
        if layer not in _plain or not _plain[layer].is_current:
            _plain[layer] = PlainLayer(layer)
    turns = {kind: _turning(places[kind]["position_embeddings"]) for kind in set(kinds)}
    return [
        partial(_plain[layer], turn=turns[kind], cache=cache, attend=attends[kind])
        for layer, kind in zip(layers, kinds, strict=True)
    ]


def _is_plain(layer: nn.Module) -> bool:
    """Adapters, quantized and sharded weights, and layers elsewhere keep transformers' way."""
    attention: Any = getattr(layer, "self_attn", None)
    if attention is None or attention.config.model_type not in PLAIN:
        return False
    if attention.config._attn_implementation != "sdpa" or attention.config.hidden_act != "silu":
        return False
    return all(_can_join(part) for parts in _parts(layer) for part in parts)


def _can_join(part: nn.Module) -> bool:
    if type(part) not in (nn.Linear, LaidOutLinear):
        return isinstance(part, Int8Part)
    weight: Any = part.weight
    # Views are no leaves: an optimizer would go on updating the weights they replace.
    is_frozen = type(weight) is nn.Parameter and not weight.requires_grad
    return is_frozen and weight.device.type == "cpu"


def _parts(layer: Any) -> list[list[Any]]:
    """Return the layer's modules that are joined: for attention, for the MLP."""
    blocks = ((getattr(layer, block), names) for block, names in JOINED.items())
    return [[getattr(block, name) for name in names] for block, names in blocks]


def _join(parts: Sequence[Any]) -> nn.Module:
    """Join the parts' weights and biases; the parts' become views."""
    if isinstance(parts[0], Int8Part):
        return parts[0].joined
    joined = type(parts[0])(1, 1, bias=parts[0].bias is not None, device="meta")
    for name in ("weight", "bias"):
        if (whole := getattr(joined, name)) is None:
            continue
        whole = torch.cat([getattr(part, name) for part in parts])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        for part, rows in zip(parts, _split(whole, parts), strict=True):
            setattr(part, name, nn.Parameter(rows, requires_grad=False))
    return joined


def _split(joined: Tensor, parts: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    return joined.split([part.out_features for part in parts])


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
