"""Convert heads to the form assumed by serving engines, with the same draft tokens.

Most engines load other forms without a message, and then accept fewer draft tokens. So this module
converts every difference, or refuses it by name.
"""

# H hidden, U draft vocabulary, V target vocabulary, k fused layers

from dataclasses import replace

import torch
from torch import nn

from pipedraft.models.dflash import DFlash
from pipedraft.models.dspark import DSpark
from pipedraft.models.eagle3 import Eagle3


def no_place(layout: str, name: str, value: object, why: str = "") -> ValueError:
    """Return the error for a setting that a layout cannot describe."""
    fix = "--format speculators" if layout == "sglang" else "another --format"
    return ValueError(
        f"--format: {layout!r} has no place for model.{name} {value!r}, with which this head was "
        f"trained{why}; give {fix}"
    )


def convert(head: Eagle3 | DFlash) -> None:
    """Sort a loaded head's fused layers and, for a whole vocabulary, its draft tokens.

    Raises:
        ValueError: a setting ignored by every engine.
    """
    if isinstance(head, Eagle3) and head.config.attention_bias:
        raise ValueError(
            "--checkpoint: model.attention_bias is true, and neither SGLang nor vLLM has biases in "
            "the attention of an EAGLE-3 head: they would drop them in silence; train one without"
        )
    sort_layers(head)
    if len(head.draft_ids) == head.target_vocab_size:
        sort_vocabulary(head)


@torch.no_grad()
def sort_layers(head: Eagle3 | DFlash) -> None:
    """Permute the columns in ``fc``: engines collect hidden states in layer order."""
    layers = head.config.feature_layers
    if len(set(layers)) < len(layers):
        raise ValueError(
            f"--checkpoint: model.feature_layers {list(layers)} names a layer twice; engines "
            "collect each layer once, train a head with different ones"
        )
    order = sorted(range(len(layers)), key=layers.__getitem__)
    head.config = replace(head.config, feature_layers=tuple(layers[i] for i in order))  # type: ignore[arg-type]
    # fc's columns follow the order of the fused layers; move both together.
    parts = head.fc.weight.chunk(len(layers), 1)  # k of [H, H]
    head.fc.weight.copy_(torch.cat([parts[i] for i in order], 1))
    if not isinstance(head, Eagle3):  # block heads have no norms before fc
        return
    if head.config.fc_norm:
        head.fc_norm = nn.ModuleList(head.fc_norm[i] for i in order)
    if head.config.norm_before_fc:
        norms = head.input_norm.weight.chunk(len(layers))
        head.input_norm.weight.copy_(torch.cat([norms[i] for i in order]))


@torch.no_grad()
def sort_vocabulary(head: Eagle3 | DFlash) -> None:
    """Order the LM head's rows by token: engines read no map for a whole vocabulary."""
    order_V = head.draft_ids.argsort()
    if isinstance(head, Eagle3):  # block heads use the target's LM head
        head.lm_head.weight.copy_(head.lm_head.weight[order_V])
    if isinstance(head, DSpark) and head.pair_UR is not None:
        head.pair_UR.copy_(head.pair_UR[order_V])
    persistent = isinstance(head, Eagle3)
    head.register_buffer("draft_ids", torch.arange(len(order_V)), persistent=persistent)
    head.config = replace(head.config, draft_vocab_size=None)  # type: ignore[arg-type]
