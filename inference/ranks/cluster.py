"""Assign stages to the ranks of a launch, connect the ranks, and shut them down.

Rank 0 is the controller and runs the draft. With one rank more than stages, ranks 1..n run the
stages. With as many ranks as stages, rank 0 also runs the first stage.
"""

import os
import secrets
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from ...devices import dtype_named
from ...models.target import StagedTarget
from ...models.target_part import load_target_part
from ...models.transformer.boundaries import stage_boundaries
from ...pretrained import load_config, quieten
from ..pipelines.process import ProcessPipeline
from ..timeline import WAIT, Timeline
from . import STORE_VARIABLE, TOKEN_VARIABLE, is_launched
from .codec import Buffer, Cause, CloseRanks, Job
from .links import Answers, DeviceLink, Local, Outbox, Receiver, Sender
from .mail import Mail, own_address
from .watch import STEP_S, Watch
from .worker import SharedWorker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Told: TypeAlias = tuple[dict[str, str], str]
"""What a rank tells the others before they connect: its endpoints, and its GPU's UUID."""
DAY = timedelta(days=1)


class Cluster:
    """Context manager for every rank. Its exit ends the other ranks, also after a failure."""

    def __init__(
        self,
        step_s: float = STEP_S,
        links: Literal["auto", "device", "host"] = "auto",
        *,
        on_cpu: bool = False,
        host: str | None = None,
        port: int = 0,
        connect_s: float = 60,
    ) -> None:
        """
        Args:
            step_s: longest forward pass, in seconds.
            links: transport for hidden states. ``device`` sends them separately from their
                messages, by NCCL between GPUs or by gloo without GPUs. ``host`` sends them inside
                the messages, through host memory. ``auto`` is ``device`` if every rank has its own
                GPU, else ``host``.
            on_cpu: True to ignore GPUs.
            host: where the other ranks reach this one. None: the address on the way to rank 0, or
                no network at all if every rank is on this machine.
            port: first port to listen on, with three for each rank of this machine; 0: any.
            connect_s: longest wait for the other ranks, which start at the same time.
        """
        if not is_launched():
            raise ValueError(
                "--backend: 'process' needs one process per stage; give --processes N, or on "
                "several machines start it with torchrun"
            )
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._links, self._on_cpu, self._connect_s = links, on_cpu, connect_s
        self._host, self._port = (host or "").strip("[]"), port
        self.timeline = Timeline("starting", device=self.device)
        self.watch = Watch(self.rank, self.world_size, step_s, self.timeline)
        self._device_links: dict[tuple[int, int], DeviceLink] = {}
        self._waiting: defaultdict[int, deque[Buffer]] = defaultdict(deque)
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
        try:
            self._meet()
        except Exception as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _meet(self) -> None:
        """Connect all ranks. The launch's store only says where they are."""
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        descriptor = None if self.rank else os.environ.get(STORE_VARIABLE)
        store: dist.Store = dist.TCPStore(
            *where,
            is_master=descriptor is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._connect_s),
            master_listen_fd=None if descriptor is None else int(descriptor),
        )
        store = dist.PrefixStore(f"ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        token = os.environ.get(TOKEN_VARIABLE)
        token = token or store.compare_set("token", "", secrets.token_hex()).decode()
        is_local = os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size) and not self._port
        if not self._host and not is_local:
            self._host = own_address(*where)
        port = self._port and self._port + 3 * int(os.environ.get("LOCAL_RANK", "0"))
        silence_s = self.watch.silence_s
        self._mail = Mail(self.rank, self.world_size, token, self._host, port, silence_s)
        gpu = ""
        if self.device.type == "cuda":
            # No index: CUDA_VISIBLE_DEVICES may number one GPU differently per rank.
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        store.set(str(self.rank), msgspec.json.encode((self._mail.bind(), gpu)).decode())
        keys = [str(rank) for rank in range(self.world_size)]
        try:
            store.wait(keys, timedelta(seconds=self._connect_s))
        except dist.DistStoreError:
            absent = next((key for key in keys if not store.check([key])), None)
            self.watch.fail(f"rank {absent} did not start in {self._connect_s:g} s")
        told = [msgspec.json.decode(text, type=Told) for text in store.multi_get(keys)]
        self._mail.dial([endpoints for endpoints, _ in told])
        self.watch.mail = self._mail
        if not self.watch.met.wait(self._connect_s):
            self.watch.fail(f"not all ranks are connected after {self._connect_s:g} s")
        has_own_gpus = len({gpu for _, gpu in told if gpu}) == self.world_size
        if self._links == "device" or (self._links == "auto" and has_own_gpus):
            self._open_device_links(store)
        has_next = self.rank + 1 < self.world_size
        self._onward = self._sender("onward", self.rank + 1) if has_next else None
        self._answers = self._sender("answers", 0) if self.rank else Local()

    def _open_device_links(self, store: dist.Store) -> None:
        """Open links to the next rank and back to the controller, in the same order on all ranks.

        NCCL connects two ranks when a link is first used. This method uses every link once, because
        a later step has a time limit.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if not self._host:
            # gloo otherwise resolves the host's name, which can fail without a network.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self._connect_s),
        )
        forward = [(rank, rank + 1) for rank in range(self.world_size - 1)]
        for sender, receiver in forward + [(rank, 0) for rank in range(1, self.world_size)]:
            pair = sorted((sender, receiver))
            # new_group is collective: every rank calls it, also one that is not in the pair.
            group = dist.new_group(pair, timeout=DAY, backend=backend)
            if self.rank in pair:
                link = DeviceLink(group, self.device)
                self._device_links[sender, receiver] = link
                link.open(receiver if self.rank == sender else sender, self.rank == sender)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, ValueError | FileNotFoundError):
            if os.environ.get("PIPEDRAFT_TRACEBACK"):
                raise error
            self.watch.fail_with(error)
        if error is not None:  # the caller prints its line; the others exit quietly
            self.watch.stop(Cause())
            return
        # Once its own notice has come back through all ranks, the controller lets them go.
        (self._onward or self._answers).send(CloseRanks())
        if self.is_controller and self.world_size > 1:
            last = self._receiver("answers", self.world_size - 1)
            while not isinstance(last.receive(), CloseRanks):
                pass
        self.watch.stop()
        if dist.is_initialized():
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
        self.job = Job(
            # A rank may have another working directory.
            target=os.path.abspath(name) if os.path.isdir(name) else name,
            revision=revision,
            boundaries=cut,
            dtype=str(dtype).removeprefix("torch."),
            traces=traces,
        )
        if self._onward is not None:
            self._onward.send(self.job)
        self._begin(self.job)
        return self._load_part(self.job, has_embedding=True, has_head=True)

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
        ranks = [self._first_rank(self.job) + k for k in range(target.num_stages)]
        # A first stage in this process answers without a link, else rank 0 would send to itself.
        own = Local()
        answers = Answers([self._receiver("answers", rank) if rank else own for rank in ranks])
        cancels = [self._sender("cancels", rank) for rank in ranks if rank]
        if ranks[0]:
            assert self._onward is not None
            return ProcessPipeline(target, self._onward, answers, self.timeline, cancels=cancels)
        worker = self._worker(target, 0, own)
        first = Local(worker.handle)
        pipeline = ProcessPipeline(target, first, answers, self.timeline, cancels=cancels)
        # No Cancel can reach a stage in this process while it computes, so it asks between layers.
        worker.is_still_wanted = pipeline.is_wanted
        return pipeline

    # -- the stages ---------------------------------------------------------------------------

    def serve(self) -> None:
        """Run a stage until the controller closes the pipeline."""
        quieten()
        inbox, worker = self._receiver("inward", self.rank - 1), None
        while True:
            with self.timeline.span(WAIT):
                message = inbox.receive()
            match message:
                case CloseRanks():
                    return
                case Job():
                    if self._onward is not None:
                        self._onward.send(message)
                    worker = self._load_stage(message)
                    # In another thread: this one computes while its segment is cancelled.
                    self.watch.on_cancel = worker.cancel
                case _ if worker is not None:
                    worker.handle(message)

    def _load_stage(self, job: Job) -> SharedWorker:
        self._begin(job)
        index = self.rank - self._first_rank(job)
        has_head = index == job.num_stages - 1
        model = self._load_part(job, has_embedding=index == 0, has_head=has_head)
        return self._worker(StagedTarget(model, job.boundaries), index, self._answers)

    # -- both ---------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        first = self._first_rank(job)
        self.watch.names = [f"stage {rank - first}" for rank in range(self.world_size)]
        self.watch.names[0] = "controller" if first else "controller and stage 0"
        self.timeline.name, self.timeline.traces = self.watch.name, job.traces

    def _worker(self, target: StagedTarget, index: int, controller: Outbox) -> SharedWorker:
        return SharedWorker(
            target=target,
            index=index,
            following=self._onward,
            controller=controller,
            timeline=self.timeline,
        )

    def _first_rank(self, job: Job) -> int:
        return self.world_size - job.num_stages

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

    def _sender(self, kind: str, peer: int) -> Sender:
        link = None if kind == "cancels" else self._device_links.get((self.rank, peer))
        return Sender(self._mail.sockets[kind], peer, self.timeline, link)

    def _receiver(self, kind: str, peer: int) -> Receiver:
        link = self._device_links.get((peer, self.rank))
        return Receiver(self._mail.sockets[kind], peer, self._waiting, link)
