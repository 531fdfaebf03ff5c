"""Work on checkpoints: push one to the Hub."""

import argparse
import sys
import tempfile
from pathlib import Path

from pipedraft.errors import Parser, make_folder, run_command

EXAMPLE = """example:
  python -m pipedraft.models push --checkpoint out/spd --repo user/name --dry-run
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
    push.add_argument("--private", action="store_true")
    push.add_argument("--revision", help="branch to upload to")
    push.add_argument("--dry-run", action="store_true", help="only write the folder to --out")
    push.add_argument(
        "--out", type=Path, help="with --dry-run: where to write it (default: out/upload/REPO)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
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
        for path in prepare_upload(folder, out):
            print(path)
        return
    with tempfile.TemporaryDirectory() as temporary:
        prepare_upload(folder, Path(temporary))
        print(
            push(Path(temporary), options.repo, private=options.private, revision=options.revision)
        )


if __name__ == "__main__":
    run_command(main)
