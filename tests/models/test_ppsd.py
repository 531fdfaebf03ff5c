"""PPSD: decoding equals the head's training, and the schedule's costs."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from decode_runs import (
    NEW_TOKENS,
    PROMPTS,
    AcceptMostLikelyMutant,
    RemembersText,
    assert_sampled_like_the_target,
    attentive_llama,
    count_tests,
    decode_exactly,
    engine_for,
    greedy_reference,
    sampling_target,
    see_siblings,
    simulate,
    unlike_plain_text,
)
from staged_targets import tiny
from tiny_drafts import make_exit, make_head
from tiny_models import tiny_llama, tiny_qwen3
from train_runs import BY_HEART, assert_learns_by_heart

from pipedraft.inference.cost_model import CostModel, continuous_acceptance_length
from pipedraft.inference.rules.sampled import RULES
from pipedraft.inference.sources.ppsd import PPSDSource
from pipedraft.inference.sources.row_cache import RowCache
from pipedraft.models.heads.configs import PPSDConfig
from pipedraft.models.target import capture_hidden
from pipedraft.models.transformer.layers import KeyValues
from pipedraft.train.objective import labeled_rows

LENGTH = 11


# -- the head -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("make_target", [tiny_llama, tiny_qwen3])
def test_rows_in_training_equal_rows_in_decoding(make_target, num_layers):
    target = make_target(layers=4).double()
    head = make_exit(target, num_stages=2, num_layers=num_layers).double()
    ids = torch.randint(0, target.config.vocab_size, (1, LENGTH))
    taps = capture_hidden(target, ids, head.taps)
    assert list(taps) == [2]
    expected = head(taps)[0]
    caches = [KeyValues() for _ in range(num_layers)]
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        out = head.rows(
            taps[2][0, start:stop],
            positions_R=torch.arange(start, stop),
            caches=caches,
            visible_RC=torch.ones(stop - start, stop, dtype=torch.bool).tril(start),
        )
        torch.testing.assert_close(out, expected[start:stop], rtol=1e-10, atol=1e-10)


class Checked(RemembersText, PPSDSource):
    """Compares the score of every draft token with a head and a target that read its path from
    scratch.

    Covers a tree's masks, and cached rows when the text moves on.
    """

    def __init__(self, draft, target) -> None:
        super().__init__(draft)
        self.target, self.num_checked = target, 0

    def grow_layer(self, tree, features, *, width, sampling):
        before = len(tree)
        added = super().grow_layer(tree, features, width=width, sampling=sampling)
        for row in range(before, len(tree)):
            above = self.text_at(tree, tree.parents[row])
            taps = capture_hidden(self.target, torch.tensor([above]), self.taps)
            expected = self.draft.logits(self.draft(taps)[0, -1]).log_softmax(-1)
            score = tree.scores[row] - tree.scores[tree.parents[row]]
            # Scores are kept in float32.
            assert math.isclose(score, expected[tree.tokens[row]], abs_tol=1e-5)
            self.num_checked += 1
        return added


def decode_checked(width) -> int:
    target = attentive_llama(4, vocab=8).double()
    source = Checked(make_exit(target, num_stages=4, num_layers=2).double(), target)
    options = {"schedule": "ppsd", "num_stages": 4, "tree_width": width, "max_new_tokens": 12}
    engine = engine_for(target, source=source, **options)
    prompts = ([5], [1, 2, 7, 3, 4, 3])  # the second text must not see the first one's rows
    tested, accepted = count_tests([decode_exactly(engine, prompt) for prompt in prompts])
    assert 0 < accepted < tested
    return source.num_checked


@pytest.mark.parametrize("width", [1, 4])
def test_draft_tokens_in_flight_are_those_of_their_paths_read_from_scratch(width):
    assert decode_checked(width) > 24 * width


def leave_rows_where_they_were(monkeypatch) -> None:
    right = RowCache.rename

    def mutant(cache, names):
        first = deepcopy(cache.layers)
        right(cache, names)
        for layer, other in zip(first, cache.layers, strict=True):
            layer.num_rows = other.num_rows
        cache.layers = first

    monkeypatch.setattr(RowCache, "rename", mutant)


@pytest.mark.parametrize("mutate", [see_siblings, leave_rows_where_they_were])
def test_wrong_rows_in_flight_are_noticed(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        decode_checked(4)


# -- the schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{"num_stages": 2}, {"num_stages": 4}, {"num_stages": 2, "boundaries": (0, 1, 4)}],
    ids=["n2", "n4", "uneven"],
)
def test_greedy_text_equals_transformers_greedy(options, width):
    target = (tiny_qwen3 if options["num_stages"] == 4 else tiny_llama)(layers=4, vocab=16)
    head = make_exit(target, **options)
    results = []
    for prompt in PROMPTS[2:]:
        expected = greedy_reference(target, prompt)
        for schedule in ("ppsd", "spd"):
            engine = engine_for(
                target,
                draft=head,
                schedule=schedule,
                num_stages=head.num_stages,
                tree_width=width,
                max_new_tokens=NEW_TOKENS,
            )
            results.append(decode_exactly(engine, prompt, expected))
    tested, accepted = count_tests(results)
    assert 0 < accepted < tested


def simulated(acceptance, prompt=(1, 2, 3), **options):
    target = tiny_llama(layers=4, vocab=16)
    return simulate(target, list(prompt), acceptance, **{"schedule": "ppsd", **options})


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("width", [1, 2])
def test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens(acceptance, width):
    for prompt, num_stages in ((PROMPTS[0], 1), (PROMPTS[1], 2), (PROMPTS[2], 4), (PROMPTS[3], 4)):
        simulated(acceptance, prompt, tree_width=width, num_stages=num_stages)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_eagle_head_runs_under_the_schedule(kind):
    target = tiny_llama(layers=4, vocab=16)
    head = make_head(target, kind)
    for width in (1, 3):
        engine = engine_for(
            target,
            draft=head,
            schedule="ppsd",
            num_stages=4,
            tree_width=width,
            max_new_tokens=NEW_TOKENS,
        )
        for prompt in PROMPTS[1:3]:
            decode_exactly(engine, prompt)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_hit_takes_one_step_and_a_miss_n(num_stages):
    """SPD's schedule formula: the drafts differ in their knowledge, not in their timing."""
    result = simulated(0.8, max_new_tokens=200, num_stages=num_stages)
    *finished, last = result.round_lengths
    assert result.num_steps == sum(num_stages + tokens - 1 for tokens in [*finished, last])
    expected = continuous_acceptance_length([result.draft_acceptance_rate], num_stages)
    assert abs(result.equivalent_acceptance_length - expected) < 0.08


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("num_stages", "num_layers"), [(2, 1), (4, 1), (4, 2)])
def test_speedup_is_the_papers_closed_form(num_stages, num_layers, width):
    """S = L' L / (Ls n + L), whatever the text: every step waits for the head's layers."""
    target = tiny_llama(layers=4, vocab=16)
    head = make_exit(target, num_stages=num_stages, num_layers=num_layers)
    options = {"num_stages": num_stages, "tree_width": width, "max_new_tokens": NEW_TOKENS}
    for prompt in PROMPTS[1:3]:
        result = engine_for(target, draft=head, schedule="ppsd", **options).decode(prompt)
        length = result.equivalent_acceptance_length
        expected = length * 4 / (num_layers * num_stages + 4)
        assert math.isclose(result.theoretical_speedup, expected, rel_tol=1e-9)
        assert result.num_draft_forwards <= result.num_steps


