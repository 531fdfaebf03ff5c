"""Each setting that a launcher can hand over is honored, refused by name, or named in a note."""

import dataclasses
import inspect
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.commands.config import cluster, config_args
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils import launch as preparations
from tiny_models import REPOSITORY
from train_runs import launcher_environment, logged

from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.errors import UsageError
from pipedraft.train.config import OptimConfig, RunConfig
from pipedraft.train.launcher_settings import Judgment, check_strategy, judge

DATA = DataConfig(sources=[Source(path="rows.jsonl")])
RUN = RunConfig(method="spd", target="target", output_dir=Path("out"), data=DATA)
RANK = {"RANK": "0", "WORLD_SIZE": "2"}
FSDP = RANK | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = RANK | {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
ZERO3 = ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def judged(environment: dict[str, str], run: RunConfig = RUN, **file: object) -> Judgment:
    """Judge for a bf16 run; ``file`` is the DeepSpeed file's content."""
    if file:
        environment = environment | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}
    return judge(environment, run, "bf16", read=lambda path: json.dumps(file))


def meshes(**sizes: int) -> dict[str, str]:
    values = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    return FSDP | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | values


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_shipped_files_are_honored_without_a_note(name):
    environment = launcher_environment(name, "--mixed_precision", "bf16")
    environment |= {} if name == "single" else RANK
    for variable in ("MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"):
        environment.pop(variable, None)  # for two processes on a CPU
    found = judged(environment)
    assert (found.refusals, found.notes) == ([], [])
    assert found.strategy == name


