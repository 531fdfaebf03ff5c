"""Compare losses, gradients and drafted blocks with results from speculators and SpecForge.

    python -m venv --system-site-packages PEERS
    PEERS/bin/pip install --no-deps speculators==0.9.0 specforge==0.2.0 hs-connectors==0.9.0 \\
      loguru pydantic-settings python-dotenv
    PYTHONPATH=.. PEERS/bin/python benchmarks/peer_losses.py --json

The first cases are divergences between random rows. The other cases are heads that are exported
here and loaded by a package. EAGLE-3 reads three texts with different lengths, each alone, padded
and packed. The second text ends on an assistant token. DFlash and DSpark read a text written by the
target, with the same anchors on both sides. Each case runs the package's training pass and ours. It
prints the largest relative differences between losses, gradients and logits, and compares the most
likely draft tokens.

SpecForge's EAGLE-3 imports triton, which torch's CPU wheels do not have. With --train OUT the
script compares nothing. Instead, it trains an EAGLE-3 head for the embedded target with each
package's pass, and saves it with that package.
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.nn.functional as F
from measurement import make_parser
from peer_logits import LAYERS, VOCABULARY, random_target
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from pipedraft.data_recipes.config import DataConfig, Source
from pipedraft.data_recipes.recipe import load_data
from pipedraft.models.exchange.export import Layout, export
from pipedraft.models.heads.configs import Eagle3Config
from pipedraft.models.heads.draft import TargetReference
from pipedraft.models.heads.eagle3 import Eagle3
from pipedraft.models.target import (
    capture_hidden,
    load_target,
    load_tokenizer,
    target_fingerprint,
)
from pipedraft.models.transformer.layers import LayerConfig
from pipedraft.train import dflash
from pipedraft.train.batch import Batch
from pipedraft.train.dflash import DFlashObjective
from pipedraft.train.dspark import DSparkObjective
from pipedraft.train.eagle3 import Eagle3Objective
from pipedraft.train.losses import chunked_distillation
from pipedraft.train.methods import (
    DFlashTrainConfig,
    DSparkTrainConfig,
    Eagle3TrainConfig,
    LossKind,
)

# M rows, H hidden, V target vocabulary, U draft vocabulary, A anchors, S draft tokens of a block

LENGTH, BLOCK, PROMPT = 40, 7, 6
TARGET, TEXTS = "assets/target", "assets/train/answers.jsonl.gz"
STEPS, DECAY = 4, 0.8
MASKS = [[0] * 4 + [1] * 9 + [0], [0] * 3 + [1] * 6, [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]]
"""Loss masks for chains, 1 for assistant tokens; the second text ends on one."""
EAGER = {
    "kl": "kl_div",
    "rkl": "rkl",
    "jsd": "jsd",
    "ce": "ce",
    "tv": "tv",
    "lk": "nla",
    "lk_hybrid": "lk_hybrid",
}
"""Our divergences -> their names in speculators."""
Found = dict[str, float | bool]
Block = tuple[Tensor, dict[str, Tensor], Tensor]
"""Loss, gradients by name, logits [A S, U]."""


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def worst(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    return max(apart(ours, theirs) for ours, theirs in pairs)


def kl(logits_MU: Tensor, p_MU: Tensor) -> Tensor:
    return F.kl_div(logits_MU.log_softmax(-1), p_MU, reduction="batchmean")


# -- divergences ----------------------------------------------------------------------------


def rows(M: int, U: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return random hidden states and LM heads for draft and teacher, and draft vocabulary ids."""
    hidden, head = torch.randn(M, 32, requires_grad=True), torch.randn(U, 32, requires_grad=True)
    ids = torch.randperm(VOCABULARY)[:U].sort().values
    return hidden, head, torch.randn(M, 32), torch.randn(VOCABULARY, 32), ids


