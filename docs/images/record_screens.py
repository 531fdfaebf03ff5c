"""Record command output for draw_screens.py, and take pictures of an evaluation's report.

    python docs/images/record_screens.py --out docs/images

The commands run one after another and take a minute or two. They print measured times, so run them
on an idle machine. The pictures need Chromium on the PATH.
"""

import argparse
import base64
import gzip
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import browser_runs

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = {
    "screen_new": "pipedraft new configs/sizes/qwen3_8b --data chats.jsonl --out out/qwen3.yaml",
    "screen_train": (
        "pipedraft train --config configs/eagle/tiny_eagle3.yaml --max_steps 20 --log_every_steps 4"
    ),
    "screen_eval": (
        "pipedraft eval --checkpoint assets/heads/eagle3 --benchmarks mt_bench,gsm8k,humaneval "
        "--limit 2 --max-new-tokens 64 --out out/report"
    ),
}
"""Picture -> command."""
REPORT = "out/report/report.html"
SIZES = {"report": (1280, 800), "report_phone": (390, 1200)}
"""Picture -> window width and height, in pixels."""
FONT = "sans-serif"  # a headless browser uses another font for system-ui
COLORS = 64
"""Number of colors in a picture. 64 keep text sharp and make the file a third as large."""


def prepare(place: Path) -> None:
    """Make a folder look like a checkout, with conversations in chats.jsonl."""
    for name in ("assets", "configs"):
        (place / name).symlink_to(REPOSITORY / name)
    shipped = REPOSITORY / "assets" / "train" / "answers.jsonl.gz"
    (place / "chats.jsonl").write_bytes(gzip.decompress(shipped.read_bytes()))


def printed(command: str, place: Path) -> list[str]:
    """Run a command, and return its lines as on a terminal, without progress bars."""
    environment = os.environ | {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{command}: status {done.returncode}\n{done.stdout}")
    return [line.rpartition("\r")[2].rstrip() for line in done.stdout.splitlines()]


def photograph(page: Path, out: Path) -> None:
    """Write a picture of the page's top in each window size from ``SIZES``."""
    with tempfile.TemporaryDirectory() as profile, browser_runs.browsing(Path(profile)) as tab:
        for name, (width, height) in SIZES.items():
            tab.open(page.as_uri(), width=width, height=height)
            tab.call("Emulation.setScrollbarsHidden", hidden=True)
            tab.evaluate(f"document.body.style.fontFamily = {FONT!r}")
            taken = tab.call("Page.captureScreenshot", format="png")["data"]
            picture = Image.open(io.BytesIO(base64.b64decode(taken))).convert("RGB")
            picture.quantize(COLORS).save(out / f"{name}.png", optimize=True)


def main() -> None:
    description, _, example, *_ = __doc__.splitlines()
    parser = argparse.ArgumentParser(description=description, epilog=f"example: {example.strip()}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    out = parser.parse_args().out
    if browser_runs.BROWSER is None:
        sys.exit("error: no Chromium on the PATH; install it, as with apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare(place)
        screens = {
            name: {"command": command, "lines": printed(command, place)}
            for name, command in COMMANDS.items()
        }
        photograph(place / REPORT, out)
    (out / "screens.json").write_text(json.dumps(screens, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
