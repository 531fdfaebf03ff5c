#!/usr/bin/env bash
# What one would guess: `logprobs.content[i].token` in a chat answer names the i-th token of the answer, as in OpenAI's
# API, whatever the temperature.
# What happens: with `top_logprobs`, mlx_lm.server repeats the first of the listed top tokens there, with that token's
# log-probability. The list is not sorted, so even at temperature 0 this need not be the answer's token. Names are raw
# tokenizer pieces. `top_logprobs` above 11 is refused (OpenAI allows 20).
# Versions: mlx-lm 0.32.2, mlx 0.32.4 (CPU), transformers 5.23.0.
# What pipedraft does: `pipedraft audit` checks that tokens spell the text. If not, it says so and compares words; it
# asks for fewer top_logprobs if 20 are refused.
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.23.0 mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
cd "$folder"
export HF_HUB_OFFLINE=1
"$folder/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["<unk>", "<end>", *(f"\u0120w{i}" for i in range(98))]
raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
raw.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<end>")
tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
tokenizer.save_pretrained("model")
settings = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
mx.random.seed(0)
model = Model(ModelArgs.from_dict(settings))
mx.save_safetensors("model/model.safetensors", dict(tree_flatten(model.parameters())), metadata={"format": "pt"})
Path("model/config.json").write_text(
    json.dumps(settings | {"architectures": ["LlamaForCausalLM"], "eos_token_id": 1, "max_position_embeddings": 512})
)
PYTHON
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/python" -m mlx_lm server --model "$folder/model" --port "$port" >log 2>&1 &
server=$!
"$folder/venv/bin/python" - "$port" "$folder/model" "$folder" <<'PYTHON'
import json
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

port, name, folder = sys.argv[1:]


def ask(**fields):
    body = {"model": name, "messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 8, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.load(reply)["choices"][0]
        except urllib.error.HTTPError as error:
            if error.code == 400:
                return 400
            print("HTTP", error.code, error.read()[:200], file=sys.stderr)
            time.sleep(1)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(1)
    raise SystemExit(Path(folder, "log").read_text())


def compare(temperature):
    choice = ask(temperature=temperature, seed=1, logprobs=True, top_logprobs=5)
    text = choice["message"]["content"].split()
    entries = choice["logprobs"]["content"]
    named = [entry["token"].replace("\u0120", "") for entry in entries]
    is_first = all(entry["token"] == entry["top_logprobs"][0]["token"] for entry in entries)
    print(f"temperature {temperature:g}: the text has {text}, logprobs.content names {named}")
    return text[: len(named)] != named[: len(text)] and is_first


print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))
compare(0.0)
is_as_stated = compare(1.0)
refused = ask(logprobs=True, top_logprobs=20)
print("top_logprobs 20: HTTP", refused)
is_as_stated &= refused == 400
print("as stated:", is_as_stated)
raise SystemExit(not is_as_stated)
PYTHON
