"""Is this machine ready? One line per check, and what to do about each that is not ok.

Exit status: 0 without a failure, 1 with one, 2 bad input. Nothing is changed, and a network that
is missing is no failure.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pipedraft.errors import Parser, run_command

# B batch, N heads, T positions, D head size

EXAMPLE = """example:
  pipedraft doctor
  pipedraft doctor --json
  pipedraft doctor --assets /copies/pipedraft/assets

each line: ok, warning or FAILURE, what was checked, what was found and what to do about it."""

LIBRARIES = ("transformers", "accelerate", "datasets", "huggingface-hub", "safetensors")
OLDEST_PYTHON = (3, 11)
GLOO_TIMEOUT_S = 60
HUB_TIMEOUT_S = 5
LITTLE_SPACE = 10 * 2**30
NO_SPACE = 2**28
SUMS = "SHA256SUMS"
GLOO_RANK = """
import sys, datetime, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), int(sys.argv[2])
limit = datetime.timedelta(seconds=int(sys.argv[3]))
store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=limit)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
assert value.item() == 3, value
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    status: Literal["ok", "warning", "failure"]
    check: str
    detail: str
    fix: str = ""

    def line(self) -> str:
        shown = "FAILURE" if self.status == "failure" else self.status
        text = f"{shown:<8} {self.check}: {self.detail}"
        return f"{text}; {self.fix}" if self.fix else text


def build_parser() -> Parser:
    parser = Parser(
        prog="pipedraft doctor",
        description=__doc__,
        epilog=EXAMPLE,
    )
    parser.add_argument("--json", action="store_true", help="one JSON list of the findings")
    parser.add_argument(
        "--assets",
        type=Path,
        default=Path(__file__).parent / "assets",
        metavar="DIR",
        help="folder with the embedded target (default: the one of this checkout)",
    )
    return parser


def checks(assets: Path) -> list[Callable[[], Iterator[Finding]]]:
    constraints = Path(__file__).parent / "constraints.txt"
    return [
        check_python,
        lambda: check_versions(constraints),
        check_torch,
        check_threads,
        check_gloo,
        lambda: check_folder(Path.cwd()),
        lambda: check_target(assets / "target"),
        check_hub,
    ]


# -- versions -------------------------------------------------------------------------------


def check_python() -> Iterator[Finding]:
    found = platform.python_version()
    if tuple(map(int, platform.python_version_tuple()[:2])) >= OLDEST_PYTHON:
        yield Finding("ok", "python", f"{found}, {platform.system()} {platform.machine()}")
    else:
        yield Finding("failure", "python", found, "make the environment with Python 3.11 or later")


