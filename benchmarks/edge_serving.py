"""Draft and server as processes on this machine, a link emulated between them; and what it saves
the server to compute several sessions in one pass.

    python benchmarks/edge_serving.py                         # both tables
    python benchmarks/edge_serving.py --links none,4g --schedules flexspec --prompts 2
    python benchmarks/edge_serving.py --only latency --pass-ms 87
    python benchmarks/edge_serving.py --only batch

Latency: milliseconds a token from the first to the last, mean of the prompts; every text must equal
the target's own. --pass-ms stretches the server's passes, as those of a larger target.
Batch: CPU seconds of passes over 5 rows of each session, one after the other and together.
Last line: JSON.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pipedraft.benchmarks.emulated_link import EmulatedLink
from pipedraft.benchmarks.measurement import make_parser, names_of
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.edge import serve as serve_command
from pipedraft.inference.edge import server
from pipedraft.inference.edge.channel import PRESETS, Link
from pipedraft.inference.edge.remote import LocalDraft, RemotePipeline
from pipedraft.inference.edge.stream import Access, Connection
from pipedraft.inference.edge.target_session import SharedTarget
from pipedraft.inference.engine import Engine
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.models.language_model import LanguageModelDraft
from pipedraft.models.stage_calls import forward_together
from pipedraft.models.target import KeepRows, Segment, load_target, load_tokenizer

NOTHING = Link.constant(up_mbps=1e5, rtt_ms=0)
TEXTS = (
    "How many legs do 12 cats have?",
    "Write a haiku about rain.",
    "Tom has 3 apples and buys 5 more. How many has he?",
    "Explain why the sky is blue.",
)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="assets/target")
    parser.add_argument("--draft-model", default="out/draft_model/best")
    add, links = parser.add_argument, names_of(["none", *PRESETS])
    add("--links", type=links, default="none,5g,4g,wifi", help="none and presets, comma list")
    schedules = "autoregressive,flexspec,picospec"
    add("--schedules", type=names_of(SCHEDULES), default=schedules, help="comma list")
    parser.add_argument("--prompts", type=int, default=len(TEXTS))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--sessions", default="1,2,4,8,16", help="of the batch table, comma list")
    parser.add_argument("--pass-ms", type=float, default=0.0, help="shortest pass of the server")
    parser.add_argument("--serve", action="store_true", help="be the server, for another process")
    parser.add_argument("--only", choices=["latency", "batch"])
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    compute = server.run_together

    def stretched(sessions: Any) -> None:
        started_s = time.monotonic()
        compute(sessions)
        time.sleep(max(0.0, options.pass_ms / 1e3 - (time.monotonic() - started_s)))

    server.run_together = stretched
    serve_command.run(["--target", options.target, "--port", "0"])


def start_server(options: argparse.Namespace) -> tuple[subprocess.Popen, int]:
    command = [sys.executable, __file__, "--serve", "--target", options.target]
    process = subprocess.Popen(
        [*command, "--pass-ms", str(options.pass_ms)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.split(" (")[0].rpartition(":")[2])


async def measure_latency(options: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    model = load_target(options.draft_model)
    network = LanguageModelDraft(model, model)
    tokenizer = load_tokenizer(options.draft_model)
    prompts = []
    for text in TEXTS[: options.prompts]:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer(rendered, add_special_tokens=False).input_ids)
    rows: list[dict[str, Any]] = []
    texts: dict[int, list[int]] = {}
    cells = [
        (link, schedule)
        for link in options.links.split(",")
        for schedule in options.schedules.split(",")
    ]
    for name, schedule in tqdm(cells, disable=None):
        link, figures = NOTHING if name == "none" else PRESETS[name], []
        async with EmulatedLink(link, "127.0.0.1", port) as emulated:
            access = Access(server=f"127.0.0.1:{emulated.port}")
            config = DecodeConfig.of(schedule, num_stages=1, max_new_tokens=options.max_new_tokens)
            results, pipeline = await asyncio.to_thread(
                decode_all, access, config, network, tokenizer, prompts
            )
        for index, result in enumerate(results):
            assert texts.setdefault(index, result.token_ids) == result.token_ids, "another text"
            elapsed_s = result.token_times_s[-1] - result.token_times_s[0]
            figures.append((elapsed_s, result.num_tokens, result.num_accepted))
        sent = pipeline.connection.bytes
        seconds, tokens, accepted = (sum(column) for column in zip(*figures, strict=True))
        rows.append(
            {
                "link": name,
                "schedule": schedule,
                "ms_per_token": 1e3 * seconds / tokens,
                "tokens": tokens,
                "accepted": accepted,
                "round_trip_ms": 1e3 * pipeline.estimates.link.state.round_trip_s,
                "bytes_per_token": (sent.up + sent.down) / tokens,
            }
        )
    return rows


def decode_all(
    access: Access,
    config: DecodeConfig,
    network: LanguageModelDraft,
    tokenizer: Any,
    prompts: list[list[int]],
) -> tuple[list[DecodeResult], RemotePipeline]:
    with Connection(access) as connection:
        pipeline = RemotePipeline(connection, LocalDraft(network=network), keeps_drafting=True)
        engine = Engine(
            pipeline.target, tokenizer, config, network, connect=lambda target: pipeline
        )
        return [engine.decode(prompt) for prompt in prompts], pipeline


def measure_batches(options: argparse.Namespace) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    target = SharedTarget(load_target(options.target))
    rows = []
    for count in tqdm([int(number) for number in options.sessions.split(",")], disable=None):
        staged = [target.staged() for _ in range(count)]
        stages = [one.stages[0] for one in staged]
        for index, one in enumerate(staged):
            one.prefill(torch.arange(64 + 8 * index))
        segments = [
            Segment(
                positions=torch.arange(5) + stage.num_committed,
                visible=torch.ones(5, 5, dtype=torch.bool).tril(),
                ids=torch.arange(5),
            )
            for stage in stages
        ]

        def apart(staged=staged, stages=stages, segments=segments) -> None:
            for one, stage, segment in zip(staged, stages, segments, strict=True):
                one.logits(stage.forward(segment).hidden)

        def together(staged=staged, stages=stages, segments=segments) -> None:
            parts = forward_together(stages, segments)
            staged[0].logits(torch.cat([part.hidden for part in parts if part.hidden is not None]))

        seconds: dict[str, list[float]] = {"apart": [], "together": []}
        for _ in range(12):
            for name, work in (("apart", apart), ("together", together)):
                started_s = time.process_time()
                work()
                seconds[name].append(time.process_time() - started_s)
                for stage in stages:
                    stage.keep(KeepRows((), 0))
        best = {name: min(times_s) for name, times_s in seconds.items()}
        rows.append({"sessions": count, **best, "times_faster": best["apart"] / best["together"]})
    return rows


def main() -> None:
    options = parse()
    if options.serve:
        serve(options)
        return
    report: dict[str, Any] = {}
    if options.only != "batch":
        for folder in (options.target, options.draft_model):
            if not Path(folder).is_dir():
                sys.exit(f"error: no folder {folder}; give --target and --draft-model")
        process, port = start_server(options)
        try:
            report["latency"] = asyncio.run(measure_latency(options, port))
        finally:
            process.terminate()
            process.wait()
        print(
            "| link | schedule | ms a token | round trip ms | bytes a token | accepted / tokens |"
        )
        print("|---|---|---|---|---|---|")
        for row in report["latency"]:
            print(
                f"| {row['link']} | {row['schedule']} | {row['ms_per_token']:.1f} | "
                f"{row['round_trip_ms']:.1f} | {row['bytes_per_token']:.0f} | "
                f"{row['accepted']} / {row['tokens']} |"
            )
    if options.only != "latency":
        report["batch"] = measure_batches(options)
        print("| sessions | CPU ms, one by one | CPU ms, together | times faster |")
        print("|---|---|---|---|")
        for row in report["batch"]:
            print(
                f"| {row['sessions']} | {row['apart'] * 1e3:.1f} | {row['together'] * 1e3:.1f} | "
                f"{row['times_faster']:.2f} |"
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
