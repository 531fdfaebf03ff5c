"""Decoding on a pretended GPU: no operation may see two devices, wherever the stages are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from decode_runs import SMALL, STATIC, PlainTokenizer, engine_for
from device_runs import bookkeeping_s, connect_ranks, decode_on_gpu
from pretended_device import MixedDevices, Pretended, pretended_cuda
from tiny_drafts import make_draft, make_exit, make_head, make_module, noisy_copy
from tiny_models import tiny_llama
from torch import nn
from torch.overrides import TorchFunctionMode

from pipedraft.devices import place_draft
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.cost_model import CostModel
from pipedraft.inference.engine import Engine
from pipedraft.inference.pipelines.local import LocalPipeline
from pipedraft.inference.rules.base import MatchVerifier
from pipedraft.inference.rules.filters import TokenFilters
from pipedraft.inference.rules.random import (
    GREEDY,
    KeyedRandom,
    draw,
    draw_on_device,
    probabilities,
)
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources import default_schedule
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.verdict import NO_TOKEN
from pipedraft.models.speed.cuda_graphs import UNDER_WAY, Graphs
from pipedraft.models.stages.together import can_run_together, forward_together
from pipedraft.models.target import KeepRows, Segment, StagedTarget
from pipedraft.models.transformer import stage_cache

PROMPT = [7, 3, 9, 3] * 17  # more rows than a graph takes
NEW_TOKENS = 6
HEADS: dict[str, Callable] = {
    "spd": lambda target: make_module(target, num_stages=2, num_layers=2).float(),
    "spd_all": lambda target: make_module(target, num_stages=2, query="all").float(),
    "ppsd": partial(make_exit, num_stages=2),
    "eagle": partial(make_head, kind="eagle"),
    "eagle3": make_head,
    "mtp": partial(make_head, kind="mtp"),
    "dflash": partial(make_head, kind="dflash"),
    "dspark": partial(make_head, kind="dspark"),
    "flexspec": make_draft,
    "language_model": noisy_copy,
}
CHAIN = TreeShape(kind="chain", depth=3)
TREES_OF_ROUNDS = ("eagle3", "dflash", "language_model")
"""Heads of all kinds, for schedules with the same demands on a head as eagle and flowspec."""
GROWS_LAYERS = ("spd", "spd_all", "ppsd")
"""Heads that only grow layers; the other heads draft for every schedule."""
SPECIAL = [
    ("spd", "spd", {"timing": "output_states"}),
    ("ppsd", "pipedec", {"tree_width": 4}),
    *[("eagle3", "eagle", {"tree": shape}) for shape in (CHAIN, STATIC)],
    ("eagle3", "pipeinfer", {"branches": 2, "split": 0.0, "draft_tokens": 6}),
    ("flexspec", "pipeinfer", {"branches": 3, "split": 0.03, "draft_tokens": 6, "accept": 0.02}),
    ("eagle3", "ssd", {"draft_tokens": 3}),
    ("eagle3", "ssd", {"cost": CostModel(draft_forward=0.15), "draft_tokens": 6}),
    ("dflash", "eagle", {"tree": TreeShape(kind="chain", depth=9)}),
    ("dflash", "pipeinfer", {"branches": 2}),
    ("dspark", "pipeinfer", {"branches": 2}),
    ("flexspec", "pipedec", {"tree_width": 4}),
    ("eagle3", "eagle", {"tree": CHAIN, "verifier": "match"}),
    ("eagle3", "eagle", {"tree": CHAIN, "verifier": "match", "top_k": 5, "min_p": 0.01}),
    ("eagle3", "eagle", {"tree": CHAIN, "verifier": "match", "top_p": 0.9}),
    ("eagle3", "eagle", {"tree": CHAIN, "verifier": "rejection"}),
]
"""Other settings; the last ssd drafts three levels a step."""


@contextmanager
def drafted():
    """Position, token and cumulative log-probability for every draft token."""
    found, right = [], TokenTree.add

    def add(tree, parent, token, score, q=None):
        found.append((tree.position(parent) + 1, token, score))
        return right(tree, parent, token, score, q)

    with patch.object(TokenTree, "add", add):
        yield found


def decode_twice(head, schedule, settings, temperature, connect):
    """Decode on the CPU, and on pretended GPUs with the CPU's own arithmetic."""
    config = DecodeConfig.of(
        schedule,
        num_stages=2,
        max_new_tokens=NEW_TOKENS,
        temperature=temperature,
        seed=3,
        **settings,
    )
    target = tiny_llama()
    draft = HEADS[head](target)
    expected = Engine(target, PlainTokenizer(), config, draft).decode(PROMPT)
    with pretended_cuda():
        target.to("cuda:0")
        place_draft(draft, target)
        engine = Engine(target, PlainTokenizer(), config, draft, connect=connect)
        return expected, engine.decode(PROMPT)


