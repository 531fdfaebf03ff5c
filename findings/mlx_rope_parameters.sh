#!/usr/bin/env bash
# What one would guess: mlx-lm reads a Llama folder that transformers 5 saved as transformers reads it.
# What happens: transformers 5 writes the rotary base into `rope_parameters` and no longer at the top level. mlx-lm's
# Llama reads `rope_theta` at the top level only, so it decodes with its default base 10000, without a word. The
# logits of a base of 100000 differ; with `rope_theta` added at the top level they agree.
# Versions: mlx-lm 0.32.2, mlx 0.32.4 (CPU), transformers 5.23.0, torch 2.13.0.
# What pipedraft does: `pipedraft audit` finds it (greedy answers differ by more than rounding), and docs/engines.md
# names the line to add to config.json.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.23.0 mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import torch
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=100,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    initializer_range=0.3,
)
model = LlamaForCausalLM(config).eval()
ids = [(7 * i) % 100 for i in range(200)]
with torch.no_grad():
    expected = model(torch.tensor([ids])).logits[0]


def largest_difference(folder: str) -> float:
    loaded, _ = load_model(Path(folder))
    found = torch.tensor(loaded(mx.array([ids]))[0].tolist())
    return float((found - expected).abs().max())


model.save_pretrained("saved")
settings = json.loads(Path("saved/config.json").read_text())
as_saved = largest_difference("saved")
Path("saved/config.json").write_text(json.dumps(settings | {"rope_theta": 100000.0}))
added = largest_difference("saved")

print("mlx-lm", version("mlx-lm"), "transformers", version("transformers"))
print("config.json: rope_parameters", settings["rope_parameters"], "; rope_theta at the top level:", "rope_theta" in settings)
print(f"largest difference of the logits as saved: {as_saved:.3f}")
print(f"with rope_theta added at the top level: {added:.6f}")
is_as_stated = "rope_theta" not in settings and as_saved > 0.1 and added < 1e-2
print("as stated:", is_as_stated)
raise SystemExit(not is_as_stated)
PYTHON
