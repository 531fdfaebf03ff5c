"""Options of `pipedraft train features`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ...options import Options, flag_of, option
from ..config import RunConfig, check_run_flags, parse_run
from ..methods import methods

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXAMPLE = """example:
  pipedraft train features --config configs/spd/tiny.yaml --out out/features
  pipedraft train --config configs/spd/tiny.yaml --features out/features
  pipedraft train features --config configs/spd/tiny.yaml --engine vllm --out out/features

Without a disk: the target runs in its own process, here or on another machine:
  pipedraft train features serve --config configs/spd/tiny.yaml --port 7500
  pipedraft train --config configs/spd/tiny.yaml --features http://127.0.0.1:7500

--config and every other option of pipedraft train decide what is stored: the target, the data, and
the layers that this head and the heads in --also read."""


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(Options):
    """Store the target's hidden states, or serve them with vLLM, for --features of train."""

    PROG: ClassVar[str] = "pipedraft train features"
    EXAMPLE: ClassVar[str] = EXAMPLE

    host: str = "127.0.0.1"
    """serve: address to listen on"""
    port: int | None = None
    """serve: port to listen on"""
    out: Path | None = None
    """folder to write or resume; serve: folder for files in transit (default: a temporary one)"""
    dtype: Literal["fp32", "bf16", "int8"] = "bf16"
    """storage dtype"""
    also: tuple[str, ...] = option((), metavar="CONFIG", repeated=True)
    """configuration of another head that will read the same states; repeatable"""
    shard_mb: float = option(512.0, metavar="MB")
    """size per file, in MB"""
    engine: Literal["vllm"] | None = None
    """run the target in this engine; default: in this process"""
    engine_python: Path = option(Path("out/engines/vllm/bin/python"), metavar="FILE")
    """python executable in the environment with the engine"""
    estimate: bool = False
    """print every head's bytes per token and exit"""


@dataclass(frozen=True)
class Head:
    """Draft head to train from a dump, with its name in tables, its run and its network."""

    name: str
    run: RunConfig
    model: "DataclassInstance"


def read_heads(arguments: list[str], also: list[str]) -> list[Head]:
    """Return the heads for one dump, from the command line and from each file in ``also``."""
    check_run_flags(arguments, methods(), [flag_of(part) for part in fields(FeatureOptions)])
    heads = [parse_run(arguments, methods(), EXAMPLE)[:2]]
    heads += [parse_run(["--config", path], methods(), EXAMPLE)[:2] for path in also]
    first = heads[0][0]
    for name, value in (("shard_target", first.shard_target), ("features", first.features)):
        if value:
            raise ValueError(
                f"{name}: {value}, but every process here runs the whole target; leave it out"
            )
    for run, _ in heads:
        if run.target is None:
            raise ValueError("target: missing; name the folder or Hub id of the frozen target")
        if (run.target, run.target_revision) != (first.target, first.target_revision):
            raise ValueError(
                f"also: a head of {run.target}, the first one's target is {first.target}; make a "
                "dump for each target"
            )
    return [Head(f"{run.method} ({run.output_dir.name})", run, model) for run, model in heads]