CONNECTS = {
    "local": LocalPipeline,
    "host": connect_ranks,
    "device": partial(connect_ranks, is_direct=True),
}
PLACES = [(link, temperature) for temperature in (0.0, 1.0) for link in CONNECTS]


def product() -> Iterator[Any]:
    """Pair every head with each of its schedules, on every link, greedy and sampled."""
    pairs = 0
    for name, kind in SCHEDULES.items():
        for head in HEADS if kind.grows and kind.engine == "pipeline" else ():
            if kind.grows != "layers" and head in GROWS_LAYERS:
                continue
            settings = {"tree": SMALL} if hasattr(kind, "tree") else {}
            pairs += 1
            is_repeated = name in ("naive_pp", "pruned_pp") and head not in TREES_OF_ROUNDS
            for number, place in enumerate(PLACES):
                is_left = is_repeated or number != pairs % len(PLACES)
                marks = [pytest.mark.all] * is_left
                yield pytest.param(head, name, settings, *place, marks=marks)
    for run in SPECIAL:
        yield pytest.param(*run, "local", 1.0)


@pytest.mark.parametrize(("head", "schedule", "settings", "link", "temperature"), [*product()])
def test_no_operation_sees_two_devices(head, schedule, settings, link, temperature):
    """Draft scores are compared too: a misplaced or wrongly masked row hardly changes outputs."""
    with drafted() as rows:
        cpu, gpu = decode_twice(head, schedule, settings, temperature, CONNECTS[link])
    assert cpu.token_ids == gpu.token_ids
    if link == "local":  # else the draft may go on for as long as the stages work
        for name in ("num_drafted", "num_draft_forwards", "round_lengths", "num_steps"):
            assert getattr(cpu, name) == getattr(gpu, name), name
        on_cpu, on_gpu = (sorted(half) for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]))
        assert [row[:2] for row in on_cpu] == [row[:2] for row in on_gpu]
        assert [row[2] for row in on_gpu] == pytest.approx([row[2] for row in on_cpu], abs=1e-5)


def test_a_draft_on_another_device_than_its_target_is_found():
    """A known-bad placement: the draft stays where it was loaded."""
    target = tiny_llama()
    draft = make_head(target)
    with pretended_cuda():
        target.to("cuda:0")
        engine = engine_for(target, draft=draft, schedule="eagle", num_stages=2, tree=CHAIN)
        with pytest.raises(MixedDevices, match="tensors on cpu and cuda:0 at models/"):
            engine.decode(PROMPT)


BUDGETS = [
    ("spd", "spd", {"num_stages": 2}),
    ("ppsd", "ppsd", {"num_stages": 2}),
    ("eagle3", "eagle", {"num_stages": 1}),
    ("flexspec", "eagle", {"num_stages": 1}),
    ("eagle", "flowspec", {"num_stages": 2}),
    ("language_model", "pipeinfer", {"num_stages": 2}),
    ("dflash", "eagle", {"num_stages": 1}),
    ("dflash", "eagle", {"num_stages": 2}),
    ("dflash", "pipeinfer", {"num_stages": 2}),
    ("dflash", "ssd", {"num_stages": 2}),
    ("dflash", "flowspec_continued", {"num_stages": 2}),
    ("eagle3", "pipeinfer", {"num_stages": 2, "draft_tokens": 6}),
    ("eagle3", "ssd", {"num_stages": 2}),
    ("flexspec", "ssd", {"num_stages": 2}),
]


