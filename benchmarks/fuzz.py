"""Fuzz checkpoints, configurations, rows, results and messages with mutated inputs.

    python benchmarks/fuzz.py --inputs 2000 --json
    make fuzz MINUTES=60

An input passes if it is accepted, or refused by a one-line ValueError or Failure, within --limit-s
seconds of processor time and --wait-s seconds on the clock. Input i in an area depends on --seed
and i alone. With --out a run continues where the last one ended, and stores the traceback of each
failing input. The exit status is 1 if an input fails. Folders here add areas with a fuzz_*.py.
"""

import argparse
import copy
import json
import random
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from measurement import make_parser
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import pipedraft
from pipedraft.data_recipes.config import Source
from pipedraft.data_recipes.conversations import read_conversation, read_json
from pipedraft.data_recipes.sources import read_source
from pipedraft.errors import Failure, make_folder
from pipedraft.eval.record import Results, parse
from pipedraft.files import write_atomically
from pipedraft.inference.config import read_cost
from pipedraft.models.heads.configs import Eagle3Config
from pipedraft.models.heads.draft import TargetReference, load_untied
from pipedraft.models.heads.eagle3 import Eagle3
from pipedraft.models.target import load_target, target_fingerprint
from pipedraft.models.transformer.layers import LayerConfig
from pipedraft.train.config import parse_run
from pipedraft.train.methods import methods

ROOT = Path(pipedraft.__file__).parent
CONFIGS = sorted((ROOT / "configs").glob("*/tiny.yaml"))
VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 7, 2**31, 2**63, 10**30, 0.5, -0.5, 1e300, 5e-324, float("nan"), float("inf")),
    *(True, None, "", "x", "\x1b[2J", "../..", "\ud800", "a" * 5000, [], {}, [[]], {"a": {}}),
)
SAVED_EVERY = 50
Area = Callable[[random.Random], None]


# -- mutations --------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Apply one to four cuts, flips, repeats or insertions."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 2, 8, 64))
        kind = rng.randrange(5)
        if kind == 0:
            changed[at : at + size] = rng.randbytes(min(size, len(changed) - at))
        elif kind == 1:
            del changed[at : at + size]
        elif kind == 2:
            changed[at:at] = changed[at : at + size] * rng.choice((1, 1, 50))
        elif kind == 3:
            changed[at:at] = rng.choice((b"\x00", b"\xff" * 8, b"[" * 2000, b'"', b"{", b"&a *a"))
        else:
            del changed[at:]
    return bytes(changed)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container inside plain data with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutate_data(value: Any, rng: random.Random) -> Any:
    """Replace, remove or move one to three values in plain data."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        found = list(places(changed))
        if not found:
            break
        where, key = rng.choice(found)
        kind = rng.randrange(4)
        if kind == 0:
            del where[key]
        elif kind == 1:
            other, name = rng.choice(found)
            where[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else other)
        else:
            where[key] = copy.deepcopy(rng.choice(VALUES))
    return changed


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    return json.dumps(mutate_data(json.loads(data), rng)).encode()


# -- areas ------------------------------------------------------------------------------------


class Areas:
    """Areas to attack, with files in a scratch folder. Each method tries one mutated input."""

    def __init__(self, work: Path) -> None:
        self.work = work
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                vocab_size=16,
                max_position_embeddings=256,
            )
        ).eval()
        self.model.save_pretrained(work / "target")
        fingerprint = target_fingerprint(self.model)
        layer = LayerConfig.from_target(self.model.config)
        config = Eagle3Config().for_target(2)
        self.draft = Eagle3(config, layer, TargetReference(name="t", fingerprint=fingerprint))
        (work / "draft").mkdir()
        self.draft.save(work / "draft")
        self.files = {
            place: {path.name: path.read_bytes() for path in (work / place).iterdir()}
            for place in ("draft", "target")
        }
        self.further: dict[str, Area] = {}
        for path in sorted(Path(__file__).parent.glob("*/fuzz_*.py")):
            self.further |= runpy.run_path(str(path))["areas"](self.model, mutate_bytes)

    def names(self) -> dict[str, Area]:
        return self.further | {
            "checkpoint": self.checkpoint,
            "target": self.target,
            "configuration": self.configuration,
            "rows": self.rows,
            "results": self.results,
        }

    def _mutated_folder(self, place: str, rng: random.Random) -> Path:
        folder = self.work / "mutated"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = dict(self.files[place])
        name = rng.choice(sorted(files))
        change = mutate_json if name.endswith(".json") else mutate_bytes
        files[name] = change(files[name], rng)
        if name.endswith(".safetensors") and rng.random() < 0.5:  # the header alone
            size = int.from_bytes(self.files[place][name][:8], "little")
            whole = self.files[place][name]
            header = mutate_json(whole[8 : 8 + size], rng)
            files[name] = len(header).to_bytes(8, "little") + header + whole[8 + size :]
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return folder

    def checkpoint(self, rng: random.Random) -> None:
        load_untied(self._mutated_folder("draft", rng))

    def target(self, rng: random.Random) -> None:
        load_target(str(self._mutated_folder("target", rng)))

    def configuration(self, rng: random.Random) -> None:
        text = rng.choice(CONFIGS).read_text()
        path = self.work / "mutated.yaml"
        if rng.random() < 0.4:
            path.write_bytes(mutate_bytes(text.encode(), rng))
        else:
            path.write_text(yaml.safe_dump(mutate_data(yaml.safe_load(text), rng)))
        parse_run(["--config", str(path)], methods(), "")

    def rows(self, rng: random.Random) -> None:
        row = {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ],
            "license": "mit",
        }
        name = rng.choice(("x.jsonl", "x.json", "x.txt"))
        lines = [mutate_json(json.dumps(row).encode(), rng) for _ in range(3)]
        content = b"[" + b",".join(lines) + b"]" if name == "x.json" else b"\n".join(lines)
        (self.work / name).write_bytes(content)
        kind: Any = "text" if name == "x.txt" else "conversations"
        source = Source(path=str(self.work / name), kind=kind, max_row_bytes=4000)
        for raw in read_source(source):
            if not raw.error and kind == "conversations":
                try:
                    read_conversation(read_json(raw.text))
                except ValueError:  # a bad row is left out
                    continue

    def results(self, rng: random.Random) -> None:
        record = {"runs": [{"method": "spd", "schedule": "spd", "benchmark": "x", "stages": 4}]}
        if rng.random() < 0.5:
            parse(mutate_json(json.dumps(record).encode(), rng), Results, Path("x"))
            return
        path = self.work / "cost.json"
        path.write_bytes(mutate_json(b'{"row": 0.1, "link": 0.0, "verify": 0.2}', rng))
        read_cost(str(path))


# -- the run ----------------------------------------------------------------------------------


def late(number: int, frame: object) -> None:
    raise TimeoutError("no end in time")


def attempt(area: Area, rng: random.Random, limit_s: float, wait_s: float) -> str:
    """Try one input. Return "taken", "refused", or an unexpected failure's traceback."""
    signal.signal(signal.SIGPROF, late)
    me = threading.get_ident()
    waiting = threading.Timer(wait_s, lambda: signal.pthread_kill(me, signal.SIGPROF))
    waiting.daemon = True
    try:
        waiting.start()
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        area(rng)
    except (ValueError, Failure) as error:
        line = str(error)
        return "refused" if line.count("\n") < 2 else f"a message of several lines: {line}"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        waiting.cancel()
    return "taken"


