"""Run decoder layers for few rows on a CPU, with transformers' arithmetic in fewer calls.

One product computes queries, keys and values. Another product computes gate and up. Their weights
are joined in memory once, and transformers' modules keep views, so nothing is stored twice.
Compiled kernels (``kernels.py``) run a layer, except attention, in two calls. Without a compiler,
torch runs it.
"""

# R rows, H hidden, N query heads, J key heads, D head size, G joined outputs, I intermediate size

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...files import Values
from ..transformer.decoder import PLAIN
from . import kernels
from .cpu import MOST_ROWS, LaidOutLinear
from .rounded import JOINED, RoundedLinear, RoundedPart

HFModule: TypeAlias = Any
"""One of transformers' modules: its submodules and settings are known by name, not by type."""
Attend: TypeAlias = Callable[..., Tensor]
"""(query [1, N, R, D], keys [1, J, C, D], values, scale=) -> [1, N, R, D]."""


class PlainLayer:
    """One layer with joined weights."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention: HFModule = layer.self_attn
        self.mlp: HFModule = layer.mlp
        self.norms: HFModule = layer.input_layernorm, layer.post_attention_layernorm
        projections, gates = _parts(layer)
        self.head_size: HFModule = self.attention.head_dim
        self.num_values: int = projections[2].out_features // self.head_size
        self.has_head_norms = hasattr(self.attention, "q_norm")
        # Decoding runs in inference mode; autograd could not use weights created there.
        with torch.inference_mode(False), torch.no_grad():
            self.query_key_value, self.gate_up = join(projections), join(gates)
        self._identity = _identity(layer)
        self._kernels = self._fitted(layer)
        """Addresses of weights; ``_kept`` keeps these weights even if they are replaced."""
        self._kept = [x for module in _read(layer) for x in module.parameters(recurse=False)]

    def is_current(self, layer: nn.Module) -> bool:
        """Return False once a module or weight was moved, merged, loaded or otherwise replaced."""
        return self._identity == _identity(layer)

    @property
    def takes_many_rows(self) -> bool:
        return self._kernels is not None or isinstance(self.attention.q_proj, RoundedPart)

    def __call__(
        self,
        hidden_1RH: Tensor,
        *,
        turn: tuple[Tensor, Tensor],
        cache: HFModule,
        attend: Attend,
    ) -> Tensor:
        """Return the layer's output [1, R, H], as transformers' layer does.

        Args:
            turn: cosines and signed sines, from ``_turning``.
            cache: ``update(keys, values, layer_idx)`` returns all keys and values.
        """
        if self._kernels is not None:
            return self._run_kernels(self._kernels, hidden_1RH, turn, cache, attend)
        first, second = self.norms
        cos_R1D, sin_R1D = turn
        rows_RH = hidden_1RH[0]
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

    def _fitted(self, layer: nn.Module) -> kernels.Layer | None:
        """Return the layer for the kernels, or None if they are missing or cannot run it."""
        if kernels.library() is None or not all(map(can_read, _read(layer))):
            return None
        joined = self.query_key_value, self.attention.o_proj, self.gate_up, self.mlp.down_proj
        weights = [kernel_weight(part) for part in joined]
        norms = [*self.norms]
        norms += [self.attention.q_norm, self.attention.k_norm] if self.has_head_norms else []
        # The kernels take whole vectors of rows and of half a head, without padding.
        is_whole = self.head_size % kernels.BLOCK == 0
        is_whole &= self.head_size <= kernels.MOST_HEAD_SIZE
        for part, own in zip(joined, weights, strict=True):
            is_whole &= own.inputs == part.in_features and own.inputs % kernels.BLOCK == 0
        if not is_whole:
            return None
        addresses = [norm.weight.data_ptr() for norm in norms] + [None] * (4 - len(norms))
        heads = self.query_key_value.out_features // self.head_size
        return kernels.Layer(
            *weights,
            *addresses,
            self.norms[0].variance_epsilon,
            self.attention.scaling,
            self.gate_up.in_features,
            heads - 2 * self.num_values,
            self.num_values,
            self.head_size,
        )

    def _run_kernels(
        self,
        layer: kernels.Layer,
        hidden_1RH: Tensor,
        turn: tuple[Tensor, Tensor],
        cache: HFModule,
        attend: Attend,
    ) -> Tensor:
        heads_1NRD = kernels.before_attention(layer, hidden_1RH, *turn)
        sizes = (layer.heads, layer.kv_heads, layer.kv_heads)
        query, keys, values = heads_1NRD.split(sizes, 1)
        keys, values = cache.update(keys, values, self.attention.layer_idx)
        attended_1NRD = attend(query, keys, values, scale=layer.scale)
        return kernels.after_attention(layer, hidden_1RH, attended_1NRD.transpose(1, 2))


def kernel_weight(part: HFModule) -> kernels.Weight:
    is_rounded = isinstance(part, RoundedLinear)
    return part.kernel_weight() if is_rounded else kernels.weight(part.weight, None, part.bias)


def _turning(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [R, 1, D], from transformers' tables [1, R, D]."""
    cos_RD, sin_RD = (x[0] for x in position_embeddings)
    left, right = sin_RD.chunk(2, -1)
    return cos_RD[:, None], torch.cat([-left, right], -1)[:, None]


