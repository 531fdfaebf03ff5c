#!/usr/bin/env bash
# One would guess that "norm_output": true in the config.json of an EAGLE-3 head means one thing, and
# that a converter keeps it. In SpecForge 0.2.0 it means that the LM head reads normed states, which is
# its default. In speculators 0.9.0 it means that the head continues with its normed state, which
# changes each draft token but the first. speculators' converter renames SpecForge's midlayer.* and
# copies the key. It also drops rope_parameters, the only place where transformers 5 writes the base.
# pipedraft decides the key by the layout, and warns about both.
# Exit status 0: the behavior is as stated.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.14.1 accelerate datasets openai pydantic-settings python-dotenv loguru rich typer aiohttp httpx psutil protobuf numpy 2>&1 | grep -v -i warn || true
"$place/venv/bin/pip" install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0 2>&1 | grep -v -i warn || true
# SpecForge's package needs a GPU's kernels, so its two lines are read instead of run.
"$place/venv/bin/pip" download -q --no-deps -d "$place" specforge==0.2.0 2>&1 | grep -v -i warn || true
OMP_NUM_THREADS=1 LOGURU_LEVEL=ERROR "$place/venv/bin/python" - "$place" <<'PYTHON'
import json, sys, warnings, zipfile
from importlib.metadata import version
from pathlib import Path

warnings.filterwarnings("ignore")
import torch
from safetensors.torch import load_file, save_file
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
torch.manual_seed(0)
H, I, V, U, T = 64, 96, 128, 50, 12
sizes = {"hidden_size": H, "intermediate_size": I, "num_attention_heads": 4, "vocab_size": V}
sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, initializer_range=0.2, **sizes))
target.save_pretrained(place / "target")
matrix = lambda rows, columns: torch.randn(rows, columns) / columns**0.5
ids = torch.randperm(V)[:U].sort().values
weights = {"fc.weight": matrix(H, 3 * H), "lm_head.weight": matrix(U, H), "norm.weight": torch.rand(H) + 0.5}
weights |= {"d2t": ids - torch.arange(U), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)}
weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
    weights[f"midlayer.{name}.weight"] = torch.rand(H) + 0.5
for name, rows, columns in (
    ("self_attn.q", 64, 2 * H), ("self_attn.k", 32, 2 * H), ("self_attn.v", 32, 2 * H),
    ("self_attn.o", H, 64), ("mlp.gate", I, H), ("mlp.up", I, H), ("mlp.down", H, I),
):
    weights[f"midlayer.{name}_proj.weight"] = matrix(rows, columns)
config = sizes | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
config |= {"num_hidden_layers": 1, "draft_vocab_size": U, "rms_norm_eps": 1e-6}
config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
tokens = torch.randint(V, (1, T))


def logits(norm_output):
    """Convert the head with this setting, and return speculators' logits of three draft tokens."""
    folder = place / f"head-{norm_output}"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"norm_output": norm_output}))
    out = place / f"converted-{norm_output}"
    Eagle3Converter().convert(folder, out, str(place / "target"), validate=False)
    settings = Eagle3SpeculatorConfig.from_pretrained(out)
    settings.eagle_aux_hidden_state_layer_ids = [2, 4, 5]
    settings.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(settings).eval()
    model.load_state_dict(load_file(out / "model.safetensors"), strict=False)
    found = []
    model.lm_head.register_forward_hook(lambda module, inputs, result: found.append(result[0]))
    with torch.no_grad():
        states = target(input_ids=tokens, output_hidden_states=True).hidden_states
        joined = torch.cat([states[layer][:, :-1] for layer in (2, 4, 5)], -1)
        places = torch.zeros(1, T - 1, dtype=torch.int64)
        model(hidden_states=joined, input_ids=tokens[:, 1:], document_ids=places, ttt_steps=3)
    return found, settings


on, settings = logits(True)
off, _ = logits(False)
steps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(on, off)]
source = zipfile.ZipFile(next(place.glob("specforge-*.whl"))).read("specforge/modeling/draft/llama3_eagle.py").decode()
default = 'self.norm_output = getattr(config, "norm_output", True)' in source
reads = "if self.norm_output:\n            norm_hidden_states = self.norm(hidden_states)" in source
base = settings.transformer_layer_config.rope_parameters["rope_theta"]
print(f"SpecForge 0.2.0: true by default, {default}; about the input of the LM head, {reads}")
print(f"speculators {version('speculators')}: the converted head has norm_output {settings.norm_output}; with it")
print("logits of draft tokens 1 to 3 differ from those without by", ", ".join(f"{x:.2f}" for x in steps))
print(f"base in the head: 1000000; in the converted head: {base:.0f}")
assert default and reads and settings.norm_output and base == 10000
assert steps[0] == 0 and min(steps[1:]) > 0.05
PYTHON
