"""Read Hugging Face models, tokenizers and configurations, for the whole package.

Code from a model's folder never runs, pickled weights are never opened, and no weight keeps its
random initial value.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
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
from transformers.utils import cached_file, logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .files import Values, file_sha256, packaged, read_json, write_folder
from .model_kinds import (
    CACHE_SCALES,
    Refused,
    check_adapter,
    check_numbers,
    check_plain,
    check_scheme,
    is_for_cache_alone,
)

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CHECKED_BYTES = 2**32
"""Weights up to this size are checked for NaN and infinity: less than a second."""
BLOCK_ROWS = 4096
"""Rows of two tensors that are compared at a time."""


Network = TypeVar("Network", bound=torch.nn.Module)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


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
    """Load a causal language model with every weight from its safetensors files.

    Weights move to the device one by one, so host memory never contains all of them.

    Args:
        name_or_path: a folder, a GGUF file, or a Hub repository name.
        field: name of the model's option, for messages.
        attention: transformers' name of the kernel. None lets transformers choose.
        quantization: a transformers quantization_config.

    Raises:
        ValueError: a missing model, custom code, pickled, missing, extra or damaged weights.
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
    """Leave out scales for a quantized cache, and count them for ``unapplied_settings``."""
    every = set(names)
    plain = {name for name in every if not CACHE_SCALES.search(name)}
    model.config.num_cache_scales = len(every) - len(plain)
    return plain


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' loader for a model that writes text, also one that reads images."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if reads_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_tokenizer(
    name_or_path: str, *, revision: str | None = None, field: str = "target"
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        ValueError: no tokenizer files, or a tokenizer with custom code.
    """
    name_or_path = local_name(name_or_path, field=field)
    check_exists(name_or_path, field=field)
    try:
        settings = get_tokenizer_config(str(name_or_path), revision=revision)
        _refuse_code(settings, "tokenizer_config.json", field, name_or_path)
        if _file(name_or_path, "config.json", revision) is not None:
            read_config(name_or_path, revision, field=field)
        return AutoTokenizer.from_pretrained(
            name_or_path, revision=revision, trust_remote_code=False
        )
    except Refused:
        raise
    except Exception as error:  # any error that transformers raises for these files
        check_adapter(str(name_or_path), partial(_find, name_or_path, revision), field)
        raise ValueError(
            f"{field}: {str(name_or_path)!r} has no tokenizer that loads "
            f"({first_line(error)}); give a folder with tokenizer.json or a Hub repository"
        ) from error


def load_config(
    name_or_path: str, revision: str | None, *, field: str = "target"
) -> PreTrainedConfig:
    """Load the configuration as transformers' class for its model_type.

    Raises:
        ValueError: a missing model, custom code, or values refused by the class.
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
"""Neutral values for each generation_config.json setting that can change greedy answers."""


def unapplied_settings(model: PreTrainedModel) -> list[str]:
    """List settings of a model's files that other packages apply and this package does not."""
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
    """Return the number of positions that a model accepts.

    If YaRN was added to config.json as in Qwen's model cards, the number is factor * original
    positions, even if config.json states fewer. With a dynamic table, config.json states the
    original ones.
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
        drops_code: remove references to custom code, which the caller does not need.

    Raises:
        ValueError: the model is missing, or its config.json is invalid or names custom code.
    """
    name_or_path = local_name(name_or_path, field=field)
    check_exists(name_or_path, field=field)
    try:
        if _file(name_or_path, "config.json", revision) is None:
            check_adapter(str(name_or_path), partial(_find, name_or_path, revision), field)
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
"""Sizes in config.json -> the largest that a model has."""


def check_sizes(config: Values, name: str, field: str) -> None:
    """Raise ``Refused`` for a size that is no whole number, or that no model has."""
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
    """Load a model's generation_config.json, or use the values in ``config`` if it is missing."""
    if _file(name_or_path, "generation_config.json", revision) is None:
        return GenerationConfig.from_model_config(config)
    with explained("target", name_or_path):
        return GenerationConfig.from_pretrained(name_or_path, revision=revision or "main")


def check_whole(stored: Values, name: str, revision: str | None, *, field: str = "target") -> None:
    """Refuse an adapter of another model, and weights that config.json calls quantized."""
    check_scheme(stored, str(name), field)
    check_adapter(str(name), partial(_find, name, revision), field)


def _refuse_code(settings: Values, file: str, field: str, name: str) -> None:
    if "auto_map" in settings:
        raise Refused(
            f"{field}: {str(name)!r} names Python code of its own in {file} (auto_map), which is "
            "never run; give a model that transformers knows"
        )


def check_exists(name_or_path: str, *, field: str = "target") -> None:
    """Refuse a missing local path before the Hub is asked for it."""
    text = str(name_or_path)
    if Path(text).exists():
        return
    names_path = text.startswith(("/", ".", "~")) or text.count("/") != 1
    hint = did_you_mean(text)
    if names_path:
        raise Refused(
            f"{field}: no folder {text!r}{hint}; give an existing folder or a Hub name "
            "(owner/model)"
        )
    if is_offline_and_unknown(text):
        raise Refused(
            f"{field}: no folder {text!r} here{hint}; as a Hub name: not in the cache, and "
            "HF_HUB_OFFLINE is set; unset it, or give a folder"
        )


