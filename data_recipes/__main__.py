"""Tokenize, mask, split and count a data configuration, and save it with its report."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..endings import leave_at_interrupts, run_command
from ..errors import make_folder
from ..options import HELP_FLAGS, Options, parse

if __name__ == "__main__":
    leave_at_interrupts()

from jsonargparse import ArgumentParser, set_parsing_settings

from ..files import locked, write_atomically

if TYPE_CHECKING:
    from .config import DataConfig

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


def main(argv: list[str] | None = None) -> None:
    run_command(partial(run, argv))


def run(argv: list[str] | None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if any(word in HELP_FLAGS for word in words):  # reads the docstring below each field
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = build_parser()
    cfg = parse(parser, words)
    build(parser.instantiate(cfg).data, cfg.tokenizer, cfg.out)
    parser.save(cfg, cfg.out / "config.yaml", overwrite=True)


def build(config: "DataConfig", tokenizer_name: str, out: Path) -> None:
    """Load the data, print the report, and write everything to ``out``."""
    import datasets

    from ..pretrained import load_tokenizer
    from .recipe import load_data

    tokenizer = load_tokenizer(tokenizer_name, field="tokenizer")
    make_folder("out", out)
    with locked(out, "out"):
        data = load_data(config, tokenizer, side_file=out / "bad_rows.jsonl")
        for name, part in (("train", data.train), ("valid", data.valid)):
            datasets.Dataset(part.whole).select(part.chosen_N).save_to_disk(out / name)
        report = json.dumps(data.report.to_dict(), indent=2) + "\n"
        write_atomically(out / "report.json", report.encode())
    print(data.report.summary())
    if config.valid_fraction and not data.report.valid_rows:
        print("warning: no row is held out; give more than one row", file=sys.stderr)


if __name__ == "__main__":
    main()
