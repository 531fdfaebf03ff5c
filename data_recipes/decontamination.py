"""Rows that contain a benchmark's prompt: word n-grams shared with the files that hold it.

As for GPT-3 (arXiv:2005.14165, appendix C): 13-grams of words in lower case without punctuation,
and what occurs very often is no overlap. Deviations: n-grams common to many prompts of one file are
the frame around its questions and are not looked for; a whole row is left out instead of a window
around the overlap; a prompt of 8 to 12 words must occur as a whole, one of fewer words is not
looked for.

W words, G n-grams of one length.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from pipedraft.data_recipes.filters import hash_ngrams, hash_words, prefix_sums, split_words
from pipedraft.data_recipes.sources import Source, list_files, read_source

CONTAMINATED = "contaminated"
NGRAM_WORDS = 13
MIN_WORDS = 8
# An n-gram of as many prompts of a file as this belongs to all its questions.
COMMON_PROMPTS = 10
# One bit of an int64 for each benchmark.
MAX_BENCHMARKS = 62
PROMPT_FIELDS = ("question", "prompt", "instruction", "problem", "text")


@dataclass(frozen=True)
class Benchmarks:
    """What must not occur in the data."""

    names: list[str]
    num_prompts: list[int]
    """Prompts of each benchmark, every turn counted."""
    num_short: list[int]
    """Those with fewer than ``MIN_WORDS`` words, which are not looked for."""
    tables: dict[int, tuple[np.ndarray, np.ndarray]]
    """Length in words -> [G] sorted hashes, and [G] int64 masks: bit b is set for benchmark b."""

    @property
    def fingerprint(self) -> str:
        digest = sha256(repr(self.names).encode())
        for length, (hashes, masks) in sorted(self.tables.items()):
            digest.update(b"%d" % length + hashes.tobytes() + masks.tobytes())
        return digest.hexdigest()

    def find(self, text: str) -> tuple[int, str]:
        """Mask of the benchmarks whose prompts the text contains, and the first words shared."""
        words = split_words(text)
        prefixes = prefix_sums(hash_words(words))
        mask, shared = 0, ""
        for length, (table, masks) in self.tables.items():
            grams_G = hash_ngrams(prefixes, length)
            places = np.minimum(np.searchsorted(table, grams_G), len(table) - 1)
            hits = np.flatnonzero(table[places] == grams_G)
            if len(hits):
                mask |= int(np.bitwise_or.reduce(masks[places[hits]]))
                shared = shared or " ".join(words[hits[0] : hits[0] + length])
        return mask, shared

    def names_of(self, mask: int) -> list[str]:
        return [name for bit, name in enumerate(self.names) if mask >> bit & 1]


def read_benchmarks(entries: Sequence[str | Source]) -> Benchmarks:
    """Index the prompts of files, folders (every file is a benchmark of its own) or Hub data sets.

    Raises:
        ValueError: a file cannot be read, or a row holds no prompt; it names file and row.
    """
    sources: list[tuple[str, Source]] = []
    for entry in entries:
        source = Source(path=entry) if isinstance(entry, str) else entry
        files = list_files(source)
        if files is None:
            parts = (source.path, source.subset or "", source.split)
            sources.append((":".join(part for part in parts if part), source))
        else:
            sources += [("/".join(f.parts[-2:]), Source(path=str(f))) for f in files]
    if len(sources) > MAX_BENCHMARKS:
        raise ValueError(
            f"data.decontaminate: {len(sources)} files; give {MAX_BENCHMARKS} at most, or "
            "concatenate some"
        )
    num_prompts, num_short = [], []
    masks: dict[int, dict[int, int]] = {}
    for bit, (_, source) in enumerate(sources):
        prompts = _read_prompts(source)
        num_prompts.append(len(prompts))
        counts: dict[int, Counter[int]] = {}
        num_short.append(0)
        for prompt in prompts:
            hashes_W = hash_words(split_words(prompt))
            if len(hashes_W) < MIN_WORDS:
                num_short[-1] += 1
                continue
            length = min(NGRAM_WORDS, len(hashes_W))
            grams = set(hash_ngrams(prefix_sums(hashes_W), length).tolist())
            counts.setdefault(length, Counter()).update(grams)
        for length, counter in counts.items():
            table = masks.setdefault(length, {})
            for gram, count in counter.items():
                if count < COMMON_PROMPTS:
                    table[gram] = table.get(gram, 0) | 1 << bit
    tables = {}
    for length, table in sorted(masks.items(), reverse=True):
        if table:
            hashes = np.array(sorted(table), dtype=np.uint64)
            bits = np.array([table[int(gram)] for gram in hashes], dtype=np.int64)
            tables[length] = (hashes, bits)
    return Benchmarks([name for name, _ in sources], num_prompts, num_short, tables)


def _read_prompts(source: Source) -> list[str]:
    """Every user turn of every row; the same prompt counts once."""
    found: dict[str, None] = {}
    for row in read_source(source):
        try:
            if row.error:
                raise ValueError(row.error)
            found.update(dict.fromkeys(prompts_of(json.loads(row.text))))
        except ValueError as error:
            raise ValueError(
                f"data.decontaminate: {row.location} holds no prompt ({error}); give JSONL rows "
                f"with turns, messages or one of {', '.join(PROMPT_FIELDS)}"
            ) from error
    if not found:
        raise ValueError(f"data.decontaminate: {source.path!r} holds no rows; leave it out")
    return list(found)


def prompts_of(row: Any) -> list[str]:
    """What the user says in one row of a benchmark."""
    if not isinstance(row, dict):
        raise ValueError("row is not an object")
    turns = row.get("messages") or row.get("conversations")
    if isinstance(turns, list):
        texts = [
            turn.get("content") or turn.get("value")
            for turn in turns
            if isinstance(turn, dict)
            and (turn.get("role") or turn.get("from")) in ("user", "human")
        ]
    elif row.get("turns"):
        texts = row["turns"]
    else:
        name = next((name for name in PROMPT_FIELDS if row.get(name)), None)
        if name is None:
            raise ValueError("none of the known fields")
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        if name == "instruction" and row.get("input"):
            texts = [f"{row[name]}\n\n{row['input']}"]
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError("a prompt is not a text")
    return texts
