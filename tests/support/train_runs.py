"""A small world for training runs, and real processes to train in it."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands import launch
from fork_server import ForkServer, rank_environments
from safetensors.torch import load_file
from small_tokenizers import train_tokenizer
from tiny_models import REPOSITORY, tiny_llama
from torch.distributed import TCPStore

from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.pretrained import quieten
from pipedraft.train import checkpoint
from pipedraft.train.__main__ import main
from pipedraft.train.config import parse_run
from pipedraft.train.methods import methods
from pipedraft.train.run import build_trainer

LAYERS = 4
CLOCK_METRICS = ("tokens_per_s", "data_share", "mfu")
"""Only these metrics differ between repeated runs."""
BY_HEART = {"optim__lr": 1e-2, "optim__schedule": "constant", "optim__warmup_fraction": 0.0}


# -- tiny data, tokenizer and target --------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Sixty conversations, a tokenizer trained on them, and a random target with it."""

    folder: Path
    data: Path
    target: Path

    def arguments(self, method: str, output_dir: Path, /, **changes: Any) -> list[str]:
        """Command line for a small run; keys in ``changes`` have __ for a dot."""
        settings: dict[str, Any] = {
            "method": method,
            "target": self.target,
            "output_dir": output_dir,
            "data.sources": json.dumps([{"path": str(self.data)}]),
            "data.cache_dir": self.folder / "cache",
            "data.max_length": 64,
            "data.valid_fraction": 0.1,
            "evaluation.decode_prompts": 0,
            "batch_tokens": 256,
            "log_every_steps": 1,
            "precision": "fp32",
            "max_steps": 4,
            "optim.lr": 3e-3,
        }
        sizes = {"spd": {"model.num_stages": 2, "model.num_layers": 1}}
        sizes["dflash"] = {"model.num_layers": 1, "model.block_size": 8}
        sizes["dspark"] = sizes["dflash"] | {"model.markov_rank": 8}
        settings |= sizes.get(method, {})
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        words = {key: value for key, value in settings.items() if value is not None}
        return [f"--{key}={value}" for key, value in words.items()]

    def trainer(self, method: str, output_dir: Path, **changes: Any) -> Any:
        run, model, _ = parse_run(self.arguments(method, output_dir, **changes), methods(), "")
        return build_trainer(run, model)


def make_world(folder: Path) -> World:
    data = folder / "chat.jsonl"
    with data.open("w") as lines:
        for i in range(60):
            answer = f"It is {i + i % 7}." + " Sure." * (i % 5)
            question = {"role": "user", "content": f"What is {i} plus {i % 7}?"}
            turns = [question, {"role": "assistant", "content": answer}]
            lines.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = train_tokenizer(DataConfig(sources=[Source(path=str(data))]), 300)
    target = tiny_llama(layers=LAYERS, vocab=len(tokenizer))
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    return World(folder, data, folder / "target")


def train(arguments: list[str], monkeypatch) -> None:
    """Run the command itself, in this process."""
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    main()


def logged(output_dir: Path) -> list[dict[str, float]]:
    """Log entries reproduced by a repeated run."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in CLOCK_METRICS} for x in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def assert_ends_as(folder: Path, whole: Path) -> None:
    """Compare logs and networks; a config.json holds an evaluation's metrics."""
    assert logged(folder) == logged(whole)
    runs = [[path.name for path in checkpoint.step_folders(run)] for run in (folder, whole)]
    assert runs[0][-1] == runs[1][-1]
    for name in ("best", *(f"checkpoints/{name}" for name in {*runs[0]} & {*runs[1]})):
        assert_equal_weights(weights(folder / name), weights(whole / name))
        texts = [(run / name / "config.json").read_text() for run in (folder, whole)]
        assert texts[0] == texts[1]


def as_rank(trainer: Any, rank: int, world_size: int) -> Any:
    """Make the accelerator act as another process; sums stay local."""
    return SimpleNamespace(
        process_index=rank,
        num_processes=world_size,
        device=trainer.accelerator.device,
        autocast=contextlib.nullcontext,
        reduce=lambda tensor, how: tensor,
    )


RELATIVE = 2e-4
"""Largest relative difference in a logged metric: float32 sums are taken in another order."""
ABSOLUTE = 1e-3
"""Bound for a trained weight; the learning rate bounds an Adam step, and is three times this."""


