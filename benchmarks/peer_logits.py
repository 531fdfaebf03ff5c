"""Compare our logits for seven draft tokens with the logits from speculators and SpecForge.

    python -m venv --system-site-packages PEERS
    PEERS/bin/pip install --no-deps speculators==0.9.0 specforge==0.2.0 hs-connectors==0.9.0 \
      loguru pydantic-settings python-dotenv
    PYTHONPATH=.. PEERS/bin/python benchmarks/peer_logits.py --json

A random EAGLE-3 head for a random target is exported, loaded by each package, and imported again.
The package's logits at every row and step are compared with the imported head's. Packages not
installed are left out. For each package and kind of head, the output is the largest difference
relative to the largest logit, and whether every greedy draft token is the same.
"""

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # SpecForge compiles its norms

import torch
import torch.nn.functional as F
from measurement import make_parser
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pipedraft.models import load_draft
from pipedraft.models.exchange.export import Layout, export
from pipedraft.models.exchange.peers import import_head
from pipedraft.models.heads.configs import Eagle3Config
from pipedraft.models.heads.draft import TargetReference
from pipedraft.models.heads.eagle3 import Eagle3
from pipedraft.models.target import capture_hidden, target_fingerprint
from pipedraft.models.transformer.layers import KeyValues, LayerConfig

# R rows, H hidden, U draft vocabulary

STEPS, LENGTH, LAYERS, VOCABULARY = 7, 24, 8, 256
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "specforge": ("sglang", {}),
    "speculators": ("speculators", {}),
    "speculators, norm_before_residual": ("speculators", {"norm_before_residual": True}),
    "speculators, norm_before_fc": ("speculators", {"norm_before_fc": True}),
    "speculators, fc_norm and norm_output": (
        "speculators",
        {"fc_norm": True, "norm_output": True},
    ),
    "speculators, qwen3": ("speculators", {"query_key_norm": True}),
}


def random_target() -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def random_head(target: PreTrainedModel, name: str, options: dict[str, Any]) -> Eagle3:
    fingerprint = target_fingerprint(target)
    config = Eagle3Config(draft_vocab_size=100, **options).for_target(LAYERS)
    layer = LayerConfig.from_target(target.config)
    head = Eagle3(config, layer, TargetReference(name=name, fingerprint=fingerprint))
    head.initialize(target, torch.randperm(VOCABULARY)[:100].sort().values)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.3 / parameter.shape[-1] ** 0.5)
    return head


def ours(head: Eagle3, target: PreTrainedModel, ids_T: Tensor) -> list[Tensor]:
    """Return each step's logits [R, U], computed by the decoding code."""
    states_RH = head.feature(capture_hidden(target, ids_T[None], head.taps))[0, :-1]
    rows, caches, out = len(ids_T) - 1, [KeyValues()], []
    visible, tokens = torch.ones(rows, rows, dtype=torch.bool).tril(), F.pad(ids_T, (0, STEPS))
    for step in range(STEPS):
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


def by_speculators(folder: Path, target: PreTrainedModel, ids_T: Tensor) -> list[Tensor]:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).eval()
    states = target(input_ids=ids_T[None], output_hidden_states=True).hidden_states
    out: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: out.append(logits[0]))
    layers = model.config.eagle_aux_hidden_state_layer_ids
    model(
        hidden_states=torch.cat([states[layer][:, :-1] for layer in layers], -1),
        input_ids=ids_T[None, 1:],
        document_ids=torch.zeros(1, len(ids_T) - 1, dtype=torch.int64),
        ttt_steps=STEPS,
    )
    return out


def by_specforge(folder: Path, target: PreTrainedModel, ids_T: Tensor) -> list[Tensor]:
    from specforge.modeling.draft.llama3_eagle import (
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    # Not by from_pretrained: it leaves the rotary frequencies without values.
    model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(folder)).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.embed_tokens.weight.data = target.get_input_embeddings().weight
    states = target(input_ids=ids_T[None], output_hidden_states=True).hidden_states
    joined = [states[layer][:, :-1] for layer in (2, LAYERS // 2, LAYERS - 3)]
    hidden, rows = model.project_hidden_states(torch.cat(joined, -1)), len(ids_T) - 1
    mask = torch.ones(1, rows, dtype=torch.bool)
    mask = prepare_decoder_attention_mask(mask, (1, rows), hidden, 0)
    cache: list[list[Tensor]] = [[], []]
    tokens, out = F.pad(ids_T, (0, STEPS)), list[Tensor]()
    for step in range(STEPS):
        hidden = model.backbone(
            input_embeds=model.embed_input_ids(tokens[None, step + 1 : step + 1 + rows]),
            hidden_states=hidden,
            cache_hidden=cache,
            attention_mask=mask,
            position_ids=torch.arange(rows)[None],
        )
        out.append(model.compute_logits(hidden)[0])
    return out


@torch.no_grad()
def compare(name: str, layout: Layout, options: dict[str, Any]) -> dict[str, float | bool]:
    torch.manual_seed(0)
    target, ids_T = random_target(), torch.randint(VOCABULARY, (LENGTH,))
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        target.save_pretrained(place / "target")
        (place / "head").mkdir()
        random_head(target, str(place / "target"), options).save(place / "head")
        export(place / "head", layout, place / "peer")
        import_head(str(place / "peer"), str(place / "target"), place / "imported")
        head = load_draft(str(place / "imported"), target)
        assert isinstance(head, Eagle3)
        run = by_specforge if name == "specforge" else by_speculators
        pairs = list(
            zip(run(place / "peer", target, ids_T), ours(head, target, ids_T), strict=True)
        )
    # The last rows of later steps read tokens behind the text, which differ by package.
    pairs = [(x[: LENGTH - 1 - i], y[: LENGTH - 1 - i]) for i, (x, y) in enumerate(pairs)]
    return {
        "difference": max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs),
        "same_draft_tokens": all(torch.equal(x.argmax(-1), y.argmax(-1)) for x, y in pairs),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    found = {
        name: compare(name, layout, options)
        for name, (layout, options) in CASES.items()
        if importlib.util.find_spec(name.partition(",")[0]) is not None
    }
    if args.json:
        print(json.dumps(found))
        return
    for name, result in found.items():
        print(f"{name:40} {result['difference']:.1e} {result['same_draft_tokens']}")


if __name__ == "__main__":
    main()
