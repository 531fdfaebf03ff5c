"""Helpers for tests of block-drafting heads: objectives, written-out formulas, checked sources."""

import math

import pytest
import torch
from attention_runs import make_batch, tiny_objective
from decode_runs import CHAIN, GREEDY, PROMPTS, SMALL

from pipedraft.inference.shapes import TreeShape
from pipedraft.inference.sources.dflash import DFlashSource
from pipedraft.inference.sources.dspark import DSparkSource
from pipedraft.inference.tree import TokenTree
from pipedraft.models.heads.dspark import DSpark
from pipedraft.models.target import capture_hidden
from pipedraft.models.transformer.layers import KeyValues
from pipedraft.train.dflash import DFlashObjective
from pipedraft.train.dspark import DSparkObjective
from pipedraft.train.methods import DFlashTrainConfig, DSparkTrainConfig

OTHER_WAYS = [
    {"schedule": "pipeinfer"},
    {"schedule": "ssd", "draft_tokens": 3},
    {"schedule": "pipeinfer", "draft_tokens": 4, "branches": 3, "split": 0.05},
    {"schedule": "eagle", "tree": TreeShape(kind="chain", depth=9)},
]


SAMPLED_WAYS = [
    {"schedule": "eagle", "tree": CHAIN, "verifier": "rejection"},
    {"schedule": "flowspec_continued"},
    *(
        pytest.param(way, marks=pytest.mark.all)
        for way in (
            {"schedule": "eagle", "tree": SMALL},
            {"schedule": "pruned_pp", "tree": SMALL},
            {"schedule": "pipedec", "tree_width": 3},
            {"schedule": "pipeinfer"},
        )
    ),
]
"""The other ways are sampled with another head in test_eagle_schedules.py and test_pipeinfer.py.
Block heads decode all of them greedily."""
KINDS = {
    "dflash": (DFlashObjective, DFlashTrainConfig, {}),
    "dspark": (DSparkObjective, DSparkTrainConfig, {"markov_rank": 6}),
}


def make_objective(target=None, kind="dflash", **options) -> DFlashObjective:
    cls, config, sizes = KINDS[kind]
    given = config(**{"num_layers": 2, "block_size": 4, **sizes, **options})
    return tiny_objective(cls, given, target)


@torch.no_grad()
def decoded_block(draft, ids_T, feature_TH, anchor):
    """Draft a block with the runtime, the context arriving in two parts."""
    caches = [KeyValues() for _ in draft.layers]
    half = anchor // 2
    draft.propose(ids_T[half, None], 2, feature_TH[:half], position=half, caches=caches)
    rows, token = feature_TH[half:anchor], ids_T[anchor, None]
    return draft.propose(token, draft.config.block_size, rows, position=anchor, caches=caches)


def assert_training_is_decoding(objective) -> None:
    T, draft = 12, objective.draft
    batch = make_batch([[1] * T] * 2)
    ids_BT = batch.ids_BT
    with torch.no_grad():
        taps = capture_hidden(objective.target, ids_BT, draft.taps)
        feature_BTH = draft.feature(taps)
        anchors = [torch.arange(1, T), T + torch.tensor([3, 4, 8])]
        states_ASH = draft(taps, ids_BT, anchors)
    for states_SH, place in zip(states_ASH, torch.cat(anchors).tolist(), strict=True):
        text, anchor = divmod(place, T)
        expected_SH = decoded_block(draft, ids_BT[text], feature_BTH[text], anchor)
        if isinstance(draft, DSpark):
            # Where another text follows, the last places of a text lie beyond its tokens.
            count = min(len(expected_SH), T - anchor)
            before = ids_BT[text, anchor : anchor + count]
            states_SH, expected_SH = states_SH[:count], draft.behind(expected_SH[:count], before)
        torch.testing.assert_close(states_SH, expected_SH, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(draft.logits(states_SH), draft.logits(expected_SH))


def plain_block(objective, ids_T, taps_TH, anchor):
    """Oracle: one block by its equations, with a dense softmax, from the layers' matrices."""
    draft, R = objective.draft, objective.config.block_size
    context = draft.hidden_norm(draft.fc(torch.cat(taps_TH, -1)[:anchor]))
    mask_id = objective.target.config.vocab_size - 1
    ids = torch.tensor([int(ids_T[anchor])] + [mask_id] * (R - 1))
    x = objective.target.model.embed_tokens(ids)
    cos, sin = draft.rotary.of_heads(torch.arange(anchor + R), x.dtype)
    for layer in draft.layers:
        normed, own = layer.input_layernorm(x), layer.self_attn
        keys, values = own.key_value(torch.cat([context, normed]), cos, sin)
        query = own.query(normed, cos[anchor:], sin[anchor:])
        group = query.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (keys, values))
        scores = query.transpose(0, 1) @ keys.mT / query.shape[-1] ** 0.5
        x = layer.finish(x, (scores.softmax(-1) @ values).transpose(0, 1))
    return draft.norm(x)[objective.config.first_row :]


def plain_logits(objective, states, before):
    """Logits for block rows, each conditioned on the tokens before it."""
    draft, head = objective.draft, objective.target.lm_head
    logits = states @ head.weight[draft.draft_ids].T
    if not isinstance(draft, DSpark) or not draft.markov_head:
        return logits, states
    pairs = draft.markov_head.markov_w1.weight[before]
    both = torch.cat([states, pairs], -1)
    return logits + pairs @ draft.markov_head.markov_w2.weight.T, both


def plain_confidence(objective, both, rate):
    """Cross-entropy between predicted and measured acceptance, and the absolute error."""
    proj = objective.draft.confidence_head.proj
    said = (both[: proj.in_features] @ proj.weight[0] + proj.bias[0]).sigmoid()
    rate = rate.detach()
    entropy = -(rate * said.log() + (1 - rate) * (1 - said).log())
    return objective.config.confidence_weight * entropy, (said - rate).abs().item()