def fuzz(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    areas = Areas(work).names()
    if args.only:
        names = args.only.split(",")
        if unknown := [name for name in names if name not in areas]:
            sys.exit(f"error: --only: {unknown[0]!r} is no area; give one of {', '.join(areas)}")
        areas = {name: area for name, area in areas.items() if name in names}
    state: dict[str, Any] = {"seed": args.seed, "next": 0, "failed": 0, "counts": {}}
    place = None if args.out is None else args.out / "state.json"
    if place is not None:
        make_folder("--out", args.out)
        if place.exists() and (found := json.loads(place.read_text()))["seed"] == args.seed:
            state = found
    counts = Counter(state["counts"])
    until_s, first = time.monotonic() + 60 * args.minutes, state["next"]
    while state["next"] < first + args.inputs and time.monotonic() < until_s:
        number = state["next"]
        name = list(areas)[number % len(areas)]
        rng = random.Random(f"{args.seed}:{number}")
        outcome = attempt(areas[name], rng, args.limit_s, args.wait_s)
        state["next"] += 1
        if outcome not in ("taken", "refused"):
            print(f"input {number} ({name}):\n{outcome}", flush=True)
            if args.out is not None:
                (args.out / f"failed-{args.seed}-{number}-{name}.txt").write_text(outcome)
            state["failed"] += 1
            outcome = "failed"
        counts[f"{name} {outcome}"] += 1
        state["counts"] = dict(sorted(counts.items()))
        if place is not None and state["next"] % SAVED_EVERY == 0:
            write_atomically(place, json.dumps(state).encode())
    if place is not None:
        write_atomically(place, json.dumps(state).encode())
    return state | {"inputs": state["next"]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=10**9, help="at most")
    parser.add_argument("--minutes", type=float, default=5.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="areas, comma list")
    parser.add_argument("--out", type=Path, help="state and failures; a later run goes on")
    parser.add_argument("--limit-s", type=float, default=20.0, help="processor time of an input")
    parser.add_argument("--wait-s", type=float, default=60.0, help="time of an input on the clock")
    parser.add_argument("--json", action="store_true", help="the last line is JSON alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="pipedraft-fuzz-") as folder:
        found = fuzz(args, Path(folder))
    print(json.dumps(found))
    raise SystemExit(bool(found["failed"]))


if __name__ == "__main__":
    main()