def compare_rows(kind: str, M: int, U: int, theirs: Callable[[Tensor, Tensor, Tensor], Tensor]):
    """Compare our divergence with ``theirs``, a function (draft logits, target logits, ids)."""
    torch.manual_seed(0)
    hidden, head, teacher, teacher_head, ids = rows(M, U)
    is_part = U < VOCABULARY
    measure = LossKind(kind=kind)  # type: ignore[arg-type]
    own = chunked_distillation(
        hidden,
        head,
        teacher,
        teacher_head,
        measure=measure,
        teacher_rows_U=ids if is_part else None,
    ).loss
    other = theirs(hidden @ head.T, teacher @ teacher_head.T, ids)
    gradients = [torch.autograd.grad(loss, (hidden, head)) for loss in (own, other)]
    return {
        "loss": apart(own.detach(), other.detach()),
        "gradients": worst(zip(*gradients, strict=True)),
    }


def summed(function: Any, logits: Tensor, target: Tensor, _: Tensor) -> Tensor:
    return function(logits[None], target[None]).sum()


def divergences() -> Iterator[tuple[str, Found]]:
    if importlib.util.find_spec("speculators") is not None:
        from speculators.losses.utils import resolve_loss_config

        for kind, name in EAGER.items():
            function, _ = resolve_loss_config(name, "eager")[name]
            yield (
                f"speculators, {kind}",
                compare_rows(kind, 20, VOCABULARY, partial(summed, function)),
            )
    if importlib.util.find_spec("specforge") is not None:
        from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss

        def whole(logits: Tensor, target: Tensor, ids: Tensor, name: str) -> Tensor:
            kept, mask = target.softmax(-1)[:, ids], torch.ones(1, len(logits), 1)
            rate, log_rate = compute_acceptance_rate(
                logits=logits[None], target_probs=kept[None], position_mask=mask
            )
            loss = compute_lk_loss(
                # Their kernel for this runs only on a GPU.
                kl_loss=kl(logits, kept / kept.sum(-1, keepdim=True)),
                acceptance_rate=rate,
                log_acceptance_rate=log_rate,
                lk_loss_type=name,
                kl_scale=1.0,
                kl_decay=3.0,
            )
            return loss * len(logits)

        for kind, name, M in (("lk", "alpha", 20), ("lk_hybrid", "lambda", 1)):
            label = f"specforge, {kind}, draft vocabulary"
            yield label, compare_rows(kind, M, 100, partial(whole, name=name))


# -- blocks ---------------------------------------------------------------------------------


def written_by(target: PreTrainedModel) -> Tensor:
    """Return token ids [T] with a random prompt and then the target's greedy tokens."""
    ids = torch.randint(VOCABULARY, (PROMPT,))
    while len(ids) < LENGTH:
        best = target(input_ids=ids[None]).logits[0, -1].argmax()
        ids = torch.cat([ids, best[None]])
    return ids


def make_objective(kind: str, target: PreTrainedModel, name: str, **options: Any) -> Any:
    cls: Any = DFlashObjective
    config: Any = DFlashTrainConfig
    sizes: dict[str, Any] = {"num_layers": 2, "block_size": BLOCK + 1, "decay_gamma": 4.0}
    if kind == "dspark":
        cls, config = DSparkObjective, DSparkTrainConfig
        sizes |= {"block_size": BLOCK, "markov_rank": 8}
    if kind == "eagle3":
        cls, config = Eagle3Objective, Eagle3TrainConfig
        sizes = {"num_steps": STEPS, "step_decay": DECAY}
    report = SimpleNamespace(to_dict=dict)
    objective = cls(
        config(**sizes, **options),
        target,
        target_name=name,
        revision=None,
        data=SimpleNamespace(report=report),  # type: ignore[arg-type]
    )
    for parameter in objective.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.3 / parameter.shape[-1] ** 0.5)
    return objective


@contextmanager
def these_anchors(anchors_A: Tensor) -> Iterator[None]:
    """Make our objective use these anchors instead of random ones."""
    with patch.object(dflash, "draw_anchors", lambda *_: [anchors_A]):
        yield


