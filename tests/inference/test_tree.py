"""Token tree against an obvious model: a list with one path per row, in arrival order."""

import numpy as np
import pytest
import torch

from pipedraft.inference.tree import TokenTree
from pipedraft.models.target import KeepRows, prune_segment

VOCAB = 4


class PathModel:
    """Tree as a list: each row is the tuple of its path's tokens, root first."""

    def __init__(self, root_token: int, root_position: int) -> None:
        self.paths = [(root_token,)]
        self.position = root_position
        self.scores = {(root_token,): 0.0}
        self.num_injected = 0

    def add(self, parent: int, token: int, score: float) -> int:
        path = (*self.paths[parent], token)
        if path not in self.paths:
            self.paths.append(path)
            self.scores[path] = score
        return self.paths.index(path)

    def visible(self, row: int) -> list[bool]:
        own = self.paths[row]
        return [own[: len(path)] == path for path in self.paths]

    def keep_rows(self, path_rows: list[int], next_token: int) -> list[int]:
        """Return the path, then all rows starting with path + next token, in the same order."""
        opened = (*self.paths[path_rows[-1]], next_token)
        below = [i for i, path in enumerate(self.paths) if path[: len(opened)] == opened]
        return [*path_rows, *below]

    def reroot(self, path_rows: list[int], next_token: int) -> "PathModel":
        opened = (*self.paths[path_rows[-1]], next_token)
        kept = [path for path in self.paths if path[: len(opened)] == opened]
        model = PathModel(next_token, self.position + len(opened) - 1)
        model.paths = [path[len(opened) - 1 :] for path in kept]
        base = self.scores[opened]
        model.scores = {path[len(opened) - 1 :]: self.scores[path] - base for path in kept}
        model.num_injected = sum(self.paths.index(path) < self.num_injected for path in kept)
        return model


def assert_same(tree: TokenTree, model: PathModel) -> None:
    size = len(model.paths)
    assert len(tree) == size
    assert tree.tokens == [path[-1] for path in model.paths]
    assert tree.parents[0] == -1
    assert [model.paths[row] for row in tree.parents[1:]] == [p[:-1] for p in model.paths[1:]]
    assert tree.depths == [len(path) - 1 for path in model.paths]
    assert tree.scores == pytest.approx([model.scores[path] for path in model.paths])
    positions = [model.position + len(path) - 1 for path in model.paths]
    assert tree.positions(0, size).tolist() == positions
    assert [tree.position(row) for row in range(size)] == positions
    assert tree.visible(0, size).tolist() == [model.visible(row) for row in range(size)]
    assert tree.num_injected == model.num_injected
    for row, path in enumerate(model.paths):
        below = [i for i, p in enumerate(model.paths) if p[:-1] == path]
        assert tree.children(row) == below
        for token in range(VOCAB):
            child = (*path, token)
            expected = model.paths.index(child) if child in model.paths else None
            assert tree.child(row, token) == expected


def random_path(tree: TokenTree, rng: np.random.Generator) -> list[int]:
    """Path from the root to a random row."""
    row = int(rng.integers(len(tree)))
    path = [row]
    while tree.parents[path[0]] >= 0:
        path.insert(0, tree.parents[path[0]])
    return path


def grow(tree: TokenTree, model: PathModel, rng: np.random.Generator, rows: int) -> None:
    for _ in range(rows):
        parent, token = int(rng.integers(len(tree))), int(rng.integers(VOCAB))
        score = float(rng.normal())
        assert tree.add(parent, token, score) == model.add(parent, token, score)


