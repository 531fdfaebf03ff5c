"""Draft model that is an independent causal LM with the target's tokenizer."""

# R rows, C cache rows, J key heads, D head size, H draft hidden, V vocabulary of both

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...devices import dtype_named
from ...errors import blaming
from ..speed.attending import folding_heads, shared_heads
from ..speed.rounded import dtype_of
from ..stages.stage_graphs import can_capture
from ..target import StagedTarget, load_target, load_tokenizer
from ..transformer.decoder import finish_logits, layer_kinds
from ..transformer.layers import KeyValues
from .draft import CONFIG_FILE


class LanguageModelDraft(nn.Module):
    """Causal LM that drafts for another one and reads only token ids.

    It drafts for any number of stages. ``load_draft_model`` reads it from a Hugging Face folder or
    the Hub, not from a checkpoint of this package.
    """

    draft_type: ClassVar[str] = "language_model"
    num_stages: ClassVar[int | None] = None
    boundaries: ClassVar[tuple[int, ...]] = ()
    draft_ids: Tensor
    shift: ClassVar[int] = 0
    reads_rows: ClassVar[bool] = False

    def __init__(
        self, model: PreTrainedModel, target: PreTrainedModel, num_tokens: int | None = None
    ) -> None:
        """
        Args:
            num_tokens: shared tokenizer size. Embedding rows beyond this size may differ.

        Raises:
            ValueError: the vocabularies differ in size.
        """
        super().__init__()
        size, target_size = (m.config.get_text_config().vocab_size for m in (model, target))
        shared = min(size, target_size)  # later embedding rows are padding, no tokens
        if size != target_size and (num_tokens is None or num_tokens > shared):
            raise ValueError(
                f"draft_model: vocab_size {size}, but the target's is {target_size}; give a model "
                "with the target's tokenizer and vocabulary"
            )
        if size < target_size:
            model.set_input_embeddings(padded(model.get_input_embeddings(), target_size))
        self.model = model
        self.target_vocab_size = target_size
        self.register_buffer("draft_ids", torch.arange(shared, device=model.device))

    def staged(self) -> StagedTarget:
        """Return the model as one stage with its own cache."""
        return StagedTarget(self.model, 1)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return logits from raw hidden states after the last layer, float32 [R, V]."""
        decoder = self.model.get_decoder()
        logits_RV = finish_logits(decoder.config, self.model.lm_head(decoder.norm(hidden_RH)))
        return logits_RV[..., : len(self.draft_ids)].float()

    # -- as CUDA graphs call it -----------------------------------------------------------

    @property
    def can_capture(self) -> bool:
        config = self.model.get_decoder().config
        return can_capture(config) and set(layer_kinds(config)) == {"full_attention"}

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def num_caches(self) -> int:
        return self.model.get_decoder().config.num_hidden_layers

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.model.get_decoder().config.hidden_size,)

    def feature(self, taps: Mapping[int, Tensor]) -> Tensor:
        raise NotImplementedError("no hidden state of the target is read")

    @torch.inference_mode()
    def step(
        self,
        tokens_R: Tensor,
        states_RH: Tensor,
        positions_R: Tensor,
        caches: Sequence[KeyValues],
        visible_RC: Tensor,
        *,
        in_order: bool,
    ) -> Tensor:
        """Append keys and values to the caches, and return hidden states before the final norm."""
        decoder = self.model.get_decoder()
        hidden_1RH = decoder.embed_tokens(tokens_R)[None]
        turn = decoder.rotary_emb(hidden_1RH, positions_R[None])
        zeros_RC = torch.zeros_like(visible_RC, dtype=hidden_1RH.dtype)
        # The minimum instead of -inf: a fully hidden row would become NaN in softmax.
        mask_RC = zeros_RC.masked_fill_(~visible_RC, torch.finfo(hidden_1RH.dtype).min)
        groups = shared_heads(decoder.config, hidden_1RH.device)
        with folding_heads(groups):
            for layer in decoder.layers:
                hidden_1RH = layer(
                    hidden_1RH,
                    attention_mask=mask_RC.repeat(groups, 1)[None, None],
                    position_embeddings=turn,
                    past_key_values=_LayerCaches(caches),
                )
        return hidden_1RH[0]

    def relative_cost(self, target: StagedTarget) -> float:
        """Return a forward's cost relative to a one-token target pass, by layer parameters."""
        own, others = (
            sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
            for model in (self.model, target.model)
        )
        return own / others


def padded(embedding: nn.Module, num_rows: int) -> nn.Embedding:
    """Return an embedding padded with zero rows for ids only the target has."""
    weight = embedding.weight.detach()  # type: ignore[union-attr]
    rows = torch.cat([weight, weight.new_zeros(num_rows - len(weight), weight.shape[1])])
    return nn.Embedding(len(rows), rows.shape[1], _weight=rows).requires_grad_(False)


class _LayerCaches:
    """Cache stand-in for transformers, backed by ``KeyValues``."""

    def __init__(self, caches: Sequence[KeyValues]) -> None:
        self.caches = caches

    def update(
        self, keys_1JRD: Tensor, values_1JRD: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        cache = self.caches[layer_idx]
        cache.append_rows(keys_1JRD[0].transpose(0, 1), values_1JRD[0].transpose(0, 1))
        return cache.keys[None], cache.values[None]


def model_folder(name_or_path: str) -> str:
    """Return the best model's folder in a run's output folder, or else the argument."""
    best = Path(name_or_path, "best")
    if (best / CONFIG_FILE).exists() and not Path(name_or_path, CONFIG_FILE).exists():
        return str(best)
    return name_or_path


def load_draft_model(
    name_or_path: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str = "auto",
) -> LanguageModelDraft:
    """Load a causal LM as a draft model, on the target's device.

    Args:
        name_or_path: model folder, a run's output folder (its best model), or Hub id.
        dtype: a dtype's name; auto: the target's.

    Raises:
        ValueError: not found, unsupported family, or a tokenizer or vocabulary different from the
            target's.
    """
    name_or_path = model_folder(name_or_path)
    own_dtype = dtype_of(target) if dtype == "auto" else dtype_named(dtype, "draft_dtype")
    with blaming("draft_model"):
        own_tokenizer = load_tokenizer(name_or_path)
        model = load_target(name_or_path, dtype=own_dtype, device=target.device)
    _check_tokenizers(str(name_or_path), own_tokenizer, tokenizer)
    return LanguageModelDraft(model, target, len(tokenizer))


def _check_tokenizers(
    name: str, own: PreTrainedTokenizerBase, targets: PreTrainedTokenizerBase
) -> None:
    ids, expected = own.get_vocab(), targets.get_vocab()
    if ids == expected:
        return
    # The smallest one, so that the message is the same in every run.
    token = min(t for t in ids.keys() | expected.keys() if ids.get(t) != expected.get(t))
    raise ValueError(
        f"draft_model: {name!r} has another tokenizer than the target: {token!r} is token "
        f"{ids.get(token)} there and {expected.get(token)} here; give a model with the target's "
        "tokenizer"
    )