def test_speedup_counts_links_and_verification_besides():
    cost = CostModel(draft_forward=1 / 32, link=0.01, verify=0.02)
    result = simulated(0.7, cost=cost)
    step = 1 / 4 + 1 / 32 + 0.03
    assert math.isclose(result.virtual_time, result.num_steps * step, rel_tol=1e-9)
    hidden = simulated(0.7, cost=cost, schedule="spd")
    assert math.isclose(hidden.virtual_time, hidden.num_steps * (1 / 4 + 0.03), rel_tol=1e-9)


SAMPLED_WAYS = [
    pytest.param({"verifier": "rejection"}, marks=pytest.mark.all, id="rejection"),
    pytest.param({"tree_width": 3}, id="tree"),
]


@pytest.fixture
def sampled() -> tuple:
    """Target and draft."""
    target = sampling_target()
    return target, make_exit(target, num_stages=2)


@pytest.mark.parametrize("way", SAMPLED_WAYS)
def test_sampled_text_has_the_targets_distribution(way, sampled):
    assert_sampled_like_the_target(*sampled, schedule="ppsd", **way)


def test_the_distribution_test_catches_the_published_tree_rule(monkeypatch, sampled):
    monkeypatch.setitem(RULES, "match", AcceptMostLikelyMutant)
    assert unlike_plain_text(*sampled, schedule="ppsd", verifier="match") > 5


