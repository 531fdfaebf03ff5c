"""Commands of `pipedraft models`: import, push and export heads, convert GGUF files."""

import shlex
import sys
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal

from ...files import write_folder
from ...model_names import check_checkpoint
from ...options import Options, option

Written = Literal["sglang", "speculators", "transformers", "openvino", "gguf"]
FORMATS: dict[str, Written] = {
    "sglang": "sglang",
    "vllm": "speculators",
    "transformers": "transformers",
    "openvino": "openvino",
    "llama.cpp": "gguf",
    "speculators": "speculators",
    "gguf": "gguf",
}
"""Value of --format -> the layout to write."""


class Command(Options):
    """Base class for subcommands, with options as fields and the work in ``run``."""

    @abstractmethod
    def run(self) -> None:
        """Run the subcommand, and print what it made."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Command):
    """convert a head from SafeAILab, SGLang, vLLM or SPD's authors, or a target's MTP layer"""

    PROG: ClassVar[str] = "pipedraft models import"
    EXAMPLE: ClassVar[str] = """example:
  pipedraft models import --from yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \\
      --target meta-llama/Llama-3.1-8B-Instruct --out out/imported
"""

    source: str = option(flag="--from", metavar="HEAD")
    """head's folder, weights file or Hub id"""
    target: str
    """target of the head: folder or Hub id"""
    out: Path
    """folder to make"""
    revision: str | None = option(None, metavar="NAME")
    """branch, tag or commit of the head's repository"""

    def run(self) -> None:
        from .peers import import_head

        draft, files = import_head(
            self.source,
            self.target,
            self.out,
            revision=self.revision,
            warn=lambda line: print(f"warning: {line}", file=sys.stderr),
        )
        print(*files, sep="\n")
        stages = "" if draft.num_stages is None else f" --stages {draft.num_stages}"
        place, target = shlex.quote(str(self.out)), shlex.quote(self.target)
        print(f"pipedraft inference --checkpoint {place} --target {target}{stages} --prompt Hello")


@dataclass(frozen=True, kw_only=True)
class PushOptions(Command):
    """upload a checkpoint to the Hub"""

    PROG: ClassVar[str] = "pipedraft models push"
    EXAMPLE: ClassVar[str] = """example:
  pipedraft models push --checkpoint assets/heads/eagle3 --repo user/name --dry-run
  pipedraft models push --checkpoint out/sglang --repo user/name-sglang --private
"""

    checkpoint: str
    """checkpoint folder, a run's folder, or an export"""
    repo: str
    """user/name on the Hub"""
    results: Path | None = None
    """results.json from pipedraft eval, for the table in the model card"""
    target: str | None = None
    """target's Hub id; default: its name in training"""
    dtype: Literal["fp16"] | None = None
    """store the weights in fp16, half the size; loading converts them to float32; default: as they
    are"""
    private: bool = False
    """make a new repository private"""
    revision: str | None = option(None, metavar="BRANCH")
    """branch to push to, created if missing; default: main"""
    commit_message: str | None = option(None, metavar="TEXT")
    """commit message for the upload"""
    dry_run: bool = False
    """only write the folder to --out"""
    out: Path | None = None
    """with --dry-run: folder to write; default: out/upload/REPO"""

    def run(self) -> None:
        check_checkpoint(self.checkpoint)
        from ..heads.draft import resolve_folder
        from .hub import check_repo_id, fill_upload, push

        check_repo_id(self.repo)
        if self.out is not None and not self.dry_run:
            raise ValueError(f"--out: {str(self.out)!r} without --dry-run; give both or neither")
        folder = resolve_folder(self.checkpoint)
        fill = partial(
            fill_upload,
            folder=folder,
            repo=self.repo,
            revision=self.revision,
            results=self.results,
            target=self.target,
            is_half=self.dtype is not None,
        )
        if self.dry_run:
            out = self.out or Path("out", "upload", *self.repo.split("/"))
            print(*write_folder(out, fill, inputs=[folder], replaces=True), sep="\n")
            return
        with TemporaryDirectory() as temporary:
            fill(Path(temporary))
            commit = push(
                Path(temporary),
                self.repo,
                revision=self.revision,
                private=self.private,
                message=self.commit_message,
            )
        print(commit)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Command):
    """write a head in an engine's layout, and print the launch command"""

    PROG: ClassVar[str] = "pipedraft models export"
    EXAMPLE: ClassVar[str] = """example:
  pipedraft models export --checkpoint assets/heads/eagle3 --format sglang --out out/sglang
"""

    checkpoint: str
    """checkpoint folder or a run's folder"""
    format: Literal[
        "sglang", "vllm", "transformers", "openvino", "llama.cpp", "speculators", "gguf"
    ]
    """engine that will read the head; speculators and gguf are the layouts of vLLM and llama.cpp"""
    out: Path
    """folder to make"""
    target: str | None = None
    """name by which the engine loads the target; default: its name in training; with gguf: the
    target's file"""
    results: Path | None = None
    """results.json from pipedraft eval with chains: sets the chain length for the launch command,
    and becomes acceptance.json for the simulators in vLLM and SGLang"""

    def run(self) -> None:
        check_checkpoint(self.checkpoint)
        from ..heads.draft import resolve_folder
        from .card import ENGINES
        from .export import Origin, export
        from .llama_cpp import export_gguf

        folder = resolve_folder(self.checkpoint)
        layout = FORMATS[self.format]
        if layout == "gguf":
            if self.results is not None:
                raise ValueError(f"--results: not with --format {self.format}; leave it out")
            files, line = export_gguf(folder, self.out, target=self.target)
            print(*files, line, sep="\n")
            return
        files = export(folder, layout, self.out, target=self.target, results=self.results)
        where = f"# where {ENGINES[layout]} is installed; docs/engines.md has the versions tried:"
        print(*files, where, Origin.read(self.out).launch_line(self.out), sep="\n")


@dataclass(frozen=True, kw_only=True)
class FromGgufOptions(Command):
    """convert a GGUF file into a float32 model folder; --target FILE.gguf does it on first use"""

    PROG: ClassVar[str] = "pipedraft models from-gguf"
    EXAMPLE: ClassVar[str] = """example:
  pipedraft models from-gguf SmolLM2-135M-Instruct.Q4_1.gguf --out out/smollm2
"""

    file: Path = option(metavar="FILE", positional=True)
    """the GGUF file"""
    out: Path
    """folder to make"""

    def run(self) -> None:
        from ...gguf_files import convert_gguf

        print(*convert_gguf(self.file, self.out, field="FILE"), sep="\n")


SUBCOMMANDS: dict[str, type[Command]] = {
    "import": ImportOptions,
    "push": PushOptions,
    "export": ExportOptions,
    "from-gguf": FromGgufOptions,
}
