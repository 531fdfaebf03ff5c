"""Documents of a split as blocks of one length, for language-model training."""

from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from datasets import Dataset


def separator_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The pad token, or EOS for a tokenizer without one."""
    token_id = tokenizer.pad_token_id
    token_id = tokenizer.eos_token_id if token_id is None else token_id
    if token_id is None:
        raise ValueError(
            f"tokenizer: {tokenizer.name_or_path!r} has neither a pad nor an EOS token to separate "
            "packed documents with; set tokenizer.pad_token"
        )
    return token_id


def pack_documents(
    part: "Dataset", *, max_length: int, seed: int, separator: int, chat_sources: set[str]
) -> "Dataset":
    """Shuffle the documents, end each with the separator, concatenate, cut in blocks.

    Args:
        chat_sources: names of the sources of conversations, after which the separator is not
            supervised.
    """
    import pyarrow
    from datasets import Dataset, Features, List, Value

    features = Features(
        {
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("int8")),
            "source": Value("string"),
        }
    )
    if not len(part):
        return Dataset.from_dict({name: [] for name in features}, features=features)
    table = part.with_format("arrow")[:].combine_chunks()
    lengths = table["input_ids"].combine_chunks().value_lengths().to_numpy()
    ends = lengths.cumsum()
    flat_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
    flat_mask = table["loss_mask"].combine_chunks().flatten().to_numpy()
    names = table["source"].to_pylist()
    order = np.random.default_rng(seed).permutation(len(lengths))
    id_pieces: list[Any] = []
    mask_pieces: list[Any] = []
    for index in order:
        document = slice(ends[index] - lengths[index], ends[index])
        id_pieces += [flat_ids[document], [separator]]
        mask_pieces += [flat_mask[document], [names[index] not in chat_sources]]
    ids = np.concatenate(id_pieces).astype(np.int32)
    mask = np.concatenate(mask_pieces).astype(np.int8)
    starts = np.arange(0, len(ids), max_length)
    first_documents = np.searchsorted((lengths[order] + 1).cumsum(), starts, side="right")
    offsets = pyarrow.array(np.append(starts, len(ids)), type=pyarrow.int32())
    blocks = {
        "input_ids": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(ids)),
        "loss_mask": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(mask)),
        "source": pyarrow.array([names[order[first]] for first in first_documents]),
    }
    return Dataset(pyarrow.table(blocks).cast(features.arrow_schema))
