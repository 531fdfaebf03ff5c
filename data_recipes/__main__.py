"""Tokenize, mask, split and count a data configuration, and save it with its report."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipedraft.errors import UsageError, make_folder, run_command

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from pipedraft.data_recipes.recipe import DataConfig

EXAMPLE = """example:
  python -m pipedraft.data_recipes --config configs/data/chat_mix.yaml --out out/chat_mix
  python -m pipedraft.data_recipes --config configs/data/chat_mix.yaml --out out/short \\
      --data.max_length 1024 --data.num_proc 8

writes OUT/train and OUT/valid (datasets.load_from_disk reads them), OUT/report.json,
OUT/bad_rows.jsonl (every row left out, with the reason), OUT/README.md (a card with licenses,
sources, filters and benchmark overlap) and OUT/config.yaml (as resolved)."""


def build_parser() -> "ArgumentParser":

    from jsonargparse import ActionConfigFile, ArgumentParser

    from pipedraft.data_recipes.recipe import DataConfig

    parser = ArgumentParser(
        prog="python -m pipedraft.data_recipes",
        description="Conversations or texts to token ids and assistant loss masks.",
        epilog=EXAMPLE,
        exit_on_error=False,
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; may be repeated")
    parser.add_argument("--tokenizer", type=str, required=True, help="folder or Hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_class_arguments(DataConfig, "data")
    return parser


def main(argv: list[str] | None = None) -> None:
    run_command(partial(run, argv))


def run(argv: list[str] | None) -> None:
    from jsonargparse import ArgumentError

    parser = build_parser()
    try:
        cfg = parser.parse_args(argv)
        data = parser.instantiate(cfg).data
    except ArgumentError as error:
        raise UsageError(str(error)) from error
    build(data, cfg.tokenizer, cfg.out)
    parser.save(cfg, cfg.out / "config.yaml", overwrite=True)


def build(config: "DataConfig", tokenizer_name: str, out: Path) -> None:
    """Load the data, print the report, and write everything to ``out``."""
    from pipedraft.data_recipes.card import dataset_card
    from pipedraft.data_recipes.recipe import load_data
    from pipedraft.pretrained import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_name, field="tokenizer")
    make_folder("out", out)
    data = load_data(config, tokenizer, side_file=out / "bad_rows.jsonl")
    data.train.save_to_disk(out / "train")
    data.valid.save_to_disk(out / "valid")
    (out / "report.json").write_text(json.dumps(data.report.to_dict(), indent=2) + "\n")
    card = dataset_card(config, tokenizer_name, data.report)
    (out / "README.md").write_text(card, encoding="utf-8")
    print(data.report.summary())


if __name__ == "__main__":
    main()
