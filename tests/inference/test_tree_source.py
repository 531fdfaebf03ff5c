"""A tree-growing draft's memory: rows from two trees, read text, continued tokens."""

import contextlib

import pytest
import torch
from decode_runs import GREEDY, begun, paths_of
from tiny_drafts import make_head
from tiny_models import tiny_llama

from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources.base import Expansion
from pipedraft.inference.sources.eagle import EagleSource
from pipedraft.inference.sources.row_cache import RowCache
from pipedraft.inference.tree import TokenTree


def four_wide(num_forwards, by_score=True):
    return Expansion(num_forwards=num_forwards, width=4, max_rows=99, by_score=by_score)


def logits_from_scratch(head, target, text, tree, rows):
    """Logits for each row after its path alone, draft token by draft token."""
    found = []
    for path in (paths_of(tree)[row] for row in rows):
        source, _ = begun(head, target, text)
        alone = TokenTree(text[-1], tree.root_position)
        for token in path:
            source.leaf_logits(alone, [len(alone) - 1], {})
            alone.add(len(alone) - 1, token, 0.0)
        found.append(source.leaf_logits(alone, [len(alone) - 1], {})[0])
    return torch.stack(found)


def fresh_tree_then_more(head, target):
    """Merge a fresh tree into an in-flight tree; then continue all rows in both."""
    text = [3, 1, 4, 1, 5]
    source, _ = begun(head, target, text)
    tree = TokenTree(text[-1], 4)
    source.grow_layer(tree, {}, width=3, sampling=GREEDY)
    source.grow_layer(tree, {}, width=3, sampling=GREEDY)
    shape = TreeShape(depth=3, top_k=3, num_tokens=20)
    source.grow_tree(tree, shape, by_score=True, sampling=GREEDY)
    rows = list(range(len(tree)))
    logits_QU = source.leaf_logits(tree, rows, {})
    return (logits_QU - logits_from_scratch(head, target, text, tree, rows)).abs().max()


def test_draft_tokens_of_a_fresh_tree_are_continued_from_what_was_computed_for_them():
    target = tiny_llama(layers=4, vocab=16).double()
    assert fresh_tree_then_more(make_head(target).double(), target) < 1e-9


def forget_to_rename(monkeypatch):
    """Mutant: keys for the fresh tree's rows pass for other rows in the session's tree."""
    monkeypatch.setattr(EagleSource, "_name", lambda source, tree, row: row)


def adopt_one_row_further(monkeypatch):
    right = RowCache.rename

    def mutant(cache, names):
        right(cache, {name: abs(new - 1) if name < 0 else new for name, new in names.items()})

    monkeypatch.setattr(RowCache, "rename", mutant)


@pytest.mark.parametrize("mutate", [forget_to_rename, adopt_one_row_further])
def test_mixing_rows_of_two_trees_is_noticed(mutate, monkeypatch):
    mutate(monkeypatch)
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target).double()
    with contextlib.suppress(KeyError):
        assert fresh_tree_then_more(head, target) > 1e-4


def expanded(head, target, num_forwards):
    """Run three forwards on one context, commit the root, then run more forwards."""
    text = [3, 1, 4, 1, 5]
    source, rest = begun(head, target, text, 4)
    tree = TokenTree(text[3], 3)
    source.expand_tree(tree, four_wide(3), GREEDY)
    child = tree.add(0, text[4], -1.0)
    keep = tree.keep_for([0], text[4])
    assert child and len(keep.rows) > keep.num_committed
    tree = tree.reroot(keep)
    source.keep(keep)
    source.observe(rest, text[4:])
    before = source.num_forwards
    source.expand_tree(tree, four_wide(num_forwards), GREEDY)
    return source, tree, source.num_forwards - before


def test_a_tree_on_its_way_is_continued_below_its_root_and_its_best_draft_tokens():
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target).double()
    text = [3, 1, 4, 1, 5]
    source, _ = begun(head, target, text)
    layered, expanding = TokenTree(text[-1], 4), TokenTree(text[-1], 4)
    for _ in range(3):
        source.grow_layer(layered, {}, width=4, sampling=GREEDY)
    source, _ = begun(head, target, text)
    assert source.expand_tree(expanding, four_wide(3), GREEDY) == 12
    assert expanding.tokens == layered.tokens and source.num_forwards == 3
    for num_forwards in (1, 2, 3):
        source, tree, used = expanded(head, target, num_forwards)
        assert used == num_forwards
        truth = logits_from_scratch(head, target, text, tree, [0])
        assert (source.leaf_logits(tree, [0], {}) - truth).abs().max() < 1e-9
        best = truth.topk(4).indices[0].tolist()
        assert {head.draft_ids[index].item() for index in best} & {
            tree.tokens[row] for row in tree.children(0)
        }


def test_text_read_together_with_draft_tokens_is_read_as_before():
    """One pass or two: the same outputs for the root and the draft tokens."""
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target).double()
    outcomes = []
    for together in (True, False):
        text = [3, 1, 4, 1, 5]
        source, rest = begun(head, target, text, 4)
        tree = TokenTree(text[3], 3)
        child = tree.add(0, text[4], -1.0)
        for token in range(3):
            source.leaf_logits(tree, [tree.parents[child]], {})
            child = tree.add(child, token, -1.0)
        source.leaf_logits(tree, [tree.parents[child]], {})
        keep = tree.keep_for([0], text[4])
        tree = tree.reroot(keep)
        source.keep(keep)
        source.observe(rest, text[4:])
        if not together:
            source.leaf_logits(tree, [0], {})
        before = source.num_forwards
        outcomes.append(source.leaf_logits(tree, [len(tree) - 1, 0], {}))
        assert source.num_forwards == before + 1
    torch.testing.assert_close(*outcomes, rtol=0, atol=1e-9)


def test_without_scores_every_draft_token_has_as_many_children():
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target).double()
    source, _ = begun(head, target, [3, 1, 4])
    tree = TokenTree(4, 2)
    source.expand_tree(tree, four_wide(2, by_score=False), GREEDY)
    assert [len(tree.children(row)) for row in range(5)] == [4, 1, 1, 1, 1]


def test_rows_that_survive_a_keep_are_continued_from_their_own_states():
    target = tiny_llama(layers=4, vocab=16).double()
    head = make_head(target).double()
    text = [3, 1, 4, 1]
    source, _ = begun(head, target, text)
    tree = TokenTree(text[-1], 3)
    for _ in range(3):
        source.grow_layer(tree, {}, width=3, sampling=GREEDY)
    child = tree.children(0)[0]
    survivors = [row for row in range(len(tree)) if row and _descends(tree, row, child)]
    before = {paths_of(tree)[row][1:]: source._rows.outputs.get(row) for row in survivors}
    keep = tree.keep_for([0], tree.tokens[child])
    tree = tree.reroot(keep)
    source.keep(keep)
    kept = {paths_of(tree)[row]: state for row, state in source._rows.outputs.items()}
    assert kept and () not in kept
    for path, state in kept.items():
        assert torch.equal(state, before[path])
    assert source._rows.layers[0].num_rows == source._rows.num_text + len(kept)


def _descends(tree, row, ancestor) -> bool:
    while row > 0 and row != ancestor:
        row = tree.parents[row]
    return row == ancestor
