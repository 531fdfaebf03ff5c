#!/usr/bin/env bash
# What one would guess: llama.cpp's converter stores an EAGLE-3 head's settings in the GGUF file, or refuses a setting that
# llama.cpp has no place for, as it refuses unknown tensors.
# What happens: it drops three settings without a word, so the file is that of another head: the fused layers in
# `eagle_config` (where nvidia-modelopt writes them, and SGLang and vLLM read them; the defaults 2, L/2 and L-3 are stored
# instead), `norm_output` (the normed state is fed back) and `sliding_window`. Fused layers at the top level, as
# speculators writes them, are stored.
# Versions: llama.cpp 0.5.0 in the sources of llama-cpp-python 0.3.36, torch 2.13.0, transformers 5.23.0.
# What pipedraft does: `models export --format gguf` writes the file itself, with the head's layers, and refuses the others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install torch==2.13.0 transformers==5.23.0 sentencepiece==0.2.3 numpy pyyaml requests tqdm
cd "$folder"
"${pip[@]}" download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
tar -xzf llama_cpp_python-0.3.36.tar.gz
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$folder/venv/bin/python" - llama_cpp_python-0.3.36/vendor/llama.cpp <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

source = Path(sys.argv[1])
sys.path.insert(0, str(source / "gguf-py"))
import gguf

V, H, F, HEADS, LAYERS = 300, 64, 128, 4, 12
sizes = {
    "hidden_size": H,
    "intermediate_size": F,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": V,
    "max_position_embeddings": 512,
}
target = LlamaConfig(num_hidden_layers=LAYERS, architectures=["LlamaForCausalLM"], **sizes)
target.save_pretrained("target")
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a small text"]),
    model_prefix="target/tokenizer",
    vocab_size=V,
    model_type="bpe",
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
)
shapes = {"fc": (H, 3 * H), "norm": (H,), "lm_head": (V, H)}
shapes |= {f"midlayer.self_attn.{x}_proj": (H, 2 * H) for x in "qkv"}
shapes |= {f"midlayer.mlp.{x}_proj": (F, H) for x in ("gate", "up")}
shapes |= {"midlayer.self_attn.o_proj": (H, H), "midlayer.mlp.down_proj": (H, F)}
norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
shapes |= {f"midlayer.{x}": (H,) for x in norms}
weights = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
plain = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "head_dim": H // HEADS,
    "draft_vocab_size": V,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    **sizes,
}
layers = {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}
settings = {
    "no setting": {},
    "layers at the top level": layers,
    "layers in eagle_config": {"eagle_config": layers | {"use_aux_hidden_state": True}},
    "norm_output": {"norm_output": True},
    "sliding_window": {"sliding_window": 64, "layer_types": ["sliding_attention"]},
}


def converted(setting):
    head = Path("head")
    head.mkdir(exist_ok=True)
    (head / "config.json").write_text(json.dumps(plain | setting))
    save_file(weights, head / "model.safetensors", {"format": "pt"})
    words = [sys.executable, source / "convert_hf_to_gguf.py", head, "--target-model-dir", "target"]
    words += ["--outtype", "f32", "--outfile", "head.gguf"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    fields = {name: x.contents() for name, x in gguf.GGUFReader("head.gguf").fields.items()}
    return fields, [line for line in said.splitlines() if "warn" in line.lower()]


files = {name: converted(setting) for name, setting in settings.items()}
own, said = files.pop("no setting")
same = {name for name, found in files.items() if found == (own, said)}
for name in files:
    print(f"{name}: {'as without it' if name in same else files[name][0]['eagle3.target_layers']}")
sys.exit(same != {*files} - {"layers at the top level"})
PYTHON
