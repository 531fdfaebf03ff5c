"""Rank program: capture CUDA graphs on pretended GPUs while sends wait for their peer.

As with NCCL, a send is in flight until the peer has posted its receive. Capturing a graph waits for
the whole device, and so for its rank's sends. Two ranks capturing at once could wait for each
other forever.

tests/process_rendezvous.py FOLDER guarded (or unguarded: capture without asking)
"""

import json
import os
import sys
import time
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from conftest import tiny_llama
from decode_runs import PROMPTS, SMALL, PlainTokenizer, friendly_module, plain_text
from pretended_device import pretended_cuda
from tiny_drafts import make_exit, make_head

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.ranks import cluster as cluster_module
from pipedraft.inference.ranks.cluster import Cluster
from pipedraft.inference.ranks.links import DeviceLink, Sender
from pipedraft.inference.ranks.watch import WatchLimits
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.models.cuda_graphs import UNDER_WAY, Graphs
from pipedraft.pretrained import place_draft

NEW_TOKENS, PROMPT = 8, PROMPTS[2]
RANK = int(os.environ["RANK"])
HANGS_S = 20
PATIENT = WatchLimits(silence_s=99, undelivered_s=99, step_s=99)
"""Limits for a busy machine; ``Taken`` ends a hanging send."""
FORGETS = 0.3
"""Probability that a rank forgets its graphs before a call; each rank draws for itself."""


class Rendezvous:
    """``DeviceLink`` over gloo: a rank announces its requests in the launch's store."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.link, self.device = DeviceLink(group, torch.device("cpu")), device
        self.name, self.num_sent, self.num_asked = group.group_name, 0, 0
        self.patience_s = HANGS_S

    def open(self, peer, sends):
        """Open the link; the peer may have come later than this rank."""
        self.patience_s = PATIENT.step_s
        DeviceLink.open(self, peer, sends)
        self.patience_s = HANGS_S

    def send(self, array, peer):
        work, whole = self.link.send(array.cpu(), peer)
        self.num_sent += 1
        return Taken(work, f"{self.name}/{self.num_sent}", self.patience_s), whole

    def receive(self, shape, dtype, peer):
        self.num_asked += 1
        store().set(f"{self.name}/{self.num_asked}", "")
        return self.link.receive(shape, dtype, peer).to(self.device)


class Taken:
    def __init__(self, work: dist.Work, key: str, patience_s: float) -> None:
        self.work, self.key, self.patience_s = work, key, patience_s
        self.has_gone = False

    def is_completed(self) -> bool:
        if not self.has_gone and store().check([self.key]):
            self.work.wait()  # once: it will be forgotten
            self.has_gone = True
        return self.has_gone

    def wait(self) -> None:
        deadline_s = time.monotonic() + self.patience_s
        while not self.is_completed():
            assert time.monotonic() < deadline_s, "recording waits for a peer that records, too"
            time.sleep(0.01)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def recording(right, counts):
    def record(self, packed, rows, compute):
        counts["recorded"] += 1
        for sender in list(UNDER_WAY):
            for work, _ in sender._apart:
                work.wait()
        return right(self, packed, rows, compute)

    return record


def forgetting(right, random):
    def run(self, *arguments, **options):
        if random.random() < FORGETS:
            self.clear()
        return right(self, *arguments, **options)

    return run


def over_gloo(right):
    return lambda ranks, *, timeout, backend: right(ranks, timeout=timeout, backend="gloo")


def main() -> None:
    folder, counts = Path(sys.argv[1]), {"rank": RANK, "recorded": 0}
    Graphs._make = recording(Graphs._make, counts)
    Graphs.run = forgetting(Graphs.run, Random(RANK))
    cluster_module.DeviceLink, dist.new_group = Rendezvous, over_gloo(dist.new_group)
    # Weights are loaded before, and moved to a pretended GPU.
    Cluster._load_part = lambda self, job, **_: tiny_llama(layers=4, vocab=16).to(self.device)
    if sys.argv[2] == "unguarded":
        Sender.is_sending = lambda self: False
    with pretended_cuda(num_devices=4), Cluster(PATIENT, "device") as cluster:
        links = cluster._device_links.values()
        counts["never used"] = sum(link.num_sent + link.num_asked == 0 for link in links)
        if cluster.is_controller:
            name = str(folder / "target")
            whole = tiny_llama(layers=4, vocab=16)
            whole.save_pretrained(name)
            part = cluster.load_target(name, revision=None, num_stages=3)
            counts["unlike plain"] = unlike_plain(cluster, part, whole)
        else:
            cluster.serve()
    print(json.dumps(counts))


def unlike_plain(cluster, part, whole) -> list[str]:
    """Schedules with an output unlike the baseline's on a CPU."""
    head = make_head(whole)
    special = {
        "autoregressive": None,
        "spd": friendly_module(whole, num_stages=3, num_layers=1),
        "ppsd": make_exit(whole, num_stages=3),
    }
    unlike = []
    expected = plain_text(whole, PROMPT, max_new_tokens=NEW_TOKENS)
    for draft in (head, special["spd"], special["ppsd"]):
        draft.attach(part)
        place_draft(draft, part)
    for name in (name for name, kind in SCHEDULES.items() if not kind.needs_link):
        own = {"tree": SMALL} if hasattr(SCHEDULES[name], "tree") else {}
        own |= {"draft_tokens": 2} if name == "pipeinfer" else {}  # it drafts while it waits
        config = DecodeConfig.of(name, num_stages=3, max_new_tokens=NEW_TOKENS, **own)
        draft = special.get(name, head)
        engine = Engine(part, PlainTokenizer(), config, draft, connect=cluster.connect)
        if engine.decode(PROMPT).token_ids != expected:
            unlike.append(name)
    return unlike


if __name__ == "__main__":
    main()
