"""Test failing stages as processes: every rank ends soon, says why, and leaves nothing behind."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import process_failures
import pytest
import torch
import torch.distributed as dist
import zmq
from process_failures import NUM_RANKS, Plan, run_forked_rank
from tiny_models import tiny_llama

from pipedraft.inference.ranks.codec import StageResult
from pipedraft.inference.ranks.links import LostLink, Sender, is_out_of_memory
from pipedraft.inference.timeline import Timeline

NAMES = ["rank 0 (controller)", "rank 1 (stage 0)", "rank 2 (stage 1)"]
LIMIT_S = 100
"""Time limit for every rank to end after a failure, on a busy machine."""
PROMISED_S = 10
"""Time limit on an idle machine."""
LOOPBACK = "0100007F"
"""127.0.0.1 in the kernel's notation."""
PREPARED = [  # imported once, by the parent process; all ranks fork from it
    "pytest",
    "pipedraft.inference.engine",
    "pipedraft.inference.ranks.cluster",
    "transformers.models.llama.modeling_llama",
]
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: /proc/net/tcp, socket filters and RLIMIT_AS"
)


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory) -> Path:
    """Save a wide target: doubling a stage's cache at 128 rows allocates 256 KB pieces."""
    target = tiny_llama(layers=4, vocab=16, hidden=256, kv_heads=4)
    target.config.max_position_embeddings = 100_000
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved_target, tmp_path) -> Path:
    (tmp_path / "t").symlink_to(saved_target)
    return tmp_path


@dataclass
class Outcome:
    statuses: list[int | None]
    seconds: float
    """Time from the failure (or the start) until the last rank has ended by itself."""
    output: list[str]

    def lines(self, rank: int) -> list[str]:
        return [line for line in self.output[rank].splitlines() if line.startswith("error: rank")]


