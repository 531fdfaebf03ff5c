#!/usr/bin/env bash
# What one would guess: `generate(use_mtp=True)` drafts with the MTP layer that a Qwen3.5 checkpoint holds.
# What happens: `generate` refuses every draft for Qwen3.5, because its linear attention keeps a state. A Llama whose
# configuration names an MTP layer is refused, too: the class must know the names of such weights. Only DeepSeek-V3,
# GLM-4-MoE, Bailing hybrid, Step-3.7, Mellum and Inkling do.
# Versions: transformers 5.23.0, torch 2.13.0.
# What pipedraft does: decodes with such a layer itself, in `generate` through `custom_generate`; docs/engines.md says
# what use_mtp takes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

torch.manual_seed(0)
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}
own = {"mtp_num_hidden_layers": 1}
qwen = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **own)).eval()
llama = LlamaForCausalLM(LlamaConfig(**sizes, num_mtp_layers=1)).eval()
said = []
for model in (qwen, llama):
    try:
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, use_mtp=True)
        said.append("decoded")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    print(type(model).__name__, "with use_mtp:", said[-1].splitlines()[0])
sys.exit(not ("stateful" in said[0] and "MTP layer patterns" in said[1]))
PYTHON