REFUSED = [
    (RANK | {"ACCELERATE_USE_MEGATRON_LM": "true"}, "distributed_type: 'true'"),
    ({"ACCELERATE_USE_SAGEMAKER": "true"}, "compute_environment: 'true'"),
    ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision: 'fp16'"),
    ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision: 'fp8'"),
    ({"ACCELERATE_FP8_BACKEND": "TE"}, "fp8_config: 'TE'"),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "accumulation: 1, but"),
    (ZERO | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "accumulation: 1, but"),
    ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "num_processes: the launcher"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun_config: processes"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "distributed_type: ACCELERATE_USE_FSDP"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "distributed_type: ACCELERATE_USE_DEEPSPEED is set"),
    (RANK | {"ACCELERATE_USE_FSDP": "true"}, "fsdp_version: '1'"),
    (FSDP | {"FSDP_VERSION": "1"}, "fsdp_version: '1'"),
    (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "full_shard"}, "fsdp_reshard_after_forward: 'full"),
    (FSDP | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "fsdp_sharding_strategy: 'HYBRID"),
    (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: 'true'"),
    (FSDP | {"FSDP_IGNORED_MODULES": "norm"}, "fsdp_ignored_modules: 'norm'"),
    (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing: 'true'"),
    (
        FSDP | {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
        "fsdp_activation_checkpointing_offload: 'true'",
    ),
    (FSDP | {"FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"}, "fsdp_state_dict_type: 'LOCAL"),
    (meshes(tp_size=2), "parallelism_config_tp_size: 2"),
    (meshes(cp_size=2), "parallelism_config_cp_size: 2"),
    (meshes(sp_size=2), "parallelism_config_sp_size: 2"),
    (meshes(dp_replicate_size=2), "parallelism_config_dp_replicate_size: 2"),
    (ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "zero_stage: '0'"),
    (ZERO | {"ACCELERATE_USE_CPU": "true"}, "use_cpu: ACCELERATE_USE_CPU turns zero2 into ddp"),
    (
        ZERO | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
        "offload_optimizer_device: 'cpu'",
    ),
    (ZERO3 | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "offload_param_device: 'nvme'"),
    (ZERO | {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Moe"}, "deepspeed_moe_layer_cls_names"),
    (ZERO | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "/none.json"}, "deepspeed_config_file: '/none"),
]


@pytest.mark.parametrize(("environment", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_settings_that_would_train_something_else_are_refused_by_name(environment, words):
    found = judge(environment, RUN, "bf16")
    assert [line for line in found.refusals if line.startswith(words)], found.refusals
    fixes = ("give ", "leave it out", "leave fp8_config out", "start ")
    for line in found.refusals:
        assert "\n" not in line and any(fix in line for fix in fixes)
    with pytest.raises(UsageError, match=re.escape(found.refusals[0])):
        found.require()


NOTED = [
    *(
        (x | {"ACCELERATE_DYNAMO_BACKEND": "TVM"}, "dynamo_backend: TVM")
        for x in (RANK, FSDP, ZERO)
    ),
    (FSDP | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading: true is"),
    (FSDP | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, "fsdp_state_dict_type: FULL_STATE_DICT"),
    (FSDP | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy: SIZE_BASED_W"),
    (FSDP | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"}, "fsdp_transformer_layer_cls_to_wrap: A,B"),
    (FSDP | {"FSDP_FORWARD_PREFETCH": "true"}, "fsdp_forward_prefetch: true has no effect"),
    (FSDP | {"FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"}, "fsdp_backward_prefetch: BACKWARD_PRE has"),
    (FSDP | {"FSDP_USE_ORIG_PARAMS": "false"}, "fsdp_use_orig_params: false has no effect"),
    (FSDP | {"FSDP_SYNC_MODULE_STATES": "false"}, "fsdp_sync_module_states: false has no effect"),
    (ZERO | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "gradient_clipping: 0.5 is not used"),
    (ZERO3, "zero3_save_16bit_model: false is not used"),
    (ZERO3 | {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}, "zero3_init_flag: true is not used"),
]


@pytest.mark.parametrize(("environment", "words"), NOTED, ids=[words for _, words in NOTED])
def test_settings_that_the_run_replaces_are_named_in_a_line(environment, words):
    found = judged(environment)
    assert found.refusals == []
    assert [line for line in found.notes if line.startswith(words)], found.notes


def test_numbers_that_agree_with_the_run_need_no_line():
    run = dataclasses.replace(RUN, accumulation=4, optim=OptimConfig(clip_norm=0.5))
    assert judged({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, run) == Judgment()
    found = judged(ZERO | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, run)
    assert (found.refusals, found.notes) == ([], [])
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert judged(bf16).notes == []
    (note,) = judge(bf16, RUN, "no").notes
    assert note.startswith("mixed_precision: 'bf16' is not used")


def test_a_file_for_several_processes_that_starts_one_is_refused(tmp_path):
    """accelerate starts one process for `multi-CPU` without MPI, and for a file without
    distributed training."""
    file = tmp_path / "cpus.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    for given in ("single", file):
        environment = launcher_environment(given, "--num_machines", "1")
        (line,) = judged(environment).refusals
        assert line.startswith("num_processes: ") and "--num_processes 1" in line
        one = launcher_environment(given, "--num_machines", "1", "--num_processes", "1")
        assert judged(one).refusals == []


@pytest.mark.parametrize(
    ("kind", "wanted", "words"),
    [
        (DistributedType.XLA, "single", "distributed_type: 'xla' is not supported"),
        (DistributedType.MEGATRON_LM, "ddp", "distributed_type: 'megatron_lm' is not supported"),
        (DistributedType.MULTI_CPU, "fsdp2", "settings ask for fsdp2, but accelerate trains with"),
        (DistributedType.NO, "zero2", "settings ask for zero2, but accelerate trains with single"),
    ],
)
def test_a_strategy_that_accelerate_did_not_take_is_refused(kind, wanted, words):
    accelerator = SimpleNamespace(distributed_type=kind, device=torch.device("cpu"))
    with pytest.raises(UsageError, match=words):
        check_strategy(accelerator, wanted)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerates_accumulation_neither_replaces_nor_divides(
    world, tmp_path, monkeypatch, accumulation
):
    """The variable agrees with the run, or is 1: no loss is divided."""
    folders = [tmp_path / "without", tmp_path / "with"]
    for folder in folders:
        world.trainer("eagle", folder, accumulation=accumulation, max_steps=2).run()
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(accumulation))
    assert logged(folders[0]) == logged(folders[1])
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(UsageError, match="gradient_accumulation_steps 4"):
        world.trainer("eagle", tmp_path / "other", accumulation=accumulation)


AUTO = {"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}


def test_a_deepspeed_file_is_judged_key_by_key():
    zero = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"}
    found = judged(ZERO, **AUTO, zero_optimization=zero)
    assert (found.strategy, found.refusals, found.notes) == ("zero3", [], [])
    for changes, words in (
        ({"optimizer": {"type": "AdamW"}}, "deepspeed_config_file: optimizer in 'ds.json'"),
        ({"zero_optimization": {"stage": 0}}, "stage 0 in 'ds.json'"),
        ({"scheduler": {}}, "deepspeed_config_file: scheduler in 'ds.json'"),
        ({"fp16": {"enabled": True}}, "precision: auto computes in bf16, but fp16.enabled is true"),
        ({"bf16": {"enabled": False}}, "precision: auto computes in bf16, but bf16.enabled is fal"),
        ({"gradient_accumulation_steps": 4}, "accumulation: gradient_accumulation_steps is 4"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "zero_quantized_"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device 'cpu'",
        ),
    ):
        values = AUTO | {"zero_optimization": zero} | changes
        (line,) = judged(ZERO, **values).refusals
        assert words in line
    for changes, words in (
        ({"train_batch_size": 64}, "train_batch_size: 64 is not used, batch_tokens"),
        ({"gradient_clipping": 3.0}, "gradient_clipping: 3.0 is not used, optim.clip_norm"),
        ({"communication_data_type": "bf16"}, "communication_data_type: gradients are summed"),
    ):
        (line,) = judged(ZERO, **AUTO | {"zero_optimization": zero} | changes).notes
        assert words in line
    (line,) = judged(ZERO, gradient_clipping=1.0).refusals
    assert "'ds.json' cannot be read" in line and "zero_optimization" in line


# -- the table --------------------------------------------------------------------------------


def settings_of_accelerate() -> set[str]:
    """Return all names of settings that accelerate writes to a file, takes as an option, or hands
    over in a variable."""
    kinds = (config_args.ClusterConfig, config_args.SageMakerConfig)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    names |= {action.dest for action in launch_command_parser()._actions}
    source = inspect.getsource(cluster)
    for section, has_prefix, key in re.findall(r'(\w+)_config\[(prefix \+ )?"(\w+)"\]', source):
        section = section.replace("parallelism", "parallelism_config")
        names.add(f"{section}_{key}" if has_prefix or section == "fp8" else key)
    source = inspect.getsource(preparations)
    names |= set(re.findall(r'prefix = "((?!ACCELERATE)\w+_)"', source))
    names |= set(re.findall(r'current_env\["(\w+)"\]', source))
    home = Path(accelerate.__file__).parent
    for file in home.rglob("*.py"):
        names |= set(re.findall(r'"(ACCELERATE_[A-Z0-9_]*[A-Z0-9])"', file.read_text()))
    return names


def table() -> list[list[str]]:
    """Return the cells of docs/lab/launcher.md's tables: settings, outcome, what, test."""
    text = (REPOSITORY / "docs/lab/launcher.md").read_text()
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert all(len(cells) == 4 for cells in rows)
    return rows


def test_the_table_knows_every_setting_of_accelerate():
    known = [name for cells in table() for name in re.findall(r"`([\w*]+)`", cells[0])]
    found = settings_of_accelerate()
    assert len(found) > 180
    unknown = {name for name in found if not any(fnmatchcase(name, x) for x in known)}
    assert not unknown, "docs/lab/launcher.md: say what becomes of these settings"
    gone = {x for x in known if not any(fnmatchcase(name, x) for name in found)}
    assert not gone, "docs/lab/launcher.md: accelerate has no such settings"


def test_the_table_names_outcomes_and_tests_that_exist():
    sources = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    for cells in table():
        assert set(cells[1].split(", ")) <= {"honored", "refused", "said", "dropped", "other"}
        for name in re.findall(r"`(\w+)`", cells[3]):
            assert f"def {name}(" in sources, name