def ours(objective: DFlashObjective, ids_T: Tensor, anchors_A: Tensor) -> Block:
    mask = [0] * PROMPT + [1] * (LENGTH - PROMPT)
    batch = Batch.padded([{"input_ids": ids_T.tolist(), "loss_mask": mask}], 0)
    with these_anchors(anchors_A):
        output = objective(batch, torch.Generator())
    parameters = dict(objective.draft.named_parameters())
    gradients = torch.autograd.grad(output.loss, [*parameters.values()])
    draft, depth = objective.draft, objective.num_target_layers
    taps = capture_hidden(objective.target, ids_T[None], {*draft.taps, depth})
    logits = draft.logits(draft(taps, ids_T[None], [anchors_A])).flatten(0, 1)
    loss = output.loss / output.counted
    found = zip(parameters, (x / output.counted for x in gradients), strict=True)
    return loss.detach(), dict(found), logits.detach()


def states_of(
    target: PreTrainedModel, ids_T: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Return joined states of ``layers`` [1, T, k H], and the last layer's, raw and normed."""
    taps = capture_hidden(target, ids_T[None], {*layers, LAYERS})
    joined = torch.cat([taps[layer] for layer in layers], -1)
    return joined, taps[LAYERS], target.get_decoder().norm(taps[LAYERS])


def by_speculators(
    kind: str, place: Path, objective: DFlashObjective, ids_T: Tensor, anchors_A: Tensor
) -> Block:
    from speculators.losses.utils import resolve_loss_config
    from speculators.models.dflash import core as dflash_core
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark import core as dspark_core
    from speculators.models.dspark.core import DSparkDraftModel

    cls, module = (
        (DSparkDraftModel, dspark_core) if kind == "dspark" else (DFlashDraftModel, dflash_core)
    )
    config = cls.config_class.from_pretrained(place)
    config.transformer_layer_config._attn_implementation = "eager"
    model = cls.from_pretrained(place, config=config).train()
    model.load_verifier_weights()
    model.requires_grad_(True)
    chosen = anchors_A, torch.ones(len(anchors_A), dtype=torch.bool)
    seen: list[Tensor] = []
    right = module.compute_metrics

    def noted(logits: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(logits[0])
        return right(logits, *rest, **options)

    # Ours is 0.1 CE + 0.9 L1; the L1 distance is twice the total variation.
    terms = '{"ce": 0.1, "tv": 1.8}' if kind == "dspark" else "kl_div"
    joined, last, _ = states_of(objective.target, ids_T, objective.draft.taps)
    with (
        patch.object(dflash_core, "select_anchors", lambda *_: chosen),
        patch.object(module, "compute_metrics", noted),
        patch.object(dspark_core, "tv_loss", resolve_loss_config("tv", "eager")["tv"][0]),
    ):
        options = {} if kind == "dflash" else {"tv_loss_fn": dspark_core.tv_loss}
        _, loss, _ = model(
            hidden_states=joined,
            input_ids=ids_T[None],
            loss_mask=torch.ones(1, LENGTH),
            verifier_last_hidden_states=last,
            document_ids=torch.zeros(1, LENGTH, dtype=torch.int64),
            loss_config=resolve_loss_config(terms, "eager"),
            gamma=4.0,
            max_anchors=len(anchors_A),
            **options,
        )
    # Its mean is over the rows, ours over the anchors.
    loss.backward()
    gradients = {name: x.grad * BLOCK for name, x in model.named_parameters() if x.grad is not None}
    logits = seen[0].unflatten(0, (len(anchors_A), -1))[:, -BLOCK:].flatten(0, 1)
    return loss.detach() * BLOCK, gradients, logits.detach()


def by_specforge(
    kind: str, place: Path, objective: DFlashObjective, ids_T: Tensor, anchors_A: Tensor
) -> Block:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    given = json.loads((place / "config.json").read_text())
    is_dpace = objective.config.position_weights == "dpace"
    cls: Any = DSparkDraftModel if kind == "dspark" else DFlashDraftModel
    online: Any = OnlineDSparkModel if kind == "dspark" else OnlineDFlashModel
    if kind == "dspark":
        names = ["mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"]
        names += ["enable_confidence_head", "confidence_head_with_markov"]
        given["dflash_config"] = {name: given[name] for name in names}
    config = Qwen3Config(**{key: x for key, x in given.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    model = cls(config).train()
    weights = load_file(place / "model.safetensors")
    own = {key: x for key, x in weights.items() if key in model.state_dict()}
    model.load_state_dict(own)
    seen: list[Tensor] = []
    right = model.apply_logits_head

    def noted(*inputs: Any, **options: Any) -> Tensor:
        seen.append(right(*inputs, **options))
        return seen[-1]

    model.apply_logits_head = noted
    target: Any = objective.target
    trained = online(
        model,
        target.lm_head,
        target.model.embed_tokens,
        objective.draft.config.mask_token_id,
        block_size=model.block_size,
        attention_backend="sdpa",
        num_anchors=len(anchors_A),
        loss_decay_gamma=4.0,
        **({"loss_type": "dpace"} if is_dpace else {}),
    )
    keep = torch.ones(1, len(anchors_A), dtype=torch.bool)
    trained._sample_anchor_positions = lambda *_: (anchors_A[None], keep)
    joined, _, normed = states_of(target, ids_T, objective.draft.taps)
    more = {"target_last_hidden_states": normed} if kind == "dspark" else {}
    loss, _, _ = trained(ids_T[None], joined, torch.ones(1, LENGTH), **more)
    # Its mean is over the weights, or with D-PACE over the texts, ours over the anchors.
    scale = float((-torch.arange(BLOCK) / 4.0).exp().sum())
    scale = 1 / len(anchors_A) if is_dpace else scale
    loss.backward()
    gradients = {n: x.grad * scale for n, x in model.named_parameters() if x.grad is not None}
    if not seen:  # DFlash's logits are the LM head's
        hidden = trained._forward_draft_blocks(ids_T[None], joined, torch.ones(1, LENGTH))[2]
        seen = [target.lm_head(hidden).unflatten(1, (len(anchors_A), -1))[:, :, 1:]]
    return loss.detach() * scale, gradients, seen[0].flatten(0, 2).detach()


def compare_blocks(package: str, kind: str, layout: Layout, **options: Any) -> Found:
    torch.manual_seed(0)
    target = random_target()
    ids_T, anchors_A = written_by(target), torch.tensor([PROMPT, 11, 12, 20, LENGTH - BLOCK - 2])
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        target.save_pretrained(place / "target")
        objective = make_objective(kind, target, str(place / "target"), **options)
        (place / "head").mkdir()
        objective.draft.save(place / "head")
        export(place / "head", layout, place / "peer")
        run = by_specforge if package == "specforge" else by_speculators
        theirs = run(kind, place / "peer", objective, ids_T, anchors_A)
    found = ours(objective, ids_T, anchors_A)
    return {
        "loss": apart(found[0], theirs[0]),
        "gradients": worst((x, theirs[1][name]) for name, x in found[1].items()),
        "logits": apart(found[2], theirs[2]),
        "same_draft_tokens": torch.equal(found[2].argmax(-1), theirs[2].argmax(-1)),
    }


# -- chains ---------------------------------------------------------------------------------


def taps_of(target: PreTrainedModel, ids_BT: Tensor) -> tuple[Tensor, Any]:
    """Return the joined hidden states that EAGLE-3 reads, and the target's output."""
    output = target(input_ids=ids_BT, output_hidden_states=True)
    depth = target.config.num_hidden_layers
    layers = (2, depth // 2, depth - 3)
    return torch.cat([output.hidden_states[layer] for layer in layers], -1), output


def raw_states_of(target: PreTrainedModel, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the joined hidden states, and the last layer's before the final norm."""
    depth = target.config.num_hidden_layers
    layers = (2, depth // 2, depth - 3)
    taps = capture_hidden(target, ids_BT, {*layers, depth})
    return torch.cat([taps[layer] for layer in layers], -1), taps[depth]


def load_by_specforge(place: Path, target: Any) -> Any:
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    # Not by from_pretrained, which leaves its rotary frequencies without values.
    model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(place)).train()
    model.load_state_dict(load_file(place / "model.safetensors"), strict=False)
    model.embed_tokens.weight.data = target.get_input_embeddings().weight.data
    return model


def chain_by_specforge(
    model: Any, target: Any, batch: Batch, *, steps: int = STEPS, decay: float = DECAY
) -> Tensor:
    """Return SpecForge's loss for a padded batch.

    Args:
        steps: draft tokens of a chain; token i, from 0, has weight ``decay ** i``.
    """
    from specforge.algorithms.eagle3 import model as eagle3

    def kl_mean(logits: Tensor, p: Tensor, mask: Tensor) -> Tensor:
        # Their kernel for this runs only on a GPU.
        return (mask * (p * (p.log() - logits.log_softmax(-1)))).sum(2).mean()

    ids_BT, mask_BT = batch.ids_BT, batch.mask_BT.clone()
    mask_BT[torch.arange(len(mask_BT)), torch.tensor(batch.lengths) - 1] = 0  # as its data sets do
    joined, output = taps_of(target, ids_BT)
    with patch.object(eagle3, "LogSoftmaxLoss", SimpleNamespace(apply=kl_mean)):
        trained = eagle3.OnlineEagle3Model(model, length=steps, attention_backend="sdpa")
        losses = trained(
            input_ids=F.pad(ids_BT[:, 1:], (0, 1)),
            attention_mask=torch.ones_like(ids_BT, dtype=torch.bool),
            target=F.pad(output.logits[:, 1:], (0, 0, 0, 1)),
            loss_mask=mask_BT[..., None],
            hidden_states=joined,
        )[0]
    decayed = [decay**step * loss for step, loss in enumerate(losses)]
    return torch.stack(decayed).sum() * ids_BT.numel()


def load_by_speculators(place: Path, target: Any) -> Any:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(place)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(place, config=config).train()
    model.load_verifier_weights()
    return model.requires_grad_(True)


def chain_by_speculators(
    model: Any, target: Any, batch: Batch, *, steps: int = STEPS, decay: float = DECAY
) -> Tensor:
    """Return speculators' loss for a padded batch, whose texts it gets packed.

    Args:
        steps: draft tokens of a chain; token i, from 0, has weight ``decay ** i``.
    """
    from speculators.losses.utils import resolve_loss_config
    from speculators.models.eagle3 import core

    right = core.compute_metrics

    def summed(logits: Tensor, targets: Tensor, mask: Tensor, *rest: Any, **options: Any) -> Any:
        loss, metrics = right(logits, targets, mask, *rest, **options)
        return loss * mask[:, rest[1] :].sum(), metrics  # its mean is over a step's rows

    joined, last = raw_states_of(target, batch.ids_BT)

    def pack(x: Tensor, start: int, end: int) -> Tensor:
        parts = [row[start : length + end] for row, length in zip(x, batch.lengths, strict=True)]
        return torch.cat(parts)[None]

    document_BT = torch.arange(len(batch.lengths))[:, None].expand_as(batch.ids_BT)
    with patch.object(core, "compute_metrics", summed):
        _, loss, _ = model(
            hidden_states=pack(joined, 0, -1),
            input_ids=pack(batch.ids_BT, 1, 0),
            document_ids=pack(document_BT, 1, 0),
            loss_mask=pack(batch.mask_BT, 1, 0),
            verifier_last_hidden_states=pack(last, 1, 0),
            ttt_steps=steps,
            ttt_step_loss_decay=decay,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    return loss


CHAINS: dict[str, tuple[Layout, Callable[..., Any], Callable[..., Tensor]]] = {
    "speculators": ("speculators", load_by_speculators, chain_by_speculators),
    "specforge": ("sglang", load_by_specforge, chain_by_specforge),
}
"""Layout, loader and loss of each package's EAGLE-3."""


def compare_chains(package: str) -> Iterator[tuple[str, Found]]:
    """Compare losses and gradients, summed over the texts.

    Ours use single, padded and packed texts. SpecForge gets padded texts, speculators single texts.
    """
    torch.manual_seed(0)
    layout, load, run = CHAINS[package]
    target = random_target()
    texts = [
        {"input_ids": torch.randint(VOCABULARY, (len(mask),)).tolist(), "loss_mask": mask}
        for mask in MASKS
    ]
    padded, alone = Batch.padded(texts, 0), [Batch.padded([text], 0) for text in texts]
    batches = {"alone": alone, "padded": [padded], "packed": [Batch.packed(texts)]}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        target.save_pretrained(place / "target")
        objective = make_objective("eagle3", target, str(place / "target"), rows=package)
        (place / "head").mkdir()
        objective.draft.save(place / "head")
        export(place / "head", layout, place / "peer")
        given = [padded] if package == "specforge" else alone
        model = load(place / "peer", target)
        theirs = torch.stack([run(model, target, batch) for batch in given]).sum()
    theirs.backward()
    own = {name.replace("layers.0.", "midlayer."): x for name, x in model.named_parameters()}
    gradients, expected = {name: x.grad for name, x in own.items()}, theirs.detach()
    parameters = dict(objective.draft.named_parameters())
    for form, given in batches.items():
        losses = [objective(batch, torch.Generator()).loss for batch in given]
        loss = torch.stack(losses).sum()
        found = torch.autograd.grad(loss, [*parameters.values()])
        both = zip(parameters, found, strict=True)
        yield (
            form,
            {
                "loss": apart(loss.detach(), expected),
                "gradients": worst((x, gradients[name]) for name, x in both),
            },
        )


def peer_of(package: str, head: Eagle3, target: PreTrainedModel) -> Any:
    """Return the package's EAGLE-3 with the weights of ours and a frozen embedding."""
    layout, load, _ = CHAINS[package]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        (place / "head").mkdir()
        head.save(place / "head")
        export(place / "head", layout, place / "peer", target=head.reference.name)
        model = load(place / "peer", target)
    model.embed_tokens.requires_grad_(False)
    return model


def train_chains(out: Path) -> None:
    """Train an EAGLE-3 head with each package, one text per step, and save it with the package."""
    target, source = load_target(TARGET, dtype=torch.float32), Source(path=TEXTS, max_rows=64)
    recipe = DataConfig(sources=[source], max_length=192)
    rows = list(load_data(recipe, load_tokenizer(TARGET)).train)
    counts = torch.bincount(torch.tensor(sum((row["input_ids"] for row in rows), [])))
    ids = counts.argsort(descending=True)[:1024].sort().values
    config = Eagle3Config(draft_vocab_size=len(ids)).for_target(target.config.num_hidden_layers)
    reference = TargetReference(name=TARGET, fingerprint=target_fingerprint(target))
    head = Eagle3(config, LayerConfig.from_target(target.config), reference)
    head.initialize(target, ids)
    for package, (_, _, run) in CHAINS.items():
        model = peer_of(package, head, target)
        trained = [x for x in model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        for row in rows:
            batch = Batch.padded([row], 0)
            loss = run(model, target, batch) / batch.mask_BT.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{package}: {float(loss):.3f} on the last of {len(rows)} texts", flush=True)
        model.save_pretrained(out / package)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--train", type=Path, help="train EAGLE-3 heads into this folder instead")
    args = parser.parse_args()
    if args.train:
        return train_chains(args.train)
    found = dict(divergences())
    for package, (layout, *_) in CHAINS.items():
        if importlib.util.find_spec(package) is not None:
            for form, result in compare_chains(package):
                found[f"{package}, eagle3, {form}"] = result
            # DFlash's authors train with the text's tokens, speculators with distributions.
            own = {"loss": "ce"} if package == "specforge" else {}
            found[f"{package}, dflash"] = compare_blocks(package, "dflash", layout, **own)
            found[f"{package}, dspark"] = compare_blocks(package, "dspark", layout)
            if package == "specforge":
                own |= {"position_weights": "dpace"}
                label = f"{package}, dflash, D-PACE"
                found[label] = compare_blocks(package, "dflash", layout, **own)
    if args.json:
        print(json.dumps(found))
        return
    for name, result in found.items():
        said = (
            f"{key} {x:.1e}" if isinstance(x, float) else f"{key} {x}" for key, x in result.items()
        )
        print(f"{name:40} {', '.join(said)}")


if __name__ == "__main__":
    main()
