"""Check whether this machine is ready: one line per check, with a fix for each problem.

Exit status: 0 without a failure, 1 with one, 2 bad input. Changes nothing; a missing network is no
failure.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from .endings import leave_at_interrupts, run_command
from .errors import requirement
from .options import Options

if __name__ == "__main__":
    leave_at_interrupts()

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from packaging.requirements import Requirement

from .files import file_sha256

EXAMPLE = """example:
  pipedraft doctor
  pipedraft doctor --json

Each line has ok, warning or FAILURE, the check, the finding, and what to do about it."""

SHOWN = ("torch", "transformers", "accelerate", "datasets", "huggingface-hub", "safetensors")
"""Libraries listed even if they are fine."""
TARGET = Path(__file__).parent / "assets" / "target"
RECURRENT_KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
"""Package with kernels for Qwen3.5's recurrent layers -> its module, imported by transformers."""
EXTRA = re.compile(r'extra == "(.*)"')
HUB_TIMEOUT_S = 5


@dataclass(frozen=True)
class Finding:
    """Result from one check."""

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
    """print the findings as one JSON list"""


def check_versions() -> Iterator[Finding]:
    """Compare Python and installed libraries with the package's requirements."""
    try:
        package = metadata.metadata("pipedraft")
    except metadata.PackageNotFoundError:
        yield Finding("warning", "pipedraft", "not installed", "pip install -e . in the checkout")
        return
    found = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "python", f"{found}, {sys.platform}")
    for needed in map(Requirement, package.get_all("Requires-Dist") or ()):
        name, extra = needed.name, EXTRA.search(str(needed.marker or ""))
        fix = f"pip install '{name}{needed.specifier}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if extra is None:
                yield Finding("failure", name, "not installed", fix)
            continue
        if not needed.specifier.contains(version, prereleases=True):
            yield Finding("failure", name, f"{version}, not {needed.specifier}", fix)
        elif name in SHOWN:
            yield Finding("ok", name, version)


def check_gpu() -> Iterator[Finding]:
    """Run the attention used to train SPD and EAGLE-3, and look for recurrent-layer kernels."""
    import torch

    from .devices import has_native_bf16, resolve_device
    from .models.heads.banded_attention import ttt_attention

    if not torch.cuda.is_available():
        yield Finding("ok", "device", str(resolve_device("auto")))
        yield from check_kernels()
        return
    device = torch.device("cuda", torch.cuda.current_device())
    yield Finding("ok", "device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    is_native = has_native_bf16(device)
    dtype = torch.bfloat16 if is_native else torch.float16
    query, keys, values = torch.zeros(3, 1, 1, 8, 64, dtype=dtype, device=device).unbind()
    try:
        out = ttt_attention(query.requires_grad_(), [keys, keys], [values, values])
        out.sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        fix = "train SPD and EAGLE-3 on an Ampere GPU or a later one, or EAGLE-1 and FlexSpec here"
        yield Finding("warning", "GPU training", str(error).splitlines()[0], fix)
    else:
        emulated = "" if is_native else "; bfloat16 is emulated, so float32 and float16 are taken"
        yield Finding("ok", "GPU training", f"attention of drafts runs in {dtype}{emulated}")
    missing = [name for name, module in RECURRENT_KERNELS.items() if find_spec(module) is None]
    if missing:
        detail = f"without {' and '.join(missing)} they run as Python loops over chunks, in float32"
        needs = requirement("linear-attention")
        fix = f"before a Qwen3.5 target pip install {needs} causal-conv1d"
        yield Finding("warning", "recurrent layers", detail, fix)


def check_kernels() -> Iterator[Finding]:
    """Compile the kernels for decoding on a CPU."""
    from .models.speed import kernels

    if kernels.library() is not None:
        yield Finding("ok", "CPU kernels", "compiled")
        return
    detail = "not compiled, so a CPU decodes more slowly, without int8 and int4"
    yield Finding("warning", "CPU kernels", detail, "install g++")


def check_target(folder: Path) -> Iterator[Finding]:
    """Compare the embedded target's files with the shipped ones, and decode with it."""
    name, sums = "embedded target", folder / "SHA256SUMS"
    if not folder.is_dir():
        fix = "run in a checkout, or use any other target"
        yield Finding("warning", name, f"none in {folder}", fix)
        return
    lines = sums.read_text().splitlines() if sums.is_file() else [f"- {sums.name}"]
    for digest, file in (line.split(maxsplit=1) for line in lines):
        path = folder / file.lstrip("*")
        if not path.is_file() or file_sha256(path) != digest:
            fault = "differs from what was shipped" if path.is_file() else "is missing"
            fix = f"git checkout {folder}, or copy it again"
            yield Finding("failure", name, f"{path} {fault}", fix)
            return
    import torch

    from .pretrained import load_model, load_tokenizer, quieten

    quieten()
    try:
        ids_BT = load_tokenizer(str(folder))("Hello", return_tensors="pt").input_ids
        model = load_model(str(folder))
        if not torch.isfinite(model(ids_BT).logits).all():
            raise RuntimeError("its logits are not finite")
    except (ValueError, RuntimeError) as error:
        fix = "reinstall torch and transformers"
        yield Finding("failure", name, str(error).splitlines()[0], fix)
        return
    size = f"{model.num_parameters() / 1e6:.2f} M parameters"
    yield Finding("ok", name, f"{folder}: sums right, {size}, decodes")


def check_hub() -> Iterator[Finding]:
    """Check the connection to the Hub. Only models and data hosted there need it."""
    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        yield Finding("ok", "Hub", "offline by HF_HUB_OFFLINE: folders and the cache are used")
        return
    try:
        httpx2.head(endpoint, timeout=HUB_TIMEOUT_S, follow_redirects=True)
        detail = "no token, which only private names and push need"
        if get_token() is not None:
            detail = f"signed in as {HfApi().whoami()['name']}"
        yield Finding("ok", "Hub", f"{endpoint} answers, {detail}")
    except httpx2.TransportError as error:
        fix = "work with folders, or set HF_HUB_OFFLINE=1"
        detail = f"{endpoint} cannot be reached ({str(error) or type(error).__name__})"
        yield Finding("warning", "Hub", detail, fix)
    except HfHubHTTPError as error:
        detail = f"{endpoint} refuses the token ({error.response.status_code})"
        yield Finding("warning", "Hub", detail, "set HF_TOKEN, or run hf auth login")


def main() -> None:
    options = DoctorOptions.read(sys.argv[1:])
    checks = (check_versions(), check_gpu(), check_target(TARGET), check_hub())
    found = []
    for finding in (finding for check in checks for finding in check):
        found.append(finding)
        if not options.json:
            print(finding.line(), flush=True)
    counts = {kind: sum(f.status == kind for f in found) for kind in ("warning", "failure")}
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        print(f"checks: {len(found)}, warnings: {counts['warning']}, failures: {counts['failure']}")
    sys.exit(1 if counts["failure"] else 0)


if __name__ == "__main__":
    run_command(main)
