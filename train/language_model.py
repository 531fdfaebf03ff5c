"""Training of a language model: plain next-token cross-entropy, from scratch or from a model.

A small target on a packed corpus; or one that exists, fine-tuned whole or by low-rank adapters
(LoRA, arXiv:2106.09685, by peft). A target that is tuned in layers 1 .. L-1 alone keeps its
FlexSpec draft; ``layers: before_last`` is that scope. What is saved is the whole model, adapters
merged in, and the adapters beside it.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipedraft.cli import check_ranges
from pipedraft.data_recipes.batch import document_lengths
from pipedraft.files import read_optional
from pipedraft.models.layers import positions_of
from pipedraft.pretrained import load_model
from pipedraft.train.objective import LossOutput, Objective

# B batch, T positions, H hidden, V vocabulary, M counted rows, C of these in one chunk
# H_out, H_in of a linear map, R rank of an adapter

ADAPTER = "default"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

LOGITS_AT_ONCE = 1 << 26
"""256 MB of float32."""

SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_key_value_heads")
RANGES = dict.fromkeys(SIZES, "[1, 1e6]") | {"max_positions": "[2, 1e9]", "rope_theta": "[1, 1e12]"}


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """W + alpha / rank * B A, of which only A and B are trained."""

    rank: int = 8
    alpha: float = 16.0
    layers: Literal["before_last", "all"] = "before_last"
    """before_last: every decoder layer but the last, which a FlexSpec draft has copied."""
    modules: list[str] = field(default_factory=lambda: list(PROJECTIONS))
    """Linear maps of a decoder layer."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"model.lora.rank: {self.rank} is below 1; give for example 8")
        if self.alpha <= 0:
            raise ValueError(
                f"model.lora.alpha: {self.alpha} is not positive; give for example twice the rank"
            )
        if not self.modules:
            raise ValueError(
                f"model.lora.modules: [] adapts nothing; leave it out for {', '.join(PROJECTIONS)}"
            )


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
    max_positions: int = 2048
    """At least data.max_length."""
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
        check_ranges(self, RANGES, "model.")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"model.num_heads: {self.num_heads} does not cut model.hidden_size "
                f"{self.hidden_size} into heads of one even size; choose a divisor of half of it"
            )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"model.num_heads {self.num_heads}; choose a divisor"
            )
        if self.lora is not None and self.init_from is None:
            raise ValueError(
                "model.lora: set without model.init_from, so the frozen weights would be random; "
                "name the model to adapt, or leave it out"
            )


def build_language_model(
    config: LanguageModelConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """A randomly initialized causal LM with tied embeddings."""
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
        card = None if config.card is None else Path(config.card)
        self.card = read_optional(card, "model.card")
        self.model = build_language_model(config, tokenizer)
        if config.lora is not None:
            assert config.init_from is not None
            add_lora(self.model, config.lora, base=config.init_from)

    def counted(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows whose next token is a label: bool [B, T-1]."""
        positions_T = self._positions(batch)
        if document_lengths(batch) is None:
            inside_BT = positions_T[None, 1:] < batch["lengths"].to(positions_T.device)[:, None]
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
        """Summed cross-entropy and number of right tokens; many logits are computed again later."""

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
        if self.card is not None:
            (folder / "README.md").write_bytes(self.card)


# -- low-rank adapters ------------------------------------------------------------------------


def add_lora(model: PreTrainedModel, config: LoRAConfig, *, base: str) -> None:
    """Put adapters that change nothing yet into a causal LM, and freeze everything else.

    Args:
        base: name of the model, for the adapter's own configuration.

    Raises:
        ValueError: peft is not installed, or the layers have no such map.
    """
    if find_spec("peft") is None:
        raise ValueError("model.lora: needs peft; pip install 'pipedraft[peft]', or leave it out")
    from peft import LoraConfig, inject_adapter_in_model

    layers = model.get_decoder().layers
    num_layers = len(layers) - (config.layers == "before_last")
    if num_layers < 1:
        raise ValueError(
            f"model.lora.layers: {config.layers!r} leaves none of {len(layers)} layers; give all"
        )
    linears = {name for name, part in layers[0].named_modules() if isinstance(part, nn.Linear)}
    known = {name.rpartition(".")[2] for name in linears}
    for name in config.modules:
        if name not in known:
            raise ValueError(
                f"model.lora.modules: {name!r} is no linear map of a decoder layer; known: "
                f"{', '.join(sorted(known))}"
            )
    adapter = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # declared int, used as a number
        target_modules=list(config.modules),
        layers_to_transform=list(range(num_layers)),
        layers_pattern="layers",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    inject_adapter_in_model(adapter, model, ADAPTER)


def merge_lora(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the same model without adapters.

    Of a module that has none they are the very tensors that came in.

    Args:
        weights: the whole state of ``model``, of which this process may hold a part.
    """
    from peft.tuners.lora import LoraLayer

    merged = {
        name.replace(".base_layer.", "."): weight
        for name, weight in weights.items()
        if ".lora_" not in name
    }
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            down_RH = weights[f"{name}.lora_A.{ADAPTER}.weight"]
            up_HR = weights[f"{name}.lora_B.{ADAPTER}.weight"]
            change_HH = module.scaling[ADAPTER] * (up_HR @ down_RH)
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + change_HH
    return merged


def save_adapter(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    """The adapters alone, as ``peft.PeftModel.from_pretrained`` reads them."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    folder.mkdir()
    tensors = {f"base_model.model.{name}": x.cpu().contiguous() for name, x in own.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(str(folder))
