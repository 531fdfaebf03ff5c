#!/usr/bin/env bash
# Guess: a config file with `dynamo_config: {dynamo_backend: ...}` changes how fast a script trains.
# accelerate 1.15.0, torch 2.13.0: `Accelerator.prepare` puts the model into a module of torch's
# compiler. Every name in its state dict then begins with `_orig_mod.`, so a script that selects
# weights by their names (`name.startswith("layer.")`) finds none. `get_state_dict` keeps the prefix.
# `nn.Module.compile` with the same compiler changes no name.
# pipedraft: hands accelerate no compiler, and says in one line that a run is not compiled.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" -q install torch==2.13.0 accelerate==1.15.0 numpy
cat > "$place/names.py" <<'PYTHON'
import os
import sys

import accelerate
import torch
from torch import nn

os.environ["ACCELERATE_DYNAMO_BACKEND"] = "EAGER"  # what `accelerate launch` sets for such a file
accelerator = accelerate.Accelerator(cpu=True)
model = nn.Sequential()
model.add_module("layer", nn.Linear(2, 2))
prepared = accelerator.prepare(model)
prefixed = list(accelerator.get_state_dict(prepared))
in_place = nn.Sequential()
in_place.add_module("layer", nn.Linear(2, 2))
in_place.compile(backend="eager")
plain = list(in_place.state_dict())
print(f"accelerate {accelerate.__version__}, torch {torch.__version__}")
print("names after Accelerator.prepare with a compiler:", *prefixed)
print("names after nn.Module.compile:", *plain)
in_place(torch.zeros(1, 2))
is_so = prefixed == [f"_orig_mod.{name}" for name in plain] and plain[0] == "layer.weight"
print("the compiler renames every weight in accelerate, and none in place" if is_so else "changed")
sys.exit(0 if is_so else 1)
PYTHON
"$place/venv/bin/python" "$place/names.py"
