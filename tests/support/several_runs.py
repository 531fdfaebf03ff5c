"""Helpers for tests with several sequences, and the ranks of test_several_ranks.py.

torchrun --nproc-per-node 2 tests/support/several_runs.py FOLDER KINDS SEQUENCES
"""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from decode_runs import SMALL, PlainTokenizer, SimulatedSource, attentive_llama, friendly_module
from tiny_drafts import make_exit, make_head, noisy_copy

from pipedraft.inference.batch import BatchEngine, BatchLimits
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines import local
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.ranks import worker
from pipedraft.inference.ranks.cluster import Cluster
from pipedraft.inference.rules.sampled import KeyedRandom
from pipedraft.models.stages import stage_layers, together

PLAIN = {"schedule": "autoregressive"}
WAYS = {
    "module": [
        {"schedule": "spd"},
        {"schedule": "spd", "tree_width": 4},
        {"schedule": "spd", "tree_width": "auto"},
        {"schedule": "spd", "timing": "output_states"},
    ],
    "head": [
        {"schedule": "eagle", "tree": SMALL},
        {"schedule": "naive_pp", "tree": "chain:3"},
        {"schedule": "naive_pp", "tree": "dynamic:3:3:auto"},
        {"schedule": "pruned_pp", "tree": SMALL},
        {"schedule": "pipedec", "tree_width": 4},
        {"schedule": "flowspec", "tree": SMALL},
        {"schedule": "flowspec_continued"},
        {"schedule": "flowspec_continued", "step_tokens": "auto"},
        {"schedule": "ssd", "draft_tokens": 3},
    ],
    "exit": [{"schedule": "ppsd"}, {"schedule": "ppsd", "tree_width": 3}],
    "language model": [
        {"schedule": "pipeinfer"},
        {"schedule": "pipeinfer", "draft_tokens": "auto", "branches": 2},
    ],
}
"""Settings for every pipeline schedule, by draft kind."""


def requests(rng, ways, num_stages, count):
    """Prompts and settings for ``count`` sequences."""
    for index in range(count):
        prompt = [rng.randrange(64) for _ in range(rng.choice([1, 3, 9, 30]))]
        settings = rng.choice([PLAIN, *ways]) if index >= len(ways) else ways[index]
        config = DecodeConfig.of(
            **settings,
            num_stages=num_stages,
            max_new_tokens=rng.randrange(1, 24),
            temperature=(0.0, 1.0, 0.0, 0.6)[index % 4],
            seed=rng.randrange(3),
        )
        yield prompt, config, rng.randrange(3)


def decode_several(target, draft, num_stages, asked, *, rng=None, connect=LocalPipeline, **limits):
    """Decode requests joining at random steps; return their handles."""
    config = DecodeConfig.of(**PLAIN, num_stages=num_stages)
    limits = BatchLimits(**{"prompt_rows": 7, **limits})
    batch = BatchEngine(target, PlainTokenizer(), config, draft, limits=limits, connect=connect)
    handles = []
    for prompt, settings, index in asked:
        handles.append(batch.submit(prompt, settings, prompt_index=index))
        for _ in range(rng.randrange(5) if rng else 0):
            batch.step()
    while batch.step():
        pass
    return batch, handles


def decode_alone(target, draft, handle):
    engine = Engine(target, PlainTokenizer(), handle.config, draft)
    return engine.decode(handle.prompt_ids, prompt_index=handle.prompt_index)


def check_as_alone(target, draft, handles) -> int:
    """Decode each sequence alone, and count the differing outputs."""
    wrong = 0
    for handle in handles:
        alone, found = decode_alone(target, draft, handle), handle.future.result(0)
        assert found.token_ids == handle.token_ids
        wrong += found.token_ids != alone.token_ids
    return wrong


def stages_of(draft) -> int:
    return getattr(draft, "num_stages", None) or 3


class OutsideVocabulary(SimulatedSource):
    """Source with an out-of-vocabulary token in its fourth draft forward."""

    def add_children(self, tree, leaf, width):
        if self.num_forwards == 4:
            return tree.add(leaf, 10**6, -1.0)
        return super().add_children(tree, leaf, width)


# -- mutants --------------------------------------------------------------------------------


def swap_rows(monkeypatch, module=local):
    """Mutant: swap the first row between two caches after a pass over both."""

    def mutant(stages, segments, taps=()):
        outputs = together.forward_together(stages, segments, taps)
        one, other = (stage.cache._keys for stage in stages[:2])
        for layer in one:
            row = one[layer][:, :, 0].clone()
            one[layer][:, :, 0] = other[layer][:, :, 0]
            other[layer][:, :, 0] = row
        return outputs

    monkeypatch.setattr(module, "forward_together", mutant)


def see_everything(monkeypatch):
    def mutant(visible, *others, **options):
        return right(torch.ones_like(visible), *others, **options)

    right = stage_layers.additive_mask
    monkeypatch.setattr(stage_layers, "additive_mask", mutant)


def share_seed(monkeypatch):
    monkeypatch.setattr(
        "pipedraft.inference.engine.KeyedRandom", lambda seed, index: KeyedRandom(0, 0)
    )


# -- ranks ----------------------------------------------------------------------------------


def main() -> None:
    name = str(Path(sys.argv[1]) / "t")
    with Cluster(60) as cluster:  # the machine may be busy
        if not cluster.is_controller:
            cluster.serve()
            return
        whole = attentive_llama(1.0)
        whole.save_pretrained(name)
        part = cluster.load_target(name, revision=None, num_stages=2)
        kinds, count = sys.argv[2].split(","), int(sys.argv[3])
        print(json.dumps(compare(cluster, whole, part, kinds, count)))


def compare(cluster, whole, part, kinds, count):
    """For each kind, count the sequences that differ from decoding alone in one process.

    Mutants decode eight sequences.
    """
    makers = {
        "module": lambda: friendly_module(whole, num_stages=2, num_layers=1),
        "head": lambda: make_head(whole),
        "exit": lambda: make_exit(whole, num_stages=2),
        "language model": lambda: noisy_copy(whole),
    }
    mutants = {
        "swapped caches": lambda patched: swap_rows(patched, worker),
        "shared seed": share_seed,
        "wrong mask": see_everything,
        "right": lambda patched: None,
    }
    wrong, steps = {}, {}
    for kind in kinds:
        draft = makers[kind]()
        for name, mutate in mutants.items():
            most = count if name == "right" else 8
            asked, rng = list(requests(random.Random(5), WAYS[kind], 2, most)), random.Random(6)
            with pytest.MonkeyPatch.context() as patched:
                mutate(patched)
                batch, handles = decode_several(
                    part, draft, 2, asked, rng=rng, connect=cluster.connect
                )
            wrong[f"{kind}, {name}"] = check_as_alone(whole, draft, handles)
        # The mutants change nothing behind them, and alone the ranks decode as before.
        engine = Engine(part, PlainTokenizer(), handles[-1].config, draft, connect=cluster.connect)
        found = engine.decode(handles[-1].prompt_ids, prompt_index=handles[-1].prompt_index)
        assert found.token_ids == decode_alone(whole, draft, handles[-1]).token_ids
        steps[kind] = [batch.clock.num_steps, sum(h.future.result().num_steps for h in handles)]
    return {"wrong": wrong, "steps": steps}


if __name__ == "__main__":
    main()
