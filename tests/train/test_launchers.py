"""Runs with settings that `accelerate config` can write: as without them, or refused by name."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tiny_models import REPOSITORY
from train_runs import (
    Runs,
    assert_same_run,
    launcher_environment,
    said,
    start_runs,
)

from pipedraft.models import load_draft
from pipedraft.models.target import load_target

CHANGES = {"eagle": {"evaluation__max_rows": 5, "save_every_steps": 2, "batch_group": 2}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    muon = "deepspeed.runtime.zero.muon.muon_optimizer"
    with start_runs(tmp_path_factory.mktemp("world"), CHANGES, muon) as found:
        yield found


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "eagle"
    assert runs.run("eagle", folder, changes={"accumulation": 2}) == 0, said(folder)
    return folder


@pytest.fixture
def settings(tmp_path) -> Callable[..., dict[str, str]]:
    """Return the environment for a shipped file with changes, by section."""

    def environment(name: str, *words: str, **sections: dict) -> dict[str, str]:
        values = yaml.safe_load((REPOSITORY / f"configs/accelerate/{name}.yaml").read_text())
        for section, changes in sections.items():
            has_more = isinstance(changes, dict)
            values[section] = values.get(section, {}) | changes if has_more else changes
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        return launcher_environment(file, *words)

    return environment


ZERO = {"gradient_clipping": "auto", "zero3_save_16bit_model": False, "zero3_init_flag": True}


LOADING = {"fsdp_cpu_ram_efficient_loading": True, "fsdp_min_num_params": 1000}
LOADING["fsdp_auto_wrap_policy"] = "SIZE_BASED_WRAP"
CLASSES = {"fsdp_transformer_layer_cls_to_wrap": "Linear"}
WRAP = {"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_state_dict_type": "FULL_STATE_DICT"}
ANSWERS = [
    ("fsdp2", {"fsdp_config": LOADING}, "fsdp_cpu_ram_efficient_loading: true is"),
    ("zero3", {"deepspeed_config": ZERO}, "zero3_init_flag: true is not used"),
    ("fsdp2", {"fsdp_config": WRAP}, "fsdp_state_dict_type: FULL_STATE_DICT is not"),
    ("fsdp2", {"fsdp_config": {"fsdp_reshard_after_forward": False}}, ", fsdp2, fp32"),
    ("fsdp2", {"parallelism_config": {"parallelism_config_dp_shard_size": 2}}, ", fsdp2, fp32"),
    ("fsdp2", {"fsdp_config": CLASSES}, "fsdp_transformer_layer_cls_to_wrap: Linear is not"),
    ("zero1", {}, ", zero1, fp32"),
    ("ddp", {"debug": True}, ", ddp, fp32"),
    ("ddp", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_backend: INDUCTOR is"),
]
"""Shipped file, changes to it, and words that the run prints."""


@pytest.mark.all
@pytest.mark.parametrize(("file", "changes", "words"), ANSWERS, ids=[a[2] for a in ANSWERS])
def test_two_processes_with_these_settings_train_the_run_of_one(
    runs, alone, settings, tmp_path, file, changes, words
):
    """The run is stopped and resumed; the head loads."""
    folder, environment = tmp_path / "eagle", settings(file, **changes)
    stop = {1: {"step": 2, "signals": [signal.SIGTERM]}}
    assert runs.together("eagle", folder, environment, jobs=stop) == [143, 143], said(folder)
    assert words in said(folder)
    assert runs.together("eagle", folder, environment) == [0, 0], said(folder)
    assert_same_run(folder, alone)
    load_draft(str(folder), load_target(str(runs.world.target)))


@pytest.mark.parametrize("backend", ["EAGER", pytest.param("INDUCTOR", marks=pytest.mark.all)])
def test_a_run_with_a_compiler_in_its_settings_is_the_run_without(runs, alone, tmp_path, backend):
    """The weights' names are the same, so the run may go on without these settings."""
    folder, environment = tmp_path / "eagle", {"ACCELERATE_DYNAMO_BACKEND": backend}
    changes = {"accumulation": 2}
    stop = {"step": 2, "signals": [signal.SIGTERM]}
    first = runs.run("eagle", folder, changes=changes, environment=environment, **stop)
    assert first == 143, said(folder)
    assert f"dynamo_backend: {backend} is not used" in said(folder)
    assert runs.run("eagle", folder, changes=changes) == 0, said(folder)
    assert_same_run(folder, alone)


@pytest.mark.all
def test_a_deepspeed_file_trains_the_run_of_one(runs, alone, settings, tmp_path):
    file, folder = tmp_path / "ds.json", tmp_path / "eagle"
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    values = {"bf16": {"enabled": "auto"}, "train_batch_size": 64, "gradient_clipping": 3.0}
    file.write_text(json.dumps(values | {"zero_optimization": zero}))
    environment = settings("zero1", mixed_precision=None)
    # accelerate asks for no other DeepSpeed setting beside a file.
    environment |= {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    environment |= {"ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file"}
    assert runs.together("eagle", folder, environment) == [0, 0], said(folder)
    for words in ("zero3, fp32", "train_batch_size: 64 is not used", "clipping: 3.0 is not used"):
        assert words in said(folder)
    assert_same_run(folder, alone)
