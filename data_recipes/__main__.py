"""Tokenize, mask, split and count a data configuration, and save it with its report."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..endings import leave_at_interrupts, run_command, show_help
from ..errors import make_folder
from ..options import HELP_FLAGS, parse

if __name__ == "__main__":
    leave_at_interrupts()

from jsonargparse import set_parsing_settings

from ..files import locked, write_atomically
from ..model_names import check_names
from .options import SHORT_HELP, build_parser
from .sources import list_files

if TYPE_CHECKING:
    from .config import DataConfig


def main(argv: list[str] | None = None) -> None:
    run_command(partial(run, argv))


def run(argv: list[str] | None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if any(word in ("-h", "--help") for word in words) and "--help-all" not in words:
        show_help(SHORT_HELP)
    if any(word in HELP_FLAGS for word in words):  # reads the docstring below each field
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = build_parser()
    cfg = parse(parser, words)
    config = parser.instantiate(cfg).data
    check_names({"tokenizer": cfg.tokenizer})
    for source in config.sources:
        list_files(source)
    build(config, cfg.tokenizer, cfg.out)
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
