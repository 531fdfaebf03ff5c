"""Running a frozen target over a data set once, and writing the states that draft heads need."""

# B batch, T positions of a padded row, M positions of texts, H hidden, V vocabulary

import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from tqdm import tqdm

from pipedraft.data_recipes.batch import collate, length_bucketed_batches
from pipedraft.data_recipes.recipe import TokenizedData
from pipedraft.errors import make_folder
from pipedraft.files import file_sha256
from pipedraft.models.cpu import tuned
from pipedraft.models.target import capture_hidden
from pipedraft.train.feature_shards import (
    INDEX,
    LayerError,
    ShardRecord,
    TeacherError,
    bytes_per_token,
    decode,
    difference,
    encode,
    publish_json,
    publish_tensors,
    read_index,
    row_lengths,
    shard_damage,
)

TEACHER_POSITIONS = 256
"""Of each shard, spread over its rows: two products with the LM head are not cheap."""
VALID_BATCH = 8
"""Rows of a batch of the loop's evaluation."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which rows go into which shard, and what all shards say about themselves."""

    identity: dict[str, Any]
    settings: dict[str, Any]
    shards: list[list[list[int]]]
    """Batches of rows; validation rows are numbered after the training rows."""
    shard_tokens: list[int]
    bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        return sum(self.shard_tokens)

    @property
    def size_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token


def make_plan(
    run: Any,
    data: TokenizedData,
    identity: dict[str, Any],
    *,
    layers: Sequence[int],
    dtype: str,
    precision: str,
    shard_mb: float,
) -> Plan:
    """Batches are those of the run's first epoch and of its evaluation: with one process, the
    states are bit for bit what that epoch computes without a dump, if stored in fp32.

    Args:
        layers: without the embeddings.
    """
    lengths = row_lengths(data.train) + row_lengths(data.valid)
    num_train, group = len(data.train), run.batch_group or 1
    batches = length_bucketed_batches(
        lengths[:num_train], run.batch_tokens, seed=run.seed, epoch=0, group=group
    )
    batches = list({rows[0]: rows for rows in batches}.values())  # some may come twice
    valid = range(num_train, len(lengths))
    batches += [list(valid[i : i + VALID_BATCH]) for i in range(0, len(valid), VALID_BATCH)]
    per_token = bytes_per_token(len(layers), identity["hidden_size"], dtype)
    shards: list[list[list[int]]] = [[]]
    tokens = [0]
    for rows in batches:
        if tokens[-1] * per_token >= shard_mb * 1e6:
            shards.append([])
            tokens.append(0)
        shards[-1].append(rows)
        tokens[-1] += sum(lengths[row] for row in rows)
    settings = {
        "layers": list(layers),
        "dtype": dtype,
        "precision": precision,
        "target_dtype": run.target_dtype,
        "target_quantization": run.target_quantization,
        "batch_tokens": run.batch_tokens,
        "batch_group": group,
        "seed": run.seed,
        "shard_mb": shard_mb,
    }
    return Plan(
        identity=identity,
        settings=settings,
        shards=shards,
        shard_tokens=tokens,
        bytes_per_token=per_token,
    )


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


