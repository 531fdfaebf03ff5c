"""Refuse models in a form this package does not load: adapters and quantized weights."""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import Values


class Refused(ValueError):
    """Error with a complete one-line message, shown without further context."""


FindFile = Callable[[str], str | None]
"""Function from a file name to the file's local path, or None if the model lacks the file."""

# -- adapters ---------------------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapters.safetensors",
    "pytorch_adapter.bin",
    "pytorch_lora_weights.safetensors",
)
"""Weight files written by peft (two formats), mlx-lm, AdapterHub and diffusers."""
HEAD_ROPES = ("default", "linear", "llama3", "yarn", "dynamic")
"""Rotary position types supported by heads."""
UNMERGED = re.compile("PROMPT|PREFIX|P_TUNING|CPT|CARTRIDGE")
"""peft types with extra tokens or states instead of changed model weights: not mergeable."""


def check_adapter(name: str, find: FindFile, field: str) -> None:
    """Raise ``Refused`` if the files are an adapter (LoRA, prompt tuning). Name its base model."""
    place = find(ADAPTER_CONFIG)
    file, settings = ADAPTER_CONFIG, {} if place is None else _json_object(place)
    if place is None:
        found = [x for x in ADAPTER_WEIGHTS if Path(name).is_dir() and Path(name, x).exists()]
        # peft saves every adapter except the default one in a folder with the adapter's name. Next
        # to a model's weights, this folder only documents a merged adapter, as `train` writes it.
        if not _has_weights(name):
            found += [f"{x.parent.name}/{x.name}" for x in _below(name, ADAPTER_CONFIG)]
        if not found:
            return
        file = found[0]
    kind = settings.get("peft_type") or settings.get("fine_tune_type") or ""
    base = settings.get("base_model_name_or_path") or settings.get("model") or ""
    about = "".join(
        f", {word}{value}" for word, value in (("", kind), ("of ", repr(base))) if value and base
    )
    fix = "merge it with peft's merge_and_unload and save the merged model"
    if "fine_tune_type" in settings:
        fix = "merge it with mlx_lm.fuse"
    if UNMERGED.search(str(kind).upper()):
        fix = "its tokens cannot be merged into weights; give the base model, or merge a LoRA"
    raise Refused(f"{field}: {name!r} is an adapter of another model ({file}{about}); {fix}")


def find_in(folder: Path) -> FindFile:
    """Return the ``FindFile`` of a local folder."""

    def find(file: str) -> str | None:
        return str(folder / file) if (folder / file).is_file() else None

    return find


def _has_weights(name: str) -> bool:
    """Return True if a local folder has a model's weights, in one file or several."""
    kinds = ("model*.safetensors", "pytorch_model*.bin")
    return any(path for kind in kinds for path in Path(name).glob(kind))


def _below(name: str, file: str) -> list[Path]:
    folder = Path(name)
    return sorted(folder.glob(f"*/{file}")) if folder.is_dir() else []


def _json_object(place: str) -> Values:
    """Return the object in a JSON file, or {} if there is none."""
    found: Any = None
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(Path(place).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


# -- quantized weights ------------------------------------------------------------------------

SCHEME_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys in config.json written by transformers, older compressed-tensors, and mlx-lm."""
SCHEME_FILES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quanto_qmap.json",
)
"""Files written by modelopt, AutoGPTQ, AutoAWQ and quanto."""
METHOD_KEYS = ("quant_method", "quant_algo", "mode")
CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant")
UNFIT = "the numbers mean nothing without their scales; give the unquantized checkpoint"

QUANTIZED = re.compile(
    r"(?:^|[._])(?:"
    r"qweight|qzeros|g_idx|W_q|codebooks|trellis|svh"  # GPTQ, AWQ, HQQ, AQLM, EXL
    r"|weight_(?:scales?|scale_inv|scale_\d|zero_point|packed|shape|g_idx|global_scale|format)"
    r"|(?:input|activation)_(?:scale\w*|zero_point|global_scale)|pre_quant_scale|scale_inv"
    r"|weight[.:]_\w+|weight_qdata|_weight_(?:scale|zero_point)"  # quanto, torchao
    r"|weight\.(?:absmax|quant_map|nested_\w+|quant_state\..+|SCB)|SCB"  # bitsandbytes
    r"|(?:proj|experts|head|embed_tokens)\.(?:scales|biases)"  # mlx-lm
    r"|proj_(?:blocks|scales)"  # gpt-oss
    r")$"
)
"""Pattern for the names of quantized weights and the tensors stored with them."""
CACHE_SCALES = re.compile(
    r"\.(?:[kvq]|kv|prob)_scale$|\.[kvq]_(?:zero_point|bmm_quantizer\._amax)$"
    r"|\.[kvq]_proj\.(?:[kvq]|output)_scale$"
)
"""Pattern for scale names in a quantized KV cache. Unquantized weights do not need these scales."""


def is_for_cache_alone(scheme: Any) -> bool:
    """Return True if a quantization scheme in config.json covers only the KV cache."""
    if not isinstance(scheme, dict) or not any(scheme.get(key) for key in CACHE_KEYS):
        return False
    is_for_weights = scheme.get("quant_algo") or scheme.get("bits") or scheme.get("config_groups")
    known = scheme.get("quant_method") in (None, "modelopt", "compressed-tensors")
    return known and not is_for_weights


def check_scheme(config: Values, name: str, field: str) -> None:
    """Raise ``Refused`` if config.json declares the weights quantized."""
    for part in (config.get("text_config"), config):
        if not isinstance(part, dict):
            continue
        for key in SCHEME_KEYS:
            scheme = part.get(key)
            if not scheme or is_for_cache_alone(scheme):
                continue
            raise Refused(
                f"{field}: {name!r} is stored quantized ({key} in config.json, {_method(scheme)}); "
                "give the unquantized checkpoint"
            )


def _method(scheme: Any) -> str:
    """Return a scheme's method, or the scheme's first 60 characters if none is named."""
    named = [k for k in METHOD_KEYS if scheme.get(k)] if isinstance(scheme, dict) else []
    return f"{named[0]} {scheme[named[0]]!r}" if named else repr(scheme)[:60]


def check_plain(names: Iterable[str], name: str, find: FindFile, field: str) -> None:
    """Raise ``Refused`` if the tensor names reveal quantized weights."""
    found = next((x for x in names if QUANTIZED.search(x) and not CACHE_SCALES.search(x)), None)
    if found is None:
        return
    source = next((x for x in SCHEME_FILES if find(x) is not None), "")
    what = f"{source}, " if source else ""
    raise Refused(f"{field}: {name!r} is stored quantized ({what}tensor {found}); {UNFIT}")


def check_numbers(dtypes: dict[str, str], name: str, field: str) -> None:
    """Raise ``Refused`` if weights are stored as integers.

    Args:
        dtypes: dtype as safetensors names it, by tensor name.
    """
    for tensor, dtype in dtypes.items():
        if tensor.endswith("weight") and dtype.startswith(("I", "U", "F4", "F6")):
            raise Refused(
                f"{field}: {name!r} is stored quantized (tensor {tensor} of {dtype}); {UNFIT}"
            )


def check_tensors(wrong: dict[str, set[str]], field: str, name: str) -> None:
    """Raise ValueError if ``wrong`` (fault -> tensor names) has a tensor."""
    for what, names in wrong.items():
        if names:
            first = ", ".join(sorted(names)[:3]) + ", ..." * (len(names) > 3)
            raise ValueError(
                f"{field}: going by config.json, {str(name)!r} has {len(names)} tensors {what} "
                f"({first}); copy or convert the model again"
            )
