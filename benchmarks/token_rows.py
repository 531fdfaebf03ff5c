"""Conversations as token ids in one safetensors file: no text, no tokenizer, read into memory.

Tensors: ``ids`` (uint16 or int32 [tokens], all rows joined), ``ends`` (int64 [rows], end offset per
row) and ``prompt`` (int32 [rows], tokens before the answer, excluded from the loss).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipedraft.data_recipes.card import DataReport
from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.data_recipes.rows import SEQUENCES
from pipedraft.data_recipes.table import Rows


def token_rows(ids: Sequence[np.ndarray], prompt_lengths: Sequence[int]) -> Rows:
    """Return rows of token ids with their loss masks.

    Args:
        ids: per row.
        prompt_lengths: prompt tokens per row, which are no labels; nor is any row's first token.
    """
    masks = [
        (np.arange(len(row)) >= max(1, length)).astype(np.int8)
        for row, length in zip(ids, prompt_lengths, strict=True)
    ]
    columns = {"input_ids": ids, "loss_mask": masks}
    schema = pyarrow.schema({name: SEQUENCES[name] for name in columns})
    return Rows([pyarrow.RecordBatch.from_pydict(columns, schema=schema)])


def write_token_rows(path: Path, ids: Sequence[np.ndarray], prompt_lengths: Sequence[int]) -> None:
    """Write rows; uint16 where the vocabulary fits, which halves the file."""
    flat = np.concatenate(ids)
    fits = flat.max() < 2**16
    tensors = {
        "ids": torch.from_numpy(flat.astype(np.uint16 if fits else np.int32)),
        "ends": torch.from_numpy(np.cumsum([len(row) for row in ids])),
        "prompt": torch.tensor(prompt_lengths, dtype=torch.int32),
    }
    save_file(tensors, path)


def read_token_rows(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """Return the rows of a file, int32 each, and their prompt lengths.

    Raises:
        ValueError: the tensors are missing or do not fit together.
    """
    with safe_open(path, "pt") as file:
        missing = {"ids", "ends", "prompt"} - set(file.keys())
        if missing:
            raise ValueError(f"{path}: no tensor {sorted(missing)[0]!r}; not a file of token rows")
        flat = file.get_tensor("ids").to(torch.int32).numpy()
        ends, prompt = file.get_tensor("ends").numpy(), file.get_tensor("prompt").tolist()
    if (
        len(ends) != len(prompt)
        or not len(ends)
        or ends[-1] != len(flat)
        or (np.diff(ends) < 1).any()
    ):
        raise ValueError(f"{path}: 'ends' does not cut 'ids' into rows; write the file again")
    return np.split(flat, ends[:-1]), prompt


def token_data(
    ids: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    *,
    num_valid: int,
    max_length: int,
    labels: str = "assistant",
    min_answer: int = 8,
) -> TokenizedData:
    """Return training and validation rows; the first ``num_valid`` rows are held out.

    Args:
        labels: "assistant": the answers alone. "all": training rows have the prompts as labels,
            too; validation rows never do.
        min_answer: minimum answer tokens; shorter rows are dropped.
    """
    cut = [(row[:max_length], n) for row, n in zip(ids, prompt_lengths, strict=True)]
    kept = [(row, n) for row, n in cut if len(row) - n >= min_answer]
    valid, train = kept[:num_valid], kept[num_valid:]
    prompts_of_train = [1 if labels == "all" else n for _, n in train]
    train_rows = token_rows([row for row, _ in train], prompts_of_train)
    valid_rows = token_rows([row for row, _ in valid], [n for _, n in valid])
    lengths = np.array([len(row) for row, _ in kept])
    p50, p90, p99, longest = (int(np.percentile(lengths, q)) for q in (50, 90, 99, 100))
    tokens = int(lengths.sum())
    report = DataReport(
        rows_read=len(ids),
        rows_kept=len(kept),
        bad_rows={},
        empty_mask_rows=len(cut) - len(kept),
        truncated_rows=sum(len(row) > max_length for row in ids),
        missing_turns=0,
        tokens=tokens,
        supervised_tokens=sum(int(mask.sum()) for _, mask in train_rows.pieces("loss_mask")),
        length_p50=p50,
        length_p90=p90,
        length_p99=p99,
        length_max=longest,
        sources={"own": {"rows_read": len(ids), "rows_kept": len(kept), "tokens": tokens}},
        licenses={"unknown": len(kept)},
    )
    report.train_rows, report.valid_rows = len(train), len(valid)
    return TokenizedData(train=train_rows, valid=valid_rows, report=report)
