"""Check this package on your GPUs, and write a report that you can attach to a bug.

    python benchmarks/gpu_check.py --out DIR

Uses random networks with a small model's size, so nothing is downloaded. Takes about ten minutes on
one GPU. With several GPUs, the links between the first two are checked, too.

The report is DIR/report.json and DIR/report.md. It compares kernels with the CPU's, a row's outputs
alone and next to other rows, CUDA graphs with single layers, and every schedule's output with
autoregressive decoding (in float32, in bfloat16 with --bitwise, and the share of equal tokens in
bfloat16 without it). It also has times for NCCL links, launches and host waits per step, step time
over the time in stages, and training speed with the measured and the planned peak memory. A failing
section reports its reason, and the others still run. The exit status is 1 if a required output
differs or a section failed, and 2 without a GPU.
"""

import contextlib
import json
import platform
import socket
import statistics
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import eagle3_step
import spd_step
from decode_runs import PlainTokenizer
from measurement import make_parser
from plan_runs import make_plan
from tiny_drafts import make_draft, make_exit, make_head, make_module, noisy_copy
from training_step import make_batch, make_step

from pipedraft.devices import has_native_bf16, place_draft
from pipedraft.files import to_json, write_atomically
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.ranks.links import DeviceLink
from pipedraft.inference.result import DecodeResult
from pipedraft.models.heads.banded_attention import ttt_attention
from pipedraft.models.target import StagedTarget
from pipedraft.models.transformer.stage_cache import Segment

Findings = dict[str, Any]
DRAFTS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "spd": (lambda target: make_module(target, num_stages=4).float(), "spd", {"num_stages": 4}),
    "ppsd": (partial(make_exit, num_stages=4), "ppsd", {"num_stages": 4}),
    "eagle": (partial(make_head, kind="eagle"), "eagle", {"num_stages": 1}),
    "eagle3": (make_head, "eagle", {"num_stages": 1}),
    "eagle3 in segments": (make_head, "flowspec", {"num_stages": 4}),
    "flexspec": (make_draft, "eagle", {"num_stages": 1}),
    "language_model": (noisy_copy, "pipeinfer", {"num_stages": 4}),
}
EXACT = ("equal tokens in float32", "equal tokens in bfloat16 with --bitwise")
MODES = (
    (EXACT[0], torch.float32, False),
    (EXACT[1], torch.bfloat16, True),
    ("equal tokens in bfloat16", torch.bfloat16, False),
)
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def counted(work: Callable[[], object]) -> Findings:
    """Run ``work``, and count its kernel launches, graph launches and host waits."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in found.key_averages()}
    return {
        "launches": sum(calls.get(name, 0) for name in LAUNCHES),
        "graphs": calls.get("cudaGraphLaunch", 0),
        "waits": sum(calls.get(name, 0) for name in WAITS) - 1,
    }


# -- sections ----------------------------------------------------------------------------------


def devices(args: Namespace) -> Findings:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "devices": names,
        "native bfloat16": has_native_bf16(torch.device("cuda", 0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def kernels(args: Namespace) -> Findings:
    """Compare training attention in bfloat16 on the GPU with float32 on the CPU, forward and
    backward. Return the largest differences, relative to the largest values."""
    torch.manual_seed(0)
    shapes = [(2, args.length, heads, 64) for heads in (8, 4, 4)]
    inputs = [torch.randn(shape) for shape in shapes]
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        query, keys, values = (x.clone().to(device, dtype).requires_grad_() for x in inputs)
        keys_BJTD, values_BJTD = keys.transpose(1, 2), values.transpose(1, 2)
        out = ttt_attention(query.transpose(1, 2), [keys_BJTD] * 2, [values_BJTD] * 2)
        gradients = torch.autograd.grad(out.float().square().sum(), (query, keys, values))
        found.append([x.detach().float().cpu() for x in (out, *gradients)])
    names = ("output", "query gradient", "key gradient", "value gradient")
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)]
    return dict(zip(names, errors, strict=True))


def rows(args: Namespace) -> Findings:
    """Count a row's bfloat16 outputs that change next to other rows, or from run to run.

    Also count rows with tied maxima for which a batched argmax makes another choice.
    """
    model = random_model(args, torch.bfloat16)
    layer, found = model.model.layers[0], {}
    parts = {"norm": layer.input_layernorm, "query": layer.self_attn.q_proj}
    parts |= {"value": layer.self_attn.v_proj, "down": layer.mlp.down_proj, "head": model.lm_head}
    for name, part in parts.items():
        torch.manual_seed(0)
        size = part.in_features if isinstance(part, torch.nn.Linear) else args.hidden
        rows_16X = torch.randn(16, size).to("cuda", torch.bfloat16)
        alone, again, beside = (part(x)[0] for x in (rows_16X[:1].repeat(16, 1),) * 2 + (rows_16X,))
        found[name] = {
            "of": alone.numel(),
            "beside others": int((alone != beside).sum()),
            "again": int((alone != again).sum()),
        }
    tied_60V = torch.randint(8, (60, args.vocabulary)).to("cuda", torch.float32)
    first_60 = torch.stack([row_V.argmax() for row_V in tied_60V])
    differ = [int((tied_60V.argmax(-1) != first_60).sum()) for _ in range(2)]
    found["best of a tie"] = {"of": 60, "beside others": differ[0], "again": differ[1]}
    return found


def graphs(args: Namespace) -> Findings:
    """Compare hidden states from CUDA graphs and from single layers, in float32."""
    model = random_model(args, torch.float32)
    recorded, plain = StagedTarget(model, 2), StagedTarget(model, 2)
    for stage in plain.stages:
        stage.graphs = None
    prompt, worst = torch.arange(20) % args.vocabulary, 0.0
    for target in (recorded, plain):
        target.prefill(prompt)
    for first in range(20, 32):
        seen = torch.ones(1, first - 19, dtype=torch.bool)
        own = Segment(positions=torch.tensor([first]), visible=seen, ids=torch.tensor([first % 7]))
        rows = []
        for target in (recorded, plain):
            segment = own
            for stage in target.stages:
                segment = stage.forward(segment)
            assert segment.hidden is not None
            rows.append(segment.hidden)
        worst = max(worst, float((rows[0] - rows[1]).abs().max() / rows[1].abs().max()))
    return {
        "largest relative difference": worst,
        "is recorded": recorded.stages[0].graphs is not None,
    }


def links(args: Namespace) -> Findings:
    """Time NCCL messages between the first two GPUs, as between two stages."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "one GPU"}
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    times = context.SimpleQueue()
    mp.spawn(_link, (port, args.hidden, times), nprocs=2)
    return times.get()