@pytest.mark.parametrize(
    ("head", "schedule", "settings", "temperature"),
    [
        pytest.param(*run, temperature, marks=[pytest.mark.all] * (temperature != index % 2))
        for index, run in enumerate(BUDGETS)
        for temperature in (0.0, 1.0)
    ],
)
def test_a_step_launches_and_waits_a_few_times_only(head, schedule, settings, temperature):
    """More layers add launches to the CUDA graph only, in a stage and in a draft."""
    counts = decode_on_gpu(HEADS[head], schedule, temperature=temperature, **settings)
    assert counts["syncs_per_step"] <= 2, counts
    assert counts["launches_per_stage"] <= 5, counts
    assert counts["launches_per_draft_forward"] <= 5, counts
    # Norm, LM head and, unless noise comes from the host, the choice are one graph, without these.
    assert counts["launches_of_a_verification"] <= (7 if temperature else 1), counts


@pytest.mark.parametrize(
    ("head", "schedule", "settings", "temperature"),
    [
        ("spd_all", "spd", {"tree_width": 3}, 1.0),
        ("eagle3", "eagle", {"tree": STATIC}, 0.0),
        *(pytest.param(*run, 0.0, marks=pytest.mark.all) for run in BUDGETS),
    ],
)
def test_a_controller_launches_and_waits_a_few_times_only(head, schedule, settings, temperature):
    """States from other ranks are written once; reading them again and again is free."""
    settings = {**settings, "num_stages": 2, "temperature": temperature}
    counts = decode_on_gpu(HEADS[head], schedule, of_controller=True, **settings)
    assert counts["syncs_per_step"] <= 2, counts
    assert counts["launches_beside_per_step"] <= 5, counts
    assert counts["launches_per_draft_forward"] <= 5, counts
    assert counts["uploads_per_step"] <= 4, counts


def test_tokens_drawn_on_the_device_are_those_drawn_on_the_host():
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(64, 500, generator=generator) * 4
    p_RV = probabilities(logits_RV, 1.0, TokenFilters(top_k=7))
    uniforms = [index / 64 for index in range(63)] + [1 - 2.0**-53]
    drawn = [draw(p_V, uniform) for p_V, uniform in zip(p_RV, uniforms, strict=True)]
    assert draw_on_device(p_RV, uniforms).tolist() == drawn
    assert draw_on_device(p_RV * torch.nan, uniforms).tolist() == [NO_TOKEN] * 64


def match_on_gpu(seed: int, temperature: float) -> tuple[list[int], list[int]]:
    """Decode by rule ``match`` on the CPU and on a pretended GPU."""
    config = DecodeConfig.of(
        "autoregressive",
        num_stages=2,
        max_new_tokens=NEW_TOKENS,
        temperature=temperature,
        seed=seed,
        verifier="match",
    )
    target = tiny_llama()
    expected = Engine(target, PlainTokenizer(), config).decode(PROMPT[:3]).token_ids
    with pretended_cuda():
        target.to("cuda:0")
        engines = [
            Engine(target, PlainTokenizer(), replace(config, temperature=t, seed=s))
            for t, s in ((temperature, seed), (3.0, seed + 1), (temperature, seed))
        ]
        # The same graphs serve other temperatures and seeds in between.
        first, _, again = (engine.decode(PROMPT[:3]).token_ids for engine in engines)
    assert first == again
    return expected, first


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_one_graph_chooses_tokens_for_every_temperature_and_seed(temperature):
    for seed in range(4):
        expected, found = match_on_gpu(seed, temperature)
        assert found == expected


def wrong_position(right):
    return lambda self, positions_R: right(self, positions_R + 1)


def wrong_temperature(right):
    def choice(self, positions_R):
        made = right(self, positions_R)
        made.numbers[:1] += 2.0
        return made

    return choice


@pytest.mark.parametrize("mutant", [wrong_position, wrong_temperature])
def test_a_wrong_choice_in_a_graph_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(MatchVerifier, "choice", mutant(MatchVerifier.choice))
    pairs = [match_on_gpu(seed, 1.3) for seed in range(4)]
    assert any(expected != found for expected, found in pairs)


