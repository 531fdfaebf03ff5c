"""Load Hugging Face models, tokenizers and configurations, for the whole package.

Loading never runs code from a model's folder and never opens pickled weights. It fails if a weight
is missing, because transformers would initialize it at random.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import LogRecord, getLogger
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .errors import first_line
from .files import Values
from .gguf_files import local_name
from .model_kinds import (
    CACHE_SCALES,
    Refused,
    check_adapter,
    check_numbers,
    check_scheme,
    check_tensors,
    is_for_cache_alone,
)
from .model_names import check_exists
from .weights import check_finite, model_file, no_weights, plain_files, stored_dtypes


def load_model(
    name_or_path: str,
    *,
    field: str = "target",
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    quantization: QuantizationConfigMixin | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a causal language model. Every weight comes from its safetensors files.

    The weights move to the device one by one, so host memory never has to hold all of them.

    Args:
        name_or_path: a folder, a GGUF file, or a Hub repository name.
        field: name of the model's option, for error messages.
        attention: attention kernel, as transformers names it. None: transformers chooses.
        quantization: a transformers quantization_config.

    Raises:
        ValueError: the model is missing or needs custom code, or its weights are pickled, missing,
            damaged or too many.
    """
    name_or_path = local_name(name_or_path, field=field)
    stored = read_config(name_or_path, revision, field=field)
    check_whole(stored, name_or_path, revision, field=field)
    files = plain_files(name_or_path, revision, field=field)
    more = {}
    if is_for_cache_alone(stored.get("quantization_config")):
        more["config"] = load_config(name_or_path, revision, field=field)
    with explained(field, name_or_path), silent():
        loaded = auto_class(load_config(name_or_path, revision, field=field)).from_pretrained(
            name_or_path,
            revision=revision,
            dtype=dtype,
            attn_implementation=attention,
            quantization_config=quantization,
            device_map={"": device},
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # `found` lists them; they are refused below
            output_loading_info=True,
            **more,
        )
    model, found = cast(tuple[PreTrainedModel, Values], loaded)
    is_quantized = hasattr(model.config, "quantization_config")
    found["unexpected_keys"] = without_cache_scales(model, found["unexpected_keys"])
    wrong = {
        "missing": set(found["missing_keys"]),
        "of another shape": {key for key, *_ in found["mismatched_keys"]},
        # A quantization library may add tensors.
        "unexpected": set() if is_quantized else set(found["unexpected_keys"]),
    }
    check_tensors(wrong, field, name_or_path)
    check_numbers(stored_dtypes(name_or_path, revision, files), str(name_or_path), field)
    check_finite(model, field, name_or_path)
    return model