@contextmanager
def started(plan: Plan) -> Iterator[list[BaseProcess]]:
    """Fork one launch's ranks without a launcher: imports take no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PREPARED)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    ranks = [
        context.Process(target=run_forked_rank, args=(rank, port, plan))
        for rank in range(NUM_RANKS)
    ]
    try:
        for process in ranks:
            process.start()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()
        del store


def outcome_of(plan: Plan, *, is_stopped: bool = False, launcher_ends_all: bool = False) -> Outcome:
    """Return the ranks' outcome after the failure.

    Args:
        is_stopped: the failing rank cannot end by itself.
        launcher_ends_all: as torchrun does when one rank has ended in failure.
    """
    start = time.monotonic()
    with started(plan) as ranks:
        running = {process.sentinel: process for process in ranks}
        if is_stopped:
            del running[ranks[plan.failing_rank].sentinel]
        while running and time.monotonic() < start + 500:
            for sentinel in wait(list(running), 1):
                process = running.pop(sentinel)
                process.join()
                if launcher_ends_all and process.exitcode:
                    for other in running.values():
                        other.terminate()
        end = time.monotonic()
        statuses = [process.exitcode for process in ranks]
    if (plan.folder / "failed_at").exists():
        start = float((plan.folder / "failed_at").read_text())
    output = [(plan.folder / f"rank{rank}.log").read_text() for rank in range(NUM_RANKS)]
    return Outcome(statuses, end - start, output)


def check_all_failed(
    outcome: Outcome,
    ranks: list[int],
    cause: str,
    limit_s: float = LIMIT_S,
    *,
    have_names: bool = True,
) -> None:
    """Assert that these ranks ended in time with status 1 and one line each, naming the cause."""
    assert outcome.seconds < limit_s, outcome
    for rank in ranks:
        assert outcome.statuses[rank] == 1, outcome
        (line,) = outcome.lines(rank)
        name = NAMES[rank] if have_names else f"rank {rank} (starting)"
        assert line.startswith(f"error: {name}: "), line
        assert re.search(cause, line), line


@pytest.mark.parametrize("limit_s", [LIMIT_S, pytest.param(PROMISED_S, marks=pytest.mark.all)])
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, r"lost rank 2 \(stage 1\)"),
        (signal.SIGSTOP, r"rank 2 \(stage 1\) is silent for 7 s"),
        (signal.SIGTERM, r"rank 2 \(stage 1\): ended by SIGTERM"),
    ],
    ids=["killed", "hung", "ended"],
)
def test_a_lost_stage_ends_every_rank_with_a_line(number, cause, limit_s, folder):
    failure = partial(process_failures.receive_signal, number=number)
    plan = Plan(folder=folder, failing_rank=2, failure=failure)
    outcome = outcome_of(plan, is_stopped=number == signal.SIGSTOP)
    ended = [0, 1, 2] if number == signal.SIGTERM else [0, 1]
    check_all_failed(outcome, ended, cause, limit_s)


def test_a_lost_controller_ends_every_rank_with_a_line(folder):
    failure = partial(process_failures.receive_signal, number=signal.SIGKILL)
    outcome = outcome_of(Plan(folder=folder, failing_rank=0, failure=failure))
    check_all_failed(outcome, [1, 2], r"lost rank 0 \(controller\)")


def test_a_rank_that_dies_before_the_ranks_have_met_ends_the_others(folder):
    """The others know where it was, but cannot connect any more."""
    outcome = outcome_of(Plan(folder=folder, failing_rank=2, dies_at="dial"))
    cause = r"lost rank 2 \(starting\): no connection to ipc://"
    check_all_failed(outcome, [0, 1], cause, have_names=False)


def test_a_rank_that_never_starts_is_named(folder):
    outcome = outcome_of(Plan(folder=folder, failing_rank=1, dies_at="bind", connect_s=5))
    check_all_failed(outcome, [0, 2], "rank 1 did not start in 5 s", have_names=False)


def test_a_rank_that_was_suspended_goes_on(folder):
    """Known-bad: with a timeout, Python's sigtimedwait makes up a signal after a longer stop."""
    failure = partial(process_failures.be_suspended, all_of_them=False)
    outcome = outcome_of(Plan(folder=folder, num_new=500, failing_rank=2, failure=failure))
    assert outcome.statuses == [0, 0, 0] and not any(map(outcome.lines, range(3))), outcome
    assert outcome.seconds > 2, "it ended before the last stop"


@pytest.mark.all
def test_a_launch_that_was_suspended_goes_on(folder):
    """Longer than a rank may be silent."""
    failure = partial(process_failures.be_suspended, times_s=[7.0], all_of_them=True)
    outcome = outcome_of(Plan(folder=folder, num_new=1500, failing_rank=2, failure=failure))
    assert outcome.statuses == [0, 0, 0] and not any(map(outcome.lines, range(3))), outcome
    assert outcome.seconds > 7, "it ended before the stop"


@needs_linux
def test_a_silent_link_ends_every_rank_with_a_line(folder):
    """Both ends live and reach everything else."""
    skip_without_filters()
    failure = partial(process_failures.silence_links, peer=1)
    plan = Plan(folder=folder, failing_rank=2, failure=failure, spans_machines=True)
    outcome = outcome_of(plan, launcher_ends_all=True)
    cause = r"rank 1 \(stage 0\): lost rank 2 \(stage 1\): no connection to tcp://127.0.0.1:\d+"
    check_all_failed(outcome, [0, 1, 2], cause)
    assert (folder / "listening").read_text() == LOOPBACK


@needs_linux
def test_a_link_that_is_reset_ends_every_rank_with_a_line(folder):
    failure = partial(process_failures.cut_links, peer=1)
    outcome = outcome_of(Plan(folder=folder, failing_rank=2, failure=failure, spans_machines=True))
    cause = r"rank 1 \(stage 0\): lost rank 2 \(stage 1\): no connection to tcp://127.0.0.1:\d+"
    check_all_failed(outcome, [0, 1, 2], cause)


