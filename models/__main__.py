"""Work on checkpoints: import a published head, push one to the Hub, export it for an engine, say
whether a fine-tuned target keeps its FlexSpec draft, make a target of a GGUF file, or a checkpoint
with fp16 weights."""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from pipedraft.errors import UsageError, leave_at_interrupts, run_command

if __name__ == "__main__":
    leave_at_interrupts()

from pipedraft.files import write_folder
from pipedraft.options import Options, option, subcommand

EXAMPLE = """example:
  python -m pipedraft.models import --from yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \\
      --target meta-llama/Llama-3.1-8B-Instruct --out out/eagle3
  python -m pipedraft.models push --checkpoint out/spd --repo user/name \\
      --results out/eval/results.json --dry-run
  python -m pipedraft.models push --checkpoint out/sglang --repo user/name-sglang --private
  python -m pipedraft.models export --checkpoint out/eagle3 --format sglang --out out/sglang
  python -m pipedraft.models scope --base assets/target --target out/tuned/best
  python -m pipedraft.models from-gguf SmolLM2-135M-Instruct.Q4_1.gguf --out out/smollm2
  python -m pipedraft.models halve --checkpoint out/spd --out out/spd_half
"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Options):
    """make a checkpoint of a head in the layout of SafeAILab, SGLang, vLLM or SPD's authors, or of
    the MTP layer that a target ships with"""

    PROG: ClassVar[str] = "pipedraft models import"
    EXAMPLE: ClassVar[str] = EXAMPLE

    source: str = option(flag="--from", metavar="HEAD")
    """folder, file of weights or Hub id"""
    target: str
    """folder or Hub id of the target it was trained for"""
    out: Path
    """folder to make"""
    revision: str | None = option(None, metavar="NAME")
    """branch, tag or commit of the head's repository"""


@dataclass(frozen=True, kw_only=True)
class PushOptions(Options):
    """upload a checkpoint to the Hub"""

    PROG: ClassVar[str] = "pipedraft models push"
    EXAMPLE: ClassVar[str] = EXAMPLE

    checkpoint: str
    """checkpoint folder, a run's folder, or an export"""
    repo: str
    """user/name"""
    results: Path | None = None
    """results.json of pipedraft eval, for the card's table"""
    target: str | None = None
    """the target's Hub id; default: the name that the training gave it"""
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


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """write a head as SGLang or vLLM load it, and how to launch them"""

    PROG: ClassVar[str] = "pipedraft models export"
    EXAMPLE: ClassVar[str] = EXAMPLE

    checkpoint: str
    """checkpoint folder or a run's folder"""
    format: Literal["sglang", "speculators"]
    """sglang: the authors' layout; speculators: vLLM's"""
    out: Path
    """folder to make"""
    target: str | None = None
    """the target's name for the engine; default: the one of the training"""


@dataclass(frozen=True, kw_only=True)
class ScopeOptions(Options):
    """list what a fine-tuned target changed of embedding, last block, final norm and LM head, which
    a FlexSpec draft has copied; exit status 1 if it changed any"""

    PROG: ClassVar[str] = "pipedraft models scope"
    EXAMPLE: ClassVar[str] = EXAMPLE

    base: str
    """folder or Hub id of the target before"""
    target: str
    """folder or Hub id of the one after, or an adapter's folder"""


@dataclass(frozen=True, kw_only=True)
class FromGgufOptions(Options):
    """write a GGUF file as a model folder, float32; --target FILE.gguf does it on first use"""

    PROG: ClassVar[str] = "pipedraft models from-gguf"
    EXAMPLE: ClassVar[str] = EXAMPLE

    file: Path = option(metavar="FILE", positional=True)
    """the GGUF file"""
    out: Path
    """folder to make"""


@dataclass(frozen=True, kw_only=True)
class HalveOptions(Options):
    """write a checkpoint with its weights in fp16, half the size; decoding computes in float32"""

    PROG: ClassVar[str] = "pipedraft models halve"
    EXAMPLE: ClassVar[str] = EXAMPLE

    checkpoint: str
    """checkpoint folder or a run's folder"""
    out: Path
    """folder to make"""


SUBCOMMANDS: dict[str, type[Options]] = {
    "import": ImportOptions,
    "push": PushOptions,
    "export": ExportOptions,
    "scope": ScopeOptions,
    "from-gguf": FromGgufOptions,
    "halve": HalveOptions,
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
    options = SUBCOMMANDS[subcommand(words[0], list(SUBCOMMANDS))].read(words[1:])
    if isinstance(options, PushOptions):
        run_push(options)
    elif isinstance(options, ImportOptions):
        run_import(options)
    elif isinstance(options, ExportOptions):
        run_export(options)
    elif isinstance(options, ScopeOptions):
        run_scope(options)
    elif isinstance(options, FromGgufOptions):
        run_from_gguf(options)
    elif isinstance(options, HalveOptions):
        run_halve(options)


def run_import(options: ImportOptions) -> None:
    from pipedraft.models.peers import import_head

    draft, files = import_head(
        options.source, options.target, options.out, revision=options.revision
    )
    for path in files:
        print(path)
    stages = "" if draft.num_stages is None else f" --stages {draft.num_stages}"
    place, target = shlex.quote(str(options.out)), shlex.quote(options.target)
    print(
        f"python -m pipedraft.inference --checkpoint {place} --target {target}{stages} "
        "--prompt Hello"
    )


def checkpoint_folder(path_or_repo: str) -> Path:
    from pipedraft.models.draft import resolve_folder

    return resolve_folder(path_or_repo)


def run_export(options: ExportOptions) -> None:
    from pipedraft.models.export import export, launch_line, target_and_kind

    folder = checkpoint_folder(options.checkpoint)
    for path in export(folder, options.format, options.out, target=options.target):
        print(path)
    target, kind = target_and_kind(folder)
    print(launch_line(options.format, options.target or target, options.out, kind))


def run_scope(options: ScopeOptions) -> None:
    from pipedraft.models.target_part import out_of_scope

    names = out_of_scope(options.base, options.target)
    if names:
        print("\n".join(names))
        sys.exit(1)
    print(f"in scope: {options.target} differs from {options.base} in layers 1 .. L-1 at most")


def run_from_gguf(options: FromGgufOptions) -> None:
    from pipedraft.gguf_target import convert

    for path in convert(options.file, options.out, field="FILE"):
        print(path)


def run_halve(options: HalveOptions) -> None:
    from pipedraft.models.hub import halve

    for path in halve(checkpoint_folder(options.checkpoint), options.out):
        print(path)


def run_push(options: PushOptions) -> None:
    from pipedraft.models.hub import Upload, check_repo_id, fill_folder, prepare_upload, push

    check_repo_id(options.repo)
    if options.out is not None and not options.dry_run:
        raise ValueError(f"--out: {str(options.out)!r} without --dry-run; give both or neither")
    folder = checkpoint_folder(options.checkpoint)
    upload = Upload(
        repo=options.repo,
        revision=options.revision,
        private=options.private,
        message=options.commit_message,
        results=options.results,
        target=options.target,
    )
    if options.dry_run:
        out = options.out or Path("out", "upload", *options.repo.split("/"))
        fill = partial(fill_folder, files=prepare_upload(folder, upload))
        for path in write_folder(out, fill, inputs=[folder], replaces=True):
            print(path)
    else:
        print(push(prepare_upload(folder, upload), upload))


if __name__ == "__main__":
    run_command(main)
