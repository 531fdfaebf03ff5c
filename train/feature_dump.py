"""Running a frozen target over a data set once, and writing the hidden states that heads need.

Or holding it ready for trainers that ask for them.
"""

# B batch, T positions of a padded row, M positions of sequences, H hidden, V vocabulary

import hashlib
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from pipedraft.cli import make_folder
from pipedraft.data_recipes.batch import collate, length_bucketed_batches
from pipedraft.data_recipes.recipe import TokenizedData, load_data
from pipedraft.files import publish
from pipedraft.models.target import capture_hidden
from pipedraft.train.__main__ import load_tokenizer_of, registry
from pipedraft.train.config import RunConfig
from pipedraft.train.feature_link import FeatureServer, Hello
from pipedraft.train.feature_reader import decoder_config, needed_layers, weightless_draft
from pipedraft.train.feature_shards import (
    INDEX,
    DumpSettings,
    Index,
    LayerError,
    ShardRecord,
    Sidecar,
    TeacherError,
    bytes_per_token,
    decode,
    difference,
    digest,
    encode,
    identity_of,
    publish_json,
    read_index,
    row_lengths,
    target_identity,
)
from pipedraft.train.launch import (
    load_frozen_target,
    make_accelerator,
    needs_others,
    on_main_process,
)
from pipedraft.train.loop import EVALUATED_ROWS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from pipedraft.train.features import FeatureOptions

TEACHER_POSITIONS = 256
"""Positions of a shard whose teacher is compared: two products with the LM head are not cheap."""


# -- what is dumped -------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A draft head that reads a dump: its name in tables, its run, and its network."""

    name: str
    run: RunConfig
    model: "DataclassInstance"


def layers_of(heads: list[Head], target_config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Layers that each head needs, and all of them together if there are several heads."""
    layers = {}
    for head in heads:
        draft = weightless_draft(registry()[head.run.method][1], head.model, target_config)
        layers[head.name] = needed_layers(draft, target_config.num_hidden_layers)
    if len(heads) > 1:
        layers["together"] = tuple(sorted(set().union(*layers.values())))
    return layers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows of every shard, and the description that all shards share."""

    identity: dict[str, int | str]
    settings: DumpSettings
    shards: list[list[list[int]]]
    """Batches of rows; validation rows are numbered after the training rows."""
    shard_tokens: list[int]
    bytes_per_token: int

    @property
    def size_bytes(self) -> int:
        return sum(self.shard_tokens) * self.bytes_per_token


def make_plan(
    run: RunConfig, data: TokenizedData, identity: dict[str, int | str], settings: DumpSettings
) -> Plan:
    """Cut the rows into batches and these into shards.

    Batches are those of the run's first epoch and of its evaluation: with one process, the hidden
    states are bit for bit what that epoch computes without a dump, if stored in fp32.
    """
    lengths = row_lengths(data.train) + row_lengths(data.valid)
    num_train, group = len(data.train), settings.batch_group
    batches = length_bucketed_batches(
        lengths[:num_train], run.batch_tokens, seed=run.seed, epoch=0, group=group
    )
    batches = list({rows[0]: rows for rows in batches}.values())  # some may come twice
    valid = range(num_train, len(lengths))
    batches += [list(valid[i : i + EVALUATED_ROWS]) for i in range(0, len(valid), EVALUATED_ROWS)]
    hidden_size = int(identity["hidden_size"])
    per_token = bytes_per_token(len(settings.layers), hidden_size, settings.dtype)
    shards: list[list[list[int]]] = [[]]
    tokens = [0]
    for rows in batches:
        if tokens[-1] * per_token >= settings.shard_mb * 1e6:
            shards.append([])
            tokens.append(0)
        shards[-1].append(rows)
        tokens[-1] += sum(lengths[row] for row in rows)
    return Plan(
        identity=identity,
        settings=settings,
        shards=shards,
        shard_tokens=tokens,
        bytes_per_token=per_token,
    )


def size_table(layers: dict[str, tuple[int, ...]], hidden_size: int) -> str:
    """Markdown: bytes per token in each dtype, and of 2,048 tokens in bf16."""
    lines = ["| head | layers | fp32 | bf16, fp16 | int8 | 2,048 tokens in bf16 |"]
    lines.append("|---|---|---|---|---|---|")
    for name, chosen in layers.items():
        sizes = [bytes_per_token(len(chosen), hidden_size, d) for d in ("fp32", "bf16", "int8")]
        cells = [name, ", ".join(map(str, chosen)), *(f"{size:,}" for size in sizes)]
        lines.append(f"| {' | '.join(cells)} | {size_text(2048 * sizes[1])} |")
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} TB"


