#!/usr/bin/env bash
# What one would guess: `transformers serve` samples if a chat request has "temperature": 1.0, as OpenAI's API does.
# What happens: it copies the temperature into the model's generation config and leaves `do_sample` as it is. For a
# model without `"do_sample": true` in generation_config.json every answer is greedy, with every seed and temperature.
# `logprobs` and `top_logprobs` are accepted and absent from the answer.
# Versions: transformers 5.23.0, torch 2.13.0.
# What pipedraft does: `pipedraft audit` says that all seeds give the same text and that the server ignores logprobs,
# and compares words instead of tokens.
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 'transformers[serving]==5.23.0' accelerate==1.15.0
cd "$folder"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<unk>", "<end>", *(f"w{i}" for i in range(98))]
raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<end>")
tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
tokenizer.save_pretrained("model")
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100, eos_token_id=1
)
LlamaForCausalLM(config).save_pretrained("model")
PYTHON
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/transformers" serve "$folder/model" --host 127.0.0.1 --port "$port" --device cpu --dtype float32 >log 2>&1 &
server=$!
"$folder/venv/bin/python" - "$port" "$folder/model" "$folder" <<'PYTHON'
import json
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

port, name, folder = sys.argv[1:]


def ask(**fields):
    body = {"model": name, "messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 12, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.load(reply)["choices"][0]
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(1)
    raise SystemExit(Path(folder, "log").read_text())


greedy = ask(temperature=0.0)["message"]["content"]
sampled = [ask(temperature=1.0, seed=seed, logprobs=True, top_logprobs=5) for seed in range(6)]
hot = ask(temperature=2.0, seed=1)["message"]["content"]
print("transformers", version("transformers"))
print("temperature 0:          ", greedy)
print("temperature 1, six seeds:", {one["message"]["content"] for one in sampled})
print("log-probabilities in the answers:", any(one.get("logprobs") for one in sampled))
is_as_stated = {greedy, hot} == {one["message"]["content"] for one in sampled}
is_as_stated &= not any(one.get("logprobs") for one in sampled)
print("as stated:", is_as_stated)
raise SystemExit(not is_as_stated)
PYTHON
