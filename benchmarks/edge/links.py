"""Measure every edge schedule over an emulated link, beside the same output on the virtual clock.

    python benchmarks/edge/links.py --out out/links/edge            # root: two network namespaces
    python benchmarks/edge/links.py --rtt 60 --loss 0.05 --rates 10:50 --out out/links/edge

The server with the target is in one network namespace, the edge in the other (emulated_link.py).
Sessions, messages and target passes are real, but passes and draft tokens are stretched by sleeping
(--pass-ms, --draft-ms), so that the table compares protocol and link, not this machine's other
work. The draft knows transformers' output and is right with the probability --acceptance, by
position. The simulation gets the same draft, link and prompt, and two measured durations: a draft
token's mean in the same cell, and a pass with its messages, fitted once as the cloud's time per
token over 5 ms. Losses are random, so the simulation decodes --seeds times. Both sides give
medians. Commands for different links may run at the same time, since they mostly sleep. --out keeps
finished cells and the pass, so other settings need another folder.

The last line with --json: edge_over_model (measured over modeled ms per token, the cell farthest
from 1), edge_cells (how many), different, bad_exits (breaks that did not end as they should).
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated_link import ADDRESSES, EmulatedLink, numbers

from pipedraft.files import to_json, write_atomically

ROOT = Path(__file__).resolve().parents[2]
PORT = 50051
METHODS = ("cloud", "stop_and_wait", "flexspec", "dssd", "pearl", "picospec")
PROMPT = "Write a Python function that returns the sum of a list."
BREAKS: dict[str, tuple[dict[str, Any], float]] = {
    "nothing": ({}, 0),
    "stall of 3 s": ({"mode": "hold"}, 3),
    "outage of 3 s": ({"mode": "drop"}, 3),
    "outage of 10 s": ({"mode": "drop"}, 10),
    "outage of 30 s": ({"mode": "drop"}, 30),
    "namespaces cut": ({"mode": "drop"}, 1e9),
}
"""Each break's settings of the link, and its seconds."""
GIVE_UP_S = 45
"""--give-up-s of the edge during breaks; longer than an outage that it must survive."""


# -- the server -----------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> None:
    """Serve the target, each pass stretched to --pass-ms."""
    from pipedraft.inference.edge import SessionLimits, grpc_server
    from pipedraft.inference.edge.grpc_command import serve as serve_until_ended
    from pipedraft.models.target import load_target, load_tokenizer

    pass_s, run_together = args.pass_ms / 1e3, grpc_server.run_together

    def run_slowly(sessions: Any) -> None:
        end_s = time.monotonic() + pass_s
        run_together(sessions)
        time.sleep(max(0.0, end_s - time.monotonic()))

    measure = grpc_server.measure
    grpc_server.run_together = run_slowly
    grpc_server.measure = lambda target: (pass_s, 0.0, measure(target)[2])
    model, tokenizer = load_target(args.target), load_tokenizer(args.target)
    server = grpc_server.Server(
        model, name=args.target, tokenizer=tokenizer, limits=SessionLimits()
    )
    asyncio.run(serve_until_ended(server, ADDRESSES[1], PORT))


# -- the edge -------------------------------------------------------------------------------------


