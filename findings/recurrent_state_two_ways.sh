#!/usr/bin/env bash
# One would guess: a recurrent layer hands its next state to the cache by `update_recurrent_state`,
# as an attention layer hands over keys and values by `update`.
#
# What happens (transformers 5.23.0): it depends on the family. Gated delta net layers (Qwen3.5) call
# `update_recurrent_state` for every token. Mamba-2 layers (Granite 4 hybrid) call it for a prompt
# only. For a single token they change the tensor from `get_recurrent_state` in place. A cache that
# hands out copies works for the first family; with the second it loses every state after the prompt,
# and no error is raised.
#
# pipedraft's cache hands out a copy and stores that copy at once as the next state, so both ways
# work; it decodes with a small copy of every family before the family is accepted.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers as hf

hf.utils.logging.set_verbosity_error()
sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    layer_types=["linear_attention", "full_attention"],
)
granite = hf.GraniteMoeHybridConfig(
    **sizes, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
    mamba_chunk_size=16, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16,
)
qwen = hf.Qwen3_5TextConfig(
    **sizes, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4,
)
found = {}
for name, config in (("granitemoehybrid", granite), ("qwen3_5", qwen)):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    cache, calls = hf.DynamicCache(config=config), []
    update = cache.update_recurrent_state
    cache.update_recurrent_state = lambda *a, **k: (calls.append(1), update(*a, **k))[1]
    with torch.no_grad():
        model(torch.arange(6)[None], past_key_values=cache, use_cache=True)
        in_prompt = len(calls)
        before = cache.get_recurrent_state(0).clone()
        model(torch.tensor([[7]]), past_key_values=cache, use_cache=True)
    changed = not torch.equal(before, cache.get_recurrent_state(0))
    found[name] = (in_prompt, len(calls) - in_prompt, changed)
    print(f"{name}: update_recurrent_state called {in_prompt} time(s) for the prompt, "
          f"{len(calls) - in_prompt} for the next token; the state changed: {changed}")
print(f"transformers {hf.__version__}")
assert found == {"granitemoehybrid": (1, 0, True), "qwen3_5": (1, 1, True)}, found
PYTHON
