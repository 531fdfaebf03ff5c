"""Run a frozen target over a data set once, and write hidden states for training heads."""

# B batch, T positions in a padded row, M positions in sequences, H hidden, V vocabulary

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ...data_recipes.batch import length_bucketed_batches
from ...data_recipes.fitting import load_fitting
from ...data_recipes.recipe import TokenizedData
from ...data_recipes.table import row_lengths
from ...errors import make_folder
from ...files import Values, publish, write_atomically
from ...models.target import capture_hidden
from ..batch import Batch, pick
from ..config import RunConfig
from ..launch import (
    load_frozen_target,
    make_accelerator,
    needs_others,
    on_main_process,
    resolve_dtype,
    uses_autocast,
)
from ..loop import EVALUATED_ROWS
from ..run import load_tokenizer_of, registry
from .options import FeatureOptions, Head
from .partial_target import decoder_config, needed_layers, weightless_draft
from .shards import (
    INDEX,
    Index,
    bytes_per_token,
    difference,
    encode,
    identity_of,
    open_shard,
    read_index,
    shard_name,
)
from .vllm import VllmStates, serve, states_request

if TYPE_CHECKING:
    pass


# -- contents -------------------------------------------------------------------------------


def layers_of(heads: list[Head], target_config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the layers that each head needs. For several heads, ``together`` has the union."""
    layers = {}
    for head in heads:
        draft = weightless_draft(registry()[head.run.method], head.model, target_config)
        layers[head.name] = needed_layers(draft, target_config.num_hidden_layers)
    if len(heads) > 1:
        layers["together"] = tuple(sorted(set().union(*layers.values())))
    return layers


def cut_in_shards(
    run: RunConfig, data: TokenizedData, settings: Values, token_bytes: int
) -> tuple[list[list[list[int]]], list[int]]:
    """Return each shard's batches and its token count. A batch is a list of row numbers.

    Validation rows are numbered after the training rows. The batches are the same as in the run's
    first epoch and its evaluation. So with one process and fp32 storage, training reads bit for bit
    the hidden states that it would compute itself.
    """
    lengths = row_lengths(data.train) + row_lengths(data.valid)
    num_train, group = len(data.train), settings["batch_group"]
    batches = length_bucketed_batches(
        lengths[:num_train], run.batch_tokens, seed=run.seed, epoch=0, group=group
    )
    batches = list({rows[0]: rows for rows in batches}.values())  # some may repeat
    valid = range(num_train, len(lengths))
    batches += [list(valid[i : i + EVALUATED_ROWS]) for i in range(0, len(valid), EVALUATED_ROWS)]
    shards: list[list[list[int]]] = [[]]
    tokens = [0]
    for rows in batches:
        if tokens[-1] * token_bytes >= settings["shard_mb"] * 1e6:
            shards.append([])
            tokens.append(0)
        shards[-1].append(rows)
        tokens[-1] += sum(lengths[row] for row in rows)
    return shards, tokens


def size_table(layers: dict[str, tuple[int, ...]], hidden_size: int) -> str:
    """Return a Markdown table with a token's bytes in each dtype and the size of 2,048 in bf16."""
    lines = ["| head | layers | fp32 | bf16 | int8 | 2,048 tokens in bf16 |"]
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


# -- running the target ---------------------------------------------------------------------


class States:
    """Frozen target that runs on rows of token ids."""

    def __init__(self, target: PreTrainedModel, accelerator: Accelerator) -> None:
        self.target, self.accelerator = target, accelerator

    @torch.no_grad()
    def of(self, ids: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Tensor]:
        """Return hidden states {layer: [M, H]}, concatenated over rows."""
        # Mask and padding are there for the batch alone: hidden states do not depend on them.
        rows = [{"input_ids": row, "loss_mask": [0] * len(row)} for row in ids]
        batch = Batch.padded(rows, 0).to(self.accelerator.device)
        with self.accelerator.autocast():
            hidden = capture_hidden(self.target, batch.ids_BT, layers)
        return {layer: pick(hidden[layer], batch.places() >= 0) for layer in layers}


# -- a folder of shards ---------------------------------------------------------------------


class Dump:
    """Writer that fills a dump folder.

    After a kill at any moment, a new writer keeps the complete shards and writes the missing ones.
    """

    def __init__(
        self,
        index: Index,
        shards: list[list[list[int]]],
        folder: Path,
        data: TokenizedData,
        accelerator: Accelerator,
    ) -> None:
        """
        Args:
            shards: each shard's batches, as lists of row numbers.

        Raises:
            ValueError: the folder contains another dump, or its disk has too little room.
        """
        self.index, self.shards, self.folder = index, shards, folder
        self.data, self.accelerator = data, accelerator
        make_folder("out", folder)
        self.damages: list[str] = []
        self.missing = on_main_process(accelerator, self._begin)

    def _begin(self) -> list[int]:
        """Write the index if there is none, and return the numbers of missing or damaged shards."""
        path = self.folder / INDEX
        if path.exists():
            self._check(read_index(self.folder), path)
        missing = []
        for number in range(len(self.shards)):
            shard = self.folder / shard_name(number)
            try:
                open_shard(shard)
            except ValueError:
                missing.append(number)
                if shard.exists():
                    self.damages.append(f"{shard.name} is damaged and made again")
        self._check_room(sum(self.index.shard_tokens[number] for number in missing))
        if not path.exists():
            # After the check for room: a refused dump leaves no index behind.
            text = json.dumps(msgspec.to_builtins(self.index), indent=1) + "\n"
            write_atomically(path, text.encode())
        return missing

    def _check_room(self, num_tokens: int) -> None:
        needed, free = num_tokens * self.index.bytes_per_token, shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"out: {self.folder} has room for {size_text(free)}, the dump takes another "
                f"{size_text(needed)}; give --out on a larger disk, --dtype int8, or fewer heads"
            )

    def _check(self, found_index: Index, path: Path) -> None:
        other = difference(found_index.identity, self.index.identity)
        for name, value in self.index.settings.items():
            found = found_index.settings.get(name)
            if other is None and found != value:
                other = f"the same with other settings ({name}: {found} != {value})"
        if other is not None:
            raise ValueError(
                f"out: {path} belongs to a dump of {other}; give another --out, or remove "
                f"{self.folder}"
            )

    def run(self, load: Callable[[], "States | VllmStates"]) -> None:
        """Write this process's share of the missing shards, then wait for the other processes.

        Args:
            load: loads the target. It is called only if this process has a shard to write.
        """
        accelerator = self.accelerator
        mine = self.missing[accelerator.process_index :: accelerator.num_processes]
        bar = tqdm(
            total=sum(self.index.shard_tokens[number] for number in mine),
            unit="token",
            unit_scale=True,
            disable=not accelerator.is_main_process or not mine,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,
        )
        if mine:
            states = load()
            with bar:
                for number in mine:
                    self._write_shard(number, states, bar)
            if isinstance(states, VllmStates):
                states.close()
        accelerator.wait_for_everyone()

    def _write_shard(self, number: int, states: "States | VllmStates", bar: tqdm) -> None:
        settings, batches = self.index.settings, self.shards[number]
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for rows in batches:
            hidden = states.of(self._ids(rows), settings["layers"])
            for layer, hidden_MH in hidden.items():
                for name, tensor in encode(hidden_MH, settings["dtype"], layer).items():
                    # Off the device at once: a whole shard may not fit into its memory.
                    parts[name].append(tensor.cpu())
            bar.update(len(hidden[settings["layers"][-1]]))
        tensors = {name: torch.cat(pieces) for name, pieces in parts.items()}
        tensors["rows"] = torch.tensor([row for rows in batches for row in rows])
        # By a rename: a killed dump leaves no partial shard under this name.
        publish(self.folder / shard_name(number), lambda place: save_file(tensors, place))

    def _ids(self, rows: Sequence[int]) -> list[list[int]]:
        """Return a batch's token ids. The rows must be all for training or all for validation."""
        num_train = len(self.data.train)
        if rows[0] < num_train:
            return self.data.train[list(rows)]["input_ids"]
        return self.data.valid[[row - num_train for row in rows]]["input_ids"]


