"""Drafts for tiny targets: one maker per head."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from tiny_models import tiny_llama

from pipedraft.models.heads.configs import (
    Eagle3Config,
    EagleConfig,
    FlexSpecConfig,
    MTPConfig,
    PPSDConfig,
    SPDConfig,
)
from pipedraft.models.heads.dflash import DFlash
from pipedraft.models.heads.draft import TargetReference
from pipedraft.models.heads.dspark import DSpark
from pipedraft.models.heads.eagle import Eagle
from pipedraft.models.heads.eagle3 import Eagle3
from pipedraft.models.heads.flexspec import FlexSpec
from pipedraft.models.heads.language_model import LanguageModelDraft
from pipedraft.models.heads.mtp import MTP, native_parts
from pipedraft.models.heads.ppsd import PPSD
from pipedraft.models.heads.spd import SPD
from pipedraft.models.target import capture_hidden, target_fingerprint
from pipedraft.models.transformer.layers import KeyValues, LayerConfig

KINDS = [
    {"preset": "paper"},
    {"preset": "paper", "residual": True, "head_init": "target"},
    {"preset": "practical"},
    {"stem_layers": 1},
    {"feature_source": "self"},
    {"feature_source": "self", "stem_layers": 1},
]
FROZEN = ("embedding.", "anchor.", "norm.", "draft_ids")


def add_noise(network, size=0.3, generator=None, *, frozen=()) -> None:
    """Add noise to parameters: special values (an identity, zero) would hide a mistake.

    Args:
        frozen: name prefixes of unchanged parameters.
    """
    for name, parameter in network.named_parameters():
        if not name.startswith(frozen):
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.data.add_(noise / parameter.shape[-1] ** 0.5)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_head(target, kind="eagle3", **options):
    """Return a head with noise on its projections, accepted now and then."""
    fingerprint = target_fingerprint(target)
    layer = LayerConfig.from_target(target.config)
    reference = TargetReference(name="tiny", fingerprint=fingerprint)
    num_layers = fingerprint["num_layers"]
    if kind in ("dflash", "dspark"):
        make = DSpark if kind == "dspark" else DFlash
        sizes = {"markov_rank": 16} if kind == "dspark" else {}
        small = make.config_class(**{"num_layers": 2, "block_size": 8, **sizes, **options})
        vocabulary = fingerprint["vocab_size"]
        head = make(small.for_target(num_layers, vocabulary), layer, reference)
    elif kind == "eagle":
        head = Eagle(EagleConfig(num_target_layers=num_layers, **options), layer, reference)
    elif kind == "mtp":
        config = MTPConfig(num_target_layers=num_layers)
        if target.config.model_type.startswith("qwen3_5"):
            config, layer = native_parts(target.config)
        head = MTP(replace(config, **options), layer, reference)
    else:
        config = Eagle3Config(**options).for_target(num_layers)
        head = Eagle3(config, layer, reference)
    torch.manual_seed(5)
    head.initialize(target)
    add_noise(head, 0.2)
    return head.eval().requires_grad_(False)


def make_module(target, *, bias=False, **options) -> SPD:
    fingerprint = target_fingerprint(target)
    config = SPDConfig(num_target_layers=fingerprint["num_layers"], **options)
    layer = replace(LayerConfig.from_target(target.config), has_attention_bias=bias)
    module = SPD(config, layer, TargetReference(name="tiny", fingerprint=fingerprint))
    module.initialize(target)
    add_noise(module, generator=seeded(3))
    return module.double().eval()


def make_exit(target, **options) -> PPSD:
    """Return a head with noise on its weights, accepted now and then."""
    fingerprint = target_fingerprint(target)
    config = PPSDConfig(num_target_layers=fingerprint["num_layers"], **options)
    reference = TargetReference(name="tiny", fingerprint=fingerprint)
    head = PPSD(config, LayerConfig.from_target(target.config), reference)
    torch.manual_seed(5)
    head.initialize(target)
    add_noise(head)
    return head.eval().requires_grad_(False)


def kind_name(kind) -> str:
    return "-".join(map(str, kind.values()))


def make_draft(target, **options) -> FlexSpec:
    """Return a draft with noise on its trained weights, accepted now and then."""
    reference = TargetReference(name="tiny", fingerprint=FlexSpec.fingerprint(target))
    layer = LayerConfig.from_target(target.config)
    draft = FlexSpec(FlexSpecConfig(**options), layer, reference)
    torch.manual_seed(5)
    draft.initialize(target)
    add_noise(draft, frozen=FROZEN)
    return draft.eval().requires_grad_(False)


def evolved(target, *parts, seed=7):
    """Return the target with noise on some modules' parameters, as if tuned elsewhere."""
    copy = tiny_llama()
    copy.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for part in parts:
        for parameter in copy.get_submodule(part).parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return copy


def noisy_copy(target, noise=0.1):
    """Return a language model whose draft tokens are often, not always, accepted."""
    model = type(target)(target.config).to(target.dtype)
    model.load_state_dict(target.state_dict())
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * noise * parameter.std())
    return LanguageModelDraft(model.eval().requires_grad_(False), target)


def decode_chain(head, ids_T, features_TH, row: int, depth: int) -> list[torch.Tensor]:
    """States of a chain below ``row``: committed rows in two calls, then one token at a time."""
    caches, window = [KeyValues()], head.window or len(ids_T)
    for start, stop in ((0, row // 2), (row // 2, row + 1)):
        if stop > start:
            behind = torch.arange(start, stop)[:, None] - torch.arange(stop)
            visible = (behind >= 0) & (behind < window)
            state = head.step(
                ids_T[start + 1 : stop + 1],
                features_TH[start:stop],
                positions_R=torch.arange(start, stop),
                caches=caches,
                visible_RC=visible,
            )
    states = [state[-1]]
    for step in range(1, depth):
        state = head.step(
            ids_T[row + step + 1, None],
            states[-1][None],
            positions_R=torch.tensor([row + step]),
            caches=caches,
            visible_RC=torch.arange(row + step, -1, -1)[None] < window,
        )
        states.append(state[0])
    return states


def step_logits(target, head, ids_T, steps):
    """Compute logits [T-1, U] for each step at every row in a text, with the decoding code."""
    states_RH = head.feature(capture_hidden(target, ids_T[None], head.taps))[0, :-1]
    rows, caches, out = len(ids_T) - 1, [KeyValues()], []
    visible, tokens = torch.ones(rows, rows, dtype=torch.bool).tril(), F.pad(ids_T, (0, steps))
    for step in range(steps):
        states_RH = head.step(
            tokens[step + 1 : step + 1 + rows],
            states_RH,
            positions_R=torch.arange(rows) + step,
            caches=caches,
            visible_RC=visible,
        )
        visible = torch.cat([visible, torch.eye(rows, dtype=torch.bool)], 1)
        out.append(head.logits(states_RH))
    return out
