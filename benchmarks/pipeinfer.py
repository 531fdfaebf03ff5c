"""Wall clock of PipeInfer on processes: its parts, a draft that is never right, first tokens.

    python benchmarks/pipeinfer.py --json

The target and its processes are those of pipeline_step.py. The draft is a language model with
random weights (a layer of the target's width) that runs in full for every draft token; its token is
then put right with probability --acceptance, with a probability of 0.9 either way: a wrong draft is
as sure as a right one, so a cutoff cannot save it. "unsure" leaves the random draft's own, flat
distribution, which a cutoff of 0.3 stops. Each case decodes the same texts, in turn with plain
decoding on the same processes. Micro-batches hold up to three draft tokens, fewer where further
rows take longer than they save: the engine's cost model has what a first text measured. Reported
are tokens per second over plain decoding's (median and range over texts), the virtual clock's L',
and the time to the first and to the second token over plain decoding's.
"""

import argparse
import math
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from pipeline_step import PROMPT, Tokenizer, boundaries, make_parser, run_ranks

SURE = 0.9


def make_draft(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 2,
        num_hidden_layers=1,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        vocab_size=args.vocab,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def make_source(args: argparse.Namespace, draft: Any, text: list[int], acceptance: float) -> Any:
    """Draft tokens at the full cost of the draft, right as often as asked."""
    from pipedraft.inference.sources.language_model import LanguageModelSource

    others = math.log((1 - SURE) / (args.vocab - 1))

    class Corrected(LanguageModelSource):
        def leaf_logits(self, tree: Any, rows: list[int], features: Any) -> torch.Tensor:
            own_QU = super().leaf_logits(tree, rows, features)
            if acceptance < 0:
                return own_QU
            logits_QU = torch.full_like(own_QU, others)
            for logits_U, row in zip(logits_QU, rows, strict=True):
                position = tree.position(row) + 1
                right = text[position] if position < len(text) else 0
                is_right = Random(f"{len(text)}:{position}").random() < acceptance
                logits_U[right if is_right else (right + 1) % args.vocab] = math.log(SURE)
            return logits_QU

    return Corrected(draft)


def cases(args: argparse.Namespace) -> dict[str, tuple[float, dict[str, Any], bool]]:
    """Name -> acceptance (below 0: the draft's own logits), micro-batch options, cancellation."""
    found: dict[str, tuple[float, dict[str, Any], bool]] = {}
    for acceptance in args.acceptance:
        found[f"full, {acceptance:g}"] = acceptance, {}, True
        found[f"no early cancellation, {acceptance:g}"] = acceptance, {}, False
        found[f"no continuous speculation, {acceptance:g}"] = acceptance, {"max_in_flight": 2}, True
        found[f"restart as published, {acceptance:g}"] = acceptance, {"restart": True}, True
        found[f"one draft token at a time, {acceptance:g}"] = acceptance, {"draft_tokens": 1}, True
    found["random, unsure, no cutoff"] = -1.0, {}, True
    found["random, unsure, cutoff 0.3"] = -1.0, {"accept": 0.3}, True
    return found


def controller(args: argparse.Namespace, cluster: Any) -> dict[str, Any]:
    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.pipelines.process import ProcessPipeline
    from pipedraft.models.language_model import LanguageModelDraft

    cut, name = boundaries(args), str(args.folder)
    target = cluster.load_target(name, revision=None, num_stages=args.stages, boundaries=cut)
    common = common_options(args)
    plain_config = DecodeConfig.of("autoregressive", **common)
    plain = Engine(target, Tokenizer(), plain_config, connect=cluster.connect)
    plain.decode(PROMPT)  # warm up
    draft = LanguageModelDraft(make_draft(args), target)
    cost = measure_cost(args, cluster, target, plain, draft)
    prompts = [[token + index for token in PROMPT] for index in range(args.texts)]
    rows: dict[str, dict[str, Any]] = {}
    for label, (acceptance, options, cancels) in cases(args).items():
        pairs, counts = [], [0, 0]
        for prompt in prompts:
            before = plain.decode(prompt)
            text = [*prompt, *before.token_ids]
            source = make_source(args, draft, text, acceptance)
            config = DecodeConfig.of("pipeinfer", cost=cost, **options, **common)
            with ExitStack() as stack:
                if not cancels:
                    stack.enter_context(patch.object(ProcessPipeline, "_cancel", lambda *_: None))
                engine = Engine(target, Tokenizer(), config, source=source, connect=cluster.connect)
                after = engine.decode(prompt)
            assert after.token_ids == before.token_ids, "the text changed"
            pairs.append((before, after))
            counts[0] += after.num_tokens
            counts[1] += after.num_steps
        speedups = [span(before) / span(after) for before, after in pairs]
        rows[label] = {
            "speedup": statistics.median(speedups),
            "speedup_range": [min(speedups), max(speedups)],
            "equivalent_acceptance_length": args.stages * counts[0] / counts[1],
            "first_token": time_over_plain(pairs, 0),
            "second_token": time_over_plain(pairs, 1),
        }
    return {
        "cases": rows,
        "cost": asdict(cost),
        "processes": cluster.world_size,
        "boundaries": list(cut),
    }


def measure_cost(
    args: argparse.Namespace, cluster: Any, target: Any, plain: Any, draft: Any
) -> Any:
    """Row slope and draft time, from a text of plain decoding and one with micro-batches."""
    from pipedraft.inference.clock import CostModel
    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine

    def measure(engine: Any) -> tuple[float, float, float]:
        """Seconds of all stages for a call, rows in it, seconds of a draft forward."""
        plain.pipeline.clear()
        num_forwards = engine.decode(PROMPT).num_draft_forwards
        reports = plain.pipeline.reports()
        calls = sum(report["counts"]["stage"] for report in reports)
        total_s = sum(report["seconds"]["stage"] for report in reports)
        drafting_s = sum(report["seconds"].get("draft", 0.0) for report in reports)
        rows = sum(report["rows"]["stage"] for report in reports)
        return args.stages * total_s / calls, rows / calls, drafting_s / max(num_forwards, 1)

    source = make_source(args, draft, [], -1.0)
    config = DecodeConfig.of("pipeinfer", give_up=0.0, **common_options(args))
    busy = Engine(target, Tokenizer(), config, source=source, connect=cluster.connect)
    pass_s, _, _ = measure(plain)
    batch_s, rows, forward_s = measure(busy)
    # Verdicts of a fast target may cut every micro-batch to a token: no row was a further one.
    further = rows - 1
    return CostModel(
        row=max(batch_s / pass_s - 1, 0.0) / further if further else 0.0,
        draft_forward=forward_s / pass_s,
        is_asynchronous=True,
        draft_on_first_stage=not args.apart,
    )


def common_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {"num_stages": args.stages, "boundaries": boundaries(args)}
    return options | {"max_new_tokens": args.tokens}


def span(result: Any) -> float:
    """Seconds from the first token to the last."""
    return result.token_times_s[-1] - result.token_times_s[0]


def time_over_plain(pairs: list[tuple[Any, Any]], token: int) -> float:
    return statistics.median(b.token_times_s[token] / a.token_times_s[token] for a, b in pairs)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.85])
    run_ranks(parser.parse_args(), controller)


if __name__ == "__main__":
    main()
