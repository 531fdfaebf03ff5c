"""Measure how much private memory a process needs to load a target: memory_growth.py WAY FOLDER."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from pipedraft.models.target import load_target
from pipedraft.models.target_part import load_target_part
from pipedraft.train.launch import shard_target

ENDS = {"has_embedding": True, "has_head": True}


@contextmanager
def rank_of(world: int, local: int, rank: int, monkeypatch) -> Iterator[SimpleNamespace]:
    """One process in a group of nodes, with collective calls that do nothing."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield SimpleNamespace(device=torch.device("cpu"), num_processes=world)
    finally:
        dist.destroy_process_group()


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def growth_of(work: Callable[..., Any], *arguments: Any) -> int:
    """Peak private bytes, pages of mapped files left out, that a process needs for ``work``."""
    before, done, peak = private_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work(*arguments)
    done.set()
    watcher.join()
    grown = max(peak[0], private_bytes()) - before
    del kept
    return grown


def load_sharded(folder: str) -> PreTrainedModel:
    with pytest.MonkeyPatch.context() as patch, rank_of(6, 6, 1, patch) as accelerator:
        shard_target(target := load_target_part(folder, layers=[], **ENDS), accelerator)
        return target


LOADS: dict[str, Callable[[str], Any]] = {
    "host": load_target,
    "device": partial(load_target, device="meta"),
    "sharded": load_sharded,
    "stage": partial(load_target_part, layers=[0, 1], has_embedding=True, has_head=False),
}


if __name__ == "__main__":
    print(growth_of(LOADS[sys.argv[1]], sys.argv[2]))
