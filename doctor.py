"""Is this machine ready? One line per check, and what to do about each that is not ok.

Exit status: 0 without a failure, 1 with one, 2 bad input. Nothing is changed, and a network that
is missing is no failure.
"""

import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from pipedraft.errors import leave_at_interrupts, run_command

if __name__ == "__main__":
    leave_at_interrupts()

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from pipedraft.files import file_sha256
from pipedraft.options import Options, option

# B batch, T positions

EXAMPLE = """example:
  pipedraft doctor
  pipedraft doctor --json
  pipedraft doctor --assets /copies/pipedraft/assets

each line: ok, warning or FAILURE, what was checked, what was found and what to do about it."""

LIBRARIES = ("transformers", "accelerate", "datasets", "huggingface-hub", "safetensors")
RECURRENT_KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
"""What transformers computes Qwen3.5's recurrent layers by, and what it imports for it."""
EXTRA = re.compile(r'extra == "(.*)"')
OLDEST_PYTHON = (3, 11)
GLOO_TIMEOUT_S = 60
HUB_TIMEOUT_S = 5
LITTLE_SPACE = 10 * 2**30
NO_SPACE = 2**28
SUMS = "SHA256SUMS"


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


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    PROG: ClassVar[str] = "pipedraft doctor"
    DESCRIPTION: ClassVar[str] = __doc__ or ""
    EXAMPLE: ClassVar[str] = EXAMPLE

    json: bool = False
    """one JSON list of the findings"""
    assets: Path = option(Path(__file__).parent / "assets", metavar="DIR")
    """folder with the embedded target"""


# -- versions -------------------------------------------------------------------------------


def check_python() -> Iterator[Finding]:
    found = platform.python_version()
    if sys.version_info >= OLDEST_PYTHON:
        yield Finding("ok", "python", f"{found}, {platform.system()} {platform.machine()}")
    else:
        yield Finding("failure", "python", found, "make the environment with Python 3.11 or later")


def check_versions(constraints: Path) -> Iterator[Finding]:
    """Installed libraries against what the package requires and against the tested set.

    Args:
        constraints: constraints.txt; an installed wheel has none.
    """
    try:
        package = metadata.metadata("pipedraft")
    except metadata.PackageNotFoundError:
        yield Finding("warning", "pipedraft", "not installed", "pip install -e . in the checkout")
        return
    pins = read_pins(constraints)
    for requirement in map(Requirement, package.get_all("Requires-Dist") or ()):
        found = EXTRA.search(str(requirement.marker or ""))
        extra = found and found[1]
        if requirement.name != "pipedraft" and extra not in ("all", "dev"):
            pin = pins.get(canonicalize_name(requirement.name))
            yield from check_version(requirement, extra, pin)


def check_version(
    requirement: Requirement, extra: str | None, pin: SpecifierSet | None
) -> Iterator[Finding]:
    name = requirement.name if extra is None else f"{requirement.name} (optional)"
    wanted = f"'{requirement.name}{requirement.specifier}'"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        if extra is None:
            yield Finding("failure", name, "not installed", f"pip install {wanted}")
        else:
            yield Finding("ok", name, f"not installed; pip install 'pipedraft[{extra}]' adds it")
        return
    if not requirement.specifier.contains(version, prereleases=True):
        yield Finding("failure", name, f"{version}, not {wanted}", f"pip install {wanted}")
    elif pin is not None and not pin.contains(version, prereleases=True):
        tested, fix = str(pin).removeprefix("=="), f"pip install {requirement.name}{pin}"
        yield Finding("warning", name, f"{version}; tested with {tested}", f"{fix} if in doubt")
    elif extra is not None or requirement.name in LIBRARIES:
        yield Finding("ok", name, version)


def read_pins(constraints: Path) -> dict[str, SpecifierSet]:
    lines = constraints.read_text().splitlines() if constraints.is_file() else []
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin.specifier for pin in pins}


# -- computing ------------------------------------------------------------------------------


