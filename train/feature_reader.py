"""Training without the target's layers: hidden states come from a dump or a server instead."""

# B batch, T positions of a padded or packed row, M positions of texts, H hidden

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.models.draft import Draft, TargetReference
from pipedraft.models.layers import LayerConfig
from pipedraft.models.target import check_family
from pipedraft.models.target_part import load_target_part
from pipedraft.pretrained import load_config, read_config
from pipedraft.train.feature_link import FeaturesLost, RemoteStates, address_of
from pipedraft.train.feature_shards import (
    decode,
    difference,
    identity_of,
    open_shard,
    read_index,
    row_lengths,
    shard_damage,
    target_identity,
)
from pipedraft.train.launch import resolve_dtype


class Source(Protocol):
    """Where states come from: a folder of shards, or a server."""

    def fetch(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """As in a shard, ``layer.I`` [M, H] and perhaps ``layer.I.scale`` [M], row after row.

        Args:
            rows: places in the data set, training rows first.
            ids: the tokens of these rows.
        """


class Features:
    """What an objective asks for the states of a batch, instead of asking the target.

    The next batch is fetched while the step of the present one is computed.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._executor = ThreadPoolExecutor(1)
        self._expected: deque[tuple[list[int], Any]] = deque()
        self._under_way: tuple[list[int], Future] | None = None
        self._ready: tuple[list[int], dict[str, Tensor]] | None = None

    @property
    def may_be_lost(self) -> bool:
        return isinstance(self.source, RemoteStates)

    def expect(self, batches: Sequence[tuple[list[int], Any]]) -> None:
        """The batches that will be read after those announced before: rows, and their tokens."""
        self._expected.extend(batches)

    def read(
        self, batch: dict[str, Tensor], layers: Collection[int], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        """{layer: [B, T, H]}, zeros where there is no text.

        Args:
            batch: with ``rows``, the place of every text in the data set.
        """
        lengths, ids_BT = batch["lengths"].tolist(), batch["input_ids"]
        B, T = ids_BT.shape
        starts = _starts(batch)
        order, stored = self._fetched(batch)
        length_of = dict(zip(batch["rows"].tolist(), lengths, strict=True))
        place_of = dict(zip(batch["rows"].tolist(), starts, strict=True))
        places_M = torch.cat(
            [torch.arange(place_of[row], place_of[row] + length_of[row]) for row in order]
        ).to(ids_BT.device)
        read: dict[int, Tensor] = {}
        for layer in layers:
            scale_M = stored.get(f"layer.{layer}.scale")
            scale_M = None if scale_M is None else scale_M.to(ids_BT.device)
            kept_MH = decode(stored[f"layer.{layer}"].to(ids_BT.device), scale_M, dtype)
            hidden_PH = kept_MH.new_zeros(B * T, kept_MH.shape[1])
            read[layer] = hidden_PH.index_copy_(0, places_M, kept_MH).view(B, T, -1)
        return read

    def wait_for(self, batch: dict[str, Tensor]) -> FeaturesLost | None:
        """Fetch what ``read`` will return for this batch; why not, if its server is lost."""
        try:
            self._ready = self._fetched(batch)
        except FeaturesLost as lost:
            return lost
        return None

    def _fetched(self, batch: dict[str, Tensor]) -> tuple[list[int], dict[str, Tensor]]:
        """The rows of a batch in some order, and their states in this order."""
        wanted, under_way = batch["rows"].tolist(), self._under_way
        ready, self._ready = self._ready, None
        if ready is not None and sorted(ready[0]) == sorted(wanted):
            return ready
        if under_way is not None and sorted(under_way[0]) == sorted(wanted):
            found, self._under_way = (under_way[0], under_way[1].result()), None
        else:
            ids_P, lengths = batch["input_ids"].flatten().tolist(), batch["lengths"].tolist()
            places = zip(_starts(batch), lengths, strict=True)
            ids = [ids_P[at : at + size] for at, size in places]
            found = wanted, self.source.fetch(wanted, ids)
        if self._under_way is None and self._expected:
            rows, ids = self._expected.popleft()
            self._under_way = rows, self._executor.submit(self.source.fetch, rows, ids)
        return found


def _starts(batch: dict[str, Tensor]) -> list[int]:
    """Where each row of tokens begins in the flattened batch, padded or packed."""
    lengths, (B, T) = batch["lengths"].tolist(), batch["input_ids"].shape
    if B == 1 and len(lengths) > 1:
        return [0, *np.cumsum(lengths)[:-1].tolist()]
    return list(range(0, B * T, T))


class ShardFolder:
    """Reads rows of a dump, memory-mapped. A shard's SHA-256 is checked when it is first read."""

    def __init__(
        self, folder: Path, identity: dict[str, Any], layers: Collection[int], lengths: list[int]
    ) -> None:
        """
        Args:
            identity: of the run; see ``identity_of``.
            layers: that will be read.
            lengths: tokens of all rows, training rows first.

        Raises:
            ValueError: not a complete dump, one of another target or other data, or without these
                layers.
        """
        self.folder, self.index = folder, read_index(folder)
        other = difference(self.index["identity"], identity)
        if other is not None:
            raise ValueError(
                f"features: {folder} is of {other}; give the target and data of the dump, or make "
                "one of yours with python -m pipedraft.train.features"
            )
        stored = self.index["settings"]["layers"]
        missing = sorted(set(layers) - set(stored))
        if missing:
            raise ValueError(
                f"features: {folder} has the layers {stored}, this head also needs {missing}; dump "
                "again with its configuration as --also"
            )
        self.layers, self.records = sorted(layers), self.index["shards"]
        self.lengths = lengths
        self.shard_of_row = np.full(len(lengths), -1, dtype=np.int32)
        self.start_of_row = np.zeros(len(lengths), dtype=np.int64)
        self._open: dict[int, Any] = {}
        for number, record in enumerate(self.records):
            self._refuse(number, shard_damage(folder, record, deep=False))
            rows = open_shard(folder / record.file).get_tensor("rows").numpy()
            sizes = np.asarray(lengths)[rows]
            self.shard_of_row[rows] = number
            self.start_of_row[rows] = np.cumsum(sizes) - sizes
        if (self.shard_of_row < 0).any():
            raise ValueError(
                f"features: {folder} lacks row {int(np.argmin(self.shard_of_row))} of the data; "
                "run python -m pipedraft.train.features again"
            )

    def _refuse(self, number: int, damage: str | None) -> None:
        if damage is not None:
            raise ValueError(
                f"features: {self.folder / self.records[number].file} is damaged: {damage}; run "
                "python -m pipedraft.train.features again, which makes this shard anew"
            )

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            record = self.records[number]
            self._refuse(number, shard_damage(self.folder, record, deep=True))
            self._open[number] = open_shard(self.folder / record.file)
        return self._open[number]

    def fetch(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        names = [f"layer.{layer}" for layer in self.layers]
        if self.index["settings"]["dtype"] == "int8":
            names += [f"{name}.scale" for name in names]
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for row in rows:
            shard, start = self._shard(int(self.shard_of_row[row])), int(self.start_of_row[row])
            for name in names:
                part = shard.get_slice(name)[start : start + self.lengths[row]]
                parts[name].append(part)
        return {name: torch.cat(pieces) for name, pieces in parts.items()}


def weightless_draft(objective_class: Any, config: Any, target_config: Any) -> Draft:
    """The draft of a configuration: its shape, and what it reads of its target, but no weights.

    Args:
        target_config: of the target's decoder.
    """
    sizes = {
        "hidden_size": target_config.hidden_size,
        "vocab_size": target_config.vocab_size,
        "num_layers": target_config.num_hidden_layers,
    }
    with torch.device("meta"):
        layer = LayerConfig.from_target(target_config)
        return objective_class.make_draft(
            config, layer, TargetReference(name="", fingerprint=sizes)
        )


def needed_layers(draft: Any, num_layers: int) -> tuple[int, ...]:
    """Those that a dump must hold: the draft's and the teacher's, without the embeddings."""
    return tuple(sorted({*draft.taps, num_layers} - {0}))


def load_embedding_and_head(run: Any, objective_class: Any, config: Any, accelerator: Any) -> Any:
    """Embedding, final norm, LM head, and those layers that the draft starts as copies of.

    Raises:
        ValueError: nothing to load, or an option that is about the layers.
    """
    for name, value in (
        ("target_quantization", run.target_quantization),
        ("shard_target", run.shard_target),
    ):
        if value:
            raise ValueError(
                f"{name}: {value} with features, for which no layer of the target runs; leave out "
                "one of the two"
            )
    address_of(run.features)
    draft = weightless_draft(objective_class, config, decoder_config(run))
    return load_target_part(
        run.target,
        revision=run.target_revision,
        layers=draft.initial_layers,
        has_embedding=True,
        has_head=True,
        dtype=resolve_dtype(run, accelerator.mixed_precision),
        device=accelerator.device,
    )


def decoder_config(run: Any) -> Any:
    """Configuration of the target's decoder."""
    check_family(read_config(run.target, run.target_revision).get("model_type"), run.target)
    return load_config(run.target, run.target_revision).get_text_config()


def open_features(run: Any, objective: Any, tokenizer: Any, data: TokenizedData) -> Features:
    """
    Raises:
        ValueError: they do not belong to this target and these data, or lack a layer.
    """
    config = objective.target.get_decoder().config
    layers = needed_layers(objective.draft, config.num_hidden_layers)
    place = address_of(run.features)
    if place is not None:
        return Features(RemoteStates(place, target_identity(run, config), layers))
    identity = identity_of(run, config, tokenizer, data)
    lengths = row_lengths(data.train) + row_lengths(data.valid)
    return Features(ShardFolder(Path(run.features), identity, layers, lengths))
