#!/usr/bin/env bash
# Guess: what a file from `accelerate config` says reaches the script, whatever else the file says.
# accelerate 1.15.0: `accelerate launch` passes some settings with one way of launching only.
#   `distributed_type: MULTI_CPU, num_processes: 2` (the answer "multi-CPU" without mpirun) starts
#   one process. `use_cpu: true` is not passed with MULTI_GPU, and `dynamo_config` not with DeepSpeed.
#   `gradient_accumulation_steps` is passed with DeepSpeed only.
# pipedraft: refuses one process where the variables of the launcher name several, and its start line
# names strategy, device, processes and accumulation of every run.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" -q install torch==2.13.0 accelerate==1.15.0 numpy
cat > "$place/show.py" <<'PYTHON'
import os

print("process", os.environ.get("RANK", "alone"), "of", os.environ.get("WORLD_SIZE", "one"))
PYTHON
cat > "$place/cpus.yaml" <<'YAML'
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 1
num_processes: 2
mixed_precision: 'no'
use_cpu: true
YAML
cat > "$place/variables.py" <<'PYTHON'
import sys
from pathlib import Path

import accelerate
import yaml
from accelerate.commands import launch
from accelerate.utils import launch as environments


def variables(place, prepare, **settings):
    common = {"num_machines": 1, "num_processes": 2, "mixed_precision": "no"}
    common["dynamo_config"] = {"dynamo_backend": "EAGER"}
    file = Path(place, "one.yaml")
    file.write_text(yaml.safe_dump(common | settings))
    words = ["--config_file", str(file), "--gradient_accumulation_steps", "4", "script.py"]
    arguments = launch.launch_command_parser().parse_args(words)
    arguments, _, _ = launch._validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ""
    found = prepare(arguments)
    return found[1] if isinstance(found, tuple) else found


place = sys.argv[1]
ddp = variables(place, environments.prepare_multi_gpu_env, distributed_type="MULTI_GPU", use_cpu=True)
zero = variables(
    place,
    environments.prepare_deepspeed_cmd_env,
    distributed_type="DEEPSPEED",
    deepspeed_config={"zero_stage": 2, "deepspeed_multinode_launcher": "standard"},
)
names = "USE_CPU", "DYNAMO_BACKEND", "GRADIENT_ACCUMULATION_STEPS"
found = {name: [f"ACCELERATE_{name}" in own for own in (ddp, zero)] for name in names}
print("accelerate", accelerate.__version__)
for name, (in_ddp, in_zero) in found.items():
    print(f"ACCELERATE_{name}: MULTI_GPU {in_ddp}, DEEPSPEED {in_zero}")
expected = {"USE_CPU": [False, False], "DYNAMO_BACKEND": [True, False]}
expected["GRADIENT_ACCUMULATION_STEPS"] = [False, True]
sys.exit(0 if found == expected else 1)
PYTHON
unset ACCELERATE_USE_CPU ACCELERATE_DYNAMO_BACKEND ACCELERATE_GRADIENT_ACCUMULATION_STEPS RANK WORLD_SIZE
"$place/venv/bin/python" "$place/variables.py" "$place"
said=$("$place/venv/bin/accelerate" launch --config_file "$place/cpus.yaml" "$place/show.py")
echo "MULTI_CPU with num_processes 2 started: $said"
[ "$said" = "process alone of one" ] || { echo "changed"; exit 1; }
echo "settings are passed with one way of launching and dropped with another"
