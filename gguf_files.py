"""Targets in GGUF files: converted once, then read as a folder of safetensors."""

from functools import partial
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .errors import first_line
from .files import Values, file_sha256, packaged, write_folder
from .model_kinds import check_tensors


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
        UsageError: ``out`` holds other files.
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
