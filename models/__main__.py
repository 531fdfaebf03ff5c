"""Work on checkpoints: push one to the Hub, export it for a serving engine, or say whether a
fine-tuned target keeps its FlexSpec draft."""

import argparse
import sys
from functools import partial
from pathlib import Path

from pipedraft.errors import Parser, run_command
from pipedraft.files import write_folder

EXAMPLE = """example:
  python -m pipedraft.models push --checkpoint out/spd --repo user/name \\
      --results out/eval/results.json --dry-run
  python -m pipedraft.models push --checkpoint out/sglang --repo user/name-sglang --private
  python -m pipedraft.models export --checkpoint out/eagle3 --format sglang --out out/sglang
  python -m pipedraft.models scope --base assets/target --target out/tuned/best
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pipedraft models",
        description=__doc__,
        epilog=EXAMPLE,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    push = commands.add_parser("push", help="upload a checkpoint to the Hub")
    push.add_argument(
        "--checkpoint", required=True, help="checkpoint folder, a run's folder, or an export"
    )
    push.add_argument("--repo", required=True, help="user/name")
    push.add_argument(
        "--results", type=Path, help="results.json of pipedraft eval, for the card's table"
    )
    push.add_argument(
        "--target", help="the target's Hub id (default: the name that the training gave it)"
    )
    push.add_argument("--private", action="store_true", help="for a repository that it makes")
    push.add_argument("--revision", metavar="BRANCH", help="made if missing (default: main)")
    push.add_argument("--commit-message", metavar="TEXT")
    push.add_argument("--dry-run", action="store_true", help="only write the folder to --out")
    push.add_argument(
        "--out", type=Path, help="with --dry-run: where to write it (default: out/upload/REPO)"
    )
    export = commands.add_parser(
        "export", help="write an EAGLE-3 head as SGLang or vLLM load it, and how to launch them"
    )
    export.add_argument("--checkpoint", required=True, help="checkpoint folder or a run's folder")
    export.add_argument(
        "--format",
        required=True,
        choices=["sglang", "speculators"],
        help="sglang: the authors' layout; speculators: vLLM's",
    )
    export.add_argument("--out", type=Path, required=True, help="folder to make")
    export.add_argument(
        "--target", help="the target's name for the engine (default: the one of the training)"
    )
    scope = commands.add_parser(
        "scope",
        help="list what a fine-tuned target changed of embedding, last block, final norm and LM "
        "head, which a FlexSpec draft has copied; exit status 1 if it changed any",
    )
    scope.add_argument("--base", required=True, help="folder or Hub id of the target before")
    scope.add_argument(
        "--target", required=True, help="folder or Hub id of the one after, or an adapter's folder"
    )
    return parser


def main() -> None:
    options = build_parser().parse_args(sys.argv[1:])
    if options.command == "export":
        run_export(options)
    elif options.command == "scope":
        run_scope(options)
    else:
        run_push(options)


def run_export(options: argparse.Namespace) -> None:
    from pipedraft.models.draft import resolve_folder
    from pipedraft.models.export import export, launch_line, target_name

    folder = resolve_folder(options.checkpoint)
    for path in export(folder, options.format, options.out, target=options.target):
        print(path)
    print(launch_line(options.format, options.target or target_name(folder), options.out))


def run_scope(options: argparse.Namespace) -> None:
    from pipedraft.models.target_part import out_of_scope

    names = out_of_scope(options.base, options.target)
    if names:
        print("\n".join(names))
        sys.exit(1)
    print(f"in scope: {options.target} differs from {options.base} in layers 1 .. L-1 at most")


def run_push(options: argparse.Namespace) -> None:
    from pipedraft.models.draft import resolve_folder
    from pipedraft.models.hub import Upload, check_repo_id, fill_folder, prepare_upload, push

    check_repo_id(options.repo)
    if options.out is not None and not options.dry_run:
        raise ValueError(f"--out: {str(options.out)!r} without --dry-run; give both or neither")
    folder = resolve_folder(options.checkpoint)
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