def test_a_wrong_greedy_choice_in_a_graph_is_caught(monkeypatch):
    worst = replace(GREEDY, choose=lambda logits_RV, _: logits_RV.argmin(-1))
    monkeypatch.setattr("pipedraft.inference.rules.base.GREEDY", worst)
    expected, found = match_on_gpu(0, 0.0)
    assert expected != found


def test_rows_sharing_a_pass_capture_no_graph(monkeypatch):
    verifier = MatchVerifier(0.0, KeyedRandom(0, 0))
    with pretended_cuda():
        staged = StagedTarget(tiny_llama().to("cuda:0"), 1)
        hidden_RH, positions_R = torch.randn(2, staged._norm.weight.numel()), torch.arange(2)
        given = staged, hidden_RH.to("cuda:0"), positions_R
        expected = verifier.judge_states(*given)
        monkeypatch.delattr(StagedTarget, "choose")
        assert verifier.judge_states(*given, alone=False).tolist() == expected.tolist()
        with pytest.raises(AttributeError):
            verifier.judge_states(*given)


def test_a_new_norm_has_graphs_of_its_own():
    config = DecodeConfig.of("autoregressive", num_stages=1, max_new_tokens=NEW_TOKENS)
    target, other = tiny_llama(), torch.Generator().manual_seed(1)
    norm = nn.Parameter(torch.rand(target.model.norm.weight.shape, generator=other))
    changed = tiny_llama()
    changed.model.norm.weight = norm
    expected = Engine(changed, PlainTokenizer(), config).decode(PROMPT[:3]).token_ids
    with pretended_cuda():
        target.to("cuda:0")
        Engine(target, PlainTokenizer(), config).decode(PROMPT[:3])
        target.model.norm.weight = nn.Parameter(norm.detach().clone().to("cuda:0"))
        found = Engine(target, PlainTokenizer(), config).decode(PROMPT[:3]).token_ids
    assert found == expected


def test_a_token_that_cannot_be_drawn_on_the_device_is_an_error():
    config = DecodeConfig.of(
        "autoregressive", num_stages=1, max_new_tokens=3, temperature=1.0, verifier="match"
    )
    target = tiny_llama()
    with pretended_cuda():
        target.to("cuda:0")
        engine = Engine(target, PlainTokenizer(), config)
        engine.decode(PROMPT[:3])
        target.model.norm.weight.data.fill_(torch.nan)
        with (
            patch.object(StagedTarget, "prefill", lambda self, ids, _=(): (torch.zeros(60), {})),
            pytest.raises(ValueError, match="NaN or infinite, so they choose no token"),
        ):
            engine.decode(PROMPT[:3])


def test_graphs_are_recorded_once_for_texts_and_engines(monkeypatch):
    """Successive outputs with any expected length reuse the idle graphs."""
    keys, right = [], Graphs._make

    def record(self, packed, rows, compute):
        keys.append((id(self), len(packed)))
        return right(self, packed, rows, compute)

    monkeypatch.setattr(Graphs, "_make", record)
    monkeypatch.setattr(stage_cache, "MIN_CAPACITY", 8)
    with pretended_cuda():
        target = tiny_llama().to("cuda:0")
        for _ in range(2):
            engine = engine_for(target, schedule="autoregressive", num_stages=2, max_new_tokens=12)
            for prompt in (PROMPT[:20], PROMPT[:2]):
                engine.decode(prompt)
            del engine
        assert len(keys) == len(set(keys)) == 3, "one for each stage, and one for tokens"


class Busy:
    """Pending send: its peer receives it at a random time."""

    def __init__(self, is_heard: bool) -> None:
        self.random, self.answers, self.is_heard = Random(0), [], is_heard

    def is_sending(self) -> bool:
        self.answers.append(self.random.random() < 0.6)
        return self.answers[-1] and self.is_heard


