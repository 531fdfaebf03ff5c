#!/usr/bin/env bash
# Guess: a layer's product needs about as much memory in bfloat16 as in float32, or less, and the number
# of rows changes only its time.
# torch 2.13.0 on a CPU with bfloat16 products (AVX512-BF16 or AMX): for every new number of rows, oneDNN
# generates a program, and keeps up to 1,024 of them. 400 row counts of one 192 x 4096 layer took 1,054 MB
# and four to five times as long as the same products again. In float32 they took 21 MB.
# So training on batches with ever other numbers of rows may be slower in bfloat16, and looks like a leak.
# ONEDNN_PRIMITIVE_CACHE_CAPACITY limits the memory, but not the time.
# pipedraft: pads rows to multiples of 64 when it trains in bfloat16 on a CPU.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
if ! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
    echo "not measured: this processor has no bfloat16 products"
    exit 0
fi
python3 -m venv "$place/venv"
"$place/venv/bin/pip" -q install torch==2.13.0 numpy
cat > "$place/rows.py" <<'PYTHON'
import time
from pathlib import Path

import torch

torch.set_num_threads(1)
COUNTS = range(100, 500)


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def products(weight):
    start = time.process_time()
    for count in COUNTS:
        torch.nn.functional.linear(weight.new_ones(count, 192), weight)
    return time.process_time() - start


print("torch", torch.__version__)
grown = {}
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones(4096, 192, dtype=dtype)
    torch.nn.functional.linear(weight.new_ones(600, 192), weight)
    before = resident_mb()
    first = products(weight)
    grown[dtype] = resident_mb() - before
    print(f"{dtype}: {grown[dtype]:.0f} MB more, {first:.2f} s, again {products(weight):.2f} s")
is_so = grown[torch.bfloat16] > 300 > 3 * grown[torch.float32]
print("bfloat16 keeps a program for each number of rows" if is_so else "changed")
raise SystemExit(not is_so)
PYTHON
"$place/venv/bin/python" "$place/rows.py"
