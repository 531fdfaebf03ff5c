"""Options of `pipedraft data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jsonargparse import ArgumentParser

from ..options import Options

if TYPE_CHECKING:
    pass

EXAMPLE = """example:
  pipedraft data --config configs/data/chat_mix.yaml --out out/chat_mix
  pipedraft data --config configs/data/chat_mix.yaml --out out/short --data.max_length 512 \\
      --data.num_proc 2

Writes OUT/train and OUT/valid (read them with datasets.load_from_disk), OUT/report.json,
OUT/bad_rows.jsonl (every dropped row and the reason) and OUT/config.yaml (all settings)."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Turn conversations or texts into token ids and assistant loss masks."""

    PROG: ClassVar[str] = "pipedraft data"
    EXAMPLE: ClassVar[str] = EXAMPLE

    tokenizer: str
    """tokenizer's folder or Hub id"""
    out: Path
    """folder to write"""


def build_parser(*, shows_help: bool = True) -> ArgumentParser:
    from .config import DataConfig

    parser = DataOptions.parser(shows_help=shows_help)
    parser.add_class_arguments(DataConfig, "data")
    return parser
