"""Run commands in README.md and docs/*.md with several processes, or with one until its end.

The processes are forked from one with all imports done. They run a launcher's program in the
launcher's environment. test_process.py and test_parallel.py use the launchers themselves.
"""

import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_processes import Process
from doc_commands import Command
from doc_place import COMMANDS, Reader, after, failures_of, num_ranks, runner_of, scaled
from fork_server import ForkServer, rank_environments
from tiny_models import REPOSITORY
from torch.distributed import TCPStore

pytestmark = pytest.mark.timeout(900)  # many processes in one test, maybe on a busy machine

RUNS = [command for command in COMMANDS if runner_of(command) == Path(__file__).name]
ADDRESS = r"(127\.0\.0\.1|cloud\.example):\d+"


class Shell:
    """Starts commands in the reader's folder, each as one or more processes."""

    def __init__(self, reader: Reader, parent: ForkServer) -> None:
        self.reader, self.parent = reader, parent
        self.servers: list[tuple[Process, Command]] = []
        self.address = ""
        """Address, from the most recently started server."""

    def start(self, command: Command, words: list[str], **options: Any) -> Process:
        folder = self.reader.folder
        return Process.start(self.parent, folder, *words, module=command.module, **options)

    def run(self, command: Command) -> None:
        words = scaled(command)
        self.reader.make_what_it_reads(words)
        if "serve" in words:
            words = ["127.0.0.1" if word == "0.0.0.0" else word for word in words]
            server = self.start(command, [*words, "--port=0"])
            self.servers.append((server, command))
            self.address = server.wait_for(r"(?:at|on) (127\.0\.0\.1:\d+)\b")[1]
            return
        words = [re.sub(ADDRESS, self.address, word) for word in words]
        num_processes = int(after(command.launcher_arguments, "--nproc-per-node", "0"))
        # A command for one of several machines starts the whole launch here.
        num_processes *= int(after(command.launcher_arguments, "--nnodes", "1"))
        num_processes = num_processes or num_ranks(words)
        # The ranks' parent process holds their rendezvous store.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = rank_environments(num_processes, store.port) or [{}]
        processes = [self.start(command, words, environment=rank) for rank in ranks]
        ends = [process.finish() for process in processes]
        assert not any(status for status, _, _ in ends), [(s, err[-400:]) for s, _, err in ends]
        if command.module == "pipedraft.inference":
            assert not any("Loading weights" in err for _, _, err in ends)

    def end_servers(self) -> list[str]:
        """End the servers, by themselves or by signal, and return the failures."""
        for server, _ in self.servers:
            server.send(signal.SIGTERM)
        wrong = []
        for server, command in self.servers:
            status, _, errors = server.finish()
            if status != (0 if command.module == "pipedraft.inference" else -signal.SIGTERM):
                wrong.append(f"{command}\n    {status} {errors[-400:]}")
        return wrong


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader"))


def make_certificate() -> None:
    """Run the command in docs/edge.md, for this machine."""
    text = (REPOSITORY / "docs" / "edge.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ +(openssl .*)$", text, re.MULTILINE)
    command = shlex.split(line.replace("DNS:cloud.example", "IP:127.0.0.1"))
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    Path("token").write_text("opensesame\n")


PAGES = sorted({command.page for command in RUNS})
OTHERS = [pytest.param(page, marks=pytest.mark.all) for page in PAGES if page != "README.md"]


@pytest.mark.parametrize("page", ["README.md", *OTHERS])
def test_commands_run(page, reader, parent, monkeypatch, capfd):
    monkeypatch.chdir(reader.folder)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # for drafts trained here
    if page == "edge.md":
        make_certificate()
    shell = Shell(reader, parent)
    failures = failures_of(RUNS, page, shell.run) + shell.end_servers()
    assert not failures, "\n".join(failures)
