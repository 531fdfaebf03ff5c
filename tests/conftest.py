"""Fixtures: tiny random targets and a tokenizer, built in code, and paths; no downloads."""

import json
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

REPOSITORY = Path(__file__).resolve().parents[1]
PYTESTS_OWN = "PYTEST_CURRENT_TEST"
LONG_FILES = {
    "test_parallel",
    "test_lossless",
    "test_process",
    "test_shipped_heads",
    "test_sampling",
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

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


def tiny_model(
    config_class: Any,
    model_class: Any,
    *,
    layers: int,
    hidden: int,
    vocab: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    **extra: Any,
) -> PreTrainedModel:
    """Return a random fp32 causal LM in eval mode, the same for the same arguments.

    Weights are drawn with standard deviation 0.2 instead of the usual 0.02: at this width 0.02
    gives nearly uniform logits, and greedy tests would hang on ties and rounding.
    """
    config = config_class(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.float().eval().requires_grad_(False)


def tiny_llama(layers: int = 4, hidden: int = 32, **sizes: Any) -> PreTrainedModel:
    return tiny_model(LlamaConfig, LlamaForCausalLM, layers=layers, hidden=hidden, **sizes)


def tiny_qwen3(layers: int = 4, hidden: int = 32, **sizes: Any) -> PreTrainedModel:
    """Like tiny_llama, with RMSNorm on queries and keys."""
    return tiny_model(Qwen3Config, Qwen3ForCausalLM, layers=layers, hidden=hidden, **sizes)


def tiny_mistral(
    layers: int = 4, hidden: int = 32, *, sliding_window: int | None = None, **sizes: Any
) -> PreTrainedModel:
    """Like tiny_llama; with ``sliding_window`` its cache keeps only that many tokens per layer."""
    sizes |= {"layers": layers, "hidden": hidden, "sliding_window": sliding_window}
    return tiny_model(MistralConfig, MistralForCausalLM, **sizes)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


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
