"""Find where a target's numbers became NaN or infinite, after a token could not be chosen."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ..models.stages.stage import Stage

FIX = "give another --dtype (float32 holds the largest numbers), or load another copy of the model"


def report(num_tokens: int, place: str) -> str:
    """Return the message for a token after ``num_tokens`` tokens."""
    return (
        f"target: its logits after {num_tokens} tokens are NaN or infinite, so they choose no "
        f"token; {place}; {FIX}"
    )


def find_module(model: PreTrainedModel, ids: list[int], drafted: list[int]) -> str:
    """Run the tokens through a whole model and name the first module with such an output.

    Args:
        drafted: draft tokens after ``ids``, looked at if ``ids`` alone give numbers.
    """
    found: list[str] = []
    hooks = [
        module.register_forward_hook(partial(_note, found, name))
        for name, module in model.named_modules()
        if not [*module.children()]
    ]
    embedding: Any = model.get_input_embeddings()
    try:
        with torch.inference_mode():
            for tokens in (ids, ids + drafted):
                if not found:
                    model(
                        input_ids=torch.tensor([tokens]).to(embedding.weight.device),
                        use_cache=False,
                    )
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return "a plain pass over them has only numbers, so another draft may decode them"
    return f"{found[0]} is the first module that gives such a number"


def _note(found: list[str], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    if not found and not all(_is_finite(x) for x in tree_leaves(output)):
        found.append(name)


def _is_finite(x: Any) -> bool:
    is_number = isinstance(x, Tensor) and x.is_floating_point()
    return not is_number or bool(x.isfinite().all())


def find_layer(stage: Stage) -> int | None:
    """Return the first of a stage's layers with such keys or values in its cache, or None."""
    return next((i for i, rows in stage.cache.rows_by_layer() if not _is_finite(rows)), None)


def name_layer(layers: list[int | None]) -> str:
    """Describe the first layer of ``find_layer``'s results for all stages."""
    found = next((layer for layer in layers if layer is not None), None)
    if found is None:
        return (
            "it comes after the last layer's attention: in its MLP, the final norm or the LM head"
        )
    return f"the first such number is in keys or values of layer {found} (from 0)"
