#!/usr/bin/env bash
# One would guess: greedy `generate` of one model on one prompt always gives the same tokens.
#
# What happens (transformers 5.23.0): with dynamic NTK rotary positions (rope_type "dynamic") the
# rotary module remembers the longest text that it has seen. After a long prompt, a prompt that is
# shorter, but still longer than max_position_embeddings, is computed with the long one's
# frequencies. The logits of the same prompt differ before and after, without a message. A prompt
# shorter than max_position_embeddings resets the module.
#
# pipedraft keeps a rotary table of its own, computes each row's frequencies from the length of the
# row's own text, and so decodes a prompt like a model that has just been loaded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers as hf

hf.utils.logging.set_verbosity_error()
config = hf.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=16,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)
torch.manual_seed(0)
model = hf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
for weight in model.parameters():
    if weight.dim() > 1:
        weight.normal_(0, 0.3)
prompt, longer, short = (torch.randint(0, 64, (1, n)) for n in (24, 60, 8))


@torch.no_grad()
def last_logits():
    return model(prompt, use_cache=False).logits[0, -1]


before = last_logits()
again = last_logits()
with torch.no_grad():
    model(longer, use_cache=False)
after_longer = last_logits()
with torch.no_grad():
    model(short, use_cache=False)
after_short = last_logits()
changed = float((after_longer - before).abs().max())
print(f"transformers {hf.__version__}: logits of one prompt of 24 tokens (16 original positions)")
print(f"the same prompt twice: equal {torch.equal(before, again)}")
print(f"after a prompt of 60 tokens: changed by up to {changed:.2g}")
print(f"after a prompt of 8 tokens: equal to the first {torch.equal(before, after_short)}")
assert torch.equal(before, again) and changed > 0.01 and torch.equal(before, after_short)
PYTHON
