"""Hidden states of whole texts, for training.

Layer indices as in models/target.py. Shape suffixes: B batch, T positions, H hidden.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipedraft.models.layers import packed_call
from pipedraft.models.target import check_packable


@torch.no_grad()
def capture_hidden(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    layers: Collection[int],
    lengths: Sequence[int] | None = None,
) -> dict[int, Tensor]:
    """Raw hidden states of a batch, for training; no cache and no logits.

    Rows may be padded on the right only: every layer is causal, so padding cannot reach the text.
    The call goes through the model's root, so sharded (FSDP, ZeRO-3) targets gather their weights.

    Args:
        layers: indices in [0, L]; index L is before the final norm.
        lengths: of the documents in a packed row [1, T]; each then sees only itself.

    Returns:
        {index: hidden_BTH}, detached, in the model's dtype.

    Raises:
        ValueError: an index outside [0, L], or packing for a target with recurrent layers.
    """
    decoder = model.get_decoder()
    num_layers = decoder.config.num_hidden_layers
    outside = sorted(index for index in layers if not 0 <= index <= num_layers)
    if outside:
        raise ValueError(
            f"layers: index {outside[0]} is outside this target; choose 0 (embeddings) to "
            f"{num_layers} (last layer)"
        )
    if lengths is not None:
        check_packable(decoder.config)
    captured: dict[int, Tensor] = {}

    def capture_as(index: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple, output: Tensor) -> None:
            captured[index] = output

        return hook

    handles = [
        (decoder.layers[index - 1] if index else decoder.embed_tokens).register_forward_hook(
            capture_as(index)
        )
        for index in set(layers)
    ]
    no_rows = torch.empty(0, dtype=torch.long, device=input_ids_BT.device)
    packed, within = packed_call(decoder.config, input_ids_BT, lengths)
    try:
        with within:
            model(input_ids=input_ids_BT, use_cache=False, logits_to_keep=no_rows, **packed)
    finally:
        for handle in handles:
            handle.remove()
    return captured