def without_cache_scales(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Drop a quantized cache's scales from the names. ``unapplied_settings`` reports them."""
    every = set(names)
    plain = {name for name in every if not CACHE_SCALES.search(name)}
    model.config.num_cache_scales = len(every) - len(plain)
    return plain


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class for a text model, or for a model with image input."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if reads_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_tokenizer(
    name_or_path: str, *, revision: str | None = None, field: str = "target"
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        ValueError: the tokenizer files are missing, or name custom code.
    """
    name_or_path = local_name(name_or_path, field=field)
    check_exists(name_or_path, field=field)
    try:
        settings = get_tokenizer_config(str(name_or_path), revision=revision)
        _refuse_code(settings, "tokenizer_config.json", field, name_or_path)
        if model_file(name_or_path, revision, "config.json") is not None:
            read_config(name_or_path, revision, field=field)
        return AutoTokenizer.from_pretrained(
            name_or_path, revision=revision, trust_remote_code=False
        )
    except Refused:
        raise
    except Exception as error:  # transformers raises errors of many classes
        check_adapter(str(name_or_path), partial(model_file, name_or_path, revision), field)
        raise ValueError(
            f"{field}: {str(name_or_path)!r} has no tokenizer that loads "
            f"({first_line(error)}); give a folder with tokenizer.json or a Hub repository"
        ) from error


def load_config(
    name_or_path: str, revision: str | None, *, field: str = "target"
) -> PreTrainedConfig:
    """Load the configuration into transformers' class for its model_type.

    Raises:
        ValueError: the model is missing or names custom code, or the class refuses a value.
    """
    name_or_path = local_name(name_or_path, field=field)
    read_config(name_or_path, revision, field=field)
    with explained(field, name_or_path):
        config = AutoConfig.from_pretrained(
            name_or_path, revision=revision, trust_remote_code=False
        )
    if is_for_cache_alone(getattr(config, "quantization_config", None)):
        del config.quantization_config  # the weights are plain, and the cache is never quantized
    return config


NEUTRAL: Values = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1.0,),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias"), ()),
}
"""Settings in generation_config.json with an effect on greedy answers -> values without one."""


def unapplied_settings(model: PreTrainedModel) -> list[str]:
    """List the settings in a model's files applied by other packages, but not by this one."""
    config = getattr(model, "generation_config", None)
    given = {name: getattr(config, name, None) for name in NEUTRAL}
    num_scales = getattr(model.config, "num_cache_scales", 0)
    lines = [
        f"the target's files have {num_scales} scales for a quantized cache of keys and values, "
        "which are not applied"
    ]
    return lines * (num_scales > 0) + [
        f"the target's generation_config.json has {name} {value}, which is not applied"
        for name, value in given.items()
        if value is not None and value not in NEUTRAL[name]
    ]


def context_length(config: PreTrainedConfig) -> int:
    """Return the maximum number of positions.

    With YaRN, as Qwen's model cards add it to config.json, this is factor * original positions,
    even if config.json states fewer. With dynamic scaling, config.json states the original number.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    own = int(text.max_position_embeddings)
    kinds = [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]
    for kind in kinds:
        original = kind.get("original_max_position_embeddings")
        if kind.get("rope_type") == "yarn" and original and kind.get("factor"):
            own = max(own, int(kind["factor"] * original))
        if kind.get("rope_type") == "dynamic" and kind.get("factor"):
            own = max(own, int(kind["factor"] * text.max_position_embeddings))
    return own


def read_config(
    name_or_path: str, revision: str | None, *, field: str = "target", drops_code: bool = False
) -> Values:
    """Read a model's config.json, from a folder or the Hub.

    Args:
        drops_code: remove references to custom code instead of refusing them.

    Raises:
        ValueError: the model is missing, or its config.json is invalid or names custom code.
    """
    name_or_path = local_name(name_or_path, field=field)
    check_exists(name_or_path, field=field)
    try:
        if model_file(name_or_path, revision, "config.json") is None:
            check_adapter(str(name_or_path), partial(model_file, name_or_path, revision), field)
        config, _ = PreTrainedConfig.get_config_dict(name_or_path, revision=revision)
        if not config:
            raise OSError("no such file")
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}, no object")
    except Refused:
        raise
    except Exception as error:
        raise ValueError(
            f"{field}: {str(name_or_path)!r} has no config.json that can be read "
            f"({first_line(error)}); give a model folder or a Hub name (owner/model)"
        ) from error
    if drops_code:
        config.pop("auto_map", None)
    check_sizes(config, str(name_or_path), field)
    _refuse_code(config, "config.json", field, name_or_path)
    return config


SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**24,
    "vocab_size": 2**31,
    "num_attention_heads": 2**20,
    "max_position_embeddings": 2**40,
}
"""Size in config.json -> largest value accepted."""


def check_sizes(config: Values, name: str, field: str) -> None:
    """Raise ``Refused`` if a size is not a whole number from 1 to its largest value."""
    if config.get("text_config", config) is None:
        del config["text_config"]
    if not isinstance(text := config.get("text_config", {}), dict):
        raise Refused(f"{field}: {name!r} has text_config {text!r} in config.json, no object")
    parts = (config, config.get("text_config"))
    for part in (part for part in parts if isinstance(part, dict)):
        for key, most in SIZES.items():
            size = part.get(key, 1)
            is_number = isinstance(size, int) and not isinstance(size, bool)
            if size is not None and not (is_number and 1 <= size <= most):
                raise Refused(
                    f"{field}: {name!r} has {key} {size!r} in config.json; a model has a whole "
                    f"number from 1 to {most}, copy the file again"
                )


def load_generation_config(
    name_or_path: str, revision: str | None, config: PreTrainedConfig
) -> GenerationConfig:
    """Load a model's generation_config.json. If it is missing, use the values in ``config``."""
    if model_file(name_or_path, revision, "generation_config.json") is None:
        return GenerationConfig.from_model_config(config)
    with explained("target", name_or_path):
        return GenerationConfig.from_pretrained(name_or_path, revision=revision or "main")


def check_whole(stored: Values, name: str, revision: str | None, *, field: str = "target") -> None:
    """Raise ``Refused`` for an adapter, or if config.json declares the weights quantized."""
    check_scheme(stored, str(name), field)
    check_adapter(str(name), partial(model_file, name, revision), field)


def _refuse_code(settings: Values, file: str, field: str, name: str) -> None:
    if "auto_map" in settings:
        raise Refused(
            f"{field}: {str(name)!r} names Python code of its own in {file} (auto_map), which is "
            "never run; give a model that transformers knows"
        )


@contextmanager
def explained(field: str, name: str) -> Iterator[None]:
    """Turn any error from transformers about a model's files into a one-line ValueError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(no_weights(field, name, first_line(error))) from error
    except Exception as error:
        raise ValueError(
            f"{field}: {str(name)!r} cannot be loaded ({type(error).__name__}: "
            f"{first_line(error)}); copy or convert the model again"
        ) from error


def quieten() -> None:
    """Turn off the libraries' warnings and progress bars."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("DeepSpeed").addFilter(_is_of_use)


def _is_of_use(record: LogRecord) -> bool:
    """Return False for DeepSpeed's message about a missing GPU."""
    return "Setting accelerator to CPU" not in record.getMessage()


@contextmanager
def silent() -> Iterator[None]:
    """Turn off transformers' progress bars and warnings inside the block."""
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    quieten()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()