# -- training and checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_the_loss_is_the_divergence_before_every_assistant_token(world, tmp_path, draft_vocab_size):
    trainer = world.trainer(
        "ppsd", tmp_path, model__num_stages=2, model__draft_vocab_size=draft_vocab_size
    )
    objective = trainer.objective
    draft, target = objective.draft, objective.target
    batch = trainer.load(trainer.data.train, [0, 1, 2])
    output = objective(batch, torch.Generator())
    loss, agreed, count = 0.0, 0, 0
    for ids, mask in zip(batch.ids_BT, batch.mask_BT, strict=True):
        p = target(ids[None]).logits[0].double().softmax(-1)
        logits = draft.logits(draft(capture_hidden(target, ids[None], draft.taps)))[0].double()
        for position in range(len(ids) - 1):
            if mask[position + 1]:
                inside = p[position, draft.draft_ids]
                inside = inside / inside.sum()
                log_q = logits[position].log_softmax(-1)
                loss += F.kl_div(log_q, inside, reduction="sum").item()
                agreed += int(draft.draft_ids[log_q.argmax()] == p[position].argmax())
                count += 1
    assert output.counted == count == objective.num_supervised(batch) == labeled_rows(batch).sum()
    assert output.loss.item() == pytest.approx(loss, rel=1e-4)
    assert output.sums["agreement"] == agreed


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_it_learns_a_handful_of_conversations_by_heart(world, tmp_path, loss):
    trainer = world.trainer("ppsd", tmp_path, model__num_stages=2, model__loss=loss, **BY_HEART)
    assert_learns_by_heart(trainer)
    for name, parameter in trainer.objective.draft.named_parameters():
        assert parameter.requires_grad, name


def test_validation_reports_the_closed_form(world, tmp_path):
    trainer = world.trainer("ppsd", tmp_path, model__num_stages=4)
    metrics = trainer.evaluate()
    for key, temperature in (("agreement", 0), ("acceptance", 1)):
        expected = continuous_acceptance_length([metrics[key]], 4)
        assert metrics[f"equivalent_acceptance_length_T{temperature}"] == expected
    assert metrics["score"] == metrics["equivalent_acceptance_length_T0"] >= 1


def test_it_starts_as_the_target_goes_on(world, tmp_path):
    options = {"model__num_stages": 4, "model__num_layers": 2, "model__draft_vocab_size": 40}
    trainer = world.trainer("ppsd", tmp_path, **options)
    draft, target = trainer.objective.draft, trainer.objective.target
    assert torch.equal(draft.norm.weight, target.model.norm.weight)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[draft.draft_ids])
    assert len(draft.draft_ids) == 40 and (draft.draft_ids.diff() > 0).all()
    taps = capture_hidden(target, torch.randint(0, 300, (2, LENGTH)), {1, 3})
    torch.testing.assert_close(draft(taps), taps[3])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_5", "qwen3_5_moe"])
def test_it_starts_random_where_the_targets_layers_are_of_another_kind(name):
    target, prompt = tiny(name), [7, 3, 9, 3, 7, 1]
    head = make_exit(target, num_stages=2, num_layers=2)
    engine = engine_for(target, draft=head, schedule="ppsd", num_stages=2, max_new_tokens=12)
    decode_exactly(engine, prompt)


def test_values_that_do_not_fit_are_refused_by_name(world, tmp_path):
    with pytest.raises(ValueError, match=r"model\.num_stages: 1; .*at least 2"):
        PPSDConfig(num_stages=1)
    with pytest.raises(ValueError, match=r"model\.num_layers: 0; "):
        PPSDConfig(num_layers=0)
    with pytest.raises(ValueError, match=r"model\.boundaries: \[0, 1, 4\] make 2 stages"):
        world.trainer("ppsd", tmp_path, model__num_stages=4, model__boundaries="[0,1,4]")
