"""Losses, their gradients and blocks, by the packages that others train heads with and by this one.

    python -m venv --system-site-packages PEERS
    PEERS/bin/pip install --no-deps speculators==0.9.0 specforge==0.2.0 hs-connectors==0.9.0 \\
      loguru pydantic-settings python-dotenv
    PYTHONPATH=.. PEERS/bin/python benchmarks/peer_losses.py --json

Divergences of random rows, then DFlash and DSpark heads that were exported and loaded by a package:
the same anchors of a text that the target wrote, the package's training pass and ours. Of every
case: by how much the loss, the gradients and the logits differ at most, over the largest of their
kind, and whether the most likely draft tokens are the same.
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
from peer_logits import LAYERS, VOCABULARY, random_target
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from pipedraft.benchmarks.measurement import make_parser
from pipedraft.data_recipes.batch import collate
from pipedraft.models.exchange.export import Layout, export
from pipedraft.models.target import capture_hidden
from pipedraft.train import dflash
from pipedraft.train.dflash import DFlashObjective, DFlashTrainConfig
from pipedraft.train.dspark import DSparkObjective, DSparkTrainConfig
from pipedraft.train.losses import LossKind, chunked_distillation

# M rows, H hidden, V target vocabulary, U draft vocabulary, A anchors, S draft tokens of a block

LENGTH, BLOCK, PROMPT = 40, 7, 6
EAGER = {
    "kl": "kl_div",
    "rkl": "rkl",
    "jsd": "jsd",
    "ce": "ce",
    "tv": "tv",
    "lk": "nla",
    "lk_hybrid": "lk_hybrid",
}
"""Our divergences, and what speculators calls them."""
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
    """Hidden, head, the teacher's hidden and head, and the ids of the draft vocabulary."""
    hidden, head = torch.randn(M, 32, requires_grad=True), torch.randn(U, 32, requires_grad=True)
    ids = torch.randperm(VOCABULARY)[:U].sort().values
    return hidden, head, torch.randn(M, 32), torch.randn(VOCABULARY, 32), ids


def compare_rows(kind: str, M: int, U: int, theirs: Callable[[Tensor, Tensor, Tensor], Tensor]):
    """A divergence of ours with one of theirs: of draft logits, target logits and draft ids."""
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
                # Their kernel of it runs on a GPU alone.
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
    """Token ids [T] whose answer is the target's own, so that its best token is the text's."""
    ids = torch.randint(VOCABULARY, (PROMPT,))
    while len(ids) < LENGTH:
        best = target(input_ids=ids[None]).logits[0, -1].argmax()
        ids = torch.cat([ids, best[None]])
    return ids


def make_objective(
    kind: str, target: PreTrainedModel, name: str, **options: Any
) -> DFlashObjective:
    cls, config = DFlashObjective, DFlashTrainConfig
    sizes: dict[str, Any] = {"num_layers": 2, "block_size": BLOCK + 1, "decay_gamma": 4.0}
    if kind == "dspark":
        cls, config = DSparkObjective, DSparkTrainConfig
        sizes |= {"block_size": BLOCK, "markov_rank": 8}
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
    """Ours are drawn by one function."""
    with patch.object(dflash, "draw_anchors", lambda *_: [anchors_A]):
        yield


def ours(objective: DFlashObjective, ids_T: Tensor, anchors_A: Tensor) -> Block:
    mask = [0] * PROMPT + [1] * (LENGTH - PROMPT)
    batch = collate([{"input_ids": ids_T.tolist(), "loss_mask": mask}], 0)
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
    """Joined hidden states [1, T, k H], and those of the last layer, raw and normed."""
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

    # The distance is twice the total variation, in the mixture of ours.
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    found = dict(divergences())
    layouts: dict[str, Layout] = {"speculators": "speculators", "specforge": "sglang"}
    for package, layout in layouts.items():
        if importlib.util.find_spec(package) is not None:
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
