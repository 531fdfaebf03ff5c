"""Replace attention in transformers' layers during the passes of a stage."""

# l, R rows, C cache rows, N query heads, J key heads, D head size

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..transformer.layers import grouped_attention
from . import kernels

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


KERNEL_ROWS = 3
"""Maximum rows for our attention kernel on a CPU; torch's is faster with more."""


def masked(
    query_1NlD: Tensor,
    keys_1JCD: Tensor,
    values_1JCD: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Run attention [1, N, l, D]. Query heads may share key heads."""
    own = query_1NlD, keys_1JCD, values_1JCD
    if mask is not None and query_1NlD.shape[2] <= KERNEL_ROWS and kernels.can_attend(*own):
        scale = query_1NlD.shape[-1] ** -0.5 if scale is None else scale
        return kernels.attend(*own, mask, scale)
    is_shared = query_1NlD.shape[1] != keys_1JCD.shape[1]
    return F.scaled_dot_product_attention(*own, mask, scale=scale, enable_gqa=is_shared)


Attend = Callable[..., Tensor]
"""(query [1, N, R, D], keys, values, mask, scale=) -> [1, N, R, D]."""
_passing = threading.local()
"""``attend``: attention function for this thread's pass, replacing transformers' own."""


@contextmanager
def attending_by(attend: Attend) -> Iterator[None]:
    # A TorchFunctionMode would work, but is called on every operation: a quarter of a small pass.
    AttentionInterface.register("sdpa", _attend)  # outside of a pass it calls transformers' own
    _passing.attend = attend
    try:
        yield
    finally:
        _passing.attend = None


def shared_heads(config: "PreTrainedConfig", device: torch.device) -> int:
    """Return query heads per key head if attention folds them into rows, else 1."""
    is_folded = device.type == "cuda" and config._attn_implementation == "sdpa"
    return config.num_attention_heads // config.num_key_value_heads if is_folded else 1


def folding_heads(groups: int) -> AbstractContextManager[None]:
    """Context for ``grouped_attention``, in which masks have ``groups`` times the rows."""
    return attending_by(grouped_attention) if groups > 1 else nullcontext()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run transformers' "sdpa", except inside ``attending_by``."""
    attend = getattr(_passing, "attend", None)
    if attend is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    out_1NRD = attend(query, key, value, attention_mask, scale=options.get("scaling"))
    return out_1NRD.transpose(1, 2).contiguous(), None