class Dump:
    """A folder that is being filled. Killed at any moment, it goes on with what is complete."""

    def __init__(
        self, plan: Plan, folder: Path, data: TokenizedData, accelerator: Accelerator
    ) -> None:
        """
        Raises:
            ValueError: the folder holds another dump, or its disk has too little room.
        """
        self.plan, self.folder, self.data, self.accelerator = plan, folder, data, accelerator
        make_folder("out", folder)
        self.damages: list[str] = []
        found: list[Any] = [{}, None]
        if accelerator.is_main_process:  # it reads every byte, and the others may not begin before
            try:
                found = [self._find_complete(), None]
                self._check_room(found[0])
            except ValueError as error:
                found = [{}, str(error)]
        self.records: dict[int, ShardRecord]
        self.records, refusal = broadcast_object_list(found)
        if refusal is not None:
            raise ValueError(refusal)

    def _check_room(self, records: dict[int, ShardRecord]) -> None:
        plan, folder = self.plan, self.folder
        needed = plan.size_bytes - sum(record.bytes for record in records.values())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(
                f"out: {folder} has room for {size_text(free)}, the dump takes another "
                f"{size_text(needed)}; give --out on a larger disk, --dtype int8, or fewer heads"
            )

    def _find_complete(self) -> dict[int, ShardRecord]:
        """Shards that are there and as they were written, by number."""
        found: dict[str, ShardRecord] = {}
        if (self.folder / INDEX).exists():
            index = read_index(self.folder)
            self._check(index, self.folder / INDEX)
            found = {record.file: record for record in index["shards"]}
        for path in sorted(self.folder.glob("shard-*.json")):
            entry = json.loads(path.read_text())
            self._check(entry, path)
            found[entry["shard"]["file"]] = ShardRecord.from_dict(entry["shard"])
        complete = {}
        for number in range(len(self.plan.shards)):
            if shard_name(number) not in found:
                continue
            record = found[shard_name(number)]
            if (damage := shard_damage(self.folder, record, deep=True)) is None:
                complete[number] = record
            else:
                self.damages.append(f"{record.file} is made again: {damage}")
        return complete

    def _check(self, entry: dict[str, Any], path: Path) -> None:
        other = difference(entry["identity"], self.plan.identity)
        for name, value in self.plan.settings.items():
            if other is None and entry["settings"].get(name) != value:
                found = entry["settings"].get(name)
                other = f"the same with other settings ({name}: {found} != {value})"
        if other is not None:
            raise ValueError(
                f"out: {path} belongs to a dump of {other}; give another --out, or remove "
                f"{self.folder}"
            )

    def run(self, load: Callable[[], "States"]) -> dict[str, Any]:
        """Write what is missing, each process its share of the shards.

        Args:
            load: called if anything is missing.

        Returns:
            The index.
        """
        accelerator, started = self.accelerator, time.monotonic()
        rank, world = accelerator.process_index, accelerator.num_processes
        mine = [n for n in range(len(self.plan.shards)) if n not in self.records][rank::world]
        bar = tqdm(
            total=sum(self.plan.shard_tokens[number] for number in mine),
            unit="token",
            unit_scale=True,
            disable=not accelerator.is_main_process or not mine,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,
        )
        states = load() if mine else None
        with bar:
            for number in mine:
                assert states is not None
                record = self._write_shard(number, states, bar)
                entry = {"identity": self.plan.identity, "settings": self.plan.settings}
                path = (self.folder / record.file).with_suffix(".json")
                publish_json(path, {**entry, "shard": record.to_dict()})
        accelerator.wait_for_everyone()
        is_new = not (self.folder / INDEX).exists() or any(self.folder.glob("shard-*.json"))
        if accelerator.is_main_process and is_new:
            self._write_index(time.monotonic() - started)
        accelerator.wait_for_everyone()
        return read_index(self.folder)

    def _write_shard(self, number: int, states: "States", bar: tqdm) -> ShardRecord:
        layers, dtype = self.plan.settings["layers"], self.plan.settings["dtype"]
        batches = self.plan.shards[number]
        record = ShardRecord(file=shard_name(number), sha256="", bytes=0, tokens=0)
        record.layers = {str(layer): LayerError() for layer in layers}
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for rows in batches:
            hidden = states.of(self._ids(rows), layers)
            for layer, hidden_MH in hidden.items():
                stored = encode(hidden_MH, dtype, layer)
                for name, tensor in stored.items():
                    parts[name].append(tensor.cpu())
                kept_MH = decode(*_pair(stored, layer), hidden_MH.dtype)
                record.layers[str(layer)].add(hidden_MH, kept_MH)
                if layer == states.num_layers:
                    count = -(-TEACHER_POSITIONS // len(batches))
                    record.teacher.merge(states.teacher_error(hidden_MH, kept_MH, count))
            num_tokens = len(hidden[layers[-1]])
            record.tokens += num_tokens
            bar.update(num_tokens)
        tensors = {name: torch.cat(pieces) for name, pieces in parts.items()}
        tensors["rows"] = torch.tensor([row for rows in batches for row in rows])
        path = self.folder / record.file
        publish_tensors(path, tensors)
        record.bytes, record.sha256 = path.stat().st_size, file_sha256(path)
        return record

    def _ids(self, rows: Sequence[int]) -> list[list[int]]:
        """Of a batch, whose rows are all for training or all for validation."""
        num_train = len(self.data.train)
        if rows[0] < num_train:
            return self.data.train[list(rows)]["input_ids"]
        return self.data.valid[[row - num_train for row in rows]]["input_ids"]

    def _write_index(self, seconds: float) -> None:
        sidecars = sorted(self.folder.glob("shard-*.json"))
        for path in sidecars:
            record = ShardRecord.from_dict(json.loads(path.read_text())["shard"])
            self.records[int(path.stem.removeprefix("shard-"))] = record
        records = [self.records[number] for number in range(len(self.plan.shards))]
        layers: dict[str, LayerError] = defaultdict(LayerError)
        teacher = TeacherError()
        for record in records:
            teacher.merge(record.teacher)
            for layer, error in record.layers.items():
                layers[layer].merge(error)
        index = {
            "identity": self.plan.identity,
            "settings": self.plan.settings,
            "tokens": sum(record.tokens for record in records),
            "bytes": sum(record.bytes for record in records),
            "bytes_per_token": self.plan.bytes_per_token,
            "seconds": seconds,
            "errors": {layer: error.figures() for layer, error in layers.items()},
            "teacher": teacher.figures(),
            "shards": [record.to_dict() for record in records],
        }
        publish_json(self.folder / INDEX, index)
        for path in sidecars:
            path.unlink()


def _pair(stored: dict[str, Tensor], layer: int) -> tuple[Tensor, Tensor | None]:
    return stored[f"layer.{layer}"], stored.get(f"layer.{layer}.scale")


class States:
    """The frozen target at work on rows of tokens."""

    def __init__(self, target: Any, pad_id: int, accelerator: Accelerator) -> None:
        self.target, self.pad_id, self.accelerator = target, pad_id, accelerator
        self.num_layers: int = target.get_decoder().config.num_hidden_layers

    @torch.no_grad()
    def of(self, ids: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Tensor]:
        """{layer: [M, H]}, row after row."""
        batch = collate(
            [{"input_ids": row, "loss_mask": [0] * len(row)} for row in ids], self.pad_id
        )
        ids_BT, device = batch["input_ids"], self.accelerator.device
        is_text_BT = torch.arange(ids_BT.shape[1]) < batch["lengths"][:, None]
        with self.accelerator.autocast(), tuned(device):
            hidden = capture_hidden(self.target, ids_BT.to(device), layers)
        is_text_BT = is_text_BT.to(device)
        return {layer: hidden[layer][is_text_BT] for layer in layers}

    @torch.no_grad()
    def teacher_error(self, hidden_MH: Tensor, kept_MH: Tensor, count: int) -> TeacherError:
        """KL(p || p of what was kept), p = softmax(LM head(norm(state))), at some positions."""
        chosen = torch.linspace(0, len(hidden_MH) - 1, min(count, len(hidden_MH))).long()
        norm, head_VH = self.target.get_decoder().norm, self.target.get_output_embeddings().weight
        exact_MV, kept_MV = (
            F.linear(norm(x_MH[chosen.to(x_MH.device)].to(norm.weight.dtype)), head_VH)
            .float()
            .log_softmax(-1)
            for x_MH in (hidden_MH, kept_MH)
        )
        kl_M = F.kl_div(kept_MV, exact_MV, log_target=True, reduction="none").sum(-1).clamp_min(0)
        return TeacherError(len(chosen), float(kl_M.double().sum()), float(kl_M.max()))


def size_text(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} TB"