def check_torch() -> Iterator[Finding]:
    import torch

    from pipedraft.placement import resolve_device

    device = resolve_device("auto")
    detail = f"{torch.__version__}, device {device}"
    if device.type == "cuda":
        detail += f" ({torch.cuda.device_count()} x {torch.cuda.get_device_name()})"
    yield Finding("ok", "torch", detail)
    cores, limit = available_cores()
    asked, threads = os.environ.get("OMP_NUM_THREADS", ""), torch.get_num_threads()
    detail = f"{cores} {limit}, OMP_NUM_THREADS {asked or 'unset'}, torch uses {threads} threads"
    # torch cuts a number that is far too large; other libraries believe it.
    if max(threads, int(asked) if asked.isdecimal() else 0) > cores:
        fix = f"set OMP_NUM_THREADS={cores}, or less for several processes"
        yield Finding("warning", "cores", f"{detail}: more threads than cores", fix)
    else:
        if not asked and cores > 1:
            detail += "; under several processes each takes as many, unless it is set"
        yield Finding("ok", "cores", detail)


def check_gpu() -> Iterator[Finding]:
    """Attention as SPD and EAGLE-3 train with it, and what recurrent layers are computed by."""
    import torch

    if not torch.cuda.is_available():
        return
    from pipedraft.models.banded_attention import ttt_attention
    from pipedraft.placement import has_native_bf16

    name, device = "GPU training", torch.device("cuda", torch.cuda.current_device())
    is_native = has_native_bf16(device)
    dtype = torch.bfloat16 if is_native else torch.float16
    query, keys, values = torch.zeros(3, 1, 1, 8, 64, dtype=dtype, device=device).unbind()
    try:
        out = ttt_attention(query.requires_grad_(), [keys, keys], [values, values])
        out.sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        fix = "train SPD and EAGLE-3 on an Ampere GPU or a later one, or EAGLE-1 and FlexSpec here"
        yield Finding("warning", name, str(error).splitlines()[0], fix)
    else:
        emulated = "" if is_native else "; bfloat16 is emulated, so float32 and float16 are taken"
        yield Finding("ok", name, f"attention of drafts runs in {dtype}{emulated}")
    missing = [x for x in RECURRENT_KERNELS if find_spec(RECURRENT_KERNELS[x]) is None]
    if missing:
        detail = f"without {' and '.join(missing)} they run as Python loops over chunks, in float32"
        fix = "before a Qwen3.5 target pip install 'pipedraft[linear-attention]' causal-conv1d"
        yield Finding("warning", "recurrent layers", detail, fix)
    else:
        yield Finding("ok", "recurrent layers", "fused kernels are installed")


def available_cores() -> tuple[int, str]:
    """Cores that this process may use, and what limits them."""
    cores, limit = os.cpu_count() or 1, "of the machine"
    if sys.platform == "linux" and len(os.sched_getaffinity(0)) < cores:
        cores, limit = len(os.sched_getaffinity(0)), "by affinity"
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        share, _, period = quota.read_text().partition(" ")
        if share != "max" and (allowed := math.ceil(int(share) / int(period))) < cores:
            cores, limit = allowed, "by the control group's quota"
    return cores, limit


def check_gloo() -> Iterator[Finding]:
    """Two processes add their numbers over 127.0.0.1, as stages and data-parallel ranks talk."""
    import torch

    limit, torch_processes = timedelta(seconds=GLOO_TIMEOUT_S), torch.multiprocessing
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=limit
    )
    ranks = torch_processes.start_processes(
        add_numbers, (store.port, GLOO_TIMEOUT_S), nprocs=2, join=False, daemon=True
    )
    limit_s, reason = GLOO_TIMEOUT_S + 10, ""
    try:
        # Each call returns as soon as one of the two has ended.
        if not (ranks.join(limit_s, grace_period=1) or ranks.join(limit_s, grace_period=1)):
            reason = f"no result in {limit_s:g} s"
    except (
        torch_processes.ProcessRaisedException,
        torch_processes.ProcessExitedException,
    ) as error:
        reason = str(error).strip().splitlines()[-1]
    finally:
        for rank in ranks.processes:
            rank.kill()
            rank.join()
    if reason:
        fix = "set GLOO_SOCKET_IFNAME=lo, and let processes talk on 127.0.0.1"
        yield Finding("failure", "gloo", f"two processes could not add numbers: {reason}", fix)
    else:
        yield Finding("ok", "gloo", "two processes added their numbers over 127.0.0.1")


