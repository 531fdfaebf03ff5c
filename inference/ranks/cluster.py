"""Assign stages to the ranks of a launch, connect the ranks, and shut them down.

Rank 0 is the controller and runs the draft. With one rank more than stages, ranks 1..n run the
stages. With as many ranks as stages, rank 0 also runs the first stage.
"""

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import msgspec
import torch
import torch.distributed as dist

from ...devices import dtype_named
from ...models.targets.target import StagedTarget
from ...models.targets.target_part import load_target_part
from ...models.transformer.boundaries import stage_boundaries
from ...pretrained import load_config, quieten
from ..pipelines.process import ProcessPipeline
from ..timeline import WAIT, Timeline
from . import is_launched
from .codec import Cancel, CloseRanks
from .links import (
    ANSWER,
    CANCEL,
    DAY,
    FORWARD,
    Answers,
    DeviceLink,
    Inbox,
    Local,
    LostLink,
    Outbox,
    Receiver,
    Sender,
)
from .watch import BAD_INPUT, CONNECT_TIMEOUT, Watch, WatchLimits
from .worker import SharedWorker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

JOB_KEY = "pipedraft/job"
DEVICE_KEY = "pipedraft/device"
LOAD_TIMEOUT = timedelta(hours=2)


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Job description sent by rank 0 to the others."""

    target: str
    revision: str | None
    boundaries: tuple[int, ...]
    dtype: str
    traces: bool

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1


class Cluster:
    """Context manager for every rank. Its exit ends the other ranks, also after a failure."""

    def __init__(
        self,
        limits: WatchLimits,
        links: Literal["auto", "device", "host"] = "auto",
        *,
        on_cpu: bool = False,
    ) -> None:
        """
        Args:
            links: transport for hidden states. ``device`` sends them separately from their
                messages, by NCCL between GPUs or by gloo without GPUs. ``host`` sends them inside
                the messages, through host memory. ``auto`` is ``device`` if every rank has its own
                GPU, else ``host``.
            on_cpu: True to ignore GPUs.
        """
        if not is_launched():
            raise ValueError(
                "--backend: 'process' needs one process per stage; give --processes N, or on "
                "several machines start it with torchrun"
            )
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.watch = Watch(self.rank, self.world_size, ["starting"] * self.world_size, limits)
        self._links, self._on_cpu = links, on_cpu
        self._device_links: dict[tuple[int, int, int], DeviceLink] = {}
        self.pipeline: ProcessPipeline | None = None

    @property
    def is_controller(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if self._on_cpu or not torch.cuda.is_available():
            return torch.device("cpu")
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", local % torch.cuda.device_count())

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # else every rank has a context on GPU 0, too
        self.watch.start()
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        # gloo otherwise resolves the host's name, which can fail without a network.
        if loopback and os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size):
            # no rank is on another machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        dist.init_process_group("gloo", timeout=CONNECT_TIMEOUT)
        if self._links == "device" or (self._links == "auto" and self._have_own_devices()):
            self._open_device_links()
        return self

    def _have_own_devices(self) -> bool:
        """Return True if every rank has its own GPU."""
        if self.device.type == "cpu":
            mine = ""
        else:
            mine = str(torch.cuda.get_device_properties(self.device).uuid)
        self.watch.store.set(f"{DEVICE_KEY}/{self.rank}", mine)
        # Compare UUIDs, not indices: CUDA_VISIBLE_DEVICES may number one GPU differently per rank.
        keys = [f"{DEVICE_KEY}/{rank}" for rank in range(self.world_size)]
        self.watch.store.wait(keys, CONNECT_TIMEOUT)
        devices = [self.watch.store.get(key).decode() for key in keys]
        return all(devices) and len(set(devices)) == len(devices)

    def _open_device_links(self) -> None:
        """Open links to the next rank and back to the controller, in the same order on all ranks.

        NCCL connects two ranks when a link is first used. This method uses every link once, because
        a later step has a time limit.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        forward = [(rank, rank + 1, FORWARD) for rank in range(self.world_size - 1)]
        back = [(rank, 0, ANSWER) for rank in range(1, self.world_size)]
        for sender, receiver, channel in forward + back:
            pair = sorted((sender, receiver))
            # new_group is collective: every rank calls it, also one that is not in the pair.
            group = dist.new_group(pair, timeout=DAY, backend=backend)
            if self.rank in pair:
                link = DeviceLink(group, self.device)
                self._device_links[sender, receiver, channel] = link
                link.open(receiver if self.rank == sender else sender, self.rank == sender)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, ValueError | FileNotFoundError):
            if os.environ.get("PIPEDRAFT_TRACEBACK"):
                raise error
            self.watch.fail_with(error)
        if error is not None:  # bad input: the caller prints its line; the others exit quietly
            self.watch.announce(f"{self.watch.name}: {BAD_INPUT}")
            return
        # Close all sends first: the peers wait for them before they answer with their own.
        for sender in self.watch.sent:
            sender.close()
        for receiver in self.watch.received:
            while receiver.is_open:
                receiver.receive()
        self.watch.stop()
        dist.destroy_process_group()

    # -- the controller -----------------------------------------------------------------------

    def num_stages(self, wanted: int | None) -> int:
        """Return the number of stages, or raise ValueError if the processes fit no layout."""
        num_stages = self.world_size if wanted is None else wanted
        if self.world_size not in (num_stages, num_stages + 1):
            raise ValueError(
                f"--processes (torchrun: --nproc-per-node): {self.world_size} for {num_stages} "
                f"stages; give {num_stages} (draft and first stage share one) or {num_stages + 1}"
            )
        return num_stages

    def load_target(
        self,
        name: str,
        *,
        revision: str | None,
        num_stages: int,
        boundaries: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        traces: bool = False,
    ) -> "PreTrainedModel":
        """Make every rank load its part, and return the controller's part as a model."""
        count = load_config(name, revision).get_text_config().num_hidden_layers
        cut = tuple(boundaries) or stage_boundaries(count, num_stages)
        job = Job(
            # A rank may have another working directory.
            target=os.path.abspath(name) if os.path.isdir(name) else name,
            revision=revision,
            boundaries=cut,
            dtype=str(dtype).removeprefix("torch."),
            traces=traces,
        )
        self._name_ranks(job)
        self.watch.store.set(JOB_KEY, msgspec.json.encode(job).decode())
        self.job = job
        return self._load_part(job, has_embedding=True, has_head=True)

    def connect(self, target: StagedTarget) -> ProcessPipeline:
        """Connect the pipeline over all ranks. ``target`` has the model from ``load_target``."""
        if target.boundaries != self.job.boundaries:
            raise ValueError(
                f"boundaries: {list(target.boundaries)}, but the processes hold stages cut at "
                f"{list(self.job.boundaries)}; evaluate drafts with other cuts in another launch"
            )
        if self.pipeline is None:
            self.pipeline = self._connect(target)
        return self.pipeline

    def _connect(self, target: StagedTarget) -> ProcessPipeline:
        timeline = self._measured(self.job)
        ranks = [self._first_rank(self.job) + k for k in range(target.num_stages)]
        # A first stage in this process answers without a link, else rank 0 would send to itself.
        links: list[Inbox] = [self._receiver(rank, ANSWER) if rank else Local() for rank in ranks]
        answers = Answers(links)
        cancels = [self._sender(rank, CANCEL, timeline) for rank in ranks if rank]
        if ranks[0]:
            first = self._sender(1, FORWARD, timeline)
            return ProcessPipeline(target, first, answers, timeline, cancels=cancels)
        mailbox = links[0]
        assert isinstance(mailbox, Local)
        worker = self._worker(target, 0, mailbox, timeline)
        beside = Local(worker.handle)
        pipeline = ProcessPipeline(target, beside, answers, timeline, cancels=cancels)
        # No Cancel can reach a stage in this process while it computes, so it asks between layers.
        worker.is_still_wanted = pipeline.is_wanted
        return pipeline

    # -- the stages ---------------------------------------------------------------------------

    def serve(self) -> None:
        """Run a stage until the controller closes the pipeline."""
        quieten()
        store = self.watch.store
        store.wait([JOB_KEY], LOAD_TIMEOUT)
        job = msgspec.json.decode(store.get(JOB_KEY), type=Job)
        self._name_ranks(job)
        index = self.rank - self._first_rank(job)
        has_head = index == job.num_stages - 1
        model = self._load_part(job, has_embedding=index == 0, has_head=has_head)
        timeline = self._measured(job)
        inbox, cancels = self._receiver(self.rank - 1, FORWARD), self._receiver(0, CANCEL)
        staged = StagedTarget(model, job.boundaries)
        worker = self._worker(staged, index, self._sender(0, ANSWER, timeline), timeline)
        # Own thread: the main one computes while a cancellation of its segment arrives.
        thread = threading.Thread(target=self._listen, args=(cancels, worker), daemon=True)
        thread.start()
        while True:
            with timeline.span(WAIT):
                message = inbox.receive()
            if isinstance(message, CloseRanks):
                break
            worker.handle(message)
        thread.join()

    def _listen(self, cancels: Receiver, worker: SharedWorker) -> None:
        """Read cancellations, which may arrive before the segments that they cancel."""
        try:
            while isinstance(message := cancels.receive(), Cancel):
                worker.cancel(message)
        except (LostLink, RuntimeError, MemoryError) as error:
            self.watch.fail_with(error)

    # -- both ---------------------------------------------------------------------------------

    def _measured(self, job: Job) -> Timeline:
        """Return this rank's timeline, which its watchdog also reads."""
        self.watch.timeline = Timeline(self.watch.name, traces=job.traces, device=self.device)
        return self.watch.timeline

    def _worker(
        self, target: StagedTarget, index: int, controller: Outbox, timeline: Timeline
    ) -> SharedWorker:
        has_next = index + 1 < target.num_stages
        following = self._sender(self.rank + 1, FORWARD, timeline) if has_next else None
        return SharedWorker(
            target=target,
            index=index,
            following=following,
            controller=controller,
            timeline=timeline,
        )

    def _first_rank(self, job: Job) -> int:
        return self.world_size - job.num_stages

    def _name_ranks(self, job: Job) -> None:
        first = self._first_rank(job)
        names = [f"stage {rank - first}" for rank in range(self.world_size)]
        names[0] = "controller" if first else "controller and stage 0"
        self.watch.names = names

    def _load_part(self, job: Job, *, has_embedding: bool, has_head: bool) -> "PreTrainedModel":
        index = self.rank - self._first_rank(job)
        layers = range(*job.boundaries[index : index + 2]) if index >= 0 else range(0)
        return load_target_part(
            job.target,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            revision=job.revision,
            dtype=dtype_named(job.dtype, "dtype"),
            device=self.device,
        )

    def _sender(self, peer: int, channel: int, timeline: Timeline) -> Sender:
        device_link = self._device_links.get((self.rank, peer, channel))
        link = Sender(peer, channel, timeline, device_link)
        self.watch.sent.append(link)
        return link

    def _receiver(self, peer: int, channel: int) -> Receiver:
        link = Receiver(peer, channel, self._device_links.get((peer, self.rank, channel)))
        self.watch.received.append(link)
        return link
