"""Count CUDA graphs, other kernels, waits and uploads per decoding step, on a pretended GPU.

    python docs/lab/launches.py
    python docs/lab/launches.py --training

--training counts kernels, waits and uploads of one optimizer step with three conversations.

The networks are tiny, because the counts do not depend on their sizes. The prompt and the capture
of graphs are left out. The script uses the tests' pretended device, so it needs a checkout.
"""

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "inference"))

import device_runs
from accelerate.state import AcceleratorState
from test_device_decode import HEADS
from train_runs import make_world

from pipedraft.inference.shapes import TreeShape
from pipedraft.models.speed.cuda_graphs import Graphs

ROWS = [
    ("autoregressive", None, "autoregressive", {"num_stages": 1}),
    ("EAGLE-3, chain:3", "eagle3", "eagle", {"num_stages": 1, "tree": TreeShape.parse("chain:3")}),
    ("EAGLE-3, tree of 59", "eagle3", "eagle", {"num_stages": 1}),
    ("SPD n = 2", "spd", "spd", {"num_stages": 2}),
    ("SPD n = 2, W = 4", "spd", "spd", {"num_stages": 2, "tree_width": 4}),
]


def count_training() -> None:
    print("| training | kernels | waits | uploads |")
    print("|---|---|---|---|")
    with TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        for method in ("eagle3", "spd", "ppsd"):
            AcceleratorState._reset_state()
            log, _ = device_runs.train_on_gpu(world, method, Path(folder) / method)
            counts = (x.total() for x in (log.launches, log.syncs, log.uploads))
            print(f"| {method} | {' | '.join(map(str, counts))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--training", action="store_true", help="count a training step instead")
    if parser.parse_args().training:
        count_training()
        return
    logs, graphs = [], [0]
    pretend, run = device_runs.pretended_cuda, Graphs.run
    place = device_runs.place_draft

    @contextmanager
    def kept():
        with pretend() as log:
            logs.append(log)
            clear = log.clear
            log.clear = lambda: (clear(), graphs.__setitem__(0, 0))
            yield log

    def counted(self, *args, **options):
        graphs[0] += 1
        return run(self, *args, **options)

    def place_if_any(draft, target):
        return None if draft is None else place(draft, target)

    print("| decoding | temperature | graphs | other kernels | waits | uploads |")
    print("|---|---|---|---|---|---|")
    with (
        patch.object(device_runs, "pretended_cuda", kept),
        patch.object(device_runs, "place_draft", place_if_any),
        patch.object(Graphs, "run", counted),
    ):
        for name, head, schedule, settings in ROWS:
            for temperature in (0.0, 1.0):
                make = HEADS[head] if head else lambda target: None
                counts = device_runs.decode_on_gpu(
                    make, schedule, temperature=temperature, **settings
                )
                steps = logs[-1].syncs.total() / counts["syncs_per_step"]
                row = graphs[0] / steps, logs[-1].launches.total() / steps
                rest = counts["syncs_per_step"], counts["uploads_per_step"]
                figures = " | ".join(f"{value:.1f}" for value in (*row, *rest))
                print(f"| {name} | {temperature:g} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
