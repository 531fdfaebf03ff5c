"""Draft forwards for several sequences in one call: each drafts the same tokens as alone."""

import time
from copy import deepcopy

import pytest
import torch
from decode_runs import SMALL, PlainTokenizer, attentive_llama, friendly_module
from several_runs import PLAIN, check_as_alone, decode_alone, stages_of
from tiny_drafts import make_exit, make_head

from pipedraft.inference.batch import BatchEngine
from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.timeline import WAIT
from pipedraft.models.heads import draft_calls
from pipedraft.models.heads.draft_calls import DraftCall, make_first
from pipedraft.models.transformer.layers import KeyValues

CONTINUED = {"schedule": "flowspec_continued", "expansion_depth": 2}
DRAFTS = {
    "module": (friendly_module, [{"schedule": "spd"}, {"schedule": "spd", "tree_width": 4}]),
    "module, all depths pass": (
        lambda target: friendly_module(target, query="all"),
        [{"schedule": "spd", "tree_width": 2}],
    ),
    "module, projections": (
        lambda target: friendly_module(target, layer_projections=True),
        [{"schedule": "spd", "tree_width": 2}],
    ),
    "exit": (make_exit, [{"schedule": "ppsd"}, {"schedule": "ppsd", "tree_width": 3}]),
    **{
        kind: (
            lambda target, kind=kind: make_head(target, kind),
            [CONTINUED, {"schedule": "eagle", "tree": SMALL}],
        )
        for kind in ("eagle3", "eagle", "mtp")
    },
}


@pytest.fixture(scope="module")
def target():
    return attentive_llama(1.0)


@pytest.fixture
def calls_made(monkeypatch):
    """For each joint call: its number of sequences, and how many results differ."""
    found = []

    def checked(calls):
        apart = [DraftCall(one.function, one.rows, copied(one.options)) for one in calls]
        assert together(calls)
        found.append((len(calls), sum(map(differs, calls, apart))))
        return True

    together = draft_calls._are_made_together
    monkeypatch.setattr(draft_calls, "_are_made_together", checked)
    return found


def copied(options):
    return {name: deepcopy(x) if name == "caches" else x for name, x in options.items()}


def differs(one, apart):
    """Compare a result or its cached rows with the one computed alone."""
    apart.make()
    pairs = [(one.outcome(), apart.outcome())] if one.outcome() is not None else []
    for ours, own in zip(one.caches(), apart.caches(), strict=True):
        assert ours.num_rows == own.num_rows
        pairs += [(ours.keys, own.keys), (ours.values, own.values)] if own.num_rows else []
    return not all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in pairs)


def submit(target, draft, ways, **options):
    """Submit six sequences with different lengths, greedy."""
    num_stages = stages_of(draft)
    configs = [
        DecodeConfig.of(**way, num_stages=num_stages, max_new_tokens=18, **options) for way in ways
    ]
    plain = DecodeConfig.of(**PLAIN, num_stages=num_stages)
    batch = BatchEngine(target, PlainTokenizer(), plain, draft)
    handles = [
        batch.submit([index, 3] * (1 + 4 * (index % 2)), configs[index % len(ways)])
        for index in range(6)
    ]
    return batch, handles


def decode(target, draft, ways, **options):
    batch, handles = submit(target, draft, ways, **options)
    while batch.step():
        pass
    return handles


def num_with_other_steps(target, draft, handles):
    """Count the sequences whose output or draft tokens differ from decoding alone."""
    count = 0
    for handle in handles:
        alone, found = decode_alone(target, draft, handle), handle.future.result(0)
        names = ("token_ids", "num_steps", "round_lengths", "num_drafted", "num_draft_forwards")
        assert found.token_ids == handle.token_ids
        count += any(getattr(found, name) != getattr(alone, name) for name in names)
    return count


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_that_share_a_pass_are_those_of_each_alone(target, kind, calls_made):
    make, ways = DRAFTS[kind]
    draft = make(target)
    handles = decode(target, draft, ways)
    assert num_with_other_steps(target, draft, handles) == 0
    sizes, wrong = zip(*calls_made, strict=True)
    assert not any(wrong)
    assert max(sizes) >= 4 and sum(sizes) > 2 * len(sizes)


def swap_keys(monkeypatch):
    def mutant(self, keys, values):
        right(self, keys, values)
        (one, *_), (other, *_) = self._own[:2]
        row = one.keys[:, 0].clone()
        one.keys[:, 0] = other.keys[:, 0]
        other.keys[:, 0] = row

    right = draft_calls._SeparateKeyValues.append_rows
    monkeypatch.setattr(draft_calls._SeparateKeyValues, "append_rows", mutant)


def swap_results(monkeypatch):
    def mutant(calls):
        results = list(right(calls))
        results[0] = results[0].roll(1, -1)
        return results

    right = draft_calls._make_joined
    monkeypatch.setattr(draft_calls, "_make_joined", mutant)


def see_everything(monkeypatch):
    def mutant(self, caches, places, visible):
        right(self, caches, places, [torch.ones_like(own) for own in visible])

    right = draft_calls._SeparateKeyValues.__init__
    monkeypatch.setattr(draft_calls._SeparateKeyValues, "__init__", mutant)


@pytest.mark.parametrize("mutate", [swap_keys, swap_results, see_everything])
def test_drafts_that_mix_are_noticed_and_cost_no_output(target, mutate, monkeypatch, calls_made):
    draft = make_head(target)
    with monkeypatch.context() as patched:
        mutate(patched)
        handles = decode(target, draft, DRAFTS["eagle3"][1])
    assert sum(wrong for _, wrong in calls_made) > 1
    assert check_as_alone(target, draft, handles) == 0


def test_bitwise_outputs_have_drafts_of_their_own(target, calls_made):
    draft = make_head(target)
    handles = decode(target, draft, [CONTINUED], bitwise=True)
    assert not calls_made
    assert check_as_alone(target, draft, handles) == 0


def test_the_time_of_drafts_is_counted_once(target):
    """Draft time is counted once, although each sequence is drafting while others draft."""
    batch, _ = submit(target, make_head(target), [CONTINUED])
    started_s = time.monotonic()
    while batch.step():
        pass
    elapsed_s, seconds = time.monotonic() - started_s, batch.timeline.seconds
    assert seconds["draft"] > 0
    assert sum(seconds.values()) - seconds[WAIT] < elapsed_s


def test_a_call_that_fails_fails_alone(target):
    draft = make_head(target)

    def ask(token, cache):
        options = {"caches": [cache], "visible_RC": torch.ones(1, 1, dtype=torch.bool)}
        state_RH = torch.full((1, draft.layer_config.hidden_size), 0.5)
        options["positions_R"] = torch.tensor([0])
        return DraftCall(draft.step, (torch.tensor([token]), state_RH), options)

    caches = [KeyValues() for _ in range(3)]
    calls = [ask(token, cache) for token, cache in zip((1, 10**6, 2), caches, strict=True)]
    assert make_first(calls) == calls
    with pytest.raises(IndexError):
        calls[1].outcome()
    assert [cache.num_rows for cache in caches] == [1, 0, 1]
    for one, token in ((calls[0], 1), (calls[2], 2)):
        alone = ask(token, KeyValues())
        alone.make()
        assert torch.equal(one.outcome(), alone.outcome())
