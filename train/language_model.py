"""Training of a language model: plain next-token cross-entropy, from scratch or from a model.

A small target on a packed corpus; or one that exists, fine-tuned whole or by low-rank adapters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipedraft.data_recipes.batch import document_lengths
from pipedraft.models.layers import positions_of
from pipedraft.pretrained import load_model
from pipedraft.train.lora import LoRAConfig, add_lora, merge_lora, save_adapter
from pipedraft.train.objective import LossOutput, Objective

# B batch, T positions, H hidden, V vocabulary, M counted rows, C of these in one chunk

LOGITS_AT_ONCE = 1 << 26
"""256 MB of float32."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    architecture: Literal["llama", "qwen3"] = "llama"
    tokenizer: str | None = None
    """Folder or Hub id; None trains a byte-level BPE of vocab_size on the same data."""
    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 16
    num_heads: int = 3
    num_key_value_heads: int = 1
    max_positions: int = 1024
    rope_theta: float = 10000.0
    init_from: str | None = None
    """Folder of a model to go on from (its shape and tokenizer are used), e.g. with longer rows."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters in init_from instead of its weights; the finished folder holds the
    merged model, and the adapters in adapter/."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Kernel while training; eager is the faster one on CPUs for rows of a few hundred tokens."""
    loss_on: Literal["all", "assistant"] = "all"
    save_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the weights in the finished folder."""
    card: str | None = None
    """Markdown file put into the finished folder as README.md."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.num_heads: {self.num_heads} does not divide model.hidden_size "
                f"{self.hidden_size}; choose a divisor"
            )
        if self.lora is not None and self.init_from is None:
            raise ValueError(
                "model.lora: set without model.init_from, so the frozen weights would be random; "
                "name the model to adapt, or leave it out"
            )


def build_language_model(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A randomly initialised causal LM with tied embeddings."""
    if config.init_from is not None:
        model = load_model(
            config.init_from,
            field="model.init_from",
            dtype=torch.float32,
            attention=config.attention,
        )
        return model.train()
    family, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[config.architecture]
    shape = family(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=config.attention,
    )
    return model_class(shape)


class LanguageModelObjective(Objective):
    """Cross-entropy of the next token; rows count when the next token is inside the example."""

    def __init__(self, config: LanguageModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.model = build_language_model(config, tokenizer)
        if config.lora is not None:
            assert config.init_from is not None
            add_lora(self.model, config.lora, base=config.init_from)

    def counted(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows whose next token is a label: bool [B, T-1]."""
        positions_T = self._positions(batch)
        if document_lengths(batch) is None:
            inside_BT = positions_T[None, 1:] < batch["lengths"][:, None]
        else:
            inside_BT = positions_T[None, 1:] > 0
        if self.config.loss_on == "assistant":
            inside_BT = inside_BT & batch["loss_mask"][:, 1:].bool()
        return inside_BT

    @staticmethod
    def _positions(batch: dict[str, Tensor]) -> Tensor:
        ids_BT = batch["input_ids"]
        return positions_of(ids_BT.shape[1], document_lengths(batch), ids_BT.device)

    def use_checkpointing(self) -> None:
        self.model.activation_checkpointing_enable({"use_reentrant": False})

    def num_counted(self, batch: dict[str, Tensor]) -> int:
        return int(self.counted(batch).sum())

    def forward(
        self, batch: dict[str, Tensor], generator: torch.Generator, *, name: str = ""
    ) -> LossOutput:
        ids_BT, counted_BT = batch["input_ids"], self.counted(batch)
        # transformers masks the documents of a packed row where positions restart: [T, T].
        is_packed = document_lengths(batch) is not None
        positions_1T = self._positions(batch)[None] if is_packed else None
        hidden_BTH = self.model.model(
            input_ids=ids_BT, position_ids=positions_1T, use_cache=False
        ).last_hidden_state
        loss, agreement = self._cross_entropy(
            hidden_BTH[:, :-1][counted_BT], ids_BT[:, 1:][counted_BT]
        )
        return LossOutput(loss, counted_BT.sum(), {"agreement": agreement})

    def _cross_entropy(self, hidden_MH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """Its sum, and the number of right tokens; many logits are computed again in backward."""

        def compare(hidden_CH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
            logits_CV = self.model.lm_head(hidden_CH)
            loss = F.cross_entropy(logits_CV.float(), labels_C, reduction="sum")
            return loss, (logits_CV.argmax(-1) == labels_C).sum()

        num_rows = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        if len(labels_M) <= num_rows:
            return compare(hidden_MH, labels_M)
        chunks = zip(hidden_MH.split(num_rows), labels_M.split(num_rows), strict=True)
        pairs = [checkpoint(compare, *x, use_reentrant=False) for x in chunks]
        losses, hits = zip(*pairs, strict=True)
        return torch.stack(losses).sum(), torch.stack(hits).sum()

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        loss = sums["loss"] / max(sums["count"], 1)
        return {
            "loss": loss,
            "top1": sums["agreement"] / max(sums["count"], 1),
            "score": -loss,
        }

    def save(self, folder: Path, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        dtype = getattr(torch, self.config.save_dtype)
        weights = {name.removeprefix("model."): x for name, x in weights.items()}
        if self.config.lora is not None:
            save_adapter(self.model, weights, folder / "adapter")
            weights = merge_lora(self.model, weights)
        weights = {name: x.to(dtype) for name, x in weights.items()}
        if self.model.config.tie_word_embeddings:
            weights.pop("lm_head.weight")
        saved_dtype, self.model.config.dtype = self.model.config.dtype, dtype
        self.model.save_pretrained(folder, state_dict=weights)
        self.model.config.dtype = saved_dtype
        self.tokenizer.save_pretrained(folder)
        if self.config.card is not None:
            (folder / "README.md").write_text(Path(self.config.card).read_text())
