"""Estimate what an entropy code for draft ids would save. Run `python docs/lab/uplink.py`.

The cloud has no draft, so the code can only use how frequent each id is. Half of SmolLM2's shipped
answers give the frequencies, and the other half is coded. Print bits per id, and bytes per message
by the number of draft tokens. Needs out/smollm2 (`make real`).
"""

import gzip
import json
import math
from collections import Counter
from pathlib import Path

import msgspec

from pipedraft.inference.edge.channel import Link
from pipedraft.inference.edge.session_messages import Verify
from pipedraft.models.target import load_tokenizer

ANSWERS = Path(__file__).resolve().parents[2] / "assets" / "train" / "smollm2_answers.jsonl.gz"


def main() -> None:
    tokenizer = load_tokenizer("out/smollm2")
    with gzip.open(ANSWERS, "rt") as file:
        texts = [tokenizer(json.loads(line)["answer"]).input_ids for line in file]
    known, others = texts[::2], [token for ids in texts[1::2] for token in ids]
    counts = Counter(token for ids in known for token in ids)
    total = counts.total() + 0.5 * len(tokenizer)
    bits = sum(-math.log2((counts[token] + 0.5) / total) for token in others) / len(others)
    num_bytes = sum(len(msgspec.msgpack.encode(token)) for token in others) / len(others)
    print(f"{len(others)} ids: {num_bytes:.2f} bytes each as msgpack, {bits:.2f} bits coded")
    for length in (1, 3, 5, 8):
        ids = others[:length]
        message = Verify(
            epoch=3, seq=40, base=300, prefix_hash=bytes(8), certain=[], ids=ids, q=[], next_s=0.012
        )
        fixed = len(msgspec.msgpack.encode(message)) + Link.header_bytes
        fixed -= sum(len(msgspec.msgpack.encode(token)) for token in ids)
        plain, coded = fixed + length * num_bytes, fixed + math.ceil(length * bits / 8)
        print(
            f"{length} draft tokens: {plain:.0f} bytes, coded {coded}: {1 - coded / plain:.1%} less"
        )


if __name__ == "__main__":
    main()
