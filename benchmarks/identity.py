"""Compare a fixed list of runs with stored results, before and after a refactoring.

    python benchmarks/identity.py --write out/identity.json      # before the change
    python benchmarks/identity.py --compare out/identity.json    # after it
    torchrun --nproc-per-node 2 benchmarks/identity.py --write out/identity_processes.json

Runs every schedule, chains and trees, greedy and at temperature 1, with each compatible draft, on
four and eight stages in one process, or on as many processes as torchrun starts. Targets and drafts
are small and random, equal in every run. Each run's token ids are stored. Runs in one process also
store N, K, the number of rounds and a hash of the step log. The last output line is one JSON
object.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measurement import make_parser
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.engine import Engine
from pipedraft.inference.ranks import is_launched
from pipedraft.inference.ranks.cluster import Cluster
from pipedraft.models.heads.configs import (
    Eagle3Config,
    EagleConfig,
    FlexSpecConfig,
    PPSDConfig,
    SPDConfig,
)
from pipedraft.models.heads.draft import TargetReference
from pipedraft.models.heads.eagle import Eagle
from pipedraft.models.heads.eagle3 import Eagle3
from pipedraft.models.heads.flexspec import FlexSpec
from pipedraft.models.heads.language_model import LanguageModelDraft
from pipedraft.models.heads.ppsd import PPSD
from pipedraft.models.heads.spd import SPD
from pipedraft.models.target import target_fingerprint
from pipedraft.models.transformer.layers import LayerConfig

NUM_LAYERS = 8
PROMPTS = [[5], [index * 5 % 60 for index in range(29)]]
NEW_TOKENS = 18
Found = dict[str, list[dict[str, Any]]]
"""Run name -> values to compare, per sequence."""
SMALL, WIDE = "dynamic:4:3:8", "dynamic:5:6:20"

LAYERED: list[dict[str, Any]] = [{"tree_width": width} for width in (1, 2, 4)]
TREES: list[dict[str, Any]] = [{"tree": tree} for tree in ("chain:5", "static", SMALL, WIDE)]
SEGMENTED: list[dict[str, Any]] = [
    *TREES,
    {"tree": WIDE, "micro_batches": 2},
    {"tree": WIDE, "level_order": True},
]
EXPANDED: list[dict[str, Any]] = [
    *SEGMENTED,
    {"tree": WIDE, "expansion_depth": 2},
    {"tree": SMALL, "expansion_tokens": 5, "refill_depth": 1},
]
CONTINUED: list[dict[str, Any]] = [
    {},
    {"step_tokens": 32, "max_segment_rows": 224},
    {"expansion_depth": 2, "level_order": True},
]
MICRO: list[dict[str, Any]] = [
    {},
    {"draft_tokens": 4, "branches": 3, "accept": 0.05, "split": 0.1, "recovery": 0.05},
    {"restart": True},
    {"max_in_flight": 4, "give_up": 0.0},
]
RUNS: dict[str, list[dict[str, Any]]] = {
    "autoregressive": [{}],
    "spd": [*LAYERED, {"timing": "output_states"}, {"tree_width": 2, "timing": "output_states"}],
    "pipedec": [{"tree_width": width} for width in (1, 4)],
    "ppsd": LAYERED,
    "eagle": TREES,
    "naive_pp": SEGMENTED[:-1],
    "pruned_pp": SEGMENTED,
    "flowspec": EXPANDED,
    "flowspec_continued": CONTINUED,
    "pipeinfer": MICRO,
    "ssd": [{}, {"draft_tokens": 3, "outcomes": 2}],
}
DRAFTS = {
    "autoregressive": ["none"],
    "spd": ["spd", "language_model"],
    "pipedec": ["spd", "eagle3"],
    "ppsd": ["ppsd"],
    "eagle": ["eagle", "eagle3", "flexspec"],
    "naive_pp": ["eagle3"],
    "pruned_pp": ["eagle", "language_model"],
    "flowspec": ["eagle3", "language_model"],
    "flowspec_continued": ["eagle3", "language_model"],
    "pipeinfer": ["language_model", "eagle3"],
    "ssd": ["language_model", "eagle3"],
}


# -- networks -------------------------------------------------------------------------------


class PlainTokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def make_target() -> PreTrainedModel:
    config = LlamaConfig(
        num_hidden_layers=NUM_LAYERS,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval().requires_grad_(False)
    return add_noise(model, 0.0)


def add_noise(network: Any, deviation: float) -> Any:
    """Add noise to every weight, with standard deviation ``deviation`` / sqrt(input size)."""
    torch.manual_seed(5)
    for parameter in network.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * deviation / parameter.shape[-1] ** 0.5)
    return network.eval().requires_grad_(False)


def make_draft(kind: str, target: PreTrainedModel, num_stages: int) -> Any:
    """Build a draft that gets some of its tokens accepted."""
    if kind == "none":
        return None
    if kind == "language_model":
        return LanguageModelDraft(add_noise(make_target(), 0.05), target)
    fingerprint = target_fingerprint(target)
    layer = LayerConfig.from_target(target.config)
    reference = TargetReference(name="small", fingerprint=fingerprint)
    draft: Any
    if kind == "spd":
        spd = SPDConfig(num_target_layers=NUM_LAYERS, num_stages=num_stages, num_layers=2)
        draft = SPD(spd, layer, reference)
    elif kind == "ppsd":
        ppsd = PPSDConfig(num_target_layers=NUM_LAYERS, num_stages=num_stages)
        draft = PPSD(ppsd, layer, reference)
    elif kind == "eagle":
        draft = Eagle(EagleConfig(num_target_layers=NUM_LAYERS), layer, reference)
    elif kind == "eagle3":
        draft = Eagle3(Eagle3Config().for_target(NUM_LAYERS), layer, reference)
    else:
        reference = TargetReference(name="small", fingerprint=FlexSpec.fingerprint(target))
        draft = FlexSpec(FlexSpecConfig(), layer, reference)
    torch.manual_seed(5)
    draft.initialize(target)
    return add_noise(draft, 0.2)


# -- runs -----------------------------------------------------------------------------------


def all_runs(num_stages: int) -> Iterator[tuple[str, str, str, dict[str, Any], dict[str, Any]]]:
    """Yield each run's name, schedule, draft, schedule settings and shared settings."""
    for schedule, ways in RUNS.items():
        for draft in DRAFTS[schedule]:
            for settings in ways:
                if "timing" in settings and draft != "spd":
                    continue
                for temperature in (0.0, 1.0):
                    shared = {"temperature": temperature, "num_stages": num_stages}
                    words = " ".join(f"{key}={value}" for key, value in settings.items())
                    name = f"{schedule} {draft} n={num_stages} T={temperature:g} {words}".strip()
                    yield name, schedule, draft, settings, shared


