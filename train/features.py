"""Run the frozen target over the data once and keep what draft heads read of it.

Exit status: 0 done; 2 bad input; 1 failure. Killed at any moment, the same command goes on.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipedraft.errors import run_command
from pipedraft.options import Options, option

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
    dtype: Literal["fp32", "bf16", "fp16", "int8"] = "bf16"
    """of what is stored"""
    also: tuple[str, ...] = option((), metavar="CONFIG", repeated=True)
    """head that reads it too"""
    shard_mb: float = option(512.0, metavar="MB", flag="--shard_mb")
    """size of a shard"""
    estimate: bool = False
    """print bytes per token of every head and end"""


def read_heads(arguments: list[str], also: list[str]) -> list[tuple[str, Any, Any]]:
    """(name, run, network) of the heads that share a dump.

    Raises:
        ValueError: they have different targets, or none.
    """
    from pipedraft.train.__main__ import methods
    from pipedraft.train.config import parse_run

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
    return [(f"{run.method} ({run.output_dir.name})", run, model) for run, model in heads]


def layers_of(heads: list[tuple[str, Any, Any]], target_config: Any) -> dict[str, tuple[int, ...]]:
    """Layers that each head needs, and all of them together if there are several heads."""
    from pipedraft.train.__main__ import registry
    from pipedraft.train.feature_reader import needed_layers, weightless_draft

    layers = {}
    for name, run, model in heads:
        draft = weightless_draft(registry()[run.method][1], model, target_config)
        layers[name] = needed_layers(draft, target_config.num_hidden_layers)
    if len(heads) > 1:
        layers["together"] = tuple(sorted(set().union(*layers.values())))
    return layers


def size_table(layers: dict[str, tuple[int, ...]], hidden_size: int) -> str:
    """Markdown: bytes per token in each dtype, and of 2,048 tokens in bf16."""
    from pipedraft.train.feature_dump import size_text
    from pipedraft.train.feature_shards import bytes_per_token

    lines = ["| head | layers | fp32 | bf16, fp16 | int8 | 2,048 tokens in bf16 |"]
    lines.append("|---|---|---|---|---|---|")
    for name, chosen in layers.items():
        sizes = [bytes_per_token(len(chosen), hidden_size, d) for d in ("fp32", "bf16", "int8")]
        cells = [name, ", ".join(map(str, chosen)), *(f"{size:,}" for size in sizes)]
        lines.append(f"| {' | '.join(cells)} | {size_text(2048 * sizes[1])} |")
    return "\n".join(lines)


def dump_features(
    own: FeatureOptions, out: Path, heads: list[tuple[str, Any, Any]], layers: tuple[int, ...]
) -> None:
    from pipedraft.data_recipes.recipe import load_data
    from pipedraft.train.__main__ import load_tokenizer_of, registry
    from pipedraft.train.feature_dump import Dump, States, make_plan, size_text
    from pipedraft.train.feature_reader import decoder_config
    from pipedraft.train.feature_shards import identity_of
    from pipedraft.train.launch import load_frozen_target, make_accelerator

    _, run, model = heads[0]
    accelerator = make_accelerator(run)
    say = print if accelerator.is_main_process else lambda *_: None
    with accelerator.main_process_first():
        tokenizer = load_tokenizer_of(run, model)
        data = load_data(run.data, tokenizer)

    plan = make_plan(
        run,
        data,
        identity_of(run, decoder_config(run), tokenizer, data),
        layers=layers,
        dtype=own.dtype,
        precision=accelerator.mixed_precision,
        shard_mb=own.shard_mb,
    )
    say(
        f"{plan.num_tokens:,} tokens of {len(data.train) + len(data.valid):,} rows, layers "
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
        for _, other_run, other_model in heads:
            registry()[other_run.method][1].check(other_model, target)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        return States(target, pad_id, accelerator)

    say(report(dump.run(load), out))


def serve_states(own: FeatureOptions, port: int, run: Any) -> None:
    """Run the target for trainers until the process ends."""
    from pipedraft.train.__main__ import load_tokenizer_of
    from pipedraft.train.feature_dump import States
    from pipedraft.train.feature_link import FeatureServer, Hello
    from pipedraft.train.feature_reader import decoder_config
    from pipedraft.train.feature_shards import target_identity
    from pipedraft.train.launch import load_frozen_target, make_accelerator

    accelerator, config = make_accelerator(run), decoder_config(run)
    pad_id = load_tokenizer_of(run, None).pad_token_id or 0
    states = States(load_frozen_target(run, accelerator), pad_id, accelerator)
    server = FeatureServer(
        states,
        Hello(target_identity(run, config), own.dtype),
        vocab_size=config.vocab_size,
        max_tokens=2 * max(run.batch_tokens, 8 * run.data.max_length),
        max_positions=config.max_position_embeddings,
    )
    server.listen(
        own.host,
        port,
        lambda host, port: print(
            f"serving states of {run.target} in {own.dtype} at {host}:{port}", flush=True
        ),
    )


def report(index: dict[str, Any], folder: Path) -> str:
    """What storing cost: errors of every layer, and of the teacher's distribution."""
    from pipedraft.train.feature_dump import size_text

    lines = ["| layer | largest error | relative RMS error |", "|---|---|---|"]
    for layer, error in index["errors"].items():
        lines.append(f"| {layer} | {error['max_abs']:.3g} | {error['relative_rms']:.3g} |")
    teacher = index["teacher"]
    lines.append(
        f"teacher's distribution: KL {teacher['kl_mean']:.3g} on average, {teacher['kl_max']:.3g} "
        f"at most, over {teacher['positions']:,} positions"
    )
    lines.append(f"{folder}: {index['tokens']:,} tokens, {size_text(index['bytes'])}")
    return "\n".join(lines)


def main() -> None:
    from pipedraft.train.__main__ import quieten

    is_server = sys.argv[1:2] == ["serve"]
    own, rest = FeatureOptions.read_own(sys.argv[1 + is_server :])
    heads = read_heads(rest, list(own.also))
    quieten()
    if is_server:
        if own.port is None:
            raise ValueError("port: missing; give for example --port 7500")
        serve_states(own, own.port, heads[0][1])
        return
    if own.shard_mb <= 0:
        raise ValueError(f"shard_mb: {own.shard_mb} is not positive; give for example 512")
    from pipedraft.train.feature_reader import decoder_config

    config = decoder_config(heads[0][1])
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