def add_numbers(rank: int, port: int, timeout_s: float) -> None:
    """Add two ranks' numbers; gloo's own words would stand among the findings."""
    import torch

    dist = torch.distributed
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    assert value.item() == 3, value
    dist.destroy_process_group()


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
    """The embedded target's files are those that were shipped, load, and decode in both dtypes."""
    name = "embedded target"
    if not folder.is_dir():
        fix = "give --assets of a checkout, or use any other target"
        yield Finding("warning", name, f"none in {folder}", fix)
        return
    for file, digest in read_sums(folder / SUMS):
        path = folder / file
        if not path.is_file() or file_sha256(path) != digest:
            fault = "differs from what was shipped" if path.is_file() else "is missing"
            fix = f"git checkout {folder}, or copy it again"
            yield Finding("failure", name, f"{path} {fault}", fix)
            return
    import torch

    from pipedraft.models.target import load_target, load_tokenizer
    from pipedraft.pretrained import quieten

    quieten()
    try:
        ids_BT = load_tokenizer(str(folder))("Hello", return_tensors="pt").input_ids
        for dtype in (torch.float32, torch.bfloat16):
            model = load_target(str(folder), dtype=dtype)
            if not torch.isfinite(model(ids_BT).logits).all():
                fix = "reinstall torch: the weights are right"
                yield Finding("failure", name, f"its logits in {dtype} are not finite", fix)
                return
    except (ValueError, RuntimeError) as error:
        yield Finding(
            "failure", name, str(error).splitlines()[0], "copy it again, or reinstall torch"
        )
        return
    size = f"{model.num_parameters() / 1e6:.2f} M parameters"
    yield Finding("ok", name, f"{folder}: sums right, {size}, decodes in float32 and bfloat16")


def read_sums(path: Path) -> list[tuple[str, str]]:
    """Read a file of sha256sum: (file name, SHA-256) a line; one that is gone names itself."""
    if not path.is_file():
        return [(path.name, "")]
    lines = [line.split(maxsplit=1) for line in path.read_text().splitlines()]
    return [(name.lstrip("*"), digest) for digest, name in lines]


# -- the Hub --------------------------------------------------------------------------------


def check_hub() -> Iterator[Finding]:
    """Whether the Hub answers; it is only needed for what is on it."""
    if constants.HF_HUB_OFFLINE:
        yield Finding("ok", "Hub", "offline by HF_HUB_OFFLINE: folders and the cache are used")
        return
    answers: list[Finding] = []
    # A thread of its own: looking up a name has no timeout, nor has a request of the library.
    asking = threading.Thread(target=lambda: answers.append(ask_hub()), daemon=True)
    asking.start()
    asking.join(2 * HUB_TIMEOUT_S + 1)
    fix = "work with folders, or set HF_HUB_OFFLINE=1"
    yield from answers or [Finding("warning", "Hub", f"{constants.ENDPOINT}: no answer", fix)]


def ask_hub() -> Finding:
    endpoint = constants.ENDPOINT
    try:
        httpx2.head(endpoint, timeout=HUB_TIMEOUT_S, follow_redirects=True)
        if get_token() is None:
            detail = f"{endpoint} answers; no token, which only private names and push need"
            return Finding("ok", "Hub", detail)
        name = HfApi().whoami()["name"]
    except httpx2.TransportError as error:
        reason = str(error) or type(error).__name__
        fix = "work with folders, or set HF_HUB_OFFLINE=1"
        return Finding("warning", "Hub", f"{endpoint} cannot be reached ({reason})", fix)
    except HfHubHTTPError as error:
        detail = f"{endpoint} refuses the token ({error.response.status_code})"
        return Finding("warning", "Hub", detail, "set HF_TOKEN, or run hf auth login")
    return Finding("ok", "Hub", f"{endpoint} answers, signed in as {name}")


# -- the command ----------------------------------------------------------------------------


def findings(assets: Path) -> Iterator[Finding]:
    constraints = Path(__file__).parent / "constraints.txt"
    return chain(
        check_python(),
        check_versions(constraints),
        check_torch(),
        check_gpu(),
        check_gloo(),
        check_folder(Path.cwd()),
        check_target(assets / "target"),
        check_hub(),
    )


def main() -> None:
    options = DoctorOptions.read(sys.argv[1:])
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