def decode_all(stages: list[int], cluster: Cluster | None, folder: str, only: str) -> Found:
    target, found = make_target(), {}
    part: Any = target
    if cluster is not None:
        target.save_pretrained(folder)
        part = cluster.load_target(folder, revision=None, num_stages=stages[0])
    for num_stages in stages:
        drafts: dict[str, Any] = {}
        for name, schedule, kind, settings, shared in all_runs(num_stages):
            if only not in name:
                continue
            if kind not in drafts:
                drafts[kind] = make_draft(kind, target, num_stages)
            config = DecodeConfig.of(
                schedule,
                **settings,
                max_new_tokens=NEW_TOKENS,
                seed=3,
                cost=CostModel(row=0.02),
                **shared,
            )
            connect: dict[str, Any] = {} if cluster is None else {"connect": cluster.connect}
            engine = Engine(part, PlainTokenizer(), config, drafts[kind], **connect)
            found[name] = [
                summarize(engine.decode(prompt, prompt_index=index), cluster is None)
                for index, prompt in enumerate(PROMPTS)
            ]
            print(name, file=sys.stderr, flush=True)
    return found


def summarize(result: Any, has_stable_steps: bool) -> dict[str, Any]:
    """Return the values that must stay equal. Without stable steps, these are only the tokens."""
    summary: dict[str, Any] = {"token_ids": result.token_ids}
    if has_stable_steps:
        log = json.dumps([result.step_log, result.round_lengths, result.round_ends])
        log += json.dumps([result.round_drafted, result.round_forwards, result.virtual_time])
        log += json.dumps([result.position_tests, result.position_accepts])
        summary |= {
            "N": result.num_tokens,
            "K": result.num_steps,
            "rounds": len(result.round_lengths),
            "log": hashlib.sha256(log.encode()).hexdigest()[:16],
        }
    return summary


def read_options(description: str | None) -> argparse.Namespace:
    parser = make_parser(description)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", type=Path, metavar="FILE")
    chosen.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="WORDS", help="runs whose name has them")
    return parser.parse_args()


def write_or_compare(found: Found, options: argparse.Namespace) -> None:
    """Store the runs, or exit with status 1 if they differ from the stored ones."""
    if not found:
        sys.exit(f"error: --only: no run's name has {options.only!r}")
    if options.write is not None:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(json.dumps(found, indent=0))
        print(json.dumps({"runs": len(found), "sequences": sum(map(len, found.values()))}))
        return
    found = json.loads(json.dumps(found))  # tuples become lists, as in the file
    stored = json.loads(options.compare.read_text())
    expected = {name: runs for name, runs in stored.items() if options.only in name}
    different = 0
    for name, runs in expected.items():
        if (mine := found.get(name)) != runs:
            different += 1
            pairs = zip(runs, mine or [{}] * len(runs), strict=True)
            fields = {field for old, new in pairs for field in old if new.get(field) != old[field]}
            print(f"different: {name}: {', '.join(sorted(fields))}", file=sys.stderr)
    print(json.dumps({"runs": len(expected), "different": different}))
    sys.exit(different > 0)


def main() -> None:
    options = read_options(__doc__)
    torch.set_num_threads(1)
    with Cluster(60) if is_launched() else nullcontext() as cluster:
        if cluster is not None and not cluster.is_controller:
            cluster.serve()
            return
        with TemporaryDirectory() as folder:
            stages = [4, 8] if cluster is None else [cluster.world_size]
            found = decode_all(stages, cluster, folder, options.only)
    write_or_compare(found, options)


if __name__ == "__main__":
    main()
