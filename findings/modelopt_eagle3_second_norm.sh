#!/usr/bin/env bash
# One would guess that an EAGLE-3 head computes the same in its trainer and from its exported files.
# modelopt 0.47.0's Hugging Face trainer normalizes the fused states twice: LlamaDecoderLayer applies
# input_layernorm to them, and modelopt's hook applies hidden_norm to the result. The exported files
# have the names of SGLang's and vLLM's layout, whose formula applies hidden_norm alone. The default
# export also adds rope_scaling "yarn" (factor 32) to a head that was trained with plain positions.
# pipedraft imports such a head as engines read it, and warns about both.
# Exit status 0: the behavior is as stated.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.14.1 nvidia-modelopt==0.47.0 accelerate datasets requests 2>&1 | grep -v -i warn || true
OMP_NUM_THREADS=1 "$place/venv/bin/python" - "$place" <<'PYTHON'
import copy, json, sys, warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import modelopt
import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
H = 64
sizes = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=H, num_hidden_layers=8, vocab_size=128, max_position_embeddings=256, **sizes)
).eval()
config = copy.deepcopy(EAGLE3_DEFAULT_CFG["config"])
config["eagle_architecture_config"].update(draft_vocab_size=128, has_lm_head=True, **sizes)
config["eagle_use_torch_compile"] = False
mtsp.convert(model, [("eagle", config)])
head = model.eagle_module.float().eval()
first = head.layers[0]
for norm in (first.input_layernorm, first.hidden_norm):
    norm.weight.data.uniform_(0.5, 1.5)  # as after training

states, embeds = torch.randn(1, 6, H), torch.randn(1, 6, H)
seen = []
first.self_attn.q_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
head._maybe_init_rope()
with torch.no_grad():
    head(states, embeds, attention_mask=None)
trained = seen[0][..., H:]  # the half of the attention's input that comes from the target
once, twice = first.hidden_norm(states), first.hidden_norm(first.input_layernorm(states))
place = Path(sys.argv[1], "export")
export_speculative_decoding(model, export_dir=place)
rope = json.loads((place / "config.json").read_text())["rope_scaling"]
in_training = head.config.rope_parameters["rope_type"]
relative = float((trained - once).abs().max() / trained.abs().max())
print(f"modelopt {modelopt.__version__}: the trainer's input to the attention differs from")
print(f"hidden_norm(states) by {relative:.2f} of its largest value, and equals")
print(f"hidden_norm(input_layernorm(states)): {torch.allclose(trained, twice, atol=1e-5)}")
print(f"rotary type in training: {in_training}; in the exported config.json: {rope['rope_type']}")
assert torch.allclose(trained, twice, atol=1e-5) and relative > 0.05
assert in_training == "default" and rope["rope_type"] == "yarn"
PYTHON
