"""Heads on vLLM's last rank draft as in our own decoding, from hidden states in any portions."""

import pytest
import torch
from tiny_drafts import make_head, make_module
from tiny_models import tiny_llama

from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.inference.tree import TokenTree
from pipedraft.inference.vllm.drafts import make_draft
from pipedraft.inference.vllm.head import GREEDY, RankHead
from pipedraft.models.target import capture_hidden

TEXT = [5, 9, 3, 7, 1, 9, 3, 2, 8, 8, 4]


def saved(folder, kind, target):
    """Save a target and a head for it, and return their folders."""
    target.save_pretrained(folder / "target")
    head = make_head(target, kind)
    (folder / "head").mkdir()
    head.save(folder / "head")
    return head, str(folder / "head"), str(folder / "target")


def states_of(target, taps):
    found = capture_hidden(target, torch.tensor([TEXT]), set(taps))
    return [found[layer][0] for layer in sorted(set(taps))]


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_do_not_depend_on_the_portions(kind, depth, tmp_path):
    target = tiny_llama(layers=6)
    head, folder, name = saved(tmp_path, kind, target)
    states = states_of(target, head.taps)
    ranked = RankHead(folder, name, depth)
    assert ranked.taps == tuple(sorted(set(head.taps)))
    place = 0
    for size in (4, 1, 1, 3, 1):  # a prompt in chunks, then one token at a time
        end = place + size
        part = [state[place:end] for state in states]
        drafted = ranked.read("a", place, TEXT[place : end + 1], part, drafts=size == 1)
        place = end
        if size > 1:
            assert drafted == []
            continue
        source = EagleSource(head)
        taps = dict(zip(ranked.taps, (state[:end] for state in states), strict=True))
        source.begin(taps, TEXT[: end + 1])
        tree = TokenTree(TEXT[end], end)
        source.grow_tree(tree, ranked.shape, by_score=False, sampling=GREEDY)
        assert drafted == tree.tokens[1:] and len(drafted) == depth


def test_a_request_restarts_where_it_is_computed_again(tmp_path):
    target = tiny_llama(layers=6)
    head, folder, name = saved(tmp_path, "eagle3", target)
    states = states_of(target, head.taps)

    def read(ranked, name, start, end):
        part = [state[start:end] for state in states]
        return ranked.read(name, start, TEXT[start : end + 1], part, drafts=True)

    ranked, fresh = RankHead(folder, name, 2), RankHead(folder, name, 2)
    read(ranked, "a", 0, 6)
    assert read(ranked, "a", 0, 8) == read(fresh, "a", 0, 8)  # after a preemption
    ranked.forget("a")
    assert read(ranked, "a", 3, 8) == read(fresh, "b", 3, 8)  # behind a cached prefix


def test_another_kind_of_head_is_refused(tmp_path):
    target = tiny_llama(layers=6)
    target.save_pretrained(tmp_path / "target")
    (tmp_path / "head").mkdir()
    make_module(target, num_stages=2).save(tmp_path / "head")
    with pytest.raises(ValueError, match="is no EAGLE or MTP head; give one, or ngram"):
        RankHead(str(tmp_path / "head"), str(tmp_path / "target"), 1)


def test_the_scheduler_takes_the_newest_draft_token_for_a_place():
    draft = make_draft("head:folder", vocab_size=9)
    assert draft.guess("a", [1, 2], []) is None
    draft.receive({"a": (3, [7, 8])})
    assert draft.guess("a", [1, 2, 3], []) == 7
    assert draft.guess("a", [1, 2, 3], [6]) == 8
    assert draft.guess("a", [1, 2, 3], [6, 6]) is None
    assert draft.guess("a", [1, 2], []) is None
    assert draft.guess("b", [1, 2, 3], []) is None
    draft.receive({"a": (4, [5]), "b": (3, [4])})
    assert draft.guess("a", [1, 2, 3], [7]) == 5 and draft.guess("b", [1, 2, 3], []) == 4
    draft.forget("a")
    assert draft.guess("a", [1, 2, 3], [7]) is None