class Edge:
    """Decodes the prompt over the network or on the virtual clock, with the rehearsed draft."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from pipedraft.chats import encode_chat
        from pipedraft.inference.sources.lookup import Lookup
        from pipedraft.models.target import load_target, load_tokenizer
        from pipedraft.pretrained import quieten

        quieten()
        torch.set_num_threads(1)
        self.args = args
        self.tokenizer = load_tokenizer(args.target)
        self.prompt = encode_chat(self.tokenizer, [{"role": "user", "content": PROMPT}])
        self.model = cast(Any, load_target(args.target))
        with torch.inference_mode():
            ids = torch.tensor([self.prompt])
            found = self.model.generate(ids, max_new_tokens=args.tokens, do_sample=False)
        self.wanted: list[int] = found[0, len(self.prompt) :].tolist()
        self.draft: Any = Lookup("ngram", self.model.config.get_text_config().vocab_size)
        self.sleep_s = 0.0
        self._rehearse()

    def guess(self, position: int) -> int:
        """Return the draft token at a position: the target's own, or another one."""
        index = position - len(self.prompt)
        right = self.wanted[index] if 0 <= index < len(self.wanted) else 0
        digest = hashlib.sha256(f"{position}".encode()).digest()
        is_right = int.from_bytes(digest[:4], "big") / 2**32 < self.args.acceptance
        return right if is_right else right + 1 if right == 0 else right - 1

    def _rehearse(self) -> None:
        """Let lookup drafts give ``guess`` after ``sleep_s``."""
        import torch

        from pipedraft.inference import sources
        from pipedraft.inference.sources.lookup import LookupSource

        edge = self

        class Rehearsed(LookupSource):
            _root: torch.Tensor | None

            def _at(self, position: int) -> torch.Tensor:
                self.num_forwards += 1
                time.sleep(edge.sleep_s)
                found_V = torch.full((self.draft.target_vocab_size,), -torch.inf)
                found_V[edge.guess(position)] = 0.0
                return found_V

            def _root_output(self, tree: Any) -> torch.Tensor:
                if self._take_pending().tokens or self._root is None:
                    self._root = self._at(tree.position(0) + 1)
                return self._root

            def _compute(self, tree: Any, rows: list[int]) -> None:
                self._root_output(tree)
                for row in rows:
                    self._states[self._name(tree, row)] = self._at(tree.position(row) + 1)

        vars(sources)["LookupSource"] = Rehearsed

    def simulate(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return milliseconds per token on the virtual clock, one for each seed."""
        from pipedraft.eval.edge.methods import METHODS, Simulation, decode, radio_energy
        from pipedraft.inference.edge.channel import Link
        from pipedraft.inference.edge.simulated import Times
        from pipedraft.inference.edge.target_session import SharedTarget

        self.sleep_s = 0.0
        link = job["link"]
        times = Times(
            draft_s=job["draft_s"], verify_s=job["verify_s"], cloud_draft_s=job["draft_s"]
        )
        found = [
            decode(
                METHODS[job["method"]],
                Simulation(
                    target=SharedTarget(self.model),
                    draft=self.draft,
                    tokenizer=self.tokenizer,
                    link=Link.constant(
                        up_mbps=link["up"],
                        down_mbps=link["down"],
                        rtt_ms=link["rtt"],
                        loss=link["loss"],
                    ),
                    times=times,
                    energy=radio_energy("cellular", draft_s=times.draft_s),
                    max_new_tokens=self.args.tokens,
                    seed=seed,
                ),
                self.prompt,
                prompt_index=0,
            ).result
            for seed in range(job["seeds"])
        ]
        return self.record(found)

    def measure(self, job: dict[str, Any], heard: Callable[[], None]) -> dict[str, Any]:
        """Return milliseconds per token over the network, one for each repeat."""
        from pipedraft.eval.edge.methods import METHODS
        from pipedraft.inference.config import DecodeConfig
        from pipedraft.inference.edge.engine import LinkEngine
        from pipedraft.inference.edge.remote import LocalDraft, RemotePipeline
        from pipedraft.inference.edge.stream import Access, Connection

        self.sleep_s = self.args.draft_ms / 1e3
        schedule = METHODS[job["method"]].schedule
        drafts = METHODS[job["method"]].drafts_in is not None
        config = DecodeConfig.of(schedule, num_stages=1, max_new_tokens=self.args.tokens)
        access = Access(server=f"{ADDRESSES[1]}:{PORT}", give_up_s=GIVE_UP_S)
        found, warnings, reopened, messages = [], list[str](), 0, 0
        draft_s = list[float]()

        class Watched(RemotePipeline):
            def drafted(self, num_tokens: int, started_s: float) -> None:
                draft_s.append(self.now() - started_s)
                super().drafted(num_tokens, started_s)

        for _ in range(job["repeats"]):
            with Connection(access) as connection:
                pipeline = Watched(
                    connection,
                    LocalDraft(network=self.draft) if drafts else None,
                    keeps_drafting=True,
                    warn=warnings.append,
                )
                draft = self.draft if drafts else None
                engine = LinkEngine(pipeline, self.tokenizer, config, draft)
                try:
                    found.append(engine.decode(self.prompt, on_token=lambda *_: heard()))
                except Exception as error:  # for breaks: what a user would be told
                    return {"failed": f"{type(error).__name__}: {error}", "warnings": warnings}
                reopened += pipeline.num_reopened
                messages += connection.up.messages
        spoken = {
            "warnings": warnings,
            "reopened": reopened,
            "messages": messages,
            "draft_s": statistics.mean(draft_s) if draft_s else 0.0,
        }
        return self.record(found) | spoken

    def record(self, found: list[Any]) -> dict[str, Any]:
        return {
            "ms": [
                1e3 * (one.token_times_s[-1] - one.token_times_s[0]) / one.num_tokens
                for one in found
            ],
            "different": sum(one.token_ids != self.wanted for one in found),
            "tau": found[0].mean_acceptance_length,
        }


def answer_jobs(args: argparse.Namespace) -> None:
    """Do the jobs on standard input, one JSON object a line, and print a line for each."""
    edge = Edge(args)
    print(json.dumps({"tokens": len(edge.wanted)}), flush=True)
    for line in sys.stdin:
        job, is_first = json.loads(line), True

        def heard() -> None:
            nonlocal is_first
            if is_first:
                print(json.dumps({"event": "first token"}), flush=True)
            is_first = False

        outcome = edge.simulate(job) if "seeds" in job else edge.measure(job, heard)
        print(json.dumps(outcome), flush=True)


# -- both sides -----------------------------------------------------------------------------------


class Sides:
    """The server's and the edge's processes."""

    def __init__(self, args: argparse.Namespace, link: EmulatedLink) -> None:
        self.args, self.link = args, link

    def _start(self, side: int, role: str) -> subprocess.Popen:
        args = self.args
        words = [sys.executable, __file__, "--role", role, "--target", args.target]
        for name in ("pass_ms", "draft_ms", "acceptance", "tokens"):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        return subprocess.Popen(
            self.link.command(side, words),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def started(self) -> Iterator["Sides"]:
        children = [self._start(1, "server")]
        try:
            self._read(children[0])
            children.append(self._start(0, "edge"))
            self.edge = children[1]
            json.loads(self._read(self.edge))
            yield self
        finally:
            for child in children:
                child.terminate()
            for child in children:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(20)
                child.kill()

    def _read(self, child: subprocess.Popen) -> str:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise OSError(f"a side has ended with {child.wait()}")
        return line

    def ask(self, **job: Any) -> None:
        assert self.edge.stdin is not None
        self.edge.stdin.write(json.dumps(job) + "\n")
        self.edge.stdin.flush()

    def hear(self, *, first_token: bool = False) -> dict[str, Any]:
        while True:
            found: dict[str, Any] = json.loads(self._read(self.edge))
            if ("event" in found) == first_token:
                return found

    def do(self, **job: Any) -> dict[str, Any]:
        self.ask(**job)
        if "failed" in (found := self.hear()):
            raise OSError(f"{job['method']}, {job['link']}: {found['failed']}")
        return found


def fitted_pass(args: argparse.Namespace, sides: Sides) -> float:
    """Return seconds for a pass with its messages: the cloud's time per token over 5 ms."""
    saved = args.out / "pass.json"
    if not saved.is_file():
        sides.link.set(rtt=5.0)
        done = sides.do(link=sides.link.settings, method="cloud", repeats=args.repeats)
        write_atomically(saved, to_json({"pass_s": statistics.median(done["ms"]) / 1e3}))
    found: float = json.loads(saved.read_text())["pass_s"]
    return found


def measure_cells(args: argparse.Namespace, sides: Sides) -> list[dict[str, Any]]:
    """Return a record for each link and method, measured and modeled."""
    links = [
        {"rtt": rtt, "up": up, "down": down, "loss": loss}
        for up, down in args.rates
        for rtt in args.rtt
        for loss in args.loss
    ]
    pass_s = fitted_pass(args, sides)
    found: dict[str, dict[str, Any]] = {}
    for side in ("real", "modeled"):
        saved = args.out / f"{side}.jsonl"
        lines = saved.read_text().splitlines() if saved.is_file() else []
        for one in map(json.loads, lines):  # finished before
            found.setdefault(one["cell"], {})[side] = one
        for link in links:
            sides.link.set(**link)
            for method in args.methods:
                cell = " ".join([*(f"{value:g}" for value in link.values()), method])
                if side in found.setdefault(cell, {}):
                    continue
                count = {"repeats": args.repeats}
                if side == "modeled":
                    count = {"seeds": args.seeds if link["loss"] else 1, "verify_s": pass_s}
                    count |= {"draft_s": found[cell]["real"]["draft_s"]}
                done = sides.do(link=link, method=method, **count)
                found[cell][side] = {"cell": cell, "link": link, "method": method} | done
                with saved.open("a") as file:
                    file.write(json.dumps(found[cell][side]) + "\n")
                if not args.json:
                    ms = statistics.median(done["ms"])
                    print(f"{side} {cell}: {ms:.1f} ms per token", file=sys.stderr)
    return [
        {"link": one["real"]["link"], "method": one["real"]["method"]} | one
        for one in found.values()
        if one.keys() == {"real", "modeled"}
    ]


def ratio(one: dict[str, Any]) -> float:
    return statistics.median(one["real"]["ms"]) / statistics.median(one["modeled"]["ms"])


def measure_breaks(args: argparse.Namespace, sides: Sides) -> list[dict[str, Any]]:
    """Return a record for each break, half a second after PicoSpec's first token."""
    records = []
    quiet = {"rtt": 20, "up": 10, "down": 50}
    for name, (settings, seconds) in BREAKS.items():
        sides.link.set(**quiet)
        sides.ask(method="picospec", repeats=1)
        sides.hear(first_token=True)
        time.sleep(0.5)
        broken_s = time.monotonic()
        if settings:
            sides.link.set(**quiet, **settings)
            time.sleep(min(seconds, GIVE_UP_S + 20))
            sides.link.set(**quiet)
        found = sides.hear()
        records.append({"break": name, "seconds": time.monotonic() - broken_s} | found)
    return records


def is_bad_break(one: dict[str, Any]) -> bool:
    """Return True unless the output is exact, or, for a cut that lasts, a failure was told."""
    if one["break"] == "namespaces cut":
        return "failed" not in one
    return "failed" in one or bool(one["different"])


def print_table(records: list[dict[str, Any]]) -> None:
    from pipedraft.eval.tables import Table, align_columns

    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for one in records:
        real, modeled = (statistics.median(one[side]["ms"]) for side in ("real", "modeled"))
        rows.setdefault(tuple(one["link"].values()), {})[one["method"]] = (
            f"{real:.1f} / {modeled:.1f} = {real / modeled:.2f}"
        )
    lines = [
        [f"{rtt:g}", f"{up:g}/{down:g}", f"{loss:g}", *(found.get(name, "-") for name in METHODS)]
        for (rtt, up, down, loss), found in rows.items()
    ]
    print(align_columns(Table(["rtt, ms", "Mbit/s", "loss", *METHODS], lines)))


def pairs(text: str) -> list[tuple[float, float]]:
    split = [part.partition(":") for part in text.split(",")]
    return [(float(up), float(down)) for up, _, down in split]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rtt", type=numbers, default=[5.0, 20.0, 60.0, 150.0], help="round trips in ms")
    add("--loss", type=numbers, default=[0.0, 0.005, 0.05], help="probability per packet")
    add("--rates", type=pairs, default=[(10.0, 50.0), (2.0, 10.0)], help="Mbit/s as UP:DOWN,..")
    add("--methods", type=lambda text: text.split(","), default=METHODS, help="comma list")
    add("--pass-ms", type=float, default=100.0, help="of the target")
    # With 15 ms, a pass and a 150 ms round trip take 16 draft tokens in one output, 17 in another.
    add("--draft-ms", type=float, default=18.0, help="for a draft token")
    add("--acceptance", type=float, default=0.8)
    add("--tokens", type=int, default=160, help="per output, at most")
    add("--repeats", type=int, default=5)
    add("--seeds", type=int, default=25, help="of the simulation, on links that lose packets")
    add("--no-breaks", action="store_true")
    add("--sysctl", action="append", default=[], help="kernel setting of both namespaces")
    add("--target", default="assets/target")
    add("--out", type=Path)
    add("--json", action="store_true", help="no progress; a line of JSON at the end")
    add("--role", choices=["server", "edge"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"--methods: {', '.join(sorted(unknown))}; give some of {', '.join(METHODS)}")
    if args.role == "server":
        serve(args)
    elif args.role == "edge":
        answer_jobs(args)
    elif args.out is None:
        parser.error("--out: missing; give a folder for the results")
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no process and namespace
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    breaks: list[dict[str, Any]] = []
    with (
        EmulatedLink(f"pdedge{os.getpid()}", args.sysctl) as link,
        Sides(args, link).started() as sides,
    ):
        records = measure_cells(args, sides)
        print_table(records)
        if not args.no_breaks:
            breaks = measure_breaks(args, sides)
    for one in breaks:
        said = one.get("failed") or "; ".join(one["warnings"]) or "nothing is said"
        print(
            f"{one['break']}: {'BAD' if is_bad_break(one) else 'as promised'} after "
            f"{one['seconds']:.1f} s, {one.get('reopened', 0)} sessions opened again; {said}"
        )
    outcome = {
        "edge_over_model": max(map(ratio, records), key=lambda found: abs(found - 1)),
        "edge_cells": len(records),
        "different": sum(one["real"]["different"] + one["modeled"]["different"] for one in records)
        + sum(one.get("different", 0) for one in breaks),
        "bad_exits": sum(map(is_bad_break, breaks)),
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
