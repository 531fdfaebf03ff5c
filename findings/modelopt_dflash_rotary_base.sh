#!/usr/bin/env bash
# One would guess that rope_theta in an exported DFlash head is the base of its training. modelopt
# 0.47.0 takes the draft's base from the target's attribute rope_theta. A configuration of transformers
# 5 has the base inside rope_parameters instead, so the draft trains with the default, 10000. The
# export reads rope_parameters and writes the target's base.
# pipedraft imports such a head as engines read it, and warns with both numbers.
# Exit status 0: the behavior is as stated.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.14.1 nvidia-modelopt==0.47.0 accelerate datasets requests 2>&1 | grep -v -i warn || true
OMP_NUM_THREADS=1 "$place/venv/bin/python" - "$place" <<'PYTHON'
import json, sys, warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import modelopt
import modelopt.torch.speculative as mtsp
import transformers
from modelopt.torch.export import export_speculative_decoding
from transformers import Qwen3Config, Qwen3ForCausalLM

sizes = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
rope = {"rope_type": "default", "rope_theta": 1e6}
target = Qwen3ForCausalLM(
    Qwen3Config(hidden_size=64, num_hidden_layers=8, vocab_size=128, rope_parameters=rope, **sizes)
)
options = {
    "dflash_architecture_config": {"num_hidden_layers": 2, "mask_token_id": 5, **sizes},
    "dflash_block_size": 4,
    "dflash_mask_token_id": 5,
}
mtsp.convert(target, [("dflash", options)])
target.dflash_module._maybe_init_rotary_emb()
frequencies = target.dflash_module.rotary_emb.inv_freq  # base ** (-2 i / head size)
trained = float(frequencies[1]) ** -len(frequencies)
place = Path(sys.argv[1], "export")
export_speculative_decoding(target, export_dir=place)
written = json.loads((place / "config.json").read_text())["rope_theta"]
print(f"modelopt {modelopt.__version__}, transformers {transformers.__version__}: the target's base is")
print(f"1000000, the DFlash draft trains with {trained:.0f}, and config.json says {written:.0f}")
assert round(trained) == 10000 and written == 1e6
PYTHON