def launcher_environment(file: str | Path, *words: str) -> dict[str, str]:
    """Return the environment from `accelerate launch` for two processes.

    Args:
        file: name in configs/accelerate, or a path.
        words: more options for the launcher.
    """
    shipped = REPOSITORY / "configs" / "accelerate" / f"{file}.yaml"
    given = ["--config_file", str(shipped if isinstance(file, str) else file)]
    given += ["--num_processes", "2", "--mixed_precision", "no", *words]
    arguments = launch.launch_command_parser().parse_args([*given, "-m", "pipedraft.train"])
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        fields = ",".join(defaults.deepspeed_config)
        arguments.deepspeed_fields_from_accelerate_config = fields
        _, environment = launch.prepare_deepspeed_cmd_env(arguments)
    elif arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        environment = launch.prepare_multi_gpu_env(arguments)
    else:
        _, environment = launch.prepare_simple_launcher_cmd_env(arguments)
    own = {key: value for key, value in environment.items() if os.environ.get(key) != value}
    return own | ({"ACCELERATE_USE_CPU": "true"} if arguments.multi_gpu else {})


def assert_same_run(folder: Path, alone: Path) -> None:
    records, expected = logged(folder), logged(alone)
    assert [r["step"] for r in records] == [r["step"] for r in expected]
    for record, values in zip(records, expected, strict=True):
        assert record.keys() == values.keys()
        for key, value in values.items():
            assert record[key] == pytest.approx(value, rel=RELATIVE, abs=1e-6), (record, key)
    for name in ("best", "checkpoints/step-0000004"):
        found, wanted = weights(folder / name), weights(alone / name)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.allclose(found[key].double(), value.double(), atol=ABSOLUTE), (name, key)


# -- processes -----------------------------------------------------------------------------


@dataclass
class Runs:
    """Parent process for forked runs."""

    world: World
    changes: dict[str, dict[str, Any]]
    """Changes for every run, by method."""
    parent: ForkServer

    def start(self, method: str, folder: Path, *, changes: dict | None = None, **job: Any) -> int:
        """Start a run and return its process id; it writes to ``folder``, and its output to
        folder.log."""
        changes = self.changes[method] | (changes or {})
        arguments = self.world.arguments(method, folder, **changes)
        log = str(folder) + ".log"
        return self.parent.ask(arguments=arguments, folder=str(folder), log=log, **job)

    def run(self, method: str, folder: Path, **job: Any) -> int:
        """Run and return the exit status, negative for a signal."""
        return self.parent.wait(self.start(method, folder, **job))

    def run_on_disk(self, method: str, folder: Path, *, full_at: int, **job: Any) -> bool:
        """Run on a disk that is full at file ``full_at``; True: the run was complete before that.

        If not, it must print one error line and exit with status 1. All saved files must be whole.
        """
        before = checkpoint.step_folders(folder)
        status = self.run(method, folder, full_at=full_at, **job)
        text = said(folder)
        Path(f"{folder}.log").unlink()
        num_errors = sum(line.startswith("error: ") for line in text.splitlines())
        assert (status, num_errors) in ((0, 0), (1, 1)) and "Traceback" not in text, text
        after = checkpoint.step_folders(folder)
        assert len(after) >= len(before)
        best = [path for path in [folder / "best"] if path.exists()]
        assert not any(map(checkpoint.damage, after + best))
        return status == 0

    def together(
        self,
        method: str,
        folder: Path,
        environment: dict[str, str],
        *,
        num_processes: int = 2,
        changes: dict | None = None,
        jobs: dict[int, dict[str, Any]] | None = None,
    ) -> list[int]:
        """Train with several processes together and return their exit statuses.

        Args:
            jobs: options for single ranks.
        """
        with self.begun(method, folder, environment, num_processes, changes, jobs or {}) as pids:
            return [self.parent.wait(pid) for pid in pids]

    @contextlib.contextmanager
    def begun(
        self,
        method: str,
        folder: Path,
        environment: dict[str, str],
        num_processes: int,
        changes: dict | None,
        jobs: dict[int, dict[str, Any]],
    ) -> Iterator[list[int]]:
        """Process ids as for ``together``; the caller waits for them."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pids = []
        for rank, own in enumerate(rank_environments(num_processes, store.port)):
            own |= environment
            job = jobs.get(rank, {})
            pids.append(self.start(method, folder, changes=changes, environment=own, **job))
        yield pids


def said(folder: Path) -> str:
    return Path(f"{folder}.log").read_text()


@contextlib.contextmanager
def start_runs(folder: Path, changes: dict[str, dict[str, Any]], *modules: str) -> Iterator[Runs]:
    """
    Args:
        modules: imported in addition to the usual ones.
    """
    quieten()
    with ForkServer.start("train_processes.py", *modules) as parent:
        yield Runs(make_world(folder), changes, parent)


class Stop(Exception):
    pass


def losses_on_one_batch(trainer: Any, rows: int, steps: int) -> list[float]:
    batch = trainer.load(trainer.data.train, list(range(rows)))
    losses = []
    for _ in range(steps):
        trainer.progress.step = 0  # the same occupancies and the full rate at every step
        losses.append(trainer.optimize([batch])["loss"])
    return losses


def assert_learns_by_heart(trainer) -> None:
    losses = losses_on_one_batch(trainer, 4, 40)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.5 * losses[0], losses[::10]