@pytest.mark.parametrize(("head", "is_heard"), [("spd", True), ("ppsd", True), ("spd", False)])
def test_nothing_is_recorded_while_a_send_waits_for_its_peer(head, is_heard, monkeypatch):
    """Capturing waits for the device, so for the send; two capturing ranks would never end.

    Known-bad: a rank that does not hear of its sends.
    """
    busy, right = Busy(is_heard), Graphs._make

    def record(self, packed, rows, compute):
        assert not busy.answers[-1], "would wait for a peer that may be recording, too"
        return right(self, packed, rows, compute)

    monkeypatch.setattr(Graphs, "_make", record)
    UNDER_WAY.add(busy)
    with nullcontext() if is_heard else pytest.raises(AssertionError, match="would wait"):
        cpu, gpu = decode_twice(head, head, {}, 0.0, connect_ranks)
        assert cpu.token_ids == gpu.token_ids
        assert any(busy.answers) and not all(busy.answers)


def test_what_a_draft_notes_of_a_row_does_not_grow_with_the_text():
    # Growth shows every time; a machine's own delays do not.
    assert any(bookkeeping_s(32_768) < 1.5 * bookkeeping_s(1024) for _ in range(5))


class Attentions(TorchFunctionMode):
    """Records query and key heads in masked attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: set[tuple[int, int]] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and isinstance(args[0], Pretended):
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            assert mask is None or not kwargs.get("enable_gqa"), "no kernel of a GPU has both"
            if mask is not None:
                self.heads.add((args[0].shape[1], args[1].shape[1]))
        return func(*args, **kwargs)


@pytest.mark.parametrize("head", ["spd", "ppsd", "eagle3", "dflash", "flexspec", "language_model"])
def test_keys_are_not_repeated_for_the_heads_that_share_them(head):
    """Every two query heads share their keys: the kernel sees them as rows of one head."""
    with Attentions() as found:
        cpu, gpu = decode_twice(head, default_schedule(head), {}, 0.0, LocalPipeline)
    assert cpu.token_ids == gpu.token_ids
    assert found.heads == {(2, 2)}


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_tree_is_pruned_by_one_graph_whatever_the_layers(num_layers):
    """Surviving rows become neighbors in the cache of every layer."""
    model, kept = tiny_llama(layers=num_layers), KeepRows((0, 2, 3), 1)
    positions, visible = torch.arange(4) + len(PROMPT), torch.ones(4, 5).bool().tril_()
    row = Segment(torch.tensor([len(PROMPT) + 2]), torch.ones(1, 3).bool(), ids=torch.tensor([8]))
    outputs, launches = [], []
    for place in ("cpu", "cuda:0"):
        with pretended_cuda() as log:
            (stage,) = StagedTarget(model.to(place), 1).stages
            for _ in range(2):
                stage.reset()
                stage.prefill(torch.tensor(PROMPT), torch.arange(len(PROMPT)))
                stage.forward(Segment(positions, visible[:, :4], ids=torch.tensor([5, 9, 4, 2])))
                log.clear()
                stage.keep(kept)
                launches.append(log.launches.total())
                outputs.append(stage.forward(row).hidden.cpu())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    assert launches[-1] <= 1


def test_several_sequences_on_a_gpu_are_one_pass_of_the_weights():
    """The batch uses the caches written by one-sequence graphs before and after it."""
    model, rounds = tiny_llama(), [[5, 9], [4, 2], [8, 1]]
    with pretended_cuda() as log, Attentions() as found:
        model.to("cuda:0")
        several, alone = ([StagedTarget(model, 1).stages[0] for _ in range(2)] for _ in range(2))
        for stage in (*several, *alone):
            stage.prefill(torch.tensor(PROMPT), torch.arange(len(PROMPT)))
        for turn, tokens in enumerate(rounds):
            position, visible = torch.tensor([len(PROMPT) + turn]), torch.ones(1, turn + 1).bool()
            rows = [Segment(position, visible, ids=torch.tensor([token])) for token in tokens]
            right = [stage.forward(row) for stage, row in zip(alone, rows, strict=True)]
            log.clear()
            if turn == 1:
                assert all(map(can_run_together, several))
                outputs = forward_together(several, rows)
                products = sum(log.launches[name] for name in ("mm", "addmm", "linear"))
            else:
                outputs = [stage.forward(row) for stage, row in zip(several, rows, strict=True)]
            for ours, theirs in zip(outputs, right, strict=True):
                torch.testing.assert_close(ours.hidden.cpu(), theirs.hidden.cpu())
    assert products == 7 * len(model.model.layers) and found.heads == {(2, 2)}
