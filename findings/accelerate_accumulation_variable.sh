#!/usr/bin/env bash
# Guess: an argument in a script is stronger than an environment variable, and a variable that only a
# script's own loop could use changes nothing in a script without `Accelerator.accumulate`.
# accelerate 1.15.0: ACCELERATE_GRADIENT_ACCUMULATION_STEPS replaces `gradient_accumulation_steps=1`,
# and `Accelerator.backward` divides every loss by it: with 4, gradients are a quarter.
# A `GradientAccumulationPlugin` is not replaced.
# pipedraft: passes a plugin with 1 step, and refuses a variable that contradicts `accumulation`.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" -q install torch==2.13.0 accelerate==1.15.0 numpy
cat > "$place/steps.py" <<'PYTHON'
import os
import sys

import accelerate
import torch
from accelerate.utils import GradientAccumulationPlugin


def gradient(**arguments):
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **arguments)
    weight = torch.ones(1, requires_grad=True)
    accelerator.backward(8 * weight.sum())
    return accelerator.gradient_accumulation_steps, weight.grad.item()


os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
found = {"argument 1": gradient(gradient_accumulation_steps=1)}
os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
found["argument 1, variable 4"] = gradient(gradient_accumulation_steps=1)
plugin = GradientAccumulationPlugin(num_steps=1)
found["plugin 1, variable 4"] = gradient(gradient_accumulation_plugin=plugin)
print("accelerate", accelerate.__version__)
for case, (steps, value) in found.items():
    print(f"{case}: {steps} steps, the gradient of 8 w is {value}")
is_so = list(found.values()) == [(1, 8.0), (4, 2.0), (1, 8.0)]
print("the variable replaces the argument and divides the loss" if is_so else "changed")
sys.exit(0 if is_so else 1)
PYTHON
"$place/venv/bin/python" "$place/steps.py"