_joined: "WeakKeyDictionary[nn.Module, PlainLayer]" = WeakKeyDictionary()
"""All stages of a model share its joined weights."""


class PlainLayers:
    """A stage's layers, called as ``PlainLayer`` if all are plain, or else as transformers' own.

    Checking 30 layers takes 3 ms, so they are checked only once per sequence.
    """

    def __init__(self, layers: Sequence[nn.Module], kinds: Sequence[str]) -> None:
        self._layers, self._kinds = layers, kinds
        self._plain: list[PlainLayer] | None = None
        self._is_checked = False

    def reset(self) -> None:
        """Check the layers again in the next call, because they may have changed."""
        self._is_checked = False

    def calls(
        self,
        num_rows: int,
        *,
        places: Mapping[str, Values],
        cache: HFModule,
        attends: Mapping[str, Attend],
        masks: Mapping[str, Tensor | None],
    ) -> list[Callable[[Tensor], Tensor]]:
        """Return the layers as functions of hidden states [1, R, H].

        Args:
            places: by layer kind, from ``LayerPositions``.
            attends: attention by layer kind.
            masks: attention mask by layer kind, for transformers' own layers.
        """
        if not self._is_checked:
            self._plain, self._is_checked = self._find(), True
        # Without kernels, transformers' products of many rows are as fast.
        if not self._plain or (num_rows > MOST_ROWS and not self._plain[0].takes_many_rows):
            return [
                partial(layer, attention_mask=masks[kind], past_key_values=cache, **places[kind])
                for layer, kind in zip(self._layers, self._kinds, strict=True)
            ]
        turns = {kind: _turning(places[kind]["position_embeddings"]) for kind in set(self._kinds)}
        return [
            partial(layer, turn=turns[kind], cache=cache, attend=attends[kind])
            for layer, kind in zip(self._plain, self._kinds, strict=True)
        ]

    def _find(self) -> list[PlainLayer] | None:
        if not all(map(_is_plain, self._layers)):
            return None
        for layer in self._layers:
            if layer not in _joined or not _joined[layer].is_current(layer):
                _joined[layer] = PlainLayer(layer)
        return [_joined[layer] for layer in self._layers]