def _link(rank: int, port: int, hidden: int, times: Any) -> None:
    address = f"tcp://127.0.0.1:{port}"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=2)
    ways = [DeviceLink(dist.new_group([0, 1]), device) for _ in range(2)]
    found = {}
    for num_rows in (1, 16, 4096):
        rows_RH = torch.ones(num_rows, hidden, dtype=torch.bfloat16, device=device)
        for turn in range(12):
            if turn == 2:  # the first ones connect
                torch.cuda.synchronize()
                started = time.perf_counter()
            for sender in (0, 1):
                if rank == sender:
                    ways[sender].send(rows_RH, 1 - rank)[0].wait()
                else:
                    assert bool(
                        (ways[sender].receive(rows_RH.shape, rows_RH.dtype, sender) == 1).all()
                    )
        found[f"us for {num_rows} rows"] = 1e6 * (time.perf_counter() - started) / 20
    if rank == 0:
        times.put(found)
    dist.destroy_process_group()


def schedules(args: Namespace) -> Findings:
    """Compare each draft's output with autoregressive decoding, and measure a step's cost."""
    source = random_model(args, torch.float32, device="cpu")
    models = {}
    for dtype in {dtype for _, dtype, _ in MODES}:
        models[dtype] = deepcopy(source)
        models[dtype].to("cuda", dtype)  # type: ignore[arg-type]  # transformers hides self
    plain = {
        label: decode(args, models[dtype], None, "autoregressive", num_stages=1, bitwise=is_bitwise)
        for label, dtype, is_bitwise in MODES
    }
    found: Findings = {"autoregressive": findings(plain, plain)}
    for name, (make, schedule, settings) in DRAFTS.items():
        draft, runs = make(source), {}
        for label, dtype, is_bitwise in MODES:  # float32 first: rounding is final
            place_draft(draft, models[dtype])
            if hasattr(draft, "attach"):
                draft.attach(models[dtype])
            runs[label] = decode(
                args, models[dtype], draft, schedule, bitwise=is_bitwise, **settings
            )
        found[name] = findings(plain, runs)
        print(f"  {name} {found[name]}", flush=True)
    return found


Runs = dict[str, tuple[Engine, DecodeResult]]


def findings(plain: Runs, runs: Runs) -> Findings:
    """Return shares of equal tokens by mode, and costs in the last mode."""
    shares = {label: equal_share(plain[label], run) for label, run in runs.items()}
    last = runs[MODES[-1][0]]
    return {"schedule": last[0].config.schedule.name} | shares | costs(*last)


def equal_share(one: tuple[Engine, DecodeResult], other: tuple[Engine, DecodeResult]) -> float:
    pairs = zip(one[1].token_ids, other[1].token_ids, strict=True)
    return statistics.mean(a == b for a, b in pairs)


def decode(
    args: Namespace, model: Any, draft: Any, schedule: str, **settings: Any
) -> tuple[Engine, DecodeResult]:
    config = DecodeConfig.of(schedule, max_new_tokens=args.tokens, **settings)
    engine = Engine(model, PlainTokenizer(), config, draft)
    return engine, engine.decode([1 + (7 * i) % (args.vocabulary - 1) for i in range(args.prompt)])