def turn_of(mask, anchor, most) -> int:
    """Count the labels after the anchor in the anchor's turn."""
    if not anchor or not mask[anchor]:
        return 0
    end = anchor
    while end + 1 < len(mask) and mask[end + 1]:
        end += 1
    return min(end - anchor, most)


def plain_loss(objective, batch):
    config, S = objective.config, objective.config.num_tokens
    names = [f"{k}_{i + 1}" for k in ("acceptance", "agreement", "count") for i in range(S)]
    loss, sums = 0.0, dict.fromkeys(names, 0.0)
    depth = objective.target.config.num_hidden_layers
    columns = batch.ids_BT, batch.mask_BT, batch.lengths
    for ids, mask, length in zip(*columns, strict=True):
        ids, mask = ids[:length], mask[:length].tolist()
        taps = capture_hidden(objective.target, ids[None], {*objective.draft.taps, depth})
        rows = [taps[layer][0] for layer in objective.draft.taps]
        last_TH = objective.target.model.norm(taps[depth][0])
        p_TV = objective.target.lm_head(last_TH).softmax(-1)
        for anchor in range(len(mask)):
            count = turn_of(mask, anchor, S)
            if not count:
                continue
            states = plain_block(objective, ids, rows, anchor)[:count]
            logits, both = plain_logits(objective, states, ids[anchor : anchor + count])
            q_SU, p_SV = logits.softmax(-1), p_TV[anchor : anchor + count]
            kept_SU = p_SV[:, objective.draft.draft_ids]
            label_S = kept_SU.argmax(-1)
            right = q_SU[range(count), label_S]
            weights = [math.exp(-i / config.decay_gamma) for i in range(count)]
            if config.position_weights == "dpace":
                smooth = (1 - config.dpace_alpha) * right.detach() + config.dpace_alpha
                prefix = smooth.cumprod(0)
                weights = [prefix[i:].sum() for i in range(count)]
            rate_S = torch.minimum(kept_SU, q_SU).sum(-1)
            normed_SU = kept_SU / kept_SU.sum(-1, keepdim=True)
            # Target mass outside the draft vocabulary is part of the distance.
            distance_S = (kept_SU - q_SU).abs().sum(-1) + 1 - kept_SU.sum(-1)
            divergence_S = {
                "kl": (normed_SU * (normed_SU.log() - q_SU.log())).sum(-1),
                "ce": -right.log(),
                "ce_l1": -config.loss_ce * right.log() + (1 - config.loss_ce) * distance_S,
            }[config.loss]
            wanted_SH = last_TH[anchor : anchor + count]
            gap_S = (states - wanted_SH).square().sum(-1) / wanted_SH.square().sum(-1)
            divergence_S = divergence_S + config.feature_weight * gap_S
            for i, rate in enumerate(rate_S):
                divergence = divergence_S[i]
                if getattr(config, "confidence", "none") != "none":
                    entropy, error = plain_confidence(objective, both[i], rate)
                    divergence = divergence + entropy
                    sums["confidence_error"] = sums.get("confidence_error", 0.0) + error
                loss = loss + weights[i] * divergence
                best = objective.draft.draft_ids[q_SU[i].argmax()]
                sums[f"acceptance_{i + 1}"] += rate.item()
                sums[f"agreement_{i + 1}"] += float(best == p_SV[i].argmax())
                sums[f"count_{i + 1}"] += 1
    return loss, sums


class Checked:
    """Compares every distribution with a block recomputed from the whole text."""

    def begin(self, features, tokens):
        self.seen, self.expected = [], {}
        super().begin(features, tokens)

    def observe(self, features, next_tokens):
        self.seen.append({layer: x.clone() for layer, x in features.items()})
        super().observe(features, next_tokens)

    def _logits(self, tree, rows):
        logits_QU, states = super()._logits(tree, rows), []
        for row in rows:
            depth, size = tree.depths[row], self.draft.config.num_tokens
            key = tree.root_position, size * (depth // size + 1)
            if key not in self.expected:
                self.expected[key] = self.from_scratch(tree.tokens[0], *key)
            state_H = self.expected[key][depth]
            if isinstance(self.draft, DSpark):
                state_H = self.draft.behind(state_H, torch.tensor(tree.tokens[row]))
            states.append(state_H)
        torch.testing.assert_close(logits_QU, self.draft.logits(torch.stack(states)))
        return logits_QU

    def from_scratch(self, token, position, num_tokens):
        taps = {layer: torch.cat([part[layer] for part in self.seen]) for layer in self.taps}
        draft, feature_TH = self.draft, self.draft.feature(taps)
        caches, anchor = [KeyValues() for _ in draft.layers], torch.tensor([token])
        assert len(feature_TH) == position
        num_rows = num_tokens + draft.config.first_row
        return draft.propose(anchor, num_rows, feature_TH, position=position, caches=caches)


class CheckedDFlash(Checked, DFlashSource):
    pass


class CheckedDSpark(Checked, DSparkSource):
    pass


def tree_of_one_pass(target, source, shape: TreeShape) -> TokenTree:
    """Return the tree that a source grows after a prompt in one head forward."""
    ids = PROMPTS[2]
    taps = capture_hidden(target, torch.tensor([ids]), source.taps)
    source.begin({layer: x[0] for layer, x in taps.items()}, [*ids, 5])
    tree = TokenTree(5, len(ids))
    assert source.grow_tree(tree, shape, by_score=True, sampling=GREEDY) > 2
    assert source.num_forwards == 1
    return tree
