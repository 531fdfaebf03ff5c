"""Finish a draft head's layer after attention in one call of the compiled kernels.

In decoding on a CPU, a head has one or a few rows. Ten operators then take longer than their
arithmetic. Training, other devices and other dtypes keep torch's operators.
"""

# R rows, H hidden, N query heads, D head size

from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..transformer import layers
from . import kernels
from .plain_layers import HFModule, can_join, can_read, join, kernel_weight


class HeadLayer:
    """A layer's weights after attention, with gate and up joined."""

    def __init__(self, layer: HFModule) -> None:
        self.identity = _identity(layer)
        self.kernel = self._fitted(layer)

    def _fitted(self, layer: HFModule) -> kernels.Layer | None:
        """Return the layer for the kernels, or None if they are missing or cannot run it."""
        norm, gates = layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]
        others = [layer.self_attn.o_proj, norm, layer.mlp.down_proj]
        fits = all(map(can_join, gates)) and all(map(can_read, others))
        if kernels.library() is None or not fits:
            return None
        # Decoding runs in inference mode; autograd could not use weights created there.
        with torch.inference_mode(False), torch.no_grad():
            parts = [others[0], join(gates), others[2]]
        self.identity = _identity(layer)  # the gates' weights are views of the joined ones now
        self._kept = [parts, norm.weight]
        weights = [kernel_weight(part) for part in parts]
        for part, own in zip(parts, weights, strict=True):
            # The kernels take whole vectors, without padding.
            if own.inputs != part.in_features or own.inputs % kernels.BLOCK:
                return None
        found = kernels.Layer(attention_norm=norm.weight.data_ptr(), eps=norm.eps)
        found.output, found.gate_up, found.down = weights
        found.hidden, found.head_size = parts[1].in_features, layer.self_attn.head_size
        return found


_found: "WeakKeyDictionary[nn.Module, HeadLayer]" = WeakKeyDictionary()


def _identity(layer: HFModule) -> list[object]:
    """Return the modules and weight addresses that a ``HeadLayer`` relies on."""
    mlp = layer.mlp
    parts = layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    weights = (getattr(part, "weight", None) for part in (*parts, layer.post_attention_layernorm))
    return [*parts, *(None if x is None else x.data_ptr() for x in weights)]


def finish(layer: HFModule, x_RH: Tensor, attended_RND: Tensor) -> Tensor:
    """Return x' + MLP(norm(x')), with x' = x + W_o attended.

    Args:
        layer: with ``self_attn.o_proj``, ``post_attention_layernorm``, a gated MLP, and the same
            by torch in ``finish``.
        x_RH: the residual [R, H]; with more axes, torch computes.
        attended_RND: the attention's output.
    """
    if (
        torch.is_inference_mode_enabled()
        and x_RH.ndim == 2
        and x_RH.dtype == torch.float32
        and x_RH.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
    ):
        found = _found.get(layer)
        if found is None or found.identity != _identity(layer):
            found = _found[layer] = HeadLayer(layer)
        if found.kernel is not None:
            return kernels.after_attention(found.kernel, x_RH[None], attended_RND[None])[0]
    return layer.finish(x_RH, attended_RND)


cached_layer = partial(layers.cached_layer, finish=finish)
"""``layers.cached_layer`` for decoding, with the kernels' ``finish``."""
