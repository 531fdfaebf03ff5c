"""Options of `pipedraft new`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ...errors import UsageError, check_ranges
from ...options import Options, option
from ..help import METHODS

EXAMPLE = """example:
  pipedraft new assets/target --data chats.jsonl --out out/mine.yaml
  pipedraft new Qwen/Qwen3-8B --data chats.jsonl --gpus 8
  pipedraft new out/smollm2 --data chats.jsonl --method spd --stages 2

Writes one recipe for this target with a reason beside each value, and prints three commands with
their expected time: answer the prompts with the target, train, evaluate. Without a GPU here, a
large target is planned for eight GPUs like an H100."""
STAGED = ("spd", "ppsd")
"""Methods whose heads are made for one number of stages."""
Method = Literal[*METHODS]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class NewOptions(Options):
    """Write a recipe for your own target, and print the commands that use it."""

    PROG: ClassVar[str] = "pipedraft new"
    EXAMPLE: ClassVar[str] = EXAMPLE

    target: str = option(metavar="TARGET", positional=True)
    """target's folder or Hub id; config.json alone is enough for a plan"""
    data: str = option(metavar="FILE")
    """prompts or conversations, as JSONL (.gz), parquet or a folder of save_to_disk; the target
    will write the answers"""
    out: Path | None = option(None, metavar="RECIPE.yaml")
    """file to write (default: out/TARGET_METHOD.yaml); answers, head and results go beside it"""
    method: Method = "eagle3"
    """head to train"""
    stages: int | None = option(None, least=1)
    """spd, ppsd: pipeline stages (default: 4)"""
    gpus: int | None = option(None, least=0)
    """GPUs to plan for; 0: the CPU (default: those here)"""
    gpu_memory: float | None = option(None, metavar="GB")
    """memory of each GPU in GB (default: that of the GPU here, else 80)"""
    peak_tflops: float | None = option(None, metavar="X")
    """peak TFLOP/s of each GPU (default: measured on the GPU here, else 989)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"gpu_memory": "(0, 1e6]", "peak_tflops": "(0, 1e9]"}, "--")
        if self.stages is not None and self.method not in STAGED:
            raise UsageError(
                f"--stages: {self.stages} with --method {self.method}, whose heads fit any number; "
                "leave it out"
            )
        for name in ("gpu_memory", "peak_tflops"):
            if self.gpus == 0 and getattr(self, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag}: {getattr(self, name)} with --gpus 0; leave one out")
        if self.out is not None and self.out.suffix != ".yaml":
            raise UsageError(f"--out: {str(self.out)!r} does not end in .yaml; give such a name")

    @property
    def recipe(self) -> Path:
        """File to write."""
        if self.out is not None:
            return self.out
        # The last part of a folder or Hub id; abspath reads ".", but follows no link.
        name = Path(os.path.abspath(self.target)).name.removesuffix(".gguf")
        return Path("out", f"{name}_{self.method}.yaml")
