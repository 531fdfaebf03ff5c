"""Measure the steady step of a pipeline of processes, and SPD's wall-clock speed-up.

    python benchmarks/pipeline_step.py --json
    python benchmarks/pipeline_step.py --apart --json      # the draft on its own rank

A random target, large enough that a stage takes several milliseconds, is cut into stages with one
process and one thread each. The first stage shares its process with the draft, and therefore has
fewer layers. The draft is a random SPD head that runs in full at every step. Its token is then
replaced by the target's own with probability --acceptance, otherwise by a wrong one. The target's
tokens are known from autoregressive decoding on the same processes.

Each output is decoded in three ways, first in this order and then in the opposite one:
autoregressively, with SPD, and with SPD without running ahead (the first stage then waits for every
step's verification result). These figures are for SPD with and without running ahead:

step_over_slowest_stage: median time between two verification results inside a round, divided by
    the busiest process's mean work per step (layers, draft and LM head) in the same run.
wallclock_over_theoretical: measured speed-up, divided by L' in the same run. It is also given per
    output, with a 95 % bootstrap interval over outputs.
draft_share: the draft's part in all processes' work per step. Even if layers are cut to make room
    for the draft, a step takes at least the processes' mean work. wallclock_over_balanced compares
    with this bound, and is 1 for a pipeline without overhead.
layers_ms: a process's time for its layers and one segment. autoregressive_layers_ms is the same in
    autoregressive decoding, where only one process computes at a time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

PROMPT = list(range(5, 37))
TIMEOUT_S = 900


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with options for the target's sizes and its cut into stages."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stages", type=int, default=2)
    add("--layers", type=int, default=32)
    add("--hidden", type=int, default=768)
    add("--vocab", type=int, default=4096)
    add("--first", type=int, help="layers of the first stage (default: two fewer than the others)")
    add("--tokens", type=int, default=128, help="of each text")
    add("--texts", type=int, default=4)
    add("--dtype", default="float32", help="of the target, as in pipedraft inference")
    add("--draft-dtype", default="auto", help="as in pipedraft inference")
    add("--apart", action="store_true", help="the draft on a rank of its own")
    add("--json", action="store_true", help="nothing but a line of JSON")
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def save_target(args: argparse.Namespace, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        vocab_size=args.vocab,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def boundaries(args: argparse.Namespace) -> tuple[int, ...]:
    from pipedraft.models.transformer.boundaries import stage_boundaries

    if args.apart:
        return stage_boundaries(args.layers, args.stages)
    rest = args.stages - 1
    first = args.first or max(1, (args.layers - 2 * rest) // args.stages)
    others = stage_boundaries(args.layers - first, rest) if rest else (0,)
    return (0, *(first + end for end in others))


def make_source(args: argparse.Namespace, target: Any, text: list[int], seed: int) -> Any:
    """Return an SPD head that runs in full. Its token is right with probability --acceptance."""
    from pipedraft.inference.sources.spd import SPDSource
    from pipedraft.models.heads.configs import SPDConfig
    from pipedraft.models.heads.draft import TargetReference
    from pipedraft.models.heads.spd import SPD
    from pipedraft.models.speed.cpu import lay_out
    from pipedraft.models.speed.rounded import round_head
    from pipedraft.models.transformer.fingerprint import target_fingerprint
    from pipedraft.models.transformer.layers import LayerConfig

    class Corrected(SPDSource):
        def grow_layer(self, tree: Any, features: Any, **options: Any) -> int:
            self.deepest_logits(tree, features)
            leaf = len(tree) - 1
            position = tree.position(leaf) + 1
            right = text[position] if position < len(text) else 0
            is_right = Random(f"{seed}:{position}").random() < args.acceptance
            tree.add(leaf, right if is_right else (right + 1) % args.vocab, 0.0)
            return 1

    cut = boundaries(args)
    config = SPDConfig(
        num_stages=args.stages, num_layers=1, num_target_layers=args.layers, boundaries=cut
    )
    torch.manual_seed(1)
    reference = TargetReference(name="random", fingerprint=target_fingerprint(target))
    draft = SPD(config, LayerConfig.from_target(target.config), reference)
    draft.attach(target)
    round_head(draft, args.draft_dtype, target)
    lay_out(draft)  # as load_draft does
    return Corrected(draft.eval().requires_grad_(False))


class Tokenizer:
    """Tokenizer for a random target. Its text is the list of token ids."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


