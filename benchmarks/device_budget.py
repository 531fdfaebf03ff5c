"""What training and decoding cost a GPU's host, counted on a pretended GPU: no GPU is needed.

    python benchmarks/device_budget.py --json

Tiny networks take the way that large ones take: kernels are launched by the same lines, and the
host waits for the device at the same ones. Counted are the largest numbers of all methods:

mismatches: operations that see tensors of two devices, which a GPU refuses.
syncs_per_micro_batch: times that the host waits for the device in forward and backward.
syncs_per_decode_step: the same in a pipeline step after the prompt, draft and verdict included.
syncs_of_a_controller, launches_of_a_controller: a step where all stages are other processes; waits,
    and kernels beside those of drafting.
launches_outside_graphs_per_stage: kernels of a stage's pass beside its CUDA graph.
launches_outside_graphs_per_draft_forward: kernels of drafting, by the draft's forward passes.
draft_bookkeeping_32k_over_1k: processor time of what a draft notes of a row behind 32,768 tokens,
    over that behind 1,024.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from device_runs import bookkeeping_s, decode_on_gpu, kernels_of_a_layer, train_on_gpu
from pretended_device import MixedDevices
from tiny_drafts import make_draft, make_exit, make_head, make_module, noisy_copy
from train_runs import make_world

from pipedraft.benchmarks.measurement import make_parser
from pipedraft.train.__main__ import quieten

METHODS = ("spd", "ppsd", "eagle", "eagle3", "dflash", "flexspec", "language_model")
DECODES: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "spd": (lambda target: make_module(target, num_stages=2).float(), "spd", {"num_stages": 2}),
    "ppsd": (partial(make_exit, num_stages=2), "ppsd", {"num_stages": 2}),
    "eagle3": (make_head, "eagle", {"num_stages": 1}),
    "dflash": (partial(make_head, kind="dflash"), "eagle", {"num_stages": 1}),
    "flexspec": (make_draft, "eagle", {"num_stages": 1}),
    "language_model": (noisy_copy, "pipeinfer", {"num_stages": 2, "branches": 2}),
    "outcomes": (make_head, "ssd", {"num_stages": 2}),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="nothing but a line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quieten()
    mismatches, syncs, decoded = 0, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        for method in METHODS:
            for packing in (False, True):
                place = Path(folder) / f"{method}-{packing}"
                try:
                    log, _ = train_on_gpu(world, method, place, packing=packing)
                    syncs[f"{method}{' packed' * packing}"] = log.syncs.total()
                except MixedDevices:
                    mismatches += 1
    for name, (make, schedule, settings) in DECODES.items():
        try:
            decoded[name] = decode_on_gpu(make, schedule, **settings)
        except MixedDevices:
            mismatches += 1
    ranks = []
    for name in ("spd", "eagle3"):
        make, schedule, settings = DECODES[name]
        settings = settings | {"num_stages": 2}
        ranks.append(decode_on_gpu(make, schedule, of_controller=True, **settings))
    if not options.json:
        print("kernels of a Llama layer in a CUDA graph:", kernels_of_a_layer())
        print("host synchronizations per micro-batch:", syncs)
        for name, counts in decoded.items():
            print(name, {what: round(count, 2) for what, count in counts.items()})
    found = {
        "mismatches": mismatches,
        "syncs_per_micro_batch": max(syncs.values()),
        "syncs_per_decode_step": max(x["syncs_per_step"] for x in decoded.values()),
        "launches_outside_graphs_per_stage": max(x["launches_per_stage"] for x in decoded.values()),
        "launches_outside_graphs_per_draft_forward": max(
            x["launches_per_draft_forward"] for x in decoded.values()
        ),
        "syncs_of_a_controller": max(x["syncs_per_step"] for x in ranks),
        "launches_of_a_controller": max(x["launches_beside_per_step"] for x in ranks),
        "draft_bookkeeping_32k_over_1k": bookkeeping_s(32_768) / bookkeeping_s(1024),
    }
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
