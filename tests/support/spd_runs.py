"""Decode with speculation modules, and compare row by row with training."""

import torch
from decode_runs import PROMPTS, PlainTokenizer, RemembersText
from tiny_drafts import make_module
from tiny_models import tiny_llama

from pipedraft.inference.config import DecodeConfig
from pipedraft.inference.engine import Engine
from pipedraft.inference.sources.spd import SPDSource
from pipedraft.models.target import capture_hidden


class LikeTraining(RemembersText, SPDSource):
    """Compares the logits of every chain with the matching row in a training pass over the whole
    text."""

    def __init__(self, draft, target, *, more=0, shallower=0) -> None:
        super().__init__(draft)
        self.target, self.more, self.fills = target, more, set()
        own = draft.feature_layers
        mutants = [own[max(depth - shallower, 0)] for depth in range(len(own))]
        # A projection is made for as many layers.
        pairs = zip(mutants, own, strict=True)
        self.trained_layers = [m if len(m) == len(layers) else layers for m, layers in pairs]

    def deepest_logits(self, tree, features):
        found_QU = super().deepest_logits(tree, features)
        ids = torch.tensor([[*self.text[:-1], *tree.tokens]])
        self.fills.add(len(tree))
        own, self.draft.feature_layers = self.draft.feature_layers, self.trained_layers
        with torch.no_grad():
            taps = capture_hidden(self.target, ids, self.taps)
            trained_TU = self.draft.logits(self.draft(taps, [len(tree) + self.more]))[0]
        self.draft.feature_layers = own
        torch.testing.assert_close(found_QU[0], trained_TU[-1], rtol=1e-8, atol=1e-8)
        return found_QU


def decode_like_training(mutant=None, **module) -> set[int]:
    """Count the tokens in flight at the forwards of a chain on four stages.

    Args:
        mutant: how ``LikeTraining`` reads the training pass wrongly.
    """
    target = tiny_llama(layers=8, vocab=16).double()
    draft = make_module(target, num_stages=4, num_layers=2, **module)
    source = LikeTraining(draft, target, **mutant or {})
    settings = {name: getattr(draft.config, name) for name in ("timing", "tokens_per_step")}
    config = DecodeConfig.of("spd", num_stages=4, max_new_tokens=24, **settings)
    Engine(target, PlainTokenizer(), config, draft, source=source).decode(PROMPTS[2])
    return source.fills
