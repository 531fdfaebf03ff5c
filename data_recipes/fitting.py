"""Fit data to a target by cutting long rows and refusing tokens beyond its embedding."""

import sys
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..pretrained import context_length
from .config import DataConfig
from .recipe import TokenizedData, load_data


def load_fitting(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedConfig,
    *,
    side_file: Path | None = None,
) -> TokenizedData:
    """Load data for a target. Cut rows with more tokens than its positions, and print a note.

    Raises:
        ValueError: as in ``load_data``, or if a token is beyond the target's embedding.
    """
    positions = context_length(target)
    is_longer = config.max_length > positions
    used = replace(config, max_length=positions) if is_longer else config
    data = load_data(used, tokenizer, side_file=side_file)
    if is_longer and data.report.length_max > positions:
        print(
            f"data.max_length: {config.max_length} is above the target's {positions} positions; "
            f"longer rows are cut ({data.report.truncated_rows} rows)",
            file=sys.stderr,
        )
    if len(tokenizer) > target.vocab_size:
        check_ids(data, target.vocab_size)
    return data


def check_ids(data: TokenizedData, vocab_size: int) -> None:
    """Raise ValueError for a token that has no row in the embedding."""
    for part in (data.train, data.valid):
        for _, ids in part.pieces("input_ids"):
            if (largest := ids.max(initial=0)) >= vocab_size:
                raise ValueError(
                    f"target: a row has token {largest}, and its embedding {vocab_size} rows; the "
                    "tokenizer has tokens that the model does not, give the model's own"
                )