@pytest.mark.parametrize("seed", range(12))
def test_random_growth_and_rerooting_follow_the_path_model(seed):
    rng = np.random.default_rng(seed)
    tree, model = TokenTree(2, 7), PathModel(2, 7)
    hits = 0
    for _ in range(25):
        grow(tree, model, rng, int(rng.integers(1, 12)))
        tree.num_injected = model.num_injected = int(rng.integers(tree.num_injected, len(tree) + 1))
        assert_same(tree, model)
        path, token = random_path(tree, rng), int(rng.integers(VOCAB))
        children = tree.children(path[-1])
        if children and rng.random() < 0.5:
            token = tree.tokens[children[-1]]
        keep = tree.keep_for(path, token)
        assert list(keep.rows) == model.keep_rows(path, token)
        assert keep.num_committed == len(path)
        if len(keep.rows) > keep.num_committed:
            hits += 1
            tree, model = tree.reroot(keep), model.reroot(path, token)
            assert_same(tree, model)
        else:
            assert tree.child(path[-1], token) is None
    assert 3 < hits < 25  # hits and misses were both seen


def test_a_repeated_draft_token_is_the_row_that_is_there():
    tree = TokenTree(1, 0)
    first = tree.add(0, 3, -0.5, torch.ones(4))
    assert tree.add(0, 3, -9.0) == first
    assert len(tree) == 2 and tree.scores[first] == -0.5
    assert tree.draft_probabilities[first] is not None
    other = tree.add(first, 3, -1.0)  # the same token below another parent is another row
    assert other != first and tree.children(0) == [first]


def test_the_ancestor_table_grows_past_its_first_size():
    tree = TokenTree(0, 5)
    for row in range(70):
        tree.add(row, row % 3, -1.0)
    chain = torch.ones(71, 71, dtype=torch.bool).tril()
    assert torch.equal(tree.visible(0, 71), chain)
    assert torch.equal(tree.visible(40, 50), chain[40:50, :50])


def test_a_copy_of_the_visible_rows_is_handed_out():
    tree = TokenTree(0, 0)
    tree.add(0, 1, 0.0)
    tree.visible(0, 2).fill_(False)
    assert tree.visible(0, 2).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("seed", range(8))
def test_a_pruned_segment_is_the_segment_of_the_rerooted_tree(seed):
    """Stages prune waiting segments, the controller re-roots its tree: both must agree."""
    rng = np.random.default_rng(100 + seed)
    tree, model = TokenTree(2, 7), PathModel(2, 7)
    compared = 0
    for _ in range(20):
        grow(tree, model, rng, 12)
        path = random_path(tree, rng)
        children = tree.children(path[-1])
        if not children:
            continue
        keep = tree.keep_for(path, tree.tokens[children[0]])
        cut = int(rng.integers(path[-1] + 1, len(tree) + 1))  # committed rows have left the stages
        kept = prune_segment(tree.segment(cut, len(tree)), keep, cut) if cut < len(tree) else None
        num_cached = len([row for row in keep.rows[keep.num_committed :] if row < cut])
        tree, model = tree.reroot(keep), model.reroot(path, tree.tokens[children[0]])
        if kept is None:
            assert num_cached == len(tree)
            continue
        expected = tree.segment(num_cached, len(tree))
        assert torch.equal(kept.ids, expected.ids)
        assert torch.equal(kept.positions, expected.positions)
        assert torch.equal(kept.visible, expected.visible)
        assert kept.lo == num_cached
        compared += 1
    assert compared > 2


@pytest.mark.parametrize("seed", range(20))
def test_keep_means_the_same_to_every_holder_of_rows(seed):
    """Cached rows, segment rows and mask columns drop exactly the rows absent from KeepRows."""
    rng = np.random.default_rng(200 + seed)
    total = int(rng.integers(1, 20))
    rows = tuple(np.flatnonzero(rng.random(total) < 0.6).tolist())
    keep = KeepRows(rows=rows, num_committed=int(rng.integers(len(rows) + 1)))
    names = [f"row{i}" for i in range(total)]
    kept = [names[i] for i in rows]
    uncommitted = kept[keep.num_committed :]
    lo, hi = sorted(rng.integers(0, total + 1, 2).tolist())
    segment = names[lo:hi]
    assert [names[i] for i in keep.cached(lo)] == [name for name in names[:lo] if name in kept]
    assert [segment[i] for i in keep.segment_rows(lo, hi)] == [n for n in segment if n in kept]
    assert [names[i] for i in keep.columns(hi)] == [n for n in names[:hi] if n in uncommitted]