@dataclass
class Phase:
    """Measurements for one way of decoding, over all outputs."""

    seconds: list[float] = field(default_factory=list)
    """Per output, from its first token to its last."""
    work: list[Counter[str]] = field(default_factory=list)
    """Per process: seconds by kind of work."""
    calls: list[Counter[str]] = field(default_factory=list)
    """Per process: spans by kind of work."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two verification results inside a round."""
    peak_rss_mb: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0

    def decode(self, engine: Any, prompt: list[int]) -> list[int]:
        """Decode, add time and work to the totals, and return the prompt and the new tokens."""
        engine.pipeline.clear()
        result = engine.decode(prompt)
        times = result.token_times_s
        self.seconds.append(times[-1] - times[0])
        self.tokens += result.num_tokens
        self.steps += result.num_steps
        emitted = 1
        for length in result.round_lengths:
            inside = range(emitted + 1, emitted + length)
            self.gaps += [times[i] - times[i - 1] for i in inside]
            emitted += length
        reports = engine.pipeline.reports()
        self.work = self.work or [Counter() for _ in reports]
        self.calls = self.calls or [Counter() for _ in reports]
        for work, calls, report in zip(self.work, self.calls, reports, strict=True):
            work.update(report["seconds"])
            calls.update(report["counts"])
        self.peak_rss_mb = [report["peak_rss_mb"] for report in reports]
        return [*prompt, *result.token_ids]

    def busy_s(self) -> list[float]:
        """Return mean seconds of computing per step, for each process."""
        kinds = ("stage", "verify", "draft")
        return [sum(work[kind] for kind in kinds) / self.steps for work in self.work]

    def layers_ms(self) -> list[float]:
        """Return each process's mean milliseconds for one segment through its layers."""
        pairs = zip(self.work, self.calls, strict=True)
        return [work["stage"] / calls["stage"] * 1e3 for work, calls in pairs if calls["stage"]]


def controller(args: argparse.Namespace, cluster: Any) -> dict[str, Any]:
    """Decode each output with all methods in one order, and again in the opposite order, so that a
    machine that becomes slower or faster affects all methods alike."""
    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.pipelines.process import ProcessPipeline

    cut = boundaries(args)
    name = str(args.folder)
    dtype = getattr(torch, args.dtype)
    target = cluster.load_target(
        name, revision=None, num_stages=args.stages, boundaries=cut, dtype=dtype
    )
    common = {"num_stages": args.stages, "boundaries": cut, "max_new_tokens": args.tokens}
    plain_config = DecodeConfig.of("autoregressive", **common)
    plain_engine = Engine(target, Tokenizer(), plain_config, connect=cluster.connect)
    plain_engine.decode(PROMPT)  # warm up
    plain, ways = Phase(), {"ahead": Phase(), "waiting": Phase()}
    ratios: dict[str, list[float]] = {way: [] for way in ways}  # speed-up over L', per output
    for index in range(args.texts):
        prompt = [token + index for token in PROMPT]
        text = plain.decode(plain_engine, prompt)
        source = make_source(args, target, text, index)
        config = DecodeConfig.of("spd", **common)
        engine = Engine(target, Tokenizer(), config, source=source, connect=cluster.connect)
        steps_before = {way: spd.steps for way, spd in ways.items()}
        assert isinstance(engine.pipeline, ProcessPipeline)
        for way in ("ahead", "waiting", "waiting", "ahead"):
            engine.pipeline.runs_ahead = way == "ahead"
            assert ways[way].decode(engine, prompt) == text, "the text changed"
        plain.decode(plain_engine, prompt)
        for way, spd in ways.items():
            speedup = sum(plain.seconds[-2:]) / sum(spd.seconds[-2:])
            tokens = 2 * (len(text) - len(prompt) - 1)
            steps = spd.steps - steps_before[way]
            ratios[way].append(speedup / (args.stages * tokens / steps))
    outcome = {way: summary(args, plain, spd, ratios[way]) for way, spd in ways.items()}
    return {
        **outcome,
        "autoregressive_work_ms": [value * args.stages * 1e3 for value in plain.busy_s()],
        "autoregressive_layers_ms": plain.layers_ms(),
        "autoregressive_tokens_per_s": plain.tokens / sum(plain.seconds),
        "stages": args.stages,
        "boundaries": list(boundaries(args)),
        "processes": cluster.world_size,
    }


