"""Options of `pipedraft data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jsonargparse import ArgumentParser

from ..options import Options, tidy

EXAMPLE = """example:
  pipedraft data --data chats.jsonl --tokenizer assets/target --out out/chats
  pipedraft data --config configs/data/chat_mix.yaml --out out/chat_mix
  pipedraft data --config configs/data/chat_mix.yaml --out out/short --data.max_length 512 \\
      --data.num_proc 2

Writes OUT/train and OUT/valid (read them with datasets.load_from_disk), OUT/report.json,
OUT/bad_rows.jsonl (every dropped row and the reason) and OUT/config.yaml (all settings)."""
SHORT_HELP = f"""\
usage: pipedraft data --data FILE --tokenizer NAME --out DIR [--data.KEY VALUE ...]

Turn conversations or texts into token ids and assistant loss masks.

  --data FILE               a file, a folder or a Hub id, or several with commas
  --config FILE             YAML file with these options and recipes of several sources
  --tokenizer NAME          tokenizer's folder or Hub id
  --out DIR                 folder to write
  --data.max_length N       tokens per row
  --data.too_long NAME      longer rows: cut or drop
  --data.duplicates NAME    rows equal to an earlier one: keep, or exact drops them
  --data.decontaminate FILE drop rows that contain a prompt of this benchmark file
  --data.valid_fraction X   share of rows held out for validation
  --data.num_proc N         processes that tokenize
  --help-all                every option

{EXAMPLE}"""


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
    tidy(parser)
    return parser