@needs_linux
def test_a_rank_cut_off_from_everything_ends_too(folder):
    """No peer can be reached in either direction."""
    skip_without_filters()
    failure = process_failures.silence_links
    outcome = outcome_of(Plan(folder=folder, failing_rank=2, failure=failure, spans_machines=True))
    check_all_failed(outcome, [0, 1], r"rank 2 \(stage 1\) is silent for 7 s")
    check_all_failed(outcome, [2], r"rank 2 \(stage 1\): rank 0 \(controller\) is silent for 7 s")


def skip_without_filters() -> None:
    with socket.socket() as probe:
        try:
            process_failures.drop_packets(probe)
        except OSError as error:
            pytest.skip(f"this kernel attaches no filter to a socket ({error})")


@needs_linux
def test_exhausted_memory_ends_every_rank_with_a_line_and_the_next_start_works(folder):
    plan = Plan(
        folder=folder, num_prompt=90, failing_rank=2, failure=process_failures.exhaust_memory
    )
    outcome = outcome_of(plan, launcher_ends_all=True)
    cause = r"rank 2 \(stage 1\): out of memory .*fewer stages on this machine.*--max-new-tokens"
    check_all_failed(outcome, [0, 1, 2], cause)
    for log in folder.glob("*.log"):
        log.unlink()
    outcome = outcome_of(Plan(folder=folder, num_new=8))
    assert outcome.statuses == [0, 0, 0] and not any(map(outcome.lines, range(3))), outcome


WAITING = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
own = folder / f"rank{rank}.new"
own.write_text(str(os.getpid()))
own.rename(own.with_suffix(".pid"))
while rank != "2" or not (folder / "go").exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_linux
def test_a_launch_ends_ranks_that_do_not_find_out_that_one_was_killed(tmp_path):
    """Until its end, no part of the launch is reachable from another machine."""
    words = [sys.executable, "-c", WAITING, str(tmp_path)]
    start = "from pipedraft.inference.ranks import launch\nlaunch.LEAVE_S = 0.2\n"
    program = f"{start}launch.run_ranks(3, {words})"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        while len(list(tmp_path.glob("*.pid"))) < NUM_RANKS:
            assert process.poll() is None
            time.sleep(0.01)
        ranks = [process_failures.rank_id(tmp_path, rank) for rank in range(NUM_RANKS)]
        addresses = process_failures.listening([process.pid, *ranks])
        (tmp_path / "go").touch()
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 1
    finally:
        process.kill()
    assert addresses == {LOOPBACK}
    (line,) = said.splitlines()
    assert line.startswith(
        "error: rank 2 was ended by SIGKILL from outside; a system that runs out"
    )
    for rank in range(NUM_RANKS):
        with pytest.raises(ProcessLookupError):
            os.kill(process_failures.rank_id(tmp_path, rank), 0)


# -- parts behind the lines --------------------------------------------------------------------


def test_every_allocator_is_recognized():
    def allocation_error(allocate):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            allocate(1 << 50)
        return caught.value

    for allocate in (bytearray, lambda n: np.empty(n, np.uint8), lambda n: torch.empty(n)):
        assert is_out_of_memory(allocation_error(allocate))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."))
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(cublas))
    assert not is_out_of_memory(RuntimeError("Connection closed by peer [127.0.0.1]:2234"))
    assert not is_out_of_memory(RuntimeError("a tensor allocated on cpu was expected on cuda:0"))


def test_memory_that_a_message_lacks_is_no_lost_link():
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        sender = Sender(socket, 1, Timeline("controller"))
        with pytest.raises(RuntimeError, match="allocate") as caught:
            sender.send(StageResult(verdicts=torch.zeros(1).expand(1 << 46)))
    assert not isinstance(caught.value, LostLink) and is_out_of_memory(caught.value)