def did_you_mean(text: str) -> str:
    """Suggest the nearest existing path, as the end of a message."""
    place = Path(text).parts[0] if text.startswith("/") else "."
    parts = Path(text).parts[1:] if text.startswith("/") else Path(text).parts
    for part in parts:
        here = Path(place)
        try:
            names = sorted(entry.name for entry in here.iterdir())
        except OSError:
            return ""
        near = [part] if part in names else difflib.get_close_matches(part, names, 1, 0.75)
        if not near:
            return ""
        place = str(here / near[0])
    return "" if place == str(Path(text)) else f", did you mean {place}?"


def is_offline_and_unknown(name: str) -> bool:
    """Return True in offline mode if a Hub model is not in the cache."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    return constants.HF_HUB_OFFLINE and not folder.is_dir()


def check_tensors(wrong: dict[str, set[str]], field: str, name: str) -> None:
    """Raise ValueError if ``wrong`` maps a kind of fault to one or more tensor names."""
    for what, names in wrong.items():
        if names:
            first = ", ".join(sorted(names)[:3]) + ", ..." * (len(names) > 3)
            raise ValueError(
                f"{field}: going by config.json, {str(name)!r} has {len(names)} tensors {what} "
                f"({first}); copy or convert the model again"
            )


def check_finite(model: torch.nn.Module, field: str, name: str) -> None:
    """Raise ValueError if a weight is NaN or infinite. Skip models above ``CHECKED_BYTES``."""
    state = model.state_dict().items()
    own = [(key, x.to_local() if isinstance(x, DTensor) else x) for key, x in state]
    floats = [(key, x) for key, x in own if x.is_floating_point() and x.itemsize > 1]
    floats = [(key, x) for key, x in floats if x.numel() and not x.is_meta]
    if sum(x.nbytes for _, x in floats) > CHECKED_BYTES:
        return
    for key, weight in floats:
        if not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise ValueError(
                f"{field}: {str(name)!r} holds NaN or infinite weights ({key}); use another copy "
                "or an earlier checkpoint"
            )


# -- files ----------------------------------------------------------------------------------


def _file(name: str, file: str, revision: str | None) -> str | None:
    """Download a model's file if needed. Return its local path, or None if it does not exist."""
    name = local_name(name)
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)


def _find(name: str, revision: str | None, file: str) -> str | None:
    return _file(name, file, revision)


def stored_dtypes(name: str, revision: str | None, files: Mapping[str, str]) -> dict[str, str]:
    """Return safetensors' name of each tensor's type."""
    found = {}
    for file in sorted(set(files.values())):
        opened = open_weights(name, revision, file)
        for tensor in opened.keys():  # noqa: SIM118  # no mapping
            found[tensor] = opened.get_slice(tensor).get_dtype()
    return found


def plain_files(
    name_or_path: str, revision: str | None, *, field: str = "target"
) -> dict[str, str]:
    """Return ``weight_files``, or raise ValueError for names of quantized weights."""
    files = weight_files(name_or_path, revision, field=field)
    check_plain(files, str(name_or_path), partial(_find, name_or_path, revision), field)
    return files


def weight_files(
    name_or_path: str, revision: str | None, *, field: str = "target"
) -> dict[str, str]:
    """Return the name of the safetensors file for each tensor name.

    Raises:
        ValueError: no such file, or a shard in another format.
    """
    index = _file(name_or_path, INDEX, revision)
    if index is None:
        with open_weights(name_or_path, revision, WEIGHTS, field=field) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    try:
        files = read_json(Path(index), INDEX, _Index).weight_map
        wrong = [x for x in files.values() if Path(x).name != x or not x.endswith(".safetensors")]
        if wrong:
            raise ValueError(f"{INDEX}: it names {wrong[0]!r}")
    except ValueError as error:
        raise ValueError(_no_weights(field, name_or_path, str(error))) from error
    return files


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor shapes from a safetensors file, by its header alone.

    Raises:
        OSError, SafetensorError: a missing or damaged file.
    """
    if not path.is_file():
        raise FileNotFoundError("no such file")
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def open_weights(
    name_or_path: str, revision: str | None, file: str, *, field: str = "target"
) -> safe_open:
    """Open a file from ``weight_files``.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        folder = local_name(name_or_path, field=field)
        return safe_open(cached_file(folder, file, revision=revision), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(_no_weights(field, name_or_path, first_line(error))) from error


def same_tensors(
    name_or_path: str, revision: str | None, files: Mapping[str, str], *pair: str
) -> bool:
    """Return True if two tensors have equal values, read in blocks of rows."""
    first, second = (
        open_weights(name_or_path, revision, files[tensor]).get_slice(tensor) for tensor in pair
    )
    shape = first.get_shape()
    if shape != second.get_shape():
        return False
    blocks = (slice(row, row + BLOCK_ROWS) for row in range(0, shape[0], BLOCK_ROWS))
    return all(torch.equal(first[rows], second[rows]) for rows in blocks)


def _no_weights(field: str, name: str, reason: str) -> str:
    return (
        f"{field}: {str(name)!r} has no loadable safetensors weights ({reason}); pickled weights "
        "are never opened, convert them with model.save_pretrained(folder)"
    )


@contextmanager
def explained(field: str, name: str) -> Iterator[None]:
    """Turn every transformers error about a model's files into a one-line ValueError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(_no_weights(field, name, first_line(error))) from error
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
    """Return False for DeepSpeed's note about a missing GPU, which is irrelevant here."""
    return "Setting accelerator to CPU" not in record.getMessage()


@contextmanager
def silent() -> Iterator[None]:
    """Load without transformers' progress bars and warnings, then restore its logging."""
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    quieten()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":"):  # the reason follows
        return " ".join(" ".join(lines).split()).rstrip(".")
    return lines[0].rstrip(".")


