"""Low-rank adapters (LoRA, arXiv:2106.09685) in a language model that is trained, by peft.

A target that is tuned in layers 1 .. L-1 alone keeps its FlexSpec draft; ``layers: before_last`` is
that scope. What is saved is the whole model, adapters merged in, and the adapters beside it.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor, nn

# H_out, H_in of a linear map, R rank

ADAPTER = "default"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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


def add_lora(model: Any, config: LoRAConfig, *, base: str) -> None:
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


def merge_lora(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
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


def save_adapter(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """The adapters alone, as ``peft.PeftModel.from_pretrained`` reads them."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    folder.mkdir()
    tensors = {f"base_model.model.{name}": x.cpu().contiguous() for name, x in own.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(str(folder))
