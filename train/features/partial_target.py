"""Load the parts of a target that a head needs, and open the hidden states of the rest."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...data_recipes.recipe import TokenizedData
from ...data_recipes.table import row_lengths
from ...models.families import check_target
from ...models.heads.draft import Draft, TargetReference
from ...models.target_part import load_target_part
from ...models.transformer.decoder import finish_logits
from ...models.transformer.layers import LayerConfig
from ...pretrained import load_config
from ..config import RunConfig
from ..launch import resolve_dtype, uses_autocast
from ..objective import DraftObjective
from .online import ServedStates, addresses_of
from .reader import Features, ShardFolder
from .shards import identity_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def weightless_draft(
    objective_class: type[DraftObjective],
    config: "DataclassInstance",
    target_config: PreTrainedConfig,
) -> Draft:
    """Return the configured draft without weights, to find out which layers it reads."""
    sizes: dict[str, int | str] = {
        "hidden_size": target_config.hidden_size,
        "vocab_size": target_config.vocab_size,
        "num_layers": target_config.num_hidden_layers,
    }
    reference = TargetReference(name="", fingerprint=sizes)
    with torch.device("meta"):
        return objective_class.make_draft(config, LayerConfig.from_target(target_config), reference)


def needed_layers(draft: Draft, num_layers: int) -> tuple[int, ...]:
    """Return the layers that the draft and the teacher read, without the embeddings (layer 0)."""
    return tuple(sorted({*draft.taps, num_layers} - {0}))


def decoder_config(run: RunConfig) -> PreTrainedConfig:
    """Return the configuration for the target's decoder."""
    assert run.target is not None
    config = load_config(run.target, run.target_revision)
    check_target(config, run.target)
    return config.get_text_config()


def load_embedding_and_head(
    run: RunConfig,
    objective_class: type[DraftObjective],
    config: "DataclassInstance",
    accelerator: Accelerator,
) -> PreTrainedModel:
    """Load the target's embedding, final norm, LM head, and the layers copied into the draft.

    A run with ``features`` never executes the other layers. In a run with ``shard_target``, each
    process reads its part of them later.

    Raises:
        ValueError: the target cannot be loaded, or an option needs whole layers.
    """
    other = "shard_target: true" if run.features is None else "features"
    name = "target_quantization" if run.target_quantization else "shard_target"
    if run.target_quantization or (run.features is not None and run.shard_target):
        raise ValueError(
            f"{name}: {getattr(run, name)} with {other}, for which no layer of the target is "
            "loaded whole; leave out one of the two"
        )
    assert run.target is not None
    if run.features is not None:
        # For its checks: a bad address must not be found after a long load.
        addresses_of(run.features)
    draft = weightless_draft(objective_class, config, decoder_config(run))
    return load_target_part(
        run.target,
        revision=run.target_revision,
        layers=draft.initial_layers,
        has_embedding=True,
        has_head=True,
        dtype=resolve_dtype(run, accelerator.mixed_precision, uses_autocast(accelerator)),
        device=accelerator.device,
        may_round=False,
    )


TIE = 0.5
"""Largest logit gap, in nats, that rounding explains between our best and the server's token."""


@torch.no_grad()
def check_served(source: ServedStates, target: PreTrainedModel, ids: Sequence[int]) -> None:
    """Raise ValueError if a server's next token does not follow from its states and the LM head."""
    ((states, token),) = source.ask([ids])
    decoder = target.get_decoder()
    norm = decoder.norm
    last_1H = states[-1:, -1].to(norm.weight.device, norm.weight.dtype)
    head_1V = target.get_output_embeddings()(norm(last_1H)).float()
    (logits_V,) = finish_logits(decoder.config, head_1V)
    gap = float(logits_V.max() - logits_V[token])
    if not gap <= TIE:  # NaN is refused, too
        raise ValueError(
            f"features: the states of {source.addresses[0]} are not this target's before its LM "
            f"head (its next token is {gap:.3g} nats less likely than the best); serve this "
            "configuration with pipedraft train features serve"
        )


def open_features(
    run: RunConfig,
    objective: DraftObjective,
    tokenizer: PreTrainedTokenizerBase,
    data: TokenizedData,
    accelerator: Accelerator,
) -> Features:
    """Open a run's dump or servers. Raise ValueError if they do not fit the run."""
    assert run.features is not None
    config = objective.target.get_decoder().config
    layers = needed_layers(objective.draft, config.num_hidden_layers)
    source: ShardFolder | ServedStates
    if places := addresses_of(run.features):
        rank = accelerator.process_index
        source = ServedStates(places, layers, config.hidden_size, first=rank)
        check_served(source, objective.target, data.train[0]["input_ids"])
    else:
        identity = identity_of(run, config, tokenizer, data)
        lengths = row_lengths(data.train) + row_lengths(data.valid)
        source = ShardFolder(Path(run.features), identity, layers, lengths)
    return Features(source, pins=accelerator.device.type == "cuda")
