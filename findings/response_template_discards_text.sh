#!/usr/bin/env bash
# Guess: tokenizer.parse_response gives all of an answer's text in some field, and a tokenizer's
# response_schema (the name in most documentation and in saved tokenizers) says how.
# What happens in transformers 5.23.0: the attribute is response_template; a response_schema in
# tokenizer_config.json is dropped without a word. If every field of the template has an opening
# mark, as gpt-oss's channels have, text before the first mark is in no field: an answer that names
# no channel parses to {"role": "assistant"}, without an error.
# pipedraft: responses.py reads response_template, and gives text outside of all channels as content.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers jinja2
cd "$folder"
cat > check.py <<'PY'
import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

FIELDS = {
    "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
    "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
}
print("transformers", transformers.__version__)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
tokenizer.response_template = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": FIELDS,
}
prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
parse = tokenizer.parse_response
good = parse("<|channel|>final<|message|>Hello.<|return|>", prefix=prompt)
lost = parse("Hello.<|return|>", prefix=prompt)
print("with its channel:", good, "- without one:", lost)
assert good == {"role": "assistant", "content": "Hello."}
assert lost == {"role": "assistant"}

tokenizer.save_pretrained("saved")
config = Path("saved/tokenizer_config.json")
values = json.loads(config.read_text())
values["response_schema"] = values.pop("response_template")
config.write_text(json.dumps(values))
again = AutoTokenizer.from_pretrained("saved")
has = [getattr(again, name, None) is not None for name in ("response_schema", "response_template")]
print("saved as response_schema, loaded again: response_schema, response_template known:", has)
assert has == [False, False]
PY
"$folder/venv/bin/python" check.py
echo "As stated: text outside of all fields is dropped, and response_schema is not read."
