#!/usr/bin/env bash
# One would guess: with longrope, greedy `generate` with its cache gives one rule for all families,
# and the same tokens as without the cache.
#
# What happens (transformers 5.23.0): Phi-3 (also Phi-3.5-MoE) drops its cache when the text outgrows
# `original_max_position_embeddings` and computes all rows again with the long factors, so cached and
# uncached generation agree. A Llama with the same rope_parameters keeps the keys that it turned by
# the short factors. From there on its text with the cache is another one than without.
#
# pipedraft asks the model which of the two it does, and decodes as `generate` with its cache: rows
# turn by their own text's length, and where `generate` starts anew, the stages do.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers as hf

hf.utils.logging.set_verbosity_error()
ORIGINAL = 32
sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
    rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 6.0, 12.0],
    },
)
differ = {}
for name, config in (
    ("phi3", hf.Phi3Config(**sizes, original_max_position_embeddings=ORIGINAL)),
    ("llama", hf.LlamaConfig(**sizes)),
):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.3)
    differ[name] = 0
    for seed in range(6):
        ids = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(seed))
        options = dict(max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(ids))
        texts = [model.generate(ids, use_cache=use, pad_token_id=0, **options) for use in (True, False)]
        differ[name] += not torch.equal(*texts)
    print(f"{name}: {differ[name]} of 6 texts differ between generate with and without its cache")
print(f"transformers {hf.__version__}")
assert differ["phi3"] == 0 and differ["llama"] > 0, differ
PYTHON