# -- the commands ---------------------------------------------------------------------------


@needs_others()
def dump_features(
    own: FeatureOptions, out: Path, heads: list[Head], layers: tuple[int, ...]
) -> None:
    """Write the dump for ``pipedraft train features``, or complete an unfinished one in ``out``."""
    run = heads[0].run
    accelerator = make_accelerator(run)
    say = print if accelerator.is_main_process else lambda *_: None
    # Once per node: the other processes read what the first one cached.
    with accelerator.local_main_process_first():
        tokenizer = load_tokenizer_of(run)
        data = load_fitting(run.data, tokenizer, decoder_config(run))
    settings: Values = dict(
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
    token_bytes = bytes_per_token(len(layers), int(identity["hidden_size"]), own.dtype)
    shards, tokens = cut_in_shards(run, data, settings, token_bytes)
    index = Index(identity, settings, token_bytes, tokens)
    say(
        f"{sum(tokens):,} tokens of {len(data.train) + len(data.valid):,} rows, layers "
        f"{', '.join(map(str, layers))} in {own.dtype}: {token_bytes:,} bytes per token, "
        f"{size_text(sum(tokens) * token_bytes)} in {len(shards)} shards"
    )
    dump = Dump(index, shards, out, data, accelerator)
    for line in dump.damages:
        say(line)
    if len(dump.missing) < len(shards):
        say(f"{len(shards) - len(dump.missing)} shards are already there")

    def load() -> States | VllmStates:
        if own.engine is not None:
            request = vllm_request(run, layers, accelerator)
            return VllmStates(own.engine_python, request, decoder_config(run).hidden_size)
        target = load_frozen_target(run, accelerator)
        for head in heads:
            registry()[head.run.method].check(head.model, target)
        return States(target, accelerator)

    dump.run(load)


def vllm_request(run: RunConfig, layers: tuple[int, ...], accelerator: Accelerator) -> Values:
    """Return vLLM's settings for a run's target."""
    if run.target_quantization:
        raise ValueError(
            f"target_quantization: {run.target_quantization} with vLLM, which loads the target as "
            "it is stored; leave it out"
        )
    dtype = resolve_dtype(run, accelerator.mixed_precision, uses_autocast(accelerator))
    return states_request(
        str(run.target),
        layers,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        max_length=run.data.max_length,
        on_cpu=accelerator.device.type == "cpu",
    )


def serve_states(own: FeatureOptions, port: int, run: RunConfig, layers: tuple[int, ...]) -> int:
    """Serve the target's hidden states with vLLM, and return vLLM's exit status."""
    request = vllm_request(run, layers, make_accelerator(run))
    folder = own.out or Path(tempfile.mkdtemp(prefix="pipedraft-states-"))
    print(f"layers {', '.join(map(str, layers))} of {run.target}, by way of {folder}", flush=True)
    return serve(own.engine_python, request, folder, host=own.host, port=port)
