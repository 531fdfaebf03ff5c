"""Work on checkpoints: push one to the Hub, or export it for a serving engine."""

import argparse
import sys
import tempfile
from pathlib import Path

from pipedraft.errors import Parser, make_folder, run_command

EXAMPLE = """example:
  python -m pipedraft.models push --checkpoint out/spd --repo user/name \\
      --results out/eval/results.json --dry-run
  python -m pipedraft.models export --checkpoint out/eagle3 --format sglang --out out/sglang
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pipedraft models",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    push = commands.add_parser("push", help="upload a checkpoint to the Hub")
    push.add_argument("--checkpoint", required=True, help="checkpoint folder or a run's folder")
    push.add_argument("--repo", required=True, help="user/name")
    push.add_argument(
        "--results", type=Path, help="results.json of pipedraft eval, for the card's table"
    )
    push.add_argument("--private", action="store_true")
    push.add_argument("--revision", help="branch to upload to")
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
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.command == "export":
        run_export(options)
    else:
        run_push(options)


def run_export(options: argparse.Namespace) -> None:
    from pipedraft.models.draft import resolve_folder
    from pipedraft.models.export import export, launch_line, target_name

    folder = resolve_folder(options.checkpoint)
    for path in export(folder, options.format, options.out, target=options.target):
        print(path)
    print(launch_line(options.format, options.target or target_name(folder), options.out))


def run_push(options: argparse.Namespace) -> None:
    from pipedraft.models.draft import resolve_folder
    from pipedraft.models.hub import prepare_upload, push

    if options.repo.count("/") != 1:
        raise ValueError(f"--repo: {options.repo!r} names no owner; give user/name")
    if options.out is not None and not options.dry_run:
        raise ValueError(f"--out: {str(options.out)!r} without --dry-run; give both or neither")
    folder = resolve_folder(options.checkpoint)
    if options.dry_run:
        out = options.out or Path("out/upload", options.repo)
        make_folder("--out", out)
        for path in prepare_upload(folder, out, options.results):
            print(path)
        return
    with tempfile.TemporaryDirectory() as temporary:
        prepare_upload(folder, Path(temporary), options.results)
        print(
            push(Path(temporary), options.repo, private=options.private, revision=options.revision)
        )


if __name__ == "__main__":
    run_command(main)
