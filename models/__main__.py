"""Work on checkpoints: import a published head, push one to the Hub, export it for an engine, make
a target of a GGUF file."""

import shlex
import sys
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from pipedraft.cli import (
    Options,
    UsageError,
    leave_at_interrupts,
    option,
    run_command,
    subcommand,
)

if __name__ == "__main__":
    leave_at_interrupts()

from pipedraft.files import write_folder

EXAMPLE = """example:
  python -m pipedraft.models import --from yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \\
      --target meta-llama/Llama-3.1-8B-Instruct --out out/eagle3
  python -m pipedraft.models push --checkpoint out/spd --repo user/name \\
      --results out/eval/results.json --dry-run
  python -m pipedraft.models push --checkpoint out/sglang --repo user/name-sglang --private
  python -m pipedraft.models export --checkpoint out/eagle3 --format sglang --out out/sglang
  python -m pipedraft.models from-gguf SmolLM2-135M-Instruct.Q4_1.gguf --out out/smollm2
"""


class Command(Options):
    """A subcommand: its options, and what it does with them."""

    EXAMPLE: ClassVar[str] = EXAMPLE

    @abstractmethod
    def run(self) -> None:
        """Do it, and print what was made."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Command):
    """make a checkpoint of a head in the layout of SafeAILab, SGLang, vLLM or SPD's authors, or of
    the MTP layer that a target ships with"""

    PROG: ClassVar[str] = "pipedraft models import"

    source: str = option(flag="--from", metavar="HEAD")
    """folder, file of weights or Hub id"""
    target: str
    """folder or Hub id of the target it was trained for"""
    out: Path
    """folder to make"""
    revision: str | None = option(None, metavar="NAME")
    """branch, tag or commit of the head's repository"""

    def run(self) -> None:
        from pipedraft.models.exchange.peers import import_head

        draft, files = import_head(self.source, self.target, self.out, revision=self.revision)
        for path in files:
            print(path)
        stages = "" if draft.num_stages is None else f" --stages {draft.num_stages}"
        place, target = shlex.quote(str(self.out)), shlex.quote(self.target)
        print(
            f"python -m pipedraft.inference --checkpoint {place} --target {target}{stages} "
            "--prompt Hello"
        )


@dataclass(frozen=True, kw_only=True)
class PushOptions(Command):
    """upload a checkpoint to the Hub"""

    PROG: ClassVar[str] = "pipedraft models push"

    checkpoint: str
    """checkpoint folder, a run's folder, or an export"""
    repo: str
    """user/name"""
    results: Path | None = None
    """results.json of pipedraft eval, for the card's table"""
    target: str | None = None
    """the target's Hub id; default: the name that the training gave it"""
    dtype: Literal["fp16"] | None = None
    """of the weights, half the size, which loading makes float32 again; default: as they are"""
    private: bool = False
    """for a repository that it makes"""
    revision: str | None = option(None, metavar="BRANCH")
    """made if missing; default: main"""
    commit_message: str | None = option(None, metavar="TEXT")
    """of the upload"""
    dry_run: bool = False
    """only write the folder to --out"""
    out: Path | None = None
    """with --dry-run: where to write it; default: out/upload/REPO"""

    def run(self) -> None:
        from pipedraft.models.exchange.hub import (
            Upload,
            check_repo_id,
            fill_folder,
            prepare_upload,
            push,
        )

        check_repo_id(self.repo)
        if self.out is not None and not self.dry_run:
            raise ValueError(f"--out: {str(self.out)!r} without --dry-run; give both or neither")
        folder = checkpoint_folder(self.checkpoint)
        upload = Upload(
            repo=self.repo,
            revision=self.revision,
            private=self.private,
            message=self.commit_message,
            results=self.results,
            target=self.target,
            is_half=self.dtype is not None,
        )
        if self.dry_run:
            out = self.out or Path("out", "upload", *self.repo.split("/"))
            fill = partial(fill_folder, files=prepare_upload(folder, upload))
            for path in write_folder(out, fill, inputs=[folder], replaces=True):
                print(path)
        else:
            print(push(prepare_upload(folder, upload), upload))


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Command):
    """write a head as SGLang, vLLM or llama.cpp load it, and how to launch them"""

    PROG: ClassVar[str] = "pipedraft models export"

    checkpoint: str
    """checkpoint folder or a run's folder"""
    format: Literal["sglang", "speculators", "gguf"]
    """sglang: the authors' layout; speculators: vLLM's; gguf: llama.cpp's"""
    out: Path
    """folder to make"""
    target: str | None = None
    """the target's name for the engine; default: the one of the training; with gguf: its file"""

    results: Path | None = None
    """results.json of pipedraft eval with a chain: decides the chain of the launch line, and
    becomes acceptance.json for the simulators of vLLM and SGLang"""

    def run(self) -> None:
        from pipedraft.models.exchange.export import Origin, export
        from pipedraft.models.exchange.llama_cpp import export_gguf

        folder = checkpoint_folder(self.checkpoint)
        if self.format == "gguf":
            if self.results is not None:
                raise ValueError("--results: not with --format gguf; leave it out")
            files, line = export_gguf(folder, self.out, target=self.target)
            print(*files, line, sep="\n")
            return
        for path in export(folder, self.format, self.out, target=self.target, results=self.results):
            print(path)
        engine = "SGLang" if self.format == "sglang" else "vLLM"
        print(f"# where {engine} is installed; docs/engines.md has the versions tried:")
        print(Origin.read(self.out).launch_line(self.out))


@dataclass(frozen=True, kw_only=True)
class FromGgufOptions(Command):
    """write a GGUF file as a model folder, float32; --target FILE.gguf does it on first use"""

    PROG: ClassVar[str] = "pipedraft models from-gguf"

    file: Path = option(metavar="FILE", positional=True)
    """the GGUF file"""
    out: Path
    """folder to make"""

    def run(self) -> None:
        from pipedraft.pretrained import convert_gguf

        for path in convert_gguf(self.file, self.out, field="FILE"):
            print(path)


def checkpoint_folder(path_or_repo: str) -> Path:
    from pipedraft.models.draft import resolve_folder

    return resolve_folder(path_or_repo)


SUBCOMMANDS: dict[str, type[Command]] = {
    "import": ImportOptions,
    "push": PushOptions,
    "export": ExportOptions,
    "from-gguf": FromGgufOptions,
}


def usage() -> str:
    about, *others = (
        " ".join((k or "").split()) for k in (__doc__, *(c.__doc__ for c in SUBCOMMANDS.values()))
    )
    lines = [f"  {name:<10}{text}" for name, text in zip(SUBCOMMANDS, others, strict=True)]
    return "\n".join(["usage: pipedraft models <command> ...", "", about, "", *lines, "", EXAMPLE])


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        print(usage())
        return
    if not words:
        raise UsageError(f"command: missing; give {' or '.join(SUBCOMMANDS)} (see --help)")
    SUBCOMMANDS[subcommand(words[0], list(SUBCOMMANDS))].read(words[1:]).run()


if __name__ == "__main__":
    run_command(main)
