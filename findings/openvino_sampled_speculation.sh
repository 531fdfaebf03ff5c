#!/usr/bin/env bash
# What one would guess: with a draft model, sampling draws from the same distribution as without one, as speculative
# decoding promises.
# What happens: with a draft model, OpenVINO GenAI samples another distribution. The first two tokens of one answer,
# drawn with 400 seeds, differ from those without a draft far more than two sets of 400 without a draft differ.
# Greedy outputs are equal. With prefix caching, the default, a sampled request with a draft raises instead.
# Versions: openvino-genai 2026.4.1.0, openvino 2026.4.1, optimum-intel 2.2.0, transformers 5.5.4.
# What pipedraft does: docs/engines.md says to decode greedily there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0 transformers==5.5.4
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision
cd "$folder"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'PYTHON'
import torch
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
for name, layers in (("target", 4), ("draft", 2)):
    torch.manual_seed(0)  # the draft has the target's first layers
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=1,
        bos_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(name)
    tokenizer.save_pretrained(name)
PYTHON
for name in target draft; do
    "$folder/venv/bin/optimum-cli" export openvino --model $name --task text-generation-with-past \
        --weight-format fp32 ${name}_ir > export.log 2>&1
done
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from collections import Counter

import numpy as np
import openvino_genai as genai
from openvino import Tensor

precise = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
row = np.array([[40, 41, 42, 43, 44]], np.int64)


def draw(pipeline, seeds, drafted, **options):
    drawn = []
    for seed in seeds:
        settings = genai.GenerationConfig(max_new_tokens=4, ignore_eos=True, rng_seed=seed, **options)
        settings.apply_chat_template = False
        if drafted:
            settings.num_assistant_tokens = 3
        inputs = genai.TokenizedInputs(Tensor(row), Tensor(np.ones_like(row)))
        drawn.append(tuple(pipeline.generate(inputs, settings).tokens[0][:2]))
    return Counter(drawn)


def variation(one, other):
    n, m = sum(one.values()), sum(other.values())
    return sum(abs(one[pair] / n - other[pair] / m) for pair in one | other) / 2


scheduler = genai.SchedulerConfig()
scheduler.enable_prefix_caching = False  # with it, a sampled request raises
alone = genai.LLMPipeline("target_ir", "CPU", scheduler_config=scheduler, **precise)
draft = genai.draft_model("draft_ir", "CPU", **precise)
with_draft = genai.LLMPipeline(
    "target_ir", "CPU", draft_model=draft, scheduler_config=scheduler, **precise
)
greedy = [draw(pipeline, [0], pipeline is with_draft) for pipeline in (alone, with_draft)]
sampled = {"do_sample": True, "temperature": 1.0, "top_k": 4}
first, second = (draw(alone, range(at, at + 400), False, **sampled) for at in (0, 400))
drafted = draw(with_draft, range(400), True, **sampled)
chance, found = variation(first, second), variation(first, drafted)
print(genai.__version__, "greedy outputs equal:", greedy[0] == greedy[1])
print(f"total variation of the first two tokens: {found:.2f} with a draft, {chance:.2f} by chance")
sys.exit(not (greedy[0] == greedy[1] and found > 3 * chance))
PYTHON
