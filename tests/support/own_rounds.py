"""Draft tokens of our own decoding by round, for stand-ins of other engines."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from pipedraft.eval.parity_rows import Decoding
from pipedraft.eval.tasks import Prompt, encode_turn, load_tasks


def own_rounds(
    decoding: Decoding, file: Path
) -> Iterator[tuple[Prompt, list[int], list[int], dict[int, list[int]]]]:
    """Decode a file's prompts. Yield each with its ids, its output, and root -> draft tokens."""
    for prompt in load_tasks([str(file)], None, None)[file.stem]:
        ids = encode_turn(decoding.tokenizer, prompt, [])
        with torch.inference_mode():
            out, drafted = decoding.run(ids)
        rounds = defaultdict(list)
        for one in drafted:
            rounds[one.root].append(one.token)
        yield prompt, ids, out, rounds
