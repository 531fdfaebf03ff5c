"""Fixtures, and the state in which every test file starts."""

import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read by these libraries when they are imported; child processes inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from fork_server import ForkServer
from hypothesis import HealthCheck, settings
from quick_sample import mark_the_rest
from tiny_models import REPOSITORY, byte_tokenizer, tiny_llama
from transformers import PreTrainedModel

PYTESTS_OWN = "PYTEST_CURRENT_TEST"
LONG_FILES = {
    "test_parallel",
    "test_lossless",
    "test_process",
    "test_shipped_heads",
    "test_sampling",
}

# A shell without job control starts background jobs with SIGINT ignored, and tests inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Draw the same examples every time, however long a busy machine takes.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    # Tests fork and compute CPU figures; benchmarks/gpu_check.py is for GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the marks given with -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: a worker starting one late would delay the whole suite."""
    mark_the_rest(items)
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with a random four-layer model and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("small") / "target"
    tiny_llama(vocab=300).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """World for short training runs: see train_runs, imported by training tests only."""
    from train_runs import make_world

    from pipedraft.pretrained import quieten

    quieten()
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True, scope="module")
def nothing_of_another_file() -> Iterator[None]:
    """Reset process state between files: a worker runs files in any order."""
    environment, folder = dict(os.environ), Path.cwd()
    seed_all()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # keeps a precision for good
    os.chdir(folder)
    for name in os.environ.keys() - environment.keys() - {PYTESTS_OWN}:
        del os.environ[name]
    os.environ.update({name: environment[name] for name in environment.keys() - {PYTESTS_OWN}})
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """Seed the global generators for tests that draw without one of their own."""
    seed_all()


def seed_all() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit memory: a file's claimed sizes must be compared with the file before any allocation."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="session")
def parent() -> Iterator[ForkServer]:
    """Starts commands in forked processes without repeated imports: see command_processes.py."""
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no", "GLOO_SOCKET_IFNAME": "lo"}
    with ForkServer.start("command_processes.py", env=environment) as started:
        yield started


@pytest.fixture(scope="session")
def repository() -> Path:
    """Checkout folder, also the package itself."""
    return REPOSITORY