# -- targets in GGUF files: converted once, then read as a safetensors folder ------------------


def local_name(name_or_path: str, *, field: str = "target") -> str:
    """Return a model's local path or name. Convert FILE.gguf into a folder on first use.

    Raises:
        ValueError: the file is missing or broken.
    """
    file = Path(name_or_path)
    if file.suffix != ".gguf" or file.is_dir():
        return packaged(str(name_or_path))
    if not file.is_file():
        raise ValueError(f"{field}: no file {str(file)!r}; give an existing GGUF file")
    place = Path(constants.HF_HOME, "pipedraft", "gguf", file_sha256(file))
    if not place.exists():
        convert_gguf(file, place, field=field)
    return str(place)


def convert_gguf(file: Path, out: Path, *, field: str = "target") -> list[Path]:
    """Convert a GGUF model into a float32 folder with transformers, and return its files.

    config.json stores the file's hash as ``gguf_sha256`` to identify the target in results.

    Raises:
        ValueError: the file is broken, or transformers cannot read its model family.
        UsageError: ``out`` is in use.
    """
    return write_folder(out, partial(_fill_from_gguf, file=file, field=field))


def _fill_from_gguf(folder: Path, *, file: Path, field: str) -> None:
    names = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        # Without `dtype` a quantized file would load as half precision.
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, **names, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **names)
    except Exception as error:  # any reader or converter error
        raise ValueError(
            f"{field}: {str(file)!r} cannot be read as GGUF ({first_line(error)[:200]}); download "
            "it again, convert the model with its authors' script, or pip install gguf"
        ) from error
    model, found = cast(tuple[PreTrainedModel, Values], loaded)
    check_tensors({"missing": set(found["missing_keys"])}, field, str(file))
    # The weights are plain numbers now; with this entry transformers would refuse to save them.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.config.gguf_sha256 = file_sha256(file)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -- devices and dtypes: --device and --dtype -------------------------------------------------


def resolve_device(name: str, field: str = "--device") -> torch.device:
    """Return the named device, after a check that it works.

    Args:
        name: auto (the first accelerator, if there is one), cpu, cuda or cuda:N.

    Raises:
        ValueError: a device missing on this machine.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.zeros(1, device=name)
        found.tolist()  # a device without storage, as meta, fails here
        return found.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{field}: {name!r} cannot be used ({reason}); give cpu or leave it out"
        ) from error


def has_native_bf16(device: torch.device) -> bool:
    """Return True if the device multiplies bfloat16 natively. Emulation is slow or refused."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def stored_dtype(name: str, revision: str | None) -> torch.dtype | None:
    """Return the weights' dtype as stated in a model's config.json."""
    config = read_config(name, revision)
    config = config.get("text_config", config)
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


WEIGHT_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")


def dtype_named(name: str, option: str) -> torch.dtype:
    """Return the weights' dtype with this name."""
    if name not in WEIGHT_DTYPES:
        known = ", ".join(WEIGHT_DTYPES)
        raise ValueError(f"{option}: {name!r} is no dtype here; give auto, {known}")
    return getattr(torch, name)


def resolve_dtype(
    dtype: str, device: torch.device, name: str, revision: str | None = None
) -> torch.dtype:
    """Return the dtype for target and draft.

    auto means float32 on a CPU and the target's stored dtype on a GPU. A GPU without native
    bfloat16 (before Ampere) uses float16 instead.
    """
    if dtype != "auto":
        return dtype_named(dtype, "dtype")
    stored = stored_dtype(name, revision)
    if device.type == "cpu" or stored not in (torch.bfloat16, torch.float16):
        return torch.float32
    return stored if stored == torch.float16 or has_native_bf16(device) else torch.float16


def place_draft(draft: Network, target: PreTrainedModel) -> Network:
    """Move a draft to the device of the target's embedding, in the target's dtype."""
    device = target.get_input_embeddings().weight.device
    return draft.to(device, target.dtype)  # type: ignore[arg-type]  # Module's weight is untyped
