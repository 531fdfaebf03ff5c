"""Draft tokens by lookup: tokens after a repeated context; outputs equal the target's."""

import pytest
import torch
from decode_runs import PROMPTS, WAYS, engine_for, greedy_reference
from tiny_models import tiny_llama

from pipedraft.inference.followers import ORDER, Followers
from pipedraft.inference.sources.lookup import LookupSource, make_lookup

MORE = [
    {"schedule": "spd"},
    {"schedule": "spd", "tree_width": 3},
    {"schedule": "ppsd"},
    {"schedule": "pipeinfer"},
    {"schedule": "ssd"},
    {"schedule": "pipeinfer", "branches": 2},
]
KINDS = ["ngram", "suffix"]


def counted(text, path, kind, vocab):
    """Estimate by brute force, from the tokens after each suffix of text + path."""
    whole, p, before = [*text, *path], torch.full((vocab,), 1 / vocab), None
    for size in range(len(whole) + 1):
        context = whole[len(whole) - size :]
        places = [i for i in range(size, len(text) + 1) if text[i - size : i] == context]
        found = [text[i] for i in places if i < len(text)]
        if not found or (kind == "ngram" and size > ORDER):
            break
        if kind == "ngram" or places != before:  # longer suffixes at the same places add nothing
            counts = torch.tensor([found.count(token) for token in range(vocab)])
            p = (counts / (len(found) + 1)) + p / (len(found) + 1)
        before = places
    return p


def texts(count):
    generator = torch.Generator().manual_seed(3)
    for index in range(count):
        alphabet = 2 + index % 4
        yield torch.randint(alphabet, (1 + index % 23,), generator=generator).tolist()


def followers_of(kind, text, vocab):
    found = Followers(kind, vocab)
    for token in text:
        found.extend(token)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_that_of_a_brute_force_count(kind):
    for text in texts(120):
        for path in ([], [0], [1, 0], [5]):
            found = followers_of(kind, text, 6).estimate(path)
            assert found.equal(counted(text, path, kind, 6)), (text, path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_a_distribution_that_knows_the_longest_context(kind):
    model = followers_of(kind, [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 16)
    p = model.estimate([])
    assert float(p.sum()) == pytest.approx(1, abs=1e-6) and bool((p > 0).all())
    assert int(p.argmax()) == 4  # after 1 2 3; after 2 3 alone 5 is as frequent
    assert int(model.estimate([4]).argmax()) == 9
    assert float(Followers(kind, 16).estimate([7]).max()) == pytest.approx(1 / 16)


class Checked(LookupSource):
    """Lookup source with an assertion: every distribution sums to 1."""

    def _logits(self, tree, rows):
        logits_RV = super()._logits(tree, rows)
        assert torch.allclose(logits_RV.exp().sum(-1), torch.ones(len(rows)), atol=1e-5)
        return logits_RV


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS + MORE, ids=str)
def test_the_output_is_the_targets_under_every_schedule(kind, way):
    target = tiny_llama(vocab=16)
    source = Checked(make_lookup(kind, target))
    prompt = PROMPTS[2] * 2
    result = engine_for(target, source=source, num_stages=4, max_new_tokens=24, **way).decode(
        prompt
    )
    assert result.token_ids == greedy_reference(target, prompt, 24)
    assert result.num_drafted > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["eagle", "flowspec", "pipedec"])
def test_sampled_output_is_plain_decodings_with_shared_noise(kind, schedule):
    target = tiny_llama(vocab=16)
    options = {"num_stages": 3, "max_new_tokens": 24, "temperature": 1.0, "verifier": "gumbel"}
    plain = engine_for(target, schedule="autoregressive", **options).decode([3, 1, 4, 1])
    draft = make_lookup(kind, target)
    result = engine_for(target, draft=draft, schedule=schedule, **options).decode([3, 1, 4, 1])
    assert result.token_ids == plain.token_ids


def test_a_repeating_text_is_drafted_right_and_costs_nothing():
    """The target repeats itself: the draft is accepted in chains, at no draft cost."""
    target = tiny_llama(vocab=16)
    text = greedy_reference(target, [3], 60)
    for kind in KINDS:
        draft = make_lookup(kind, target)
        engine = engine_for(target, draft=draft, schedule="eagle", num_stages=2, max_new_tokens=24)
        result = engine.decode([3, *text])
        assert engine.draft_cost == 0
        assert result.mean_acceptance_length > 2, kind