def summary(
    args: argparse.Namespace, plain: Phase, spd: Phase, ratios: list[float]
) -> dict[str, Any]:
    """Return speed-up, its share of L' and times by kind of work, over all outputs.

    Args:
        ratios: speed-up over L', per output.
    """
    work = spd.busy_s()
    draft_s = sum(process["draft"] for process in spd.work) / spd.steps
    speedup = sum(plain.seconds) / sum(spd.seconds)
    equivalent = args.stages * spd.tokens / spd.steps
    balanced = sum(work) / (sum(work) - draft_s)
    step_s = statistics.median(spd.gaps)
    random = Random(0)
    means = [statistics.fmean(random.choices(ratios, k=len(ratios))) for _ in range(2000)]
    low, *_, high = statistics.quantiles(means, n=40)
    return {
        "step_over_slowest_stage": step_s / max(work),
        "wallclock_over_theoretical": speedup / equivalent,
        "wallclock_over_theoretical_texts": {
            "mean": statistics.fmean(ratios),
            "ci95": [low, high],
            "each": ratios,
        },
        "wallclock_over_balanced": speedup / equivalent * balanced,
        "wallclock_over_balanced_ci95": [low * balanced, high * balanced],
        "step_ms": step_s * 1e3,
        "step_ms_quartiles": [q * 1e3 for q in statistics.quantiles(spd.gaps, n=4)],
        "work_ms": [value * 1e3 for value in work],
        "draft_share": draft_s / sum(work),
        "layers_ms": spd.layers_ms(),
        "equivalent_acceptance_length": equivalent,
        "speedup": speedup,
        "tokens_per_s": spd.tokens / sum(spd.seconds),
        "breakdown_ms_per_step": [
            {kind: s / spd.steps * 1e3 for kind, s in process.items()} for process in spd.work
        ],
        "peak_rss_mb": spd.peak_rss_mb,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--acceptance", type=float, default=0.85)
    run_ranks(parser.parse_args(), controller)


def run_ranks(
    args: argparse.Namespace, controller: Callable[[argparse.Namespace, Any], dict[str, Any]]
) -> None:
    """Start this script again on every rank, and print the controller's outcome as JSON."""
    if args.folder is not None:  # one of the ranks
        from pipedraft.inference.ranks.cluster import Cluster

        with Cluster(60) as cluster:
            if cluster.is_controller:
                print(json.dumps(controller(args, cluster)), flush=True)
            else:
                cluster.serve()
        return
    with tempfile.TemporaryDirectory() as folder:
        save_target(args, Path(folder))
        command = [
            str(Path(sys.executable).with_name("torchrun")),
            *("--nproc-per-node", str(args.stages + args.apart)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *(sys.argv[0], *sys.argv[1:], "--folder", folder),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        child = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    outcome = json.loads(child.stdout.splitlines()[-1])
    if not args.json:
        for name, value in outcome.items():
            print(f"{name}: {value}")
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