def check_versions(constraints: Path) -> Iterator[Finding]:
    """Installed against what the package requires, and against the set that is tested.

    Args:
        constraints: constraints.txt; an installed wheel has none.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        required = [Requirement(text) for text in metadata.requires("pipedraft") or []]
    except metadata.PackageNotFoundError:
        yield Finding("warning", "pipedraft", "not installed", "pip install -e . in the checkout")
        return
    pins = read_pins(constraints)
    extras = sorted(metadata.metadata("pipedraft").get_all("Provides-Extra") or [])
    shown = [name for name in extras if name not in ("all", "dev")]
    for requirement in required:
        if requirement.name == "pipedraft":
            continue  # an extra that is made of others
        extra = next((e for e in shown if _only_with(requirement, e)), None)
        if requirement.marker is not None and extra is None:
            continue  # for developing pipedraft
        version = _installed(requirement.name)
        pin = pins.get(_normal(requirement.name))
        name = requirement.name if extra is None else f"{requirement.name} (optional)"
        if version is None and extra is not None:
            yield Finding("ok", name, f"not installed; pip install 'pipedraft[{extra}]' adds it")
        elif version is None:
            yield Finding("failure", name, "not installed", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            wanted = f"'{requirement.name}{requirement.specifier}'"
            yield Finding("failure", name, f"{version}, not {wanted}", f"pip install {wanted}")
        elif pin is not None and Version(pin).release != Version(version).release:
            fix = f"pip install {requirement.name}=={pin} if something is odd"
            yield Finding("warning", name, f"{version}; tested with {pin}", fix)
        elif extra is not None or requirement.name in LIBRARIES:
            yield Finding("ok", name, version)


def _only_with(requirement: Any, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def read_pins(constraints: Path) -> dict[str, str]:
    if not constraints.is_file():
        return {}
    lines = [line for line in constraints.read_text().splitlines() if "==" in line]
    pins = (line.split("==", 1) for line in lines if not line.startswith("#"))
    return {_normal(name.strip()): version.strip() for name, version in pins}


# -- computing ------------------------------------------------------------------------------


def check_torch() -> Iterator[Finding]:
    import torch
    import torch.nn.functional as F

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    detail = f"{torch.__version__}, device {device}"
    if device.type == "cuda":
        detail += f" ({torch.cuda.device_count()} x {torch.cuda.get_device_name()})"
    yield Finding("ok", "torch", detail)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"attention in {str(dtype).removeprefix('torch.')}"
        query_BNTD = torch.ones(1, 2, 4, 8, device=device, dtype=dtype)
        fault = ""
        try:
            out = F.scaled_dot_product_attention(query_BNTD, query_BNTD, query_BNTD, is_causal=True)
            if (out.float() - 1).abs().max() > 1e-2:
                fault = "wrong result"
        except RuntimeError as error:
            fault = str(error).splitlines()[0]
        if fault:
            fix = "train and decode in float32" if dtype == torch.bfloat16 else "reinstall torch"
            yield Finding("failure", name, fault, fix)
        else:
            yield Finding("ok", name, "scaled_dot_product_attention computes it")


def available_cores() -> tuple[int, str]:
    """Cores that this process may use, and what limits them."""
    if sys.platform != "linux":
        return os.cpu_count() or 1, "of the machine"
    cores, limit = len(os.sched_getaffinity(0)), "of the machine"
    if cores < (os.cpu_count() or 1):
        limit = "by affinity"
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        share, _, period = quota.read_text().partition(" ")
        if share != "max" and (allowed := math.ceil(int(share) / int(period))) < cores:
            cores, limit = allowed, "by the control group's quota"
    return cores, limit


def check_threads() -> Iterator[Finding]:
    import torch

    cores, limit = available_cores()
    asked, threads = os.environ.get("OMP_NUM_THREADS", ""), torch.get_num_threads()
    detail = f"{cores} {limit}, OMP_NUM_THREADS {asked or 'unset'}, torch uses {threads} threads"
    # torch cuts a number that is far too large; other libraries believe it.
    if max(threads, int(asked) if asked.isdecimal() else 0) > cores:
        fix = f"set OMP_NUM_THREADS={cores}, or less for several processes"
        yield Finding("warning", "cores", f"{detail}: more threads than cores", fix)
    elif not asked and cores > 1:
        detail += "; under several processes each takes as many, unless it is set"
        yield Finding("ok", "cores", detail)
    else:
        yield Finding("ok", "cores", detail)


def check_gloo() -> Iterator[Finding]:
    """Two processes add their numbers over 127.0.0.1, as stages and data-parallel ranks talk."""
    import datetime

    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("failure", "gloo", "torch was built without it", "install another torch")
        return
    limit = datetime.timedelta(seconds=GLOO_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=limit)
    command = [sys.executable, "-P", "-c", GLOO_RANK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), str(GLOO_TIMEOUT_S)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        reason = wait_for(ranks, GLOO_TIMEOUT_S + 10)
    finally:
        for rank in ranks:
            rank.kill()
            with rank:  # closes its pipe, and waits
                pass
    if reason:
        fix = "set GLOO_SOCKET_IFNAME=lo, and let processes talk on 127.0.0.1"
        yield Finding("failure", "gloo", f"two processes could not add numbers: {reason}", fix)
    else:
        yield Finding("ok", "gloo", "two processes added their numbers over 127.0.0.1")


def wait_for(ranks: list[subprocess.Popen[str]], limit_s: float) -> str:
    """Why one of the processes failed first, "" if none did."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for rank in ranks:
            if rank.poll():
                said = rank.communicate()[1].strip().splitlines()
                return said[-1] if said else f"status {rank.returncode}"
        if all(rank.poll() == 0 for rank in ranks):
            return ""
        time.sleep(0.05)
    return f"no result in {limit_s:g} s"


# -- files ----------------------------------------------------------------------------------


def check_folder(folder: Path) -> Iterator[Finding]:
    """Results go to out/ in the current folder unless an option says otherwise."""
    name = f"folder {folder}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        fix = "change to a folder where you may write"
        yield Finding("failure", name, f"nothing can be written ({error.strerror})", fix)
        return
    free = shutil.disk_usage(folder).free
    detail = f"writable, {free / 2**30:.1f} GiB free"
    if free < NO_SPACE:
        yield Finding("failure", name, detail, "make room, or change to another disk")
    elif free < LITTLE_SPACE:
        fix = "checkpoints of a large target need more; --plan of train says how much"
        yield Finding("warning", name, detail, fix)
    else:
        yield Finding("ok", name, detail)


