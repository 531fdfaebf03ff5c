"""Run the frozen target over the data once and keep what draft heads read of it.

Or hold it ready for trainers that ask for hidden states.

Exit status: 0 done; 2 bad input; 1 failure. Killed at any moment, the same command goes on.
"""

# M positions of sequences, H hidden

import hashlib
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pipedraft.errors import leave_at_interrupts, make_folder, run_command

if __name__ == "__main__":
    leave_at_interrupts()

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig

from pipedraft.data_recipes.batch import length_bucketed_batches
from pipedraft.data_recipes.recipe import TokenizedData, load_data
from pipedraft.files import publish
from pipedraft.options import Options, option
from pipedraft.train.__main__ import load_tokenizer_of, methods, quieten, registry
from pipedraft.train.config import RunConfig, parse_run
from pipedraft.train.feature_link import FeatureServer, Hello, States
from pipedraft.train.feature_reader import decoder_config, needed_layers, weightless_draft
from pipedraft.train.feature_shards import (
    INDEX,
    DumpSettings,
    Index,
    LayerError,
    ShardRecord,
    Sidecar,
    StoredDtype,
    TeacherError,
    bytes_per_token,
    decode,
    difference,
    digest,
    encode,
    identity_of,
    publish_json,
    read_index,
    report,
    row_lengths,
    size_table,
    size_text,
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

TEACHER_POSITIONS = 256
"""Positions of a shard whose teacher is compared: two products with the LM head are not cheap."""

EXAMPLE = """example:
  python -m pipedraft.train.features --config configs/spd/tiny.yaml --out out/features
  accelerate launch -m pipedraft.train --config configs/spd/tiny.yaml --features out/features

without a disk, the target in a process of its own, here or on another machine:
  python -m pipedraft.train.features serve --config configs/spd/tiny.yaml --port 7500
  accelerate launch -m pipedraft.train --config configs/spd/tiny.yaml --features 127.0.0.1:7500

--config, and every other option of python -m pipedraft.train, say what is dumped: the target, the
data and the layers that this head and those of --also read."""


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(Options):
    """Hidden states of the target, on disk or on demand, for --features of train."""

    PROG: ClassVar[str] = "python -m pipedraft.train.features"
    EXAMPLE: ClassVar[str] = EXAMPLE

    host: str = "127.0.0.1"
    """serve: address to listen on"""
    port: int | None = None
    """serve: port to listen on; 0 takes a free one"""
    out: Path | None = None
    """folder to write, or to go on with"""
    dtype: StoredDtype = "bf16"
    """of what is stored"""
    also: tuple[str, ...] = option((), metavar="CONFIG", repeated=True)
    """head that reads it too"""
    shard_mb: float = option(512.0, metavar="MB", flag="--shard_mb")
    """size of a shard"""
    estimate: bool = False
    """print bytes per token of every head and end"""


# -- what is dumped -------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A draft head that reads a dump: its name in tables, its run, and its network."""

    name: str
    run: RunConfig
    model: "DataclassInstance"


def read_heads(arguments: list[str], also: list[str]) -> list[Head]:
    """The heads that share a dump, the first one by the command line.

    Raises:
        ValueError: they have different targets, or none.
    """
    heads = [parse_run(arguments, methods(), EXAMPLE)[:2]]
    heads += [parse_run(["--config", path], methods(), EXAMPLE)[:2] for path in also]
    first = heads[0][0]
    for name, value in (("shard_target", first.shard_target), ("features", first.features)):
        if value:
            raise ValueError(
                f"{name}: {value}, but every process here runs the whole target; leave it out"
            )
    for run, _ in heads:
        if run.method == "language_model" or run.target is None:
            raise ValueError(
                f"method: {run.method!r} reads no target; give a draft head's --config"
            )
        if (run.target, run.target_revision) != (first.target, first.target_revision):
            raise ValueError(
                f"also: a head of {run.target}, the first one's target is {first.target}; make a "
                "dump for each target"
            )
    return [Head(f"{run.method} ({run.output_dir.name})", run, model) for run, model in heads]


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

    def run(self, load: Callable[[], States]) -> Index:
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

    def _write_shard(self, number: int, states: States, bar: tqdm) -> ShardRecord:
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
    own: FeatureOptions, out: Path, heads: list[Head], layers: tuple[int, ...]
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
        pad_id = tokenizer.pad_token_id or 0
        return States(target, pad_id, accelerator)

    say(report(dump.run(load), out))


def serve_states(own: FeatureOptions, port: int, run: RunConfig) -> None:
    """Run the target for trainers until the process ends."""
    accelerator, config = make_accelerator(run), decoder_config(run)
    pad_id = load_tokenizer_of(run, None).pad_token_id or 0
    states = States(load_frozen_target(run, accelerator), pad_id, accelerator)
    hello = Hello(target_identity(run, config), own.dtype)
    server = FeatureServer(states, hello, 2 * max(run.batch_tokens, 8 * run.data.max_length))
    said = f"serving states of {run.target} in {own.dtype} at"
    server.listen(own.host, port, lambda host, port: print(f"{said} {host}:{port}", flush=True))


def main() -> None:
    is_server = sys.argv[1:2] == ["serve"]
    own, rest = FeatureOptions.read_own(sys.argv[1 + is_server :])
    for name in ("host", "port"):
        value = getattr(own, name)
        if not is_server and value != getattr(FeatureOptions, name):
            raise ValueError(f"{name}: {value} without serve; give serve as first word, or drop it")
    heads = read_heads(rest, list(own.also))
    quieten()
    if is_server:
        if own.port is None:
            raise ValueError("port: missing; give for example --port 7500")
        serve_states(own, own.port, heads[0].run)
        return
    if own.shard_mb <= 0:
        raise ValueError(f"shard_mb: {own.shard_mb} is not positive; give for example 512")
    config = decoder_config(heads[0].run)
    layers = layers_of(heads, config)
    if own.estimate:
        print(size_table(layers, config.hidden_size))
        return
    if own.out is None:
        raise ValueError("out: missing; give a folder for the dump, or --estimate")
    *_, together = layers.values()
    dump_features(own, own.out, heads, together)


if __name__ == "__main__":
    run_command(main)
