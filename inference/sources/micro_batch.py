"""A few more guesses below one row of the tree, as far as the draft is sure of them."""

# Q leaves, U draft vocabulary, W best tokens of each

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from pipedraft.inference.shapes import MicroBatch
from pipedraft.inference.sources import DraftSource
from pipedraft.inference.tree import TokenTree


def grow_micro_batch(
    source: DraftSource,
    tree: TokenTree,
    features: Mapping[int, Tensor],
    *,
    start: int,
    batch: MicroBatch,
    shift: float,
    interrupted: Callable[[], bool],
) -> list[int]:
    """Guess up to ``batch.size`` tokens below a row, level by level.

    A branch ends where the draft's best token has a probability below ``accept + shift``. It forks
    into its next best tokens where theirs exceed ``split + shift``, while fewer than
    ``batch.branches`` branches were begun.

    Args:
        start: the row to continue.
        shift: what recovery and decay add to both thresholds.
        interrupted: asked before every draft forward but the first; True ends the micro-batch.

    Returns:
        The row of every guess, parents first; the tree may have had some of them before.
    """
    accept, split = batch.accept + shift, batch.split + shift
    rows: list[int] = []
    leaves, num_branches = [start], 1
    while leaves and len(rows) < batch.size and not (rows and interrupted()):
        logprob_QU = source.leaf_logits(tree, leaves, features).float().log_softmax(-1)
        best_QW, index_QW = logprob_QU.topk(min(batch.branches, logprob_QU.shape[1]), -1)
        tokens_QW = source.draft_ids[index_QW]
        level: list[int] = []
        for leaf, tokens, logprobs in zip(
            leaves, tokens_QW.tolist(), best_QW.tolist(), strict=True
        ):
            best, *others = zip(tokens, logprobs, strict=True)
            if math.exp(best[1]) < accept:
                continue
            forks = [guess for guess in others if math.exp(guess[1]) > split]
            forks = forks[: batch.branches - num_branches]
            num_branches += len(forks)
            room = batch.size - len(rows) - len(level)
            for token, logprob in [best, *forks][:room]:
                level.append(tree.add(leaf, token, tree.scores[leaf] + logprob))
        rows += level
        leaves = level
    return rows