def check_target(folder: Path) -> Iterator[Finding]:
    """Its files are those that were shipped, and they load and decode."""
    if not folder.is_dir():
        fix = "give --assets of a checkout, or use any other target"
        yield Finding("warning", "embedded target", f"none in {folder}", fix)
        return
    for name, digest in read_sums(folder / SUMS):
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            fault = "differs from what was shipped" if path.is_file() else "is missing"
            fix = f"git checkout {folder}, or copy it again"
            yield Finding("failure", "embedded target", f"{path} {fault}", fix)
            return
    import torch
    from transformers.utils import logging

    from pipedraft.models.target import load_target, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = load_target(str(folder))
        ids_BT = load_tokenizer(str(folder))("Hello", return_tensors="pt").input_ids
        finite = bool(torch.isfinite(model(ids_BT).logits).all())
    except ValueError as error:
        yield Finding("failure", "embedded target", str(error), "copy the folder again")
        return
    if finite:
        size = f"{model.num_parameters() / 1e6:.2f} M parameters"
        yield Finding("ok", "embedded target", f"{folder}: sums right, {size}, decodes")
    else:
        fix = "reinstall torch: the weights are right"
        yield Finding("failure", "embedded target", "its logits are not finite", fix)


def read_sums(path: Path) -> list[tuple[str, str]]:
    """(file name, SHA-256) of a file as sha256sum writes it; one that is gone names itself."""
    if not path.is_file():
        return [(path.name, "")]
    lines = [line.split(maxsplit=1) for line in path.read_text().splitlines()]
    return [(name.lstrip("*"), digest) for digest, name in lines]


# -- the Hub --------------------------------------------------------------------------------


def check_hub() -> Iterator[Finding]:
    """Whether the Hub answers; it is only needed for what is on it."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        yield Finding("ok", "Hub", "offline by HF_HUB_OFFLINE: folders and the cache are used")
        return
    answers: list[Finding] = []
    # A thread of its own: looking up a name has no timeout.
    asking = threading.Thread(target=lambda: answers.extend(ask_hub(ENDPOINT)), daemon=True)
    asking.start()
    asking.join(2 * HUB_TIMEOUT_S + 1)
    nothing = Finding(
        "warning", "Hub", f"{ENDPOINT}: no answer", "work with folders, or set HF_HUB_OFFLINE=1"
    )
    yield from answers or [nothing]


def ask_hub(endpoint: str) -> list[Finding]:
    import httpx2
    from huggingface_hub import get_token

    try:
        with httpx2.Client(timeout=HUB_TIMEOUT_S, follow_redirects=True) as client:
            client.head(endpoint)
            token = get_token()
            if token is None:
                detail = f"{endpoint} answers; no token, which only private names and push need"
                return [Finding("ok", "Hub", detail)]
            headers = {"Authorization": f"Bearer {token}"}
            answer = client.get(f"{endpoint}/api/whoami-v2", headers=headers)
    except httpx2.TransportError as error:
        reason = str(error) or type(error).__name__
        fix = "work with folders, or set HF_HUB_OFFLINE=1"
        return [Finding("warning", "Hub", f"{endpoint} cannot be reached ({reason})", fix)]
    if answer.status_code == 200:
        return [Finding("ok", "Hub", f"{endpoint} answers, signed in as {answer.json()['name']}")]
    detail = f"{endpoint} refuses the token ({answer.status_code})"
    return [Finding("warning", "Hub", detail, "set HF_TOKEN, or run hf auth login")]


# -- the command ----------------------------------------------------------------------------


def findings(assets: Path) -> Iterator[Finding]:
    for check in checks(assets):
        yield from check()


def main() -> None:
    options = build_parser().parse_args(sys.argv[1:])
    found = []
    for finding in findings(options.assets):
        found.append(finding)
        if not options.json:
            print(finding.line(), flush=True)
    counts = {kind: sum(f.status == kind for f in found) for kind in ("warning", "failure")}
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        print(f"{len(found)} checks, {counts['warning']} warnings, {counts['failure']} failures")
    sys.exit(1 if counts["failure"] else 0)


if __name__ == "__main__":
    run_command(main)