def costs(engine: Engine, first: DecodeResult) -> Findings:
    """Measure a second decoding, because the first one captures the CUDA graphs."""
    engine.pipeline.clear()
    started = time.perf_counter()
    result = engine.decode(first.prompt_ids)
    decode_s = time.perf_counter() - started - result.prefill_s
    steps = max(result.num_steps, 1)
    (report,) = engine.pipeline.reports()
    stage_s = report["seconds"].get("stage", 0.0) / max(report["counts"].get("stage", 1), 1)
    return counted_steps(engine, first.prompt_ids) | {
        "draft forwards a step": result.num_draft_forwards / steps,
        "tokens a step": len(result.token_ids) / steps,
        "ms a step": 1e3 * decode_s / steps,
        "ms of a stage": 1e3 * stage_s,
        "step over its stages": decode_s / steps / max(stage_s * result.num_stages, 1e-9),
    }


def counted_steps(engine: Engine, prompt_ids: list[int]) -> Findings:
    """Return driver calls per step, from the difference between a longer and a shorter decoding."""
    whole, found = engine.config, []
    results: list[DecodeResult] = []
    for tokens in (whole.max_new_tokens // 4, whole.max_new_tokens // 2):
        engine.config = replace(whole, max_new_tokens=max(tokens, 1))
        calls = counted(lambda: results.append(engine.decode(prompt_ids)))
        found.append((results[-1].num_steps, calls))
    engine.config = whole
    (half_steps, half), (steps, calls) = found
    more = max(steps - half_steps, 1)
    return {f"{name} a step": (count - half[name]) / more for name, count in calls.items()}


def training(args: Namespace) -> Findings:
    """Return tokens per second and peak memory for optimizer steps under bfloat16 autocast."""
    found = {}
    step_args = Namespace(**vars(args), batch=2, steps=7, n=4, num_layers=2, query="newest")
    for name, build in (("eagle3", eagle3_step.build_objective), ("spd", spd_step.build_objective)):
        torch.cuda.reset_peak_memory_stats()
        objective = build(step_args).to("cuda")
        planned = planned_bytes(name, objective.target.config, step_args)
        torch.nn.Module.to(objective.target, "cuda", torch.bfloat16)
        step = make_step(objective)
        batch = make_batch(step_args, 1.0, args.length).to(torch.device("cuda"))
        with torch.autocast("cuda", torch.bfloat16):
            step(batch)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(args.repeats):
                step(batch)
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / args.repeats
        found[name] = {
            "tokens a second": step_args.batch * args.length / seconds,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
            "planned GiB": planned / 2**30,
        }
    return found


def planned_bytes(method: str, target: PreTrainedConfig, args: Namespace) -> float:
    """Return the planned memory in bytes for one process, with every position supervised."""
    options = {
        "eagle3": [f"--model.num_steps={args.steps}"],
        "spd": [f"--model.num_stages={args.n}"],
    }
    target.dtype = torch.bfloat16
    tokens = args.batch * args.length
    plan = make_plan(method, target, args.length, tokens, options[method])
    return sum(plan.memory_bytes(plan.measure(), processes=1, strategy="ddp").values())


def random_model(args: Namespace, dtype: torch.dtype, device: str = "cuda") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.target_layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.key_heads,
        head_dim=args.hidden // args.heads,
        vocab_size=args.vocabulary,
        max_position_embeddings=4096,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.to(device, dtype)  # type: ignore[arg-type]  # transformers hides self
    return model


SECTIONS = (devices, kernels, rows, graphs, links, schedules, training)


# -- the report --------------------------------------------------------------------------------


def markdown(report: Findings) -> str:
    """Return all sections as headings and tables."""
    lines = ["# GPU check", ""]
    for name, found in report.items():
        lines += [f"## {name}", ""]
        rows = found.items() if any(isinstance(x, dict) for x in found.values()) else [("", found)]
        columns = list(dict.fromkeys(column for _, row in rows for column in row))
        lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for label, row in rows:
            cells = [_cell(row.get(column, "-")) for column in columns]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", " ")


def check(args: Namespace) -> Findings:
    report: Findings = {}
    for section in SECTIONS:
        print(f"{section.__name__} ...", flush=True)
        started = time.perf_counter()
        try:
            report[section.__name__] = section(args)
        except Exception as error:  # the report must cover any fault of a machine
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            report[section.__name__] = {"failed": reason, "trace": traceback.format_exc()}
            print(f"{section.__name__} failed: {reason}", flush=True)
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)
    return report


def is_right(report: Findings) -> bool:
    """Return True if every section has run and required outputs match autoregressive decoding."""
    found = [x for x in report["schedules"].values() if isinstance(x, dict)]
    are_equal = all(x.get(label, 1) == 1 for x in found for label in EXACT)
    return are_equal and not any("failed" in found for found in report.values())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--target-layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--length", type=int, default=2048, help="positions of a training row")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: no GPU that torch can use; run it where there is one", file=sys.stderr)
        sys.exit(2)
    args.out.mkdir(parents=True, exist_ok=True)
    report = check(args)
    write_atomically(args.out / "report.json", to_json(report))
    write_atomically(args.out / "report.md", markdown(report).encode())
    print(json.dumps({"is_right": is_right(report), "report": str(args.out / "report.md")}))
    sys.exit(0 if is_right(report) else 1)


if __name__ == "__main__":
    main()
