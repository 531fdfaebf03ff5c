#!/usr/bin/env bash
# Guess: the {% generation %} marks of TRL's training templates cover what the model writes, so they
# begin behind the generation prompt.
# What happens in trl 1.16.0: for most templates they do (Qwen3, Llama 3), but in gptoss_training.jinja
# the marks begin before <|start|>assistant, which the generation prompt already has. So
# return_assistant_tokens_mask marks two header tokens of each turn that the model never writes.
# pipedraft: data_recipes/turns.py finds a turn's start behind its prompt; marks only take away.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers jinja2
"$folder/venv/bin/pip" download -q --no-deps -d "$folder" trl==1.16.0
cd "$folder"
cat > check.py <<'PY'
import zipfile
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

(wheel,) = Path(".").glob("trl-1.16.0*.whl")
print("transformers", transformers.__version__, wheel.name)
bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({x: i for i, x in enumerate(bytes_of)}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
marked = {}
for name in ("qwen3", "llama3", "gptoss"):
    with zipfile.ZipFile(wheel) as files:
        template = files.read(f"trl/chat_templates/{name}_training.jinja").decode()
    given = {"chat_template": template, "return_dict": True}
    whole = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, **given)
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, **given)
    size = len(prompt["input_ids"])
    assert whole["input_ids"][:size] == prompt["input_ids"]
    mask = whole["assistant_masks"][:size]
    marked[name] = tokenizer.decode([t for t, m in zip(prompt["input_ids"], mask) if m])
    print(f"{name}: marked as the assistant's, within the prompt: {marked[name]!r}")
assert marked == {"qwen3": "", "llama3": "", "gptoss": "<|start|>assistant"}
PY
"$folder/venv/bin/python" check.py
echo "As stated: gpt-oss's marks include the header of the generation prompt, the others do not."
