"""Draft one token at a time for requests in vLLM's scheduler process.

A draft is named by a word: ``ngram``, ``suffix``, ``head:FOLDER``, ``model:FOLDER`` or
``oracle:FILE:RATE``. A head drafts on the last rank (``head.py``). The oracle knows each prompt's
output from a file, and is right with probability RATE: it measures what a draft with this
acceptance rate would gain.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ..followers import Followers, LookupKind
from .gate import parse_draft

MAX_ORACLE_BYTES = 2**28


class Draft(Protocol):
    """Drafts for any number of requests, each named by its id."""

    def guess(self, name: str, text: Sequence[int], path: Sequence[int]) -> int | None:
        """Return the token after ``text`` and ``path``, or None.

        Args:
            text: verified tokens, the prompt's first. Between calls it only grows.
            path: earlier guesses behind the text, unverified.
        """

    def forget(self, name: str) -> None:
        """Drop a request's state, if it has any."""


class LookupDraft:
    """The most probable token after earlier occurrences of the context."""

    def __init__(self, kind: LookupKind, vocab_size: int) -> None:
        self._kind, self._vocab_size = kind, vocab_size
        self._read: dict[str, tuple[Followers, int]] = {}
        """Request -> counts of its text, and how many tokens they contain."""

    def guess(self, name: str, text: Sequence[int], path: Sequence[int]) -> int:
        followers, num_read = self._read.get(name) or (Followers(self._kind, self._vocab_size), 0)
        for token in text[num_read:]:
            followers.extend(token)
        self._read[name] = followers, len(text)
        return int(followers.estimate(path).argmax())

    def forget(self, name: str) -> None:
        self._read.pop(name, None)


class OracleDraft:
    """The right token with a given probability, otherwise a wrong one.

    FILE: ``{"runs": [{"prompt_ids": [..], "out": [..]}, ..]}``.
    """

    def __init__(self, file: Path, rate: float, vocab_size: int) -> None:
        if file.stat().st_size > MAX_ORACLE_BYTES:
            raise ValueError(f"draft: {str(file)!r} is larger than {MAX_ORACLE_BYTES} bytes")
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._sizes: set[int] = set()
        for run in json.loads(file.read_text())["runs"]:
            prompt = tuple(run["prompt_ids"])
            self._texts[prompt] = [*prompt, *run["out"]]
        self._sizes = {len(prompt) for prompt in self._texts}
        self._rate, self._vocab_size = rate, vocab_size
        self._random = random.Random(0)
        self._found: dict[str, list[int]] = {}

    def guess(self, name: str, text: Sequence[int], path: Sequence[int]) -> int | None:
        if name not in self._found:
            known = (self._texts.get(tuple(text[:size])) for size in self._sizes)
            self._found[name] = max(filter(None, known), key=len, default=[])
        whole, place = self._found[name], len(text) + len(path)
        if place >= len(whole):
            return None
        is_right = self._random.random() < self._rate
        return whole[place] if is_right else (whole[place] + 1) % self._vocab_size

    def forget(self, name: str) -> None:
        self._found.pop(name, None)


class ModelDraft:
    """Greedy tokens of a small causal LM with the target's tokenizer, cached per request."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        from ...pretrained import load_model

        self._model = load_model(folder, dtype=torch.float32, field="draft").eval()
        if self._model.config.get_text_config().vocab_size != vocab_size:
            raise ValueError(f"draft: {folder!r} has another vocabulary size than the target")
        self._cached: dict[str, tuple[Any, list[int]]] = {}
        """Request -> cache, and the tokens it contains."""

    @torch.inference_mode()
    def guess(self, name: str, text: Sequence[int], path: Sequence[int]) -> int:
        from transformers import DynamicCache

        whole = [*text, *path]
        cache, tokens = self._cached.get(name) or (DynamicCache(config=self._model.config), [])
        pairs = zip(tokens, whole[:-1], strict=False)  # the last token is always computed
        shared = next(
            (place for place, (a, b) in enumerate(pairs) if a != b),
            min(len(tokens), len(whole) - 1),
        )
        if len(tokens) > shared:
            cache.crop(shared - len(tokens))  # negative: tokens to remove
        ids = torch.tensor([whole[shared:]])
        logits_V = self._model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        self._cached[name] = cache, whole
        return int(logits_V.argmax())

    def forget(self, name: str) -> None:
        self._cached.pop(name, None)


class HeadDraft:
    """Draft tokens that the last rank has sent with its outputs."""

    def __init__(self) -> None:
        self._chains: dict[str, tuple[int, list[int]]] = {}

    def receive(self, chains: Mapping[str, tuple[int, list[int]]]) -> None:
        """Take each request's newest draft tokens, with the place of the first."""
        self._chains |= chains

    def guess(self, name: str, text: Sequence[int], path: Sequence[int]) -> int | None:
        """Return the newest draft token for this place, whatever earlier ones said before it."""
        start, tokens = self._chains.get(name, (0, []))
        index = len(text) + len(path) - start
        return tokens[index] if 0 <= index < len(tokens) else None

    def forget(self, name: str) -> None:
        self._chains.pop(name, None)


def make_draft(text: str, *, vocab_size: int) -> Draft:
    """Make the draft with a name as in the module's docstring, for the target's vocabulary."""
    kind, *arguments = parse_draft(text)
    if kind == "oracle":
        file, rate = arguments
        return OracleDraft(Path(file), float(rate), vocab_size)
    if kind == "head":
        return HeadDraft()
    if kind == "model":
        return ModelDraft(arguments[0], vocab_size)
    return LookupDraft("ngram" if kind == "ngram" else "suffix", vocab_size)