def _is_plain(layer: nn.Module) -> bool:
    """Return True for a float32 or rounded layer on a CPU, without hooks, adapters or sharding.

    The family must be in ``PLAIN``, with sdpa attention, SiLU and frozen weights. In other dtypes
    transformers' norms round between steps, and the results would differ.
    """
    attention: HFModule = getattr(layer, "self_attn", None)
    config = getattr(attention, "config", None)  # some families' attention keeps none
    if config is None or config.model_type not in PLAIN:
        return False
    if config._attn_implementation != "sdpa" or config.hidden_act != "silu":
        return False
    blocks: HFModule = layer, attention, layer.mlp
    # The pass calls none of these modules, so nobody may expect to be called by them.
    if any(x._forward_hooks or x._forward_pre_hooks or "forward" in vars(x) for x in blocks):
        return False
    return all(can_join(part) for parts in _parts(layer) for part in parts)


def can_join(part: HFModule) -> bool:
    if isinstance(part, RoundedPart):
        return True
    if (
        type(part) not in (nn.Linear, LaidOutLinear)
        or part._forward_hooks
        or part._forward_pre_hooks
    ):
        return False
    # An optimizer would go on updating the weights that the views replace.
    is_frozen = type(part.weight) is nn.Parameter and not part.weight.requires_grad
    is_float32 = part.weight.dtype == torch.float32 and part.weight.device.type == "cpu"
    return is_frozen and is_float32


def _read(layer: HFModule) -> list[HFModule]:
    """Return the norms and projections that the kernels read but that are not joined."""
    found = [layer.input_layernorm, layer.post_attention_layernorm]
    found += [layer.self_attn.o_proj, layer.mlp.down_proj]
    names = [name for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
    return found + [getattr(layer.self_attn, name) for name in names]


def can_read(part: HFModule) -> bool:
    """Return True if a module only applies its weights, and the kernels can read these weights."""
    if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
        return False
    if isinstance(part, RoundedLinear):
        return True
    if isinstance(part, nn.Linear) and not can_join(part):
        return False
    weight = getattr(part, "weight", None)
    is_tensor = isinstance(weight, Tensor) and weight.dtype == torch.float32
    return is_tensor and weight.device.type == "cpu" and weight.is_contiguous()


def _identity(layer: HFModule) -> list[object]:
    """Return the modules, weight addresses and kernel support that a ``PlainLayer`` relies on."""
    found: list[object] = [layer.self_attn, layer.mlp, *_read(layer)]
    for part in _read(layer):
        found += [can_read(part), *(x.data_ptr() for x in part.parameters(recurse=False))]
    for part in [part for parts in _parts(layer) for part in parts]:
        if isinstance(part, RoundedPart):
            found.append(part.joined)
        else:
            found += [x.data_ptr() for x in (part.weight, part.bias) if x is not None]
    return found


def _parts(layer: HFModule) -> list[list[HFModule]]:
    """Return the modules to join, first those for attention and then those for the MLP."""
    blocks = ((getattr(layer, block), names) for block, names in JOINED.items())
    return [[getattr(block, name) for name in names] for block, names in blocks]


def join(parts: Sequence[HFModule]) -> nn.Module:
    """Join weights and biases into one layer, and replace the parts' own by views."""
    if isinstance(parts[0], RoundedPart):
        return parts[0].joined
    sizes = parts[0].in_features, sum(part.out_features for part in parts)
    joined = type(parts[0])(*sizes, bias=parts[0].bias is not None, device="meta")
    for name in ("weight", "bias"):
        if (whole := getattr(joined, name)) is None:
            continue
        whole = torch.cat([getattr(part, name) for part in parts])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        rows_of = whole.split([part.out_features for part in parts])
        for part, rows in zip(parts, rows_of, strict=True):
            setattr(part, name, nn.Parameter(rows, requires_grad=False))
    return joined


def _norm(norm: HFModule, x: Tensor) -> Tensor:
    """Return w x / sqrt(mean(x^2) + eps) = w x / hypot(|x| / sqrt(H), sqrt(eps)).

    ``F.rms_norm`` runs twice as many operators on a CPU.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    return (x / length.hypot_(_root(norm.variance_epsilon))).mul_(norm.weight)


@cache
def _root(epsilon: float) -> Tensor:
    return torch.tensor(epsilon).sqrt_()
