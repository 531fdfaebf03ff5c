#!/usr/bin/env bash
# What one would guess: OpenVINO GenAI feeds an EAGLE-3 head the target's states that its trainers mean. EAGLE-3's authors
# write `if idx==len(self.layers)-3 or idx==len(self.layers)//2 or idx==2: all_hidden_states += (hidden_states,)` before
# the layer is called: the inputs of layers 2, L/2 and L-3. Most trainers do so.
# What happens: without a list in the head's IR, OpenVINO fuses the outputs of these layers, each one too late, and says
# nothing. In this target only layer 2 changes the state. A head made for the input of layer 2 has no draft token
# accepted, a head made for its output all. With a real head the acceptance only falls. `hidden_layers_list` in the IR's
# rt_info, by outputs, corrects it; optimum-intel writes none.
# Versions: openvino-genai 2026.4.1.0, openvino 2026.4.1, optimum-intel 2.2.0, transformers 5.5.4.
# What pipedraft does: `models export --format openvino` writes the head's own layers into the IR, and `eval parity
# --engine openvino` names a layer off by one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0 transformers==5.5.4
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision
cd "$folder"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$folder/venv/bin/python" - > export.log 2>&1 <<'PYTHON'
import torch
from optimum.exporters.openvino import export_from_model, model_patcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
words.train_from_iterator(
    ["a small text"],
    trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
V, LAYERS, HEAD = len(tokenizer), 10, 64
H = 2 * 64 * -(-V // 64)  # the first half holds the token, the second what layer 2 adds: the next
following = [2 + (7 * (i - 2) + 3) % (V - 2) for i in range(V)]  # never an end token
sizes = {
    "hidden_size": H,
    "intermediate_size": V,
    "num_attention_heads": H // HEAD,
    "num_key_value_heads": H // HEAD,
    "head_dim": HEAD,
    "vocab_size": V,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def zeroed(model):
    for name, weight in model.named_parameters():
        weight.data.fill_(1.0 if "norm" in name else 0.0)
    return model


target = zeroed(LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes)))
mlp = target.model.layers[2].mlp
with torch.no_grad():
    for i, then in enumerate(following):
        target.model.embed_tokens.weight[i, i] = 1
        mlp.gate_proj.weight[i, i] = mlp.up_proj.weight[i, i] = 1
        mlp.down_proj.weight[H // 2 + then, i] = 1
        target.lm_head.weight[then, H // 2 + then] = 1
target.save_pretrained("target")
tokenizer.save_pretrained("target")
names = {"architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": H}
config = LlamaConfig(num_hidden_layers=1, draft_vocab_size=V, **names, **sizes)


class Head(model_patcher.LlamaEagle3ForCausalLM):
    __module__ = "transformers"  # optimum-intel asks a class for its library


for name, reads_output in (("input", False), ("output", True)):
    head = zeroed(Head(config))
    with torch.no_grad():
        head.model.fc.weight[:, :H] = torch.eye(H)  # the first of the three fused states
        for i, then in enumerate(following):
            head.model.embed_tokens.weight[i, i] = 1
            right, wrong = following[then], following[following[then]]
            if reads_output:
                head.model.lm_head.weight[right, H // 2 + then] = 1
            else:
                head.model.lm_head.weight[right, i] = 1
                head.model.lm_head.weight[wrong, H // 2 + then] = 1
    export_from_model(head, f"{name}_ir", task="text-generation-with-past")
PYTHON
"$folder/venv/bin/optimum-cli" export openvino --model target --task text-generation-with-past \
    --weight-format fp32 target_ir > export.log 2>&1
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import openvino_genai as genai
from openvino import Tensor

precise = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
row = np.array([[40, 41, 42, 43, 44]], np.int64)
settings = genai.GenerationConfig(max_new_tokens=41, apply_chat_template=False)
settings.num_assistant_tokens = 1
shares = {}
for name in ("input", "output"):
    draft = genai.draft_model(f"{name}_ir", "CPU", **precise)
    pipeline = genai.LLMPipeline("target_ir", "CPU", draft_model=draft, **precise)
    inputs = genai.TokenizedInputs(Tensor(row), Tensor(np.ones_like(row)))
    found = pipeline.generate(inputs, settings)
    steps = found.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes[1:]
    shares[name] = sum(size - 1 for size in steps) / len(steps)
    print(f"a head made for the {name} of layer 2: {shares[name]:.0%} of its draft tokens accepted")
print(genai.__version__)
sys.exit(not (shares["input"] == 0 and shares["output"] > 0.9))
PYTHON