# -- the target at work ---------------------------------------------------------------------


class States:
    """The frozen target at work on rows of tokens."""

    def __init__(self, target: PreTrainedModel, pad_id: int, accelerator: Accelerator) -> None:
        self.target, self.pad_id, self.accelerator = target, pad_id, accelerator
        self.config = target.get_decoder().config
        self.num_layers: int = self.config.num_hidden_layers

    @torch.no_grad()
    def of(self, ids: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states {layer: [M, H]}, row after row."""
        batch = collate(
            [{"input_ids": row, "loss_mask": [0] * len(row)} for row in ids], self.pad_id
        )
        ids_BT, device = batch["input_ids"], self.accelerator.device
        is_token_BT = torch.arange(ids_BT.shape[1]) < batch["lengths"][:, None]
        with self.accelerator.autocast():
            hidden = capture_hidden(self.target, ids_BT.to(device), layers)
        is_token_BT = is_token_BT.to(device)
        return {layer: hidden[layer][is_token_BT] for layer in layers}

    @torch.no_grad()
    def teacher_divergence(self, hidden_MH: Tensor, kept_MH: Tensor, count: int) -> Tensor:
        """KL(p || p of what was kept), p = softmax(LM head(norm(hidden))), at some positions."""
        chosen = torch.linspace(0, len(hidden_MH) - 1, min(count, len(hidden_MH))).long()
        norm, head_VH = self.target.get_decoder().norm, self.target.get_output_embeddings().weight
        exact_MV, kept_MV = (
            F.linear(norm(x_MH[chosen.to(x_MH.device)].to(norm.weight.dtype)), head_VH)
            .float()
            .log_softmax(-1)
            for x_MH in (hidden_MH, kept_MH)
        )
        kl_M = F.kl_div(kept_MV, exact_MV, log_target=True, reduction="none").sum(-1).clamp_min(0)
        return kl_M


# -- a folder of shards ---------------------------------------------------------------------


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
        self.records = on_main_process(accelerator, self._find_written)
        self._drop_damaged()
        on_main_process(accelerator, self._check_room)

    def _find_written(self) -> dict[int, ShardRecord]:
        """Records of the plan's shards that this dump has, by number."""
        found: dict[str, ShardRecord] = {}
        if (self.folder / INDEX).exists():
            index = read_index(self.folder)
            self._check(index, self.folder / INDEX)
            found = {record.file: record for record in index.shards}
        for path in self._sidecars():
            sidecar = msgspec.json.decode(path.read_bytes(), type=Sidecar)
            self._check(sidecar, path)
            found[sidecar.shard.file] = sidecar.shard
        numbers = range(len(self.plan.shards))
        return {n: found[name] for n in numbers if (name := shard_name(n)) in found}

    def _drop_damaged(self) -> None:
        """Forget shards that are not as they were written; each process reads its share of them."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        own = list(self.records)[rank::world]
        found = [(n, self.records[n].damage(self.folder, deep=True)) for n in own]
        for number, damage in sorted(gather_object(found)):
            if damage is not None:
                record = self.records.pop(number)
                self.damages.append(f"{record.file} is made again: {damage}")

    def _check_room(self) -> None:
        needed = self.plan.size_bytes - sum(record.bytes for record in self.records.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"out: {self.folder} has room for {size_text(free)}, the dump takes another "
                f"{size_text(needed)}; give --out on a larger disk, --dtype int8, or fewer heads"
            )

    def _sidecars(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.json"))

    def _check(self, entry: Index | Sidecar, path: Path) -> None:
        other = difference(entry.identity, self.plan.identity)
        for name, value in msgspec.structs.asdict(self.plan.settings).items():
            found = getattr(entry.settings, name)
            if other is None and found != value:
                other = f"the same with other settings ({name}: {found} != {value})"
        if other is not None:
            raise ValueError(
                f"out: {path} belongs to a dump of {other}; give another --out, or remove "
                f"{self.folder}"
            )

    def run(self, load: Callable[[], "States"]) -> Index:
        """Write what is missing, each process its share of the shards.

        Args:
            load: called if anything is missing.
        """
        accelerator, plan, started = self.accelerator, self.plan, time.monotonic()
        rank, world = accelerator.process_index, accelerator.num_processes
        mine = [n for n in range(len(plan.shards)) if n not in self.records][rank::world]
        bar = tqdm(
            total=sum(plan.shard_tokens[number] for number in mine),
            unit="token",
            unit_scale=True,
            disable=not accelerator.is_main_process or not mine,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,
        )
        if mine:
            states = load()
            with bar:
                for number in mine:
                    record = self._write_shard(number, states, bar)
                    path = (self.folder / record.file).with_suffix(".json")
                    publish_json(path, Sidecar(plan.identity, plan.settings, record))
        accelerator.wait_for_everyone()
        is_new = not (self.folder / INDEX).exists() or bool(self._sidecars())
        if accelerator.is_main_process and is_new:
            self._write_index(time.monotonic() - started)
        accelerator.wait_for_everyone()
        return read_index(self.folder)

    def _write_shard(self, number: int, states: "States", bar: tqdm) -> ShardRecord:
        layers, dtype = self.plan.settings.layers, self.plan.settings.dtype
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
                name = f"layer.{layer}"
                kept_MH = decode(stored[name], stored.get(f"{name}.scale"), hidden_MH.dtype)
                record.layers[str(layer)].add(hidden_MH, kept_MH)
                if layer == states.num_layers:
                    count = -(-TEACHER_POSITIONS // len(batches))
                    record.teacher.add(states.teacher_divergence(hidden_MH, kept_MH, count))
            num_tokens = len(hidden[layers[-1]])
            record.tokens += num_tokens
            bar.update(num_tokens)
        tensors = {name: torch.cat(pieces) for name, pieces in parts.items()}
        numbers = [row for rows in batches for row in rows]
        # A reader checks the rows that it reads, not whole shards.
        lengths = [len(row) for rows in batches for row in self._ids(rows)]
        for layer in layers:
            names = [name for name in parts if name.removesuffix(".scale") == f"layer.{layer}"]
            split = zip(*(tensors[name].split(lengths) for name in names), strict=True)
            digests = [digest(*pair) for pair in zip(numbers, split, strict=True)]
            tensors[f"layer.{layer}.digest"] = torch.tensor(digests)
        tensors["rows"] = torch.tensor(numbers)
        path = self.folder / record.file
        content = save(tensors)  # hashed in memory: the disk is not read again
        publish(path, lambda place: place.write_bytes(content))
        record.bytes, record.sha256 = len(content), hashlib.sha256(content).hexdigest()
        return record

    def _ids(self, rows: Sequence[int]) -> list[list[int]]:
        """Tokens of a batch, whose rows are all for training or all for validation."""
        num_train = len(self.data.train)
        if rows[0] < num_train:
            return self.data.train[list(rows)]["input_ids"]
        return self.data.valid[[row - num_train for row in rows]]["input_ids"]

    def _write_index(self, seconds: float) -> None:
        sidecars = self._sidecars()
        for path in sidecars:
            record = msgspec.json.decode(path.read_bytes(), type=Sidecar).shard
            self.records[int(path.stem.removeprefix("shard-"))] = record
        records = [self.records[number] for number in range(len(self.plan.shards))]
        index = Index(
            identity=self.plan.identity,
            settings=self.plan.settings,
            tokens=sum(record.tokens for record in records),
            bytes=sum(record.bytes for record in records),
            bytes_per_token=self.plan.bytes_per_token,
            seconds=seconds,
            errors={
                layer: LayerError.figures([record.layers[layer] for record in records])
                for layer in records[0].layers
            },
            teacher=TeacherError.figures([record.teacher for record in records]),
            shards=records,
        )
        publish_json(self.folder / INDEX, index)
        for path in sidecars:
            path.unlink()


# -- the commands ---------------------------------------------------------------------------


@needs_others()
def dump_features(
    own: "FeatureOptions", out: Path, heads: list[Head], layers: tuple[int, ...]
) -> None:
    """Write, or go on with, the folder of ``python -m pipedraft.train.features``."""
    run, model = heads[0].run, heads[0].model
    accelerator = make_accelerator(run)
    say = print if accelerator.is_main_process else lambda *_: None
    with accelerator.local_main_process_first():
        tokenizer = load_tokenizer_of(run, model)
        data = load_data(run.data, tokenizer)
    settings = DumpSettings(
        layers=list(layers),
        dtype=own.dtype,
        precision=accelerator.mixed_precision,
        target_dtype=run.target_dtype,
        target_quantization=run.target_quantization,
        batch_tokens=run.batch_tokens,
        batch_group=run.batch_group or 1,
        seed=run.seed,
        shard_mb=own.shard_mb,
    )
    identity = identity_of(run, decoder_config(run), tokenizer, data)
    plan = make_plan(run, data, identity, settings)
    say(
        f"{sum(plan.shard_tokens):,} tokens of {len(data.train) + len(data.valid):,} rows, layers "
        f"{', '.join(map(str, layers))} in {own.dtype}: {plan.bytes_per_token:,} bytes per token, "
        f"{size_text(plan.size_bytes)} in {len(plan.shards)} shards"
    )
    dump = Dump(plan, out, data, accelerator)
    for line in dump.damages:
        say(line)
    if dump.records:
        say(f"{len(dump.records)} shards are already there")

    def load() -> States:
        target = load_frozen_target(run, accelerator)
        for head in heads:
            registry()[head.run.method][1].check(head.model, target)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        return States(target, pad_id, accelerator)

    say(report(dump.run(load), out))


def serve_states(own: "FeatureOptions", port: int, run: RunConfig) -> None:
    """Run the target for trainers until the process ends."""
    accelerator, config = make_accelerator(run), decoder_config(run)
    pad_id = load_tokenizer_of(run, None).pad_token_id or 0
    states = States(load_frozen_target(run, accelerator), pad_id, accelerator)
    hello = Hello(target_identity(run, config), own.dtype)
    server = FeatureServer(states, hello, 2 * max(run.batch_tokens, 8 * run.data.max_length))
    said = f"serving states of {run.target} in {own.dtype} at"
    server.listen(own.host, port, lambda host, port: print(f"{said} {host}:{port}", flush=True))


def report(index: Index, folder: Path) -> str:
    """The errors of storing: of every layer, and of the teacher's distribution."""
    lines = ["| layer | largest error | relative RMS error |", "|---|---|---|"]
    for layer, error in index.errors.items():
        lines.append(f"| {layer} | {error['max_abs']:.3g} | {error['relative_rms']:.3g} |")
    teacher = index.teacher
    lines.append(
        f"teacher's distribution: KL {teacher['kl_mean']:.3g} on average, {teacher['kl_max']:.3g} "
        f"at most, over {int(teacher['positions']):,} positions"
    )
    lines.append(f"{folder}: {index.tokens:,} tokens, {size_text(index.bytes)}")
    return "\n".join(lines)
