"""Targets in GGUF files: read once, kept as a folder of safetensors that everything else loads.

Weights are dequantized to the numbers that the file stands for; nothing is rounded after that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipedraft.files import file_sha256, write_folder

SUFFIX = ".gguf"
MAGIC = b"GGUF"
HASH_KEY = "gguf_sha256"
"""In config.json of the folder: SHA-256 of the file, by which results name the target."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose GGUF tensors transformers maps, and which can be cut into stages."""


def local_name(name_or_path: str, *, field: str = "target") -> str:
    """A model's name as it is; for FILE.gguf the folder that is made of it when first asked for.

    Raises:
        ValueError: the file is missing, broken or of another model family.
    """
    if not str(name_or_path).endswith(SUFFIX) or Path(name_or_path).is_dir():
        return name_or_path
    file = Path(name_or_path)
    check_file(file, field=field)
    place = Path(constants.HF_HOME, "pipedraft", "gguf", file_sha256(file))
    if not place.exists():
        convert(file, place, field=field)
    return str(place)


def check_file(file: Path, *, field: str) -> None:
    """Raise ValueError unless the file begins as GGUF does and can be read here."""
    try:
        with file.open("rb") as opened:
            start = opened.read(len(MAGIC))
    except OSError as error:
        raise ValueError(
            f"{field}: {str(file)!r} cannot be read ({error.strerror}); give an existing GGUF file"
        ) from error
    if start != MAGIC:
        raise ValueError(
            f"{field}: {str(file)!r} does not begin with {MAGIC.decode()!r}; download it again"
        )
    if find_spec("gguf") is None:
        raise ValueError(f"{field}: {str(file)!r} needs the package gguf: pip install gguf")


def convert(file: Path, out: Path, *, field: str = "target") -> list[Path]:
    """Write a GGUF model as a folder in transformers' form, float32; returns its files.

    Raises:
        ValueError: the file is broken, or of a model family that cannot be cut into stages.
        UsageError: ``out`` is in use.
    """
    check_file(file, field=field)
    return write_folder(out, partial(_fill, file=file, field=field))


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses a file for its configuration, its weights and its tokenizer, seconds
    each, and makes the table of names again for every module of the model: here once each."""
    import gguf

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = np.asarray(mapped)  # no memmap, whose slices cost more than the parsing

    table = cache(gguf.get_tensor_name_map)
    with patch.multiple(gguf, GGUFReader=cache(Reader), get_tensor_name_map=table):
        yield


def _fill(folder: Path, *, file: Path, field: str) -> None:
    try:
        with _parsed_once():
            # Without `dtype` a quantized file would load as half precision.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
    except Exception as error:  # whatever reader and converter trip over in the file
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{field}: {str(file)!r} cannot be read as GGUF ({first[:200]}); download it again, or "
            "convert the model with its authors' script"
        ) from error
    model, found = loaded
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"{field}: {str(file)!r} holds a model of type {kind!r}; supported as GGUF: "
            f"{', '.join(FAMILIES)}"
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{field}: {str(file)!r} has {len(missing)} tensors missing ({missing[0]}); download "
            "it again"
        )
    plain = _unquantized(model, file)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unquantized(model: PreTrainedModel, file: Path) -> PreTrainedModel:
    """A model's weights in one whose configuration names no quantization."""
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    settings[HASH_KEY] = file_sha256(file)
    config = type(model.config)(**settings)
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
