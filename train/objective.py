"""Base classes for training objectives, which connect the methods with the training loop."""

# B batch, T positions, P = B T, M labeled rows, L distinct labels, H hidden, S steps

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data_recipes.recipe import TokenizedData
from ..devices import place_draft
from ..errors import blaming
from ..files import Values
from ..inference.cost_model import continuous_acceptance_length
from ..models.heads.draft import (
    Draft,
    StagedDraft,
    TargetReference,
    draft_vocabulary,
    load_untied,
    read_description,
    resolve_folder,
)
from ..models.target import StagedTarget, capture_hidden
from ..models.transformer.decoder import embed, logits_divisor
from ..models.transformer.layers import LayerConfig
from .batch import Batch, pick, put
from .checkpoint import Layout, layout_of
from .features.reader import Features
from .losses import DistillationLoss, chunked_distillation
from .methods import DivergenceConfig, LossKind, StagedTrainConfig, StartConfig

EVALUATED_DEPTH = 7  # EAGLE-3's training depth, for all heads, so their scores are comparable


class LossOutput(NamedTuple):
    """Loss and metric sums of one forward pass. ZeRO-3 can find the tensors in a named tuple."""

    loss: Tensor
    """SUM over this forward pass's supervised tokens, differentiable."""
    counted: Tensor
    """Supervised tokens in this forward pass, int64 scalar."""
    sums: dict[str, Tensor]
    """Detached sums for metrics; ratios are computed after summing over processes."""


def labeled_rows(batch: Batch) -> Tensor:
    """Return bool [B, T] on the host, True at rows with an assistant token NEXT."""
    return F.pad(batch.mask_BT[:, 1:], (0, 1))


def feature_gap(hidden_MH: Tensor, teacher_LH: Tensor, index_M: Tensor | None) -> Tensor:
    """Return |h - t|^2 / |t|^2 per row, at least float32 [M], for LM head inputs h and t.

    The target's own LM head maps t to its logits. So a row close to t is right before the draft's
    LM head has seen the token, and few tokens teach more.

    Args:
        hidden_MH: the draft's; of wider rows, the first H columns count.
        index_M: teacher row of each row, on the host; None: row i has teacher row i.
    """
    # In 16 bits, small differences would underflow when squared.
    exact = torch.promote_types(teacher_LH.dtype, torch.float32)
    wanted_MH = teacher_LH.to(exact)
    if index_M is not None:
        wanted_MH = wanted_MH.index_select(0, put(index_M, wanted_MH))
    gap_MH = hidden_MH[:, : wanted_MH.shape[1]].to(exact) - wanted_MH
    size_M = wanted_MH.square().sum(1).clamp_min(torch.finfo(exact).tiny)
    return gap_MH.square().sum(1) / size_M


def acceptance_length(rates: list[float]) -> float:
    """Return tokens per verification round for chains with these acceptance rates.

    1 + sum_j prod_{i<=j} rates_i, as if draft tokens were accepted independently.
    """
    return 1 + float(np.cumprod(rates).sum())


C = TypeVar("C", bound=StartConfig)
StagedC = TypeVar("StagedC", bound=StagedTrainConfig)


def load_start(place: str, kind: type[Draft]) -> Draft:
    """Load the draft this run starts from, on the CPU. Raise ValueError for another method."""
    with torch.device("cpu"), blaming("model.init_from"):  # also inside a meta-device context
        draft = load_untied(resolve_folder(place))
    # isinstance would accept a DSpark head as a DFlash head
    if draft.draft_type != kind.draft_type:
        raise ValueError(
            f"model.init_from: {place!r} holds a draft of type {draft.draft_type!r}; give one of "
            f"type {kind.draft_type!r}, or leave it out"
        )
    return draft


class DraftObjective(nn.Module, ABC, Generic[C]):
    """Base class for objectives that distill a frozen target into a draft, configured by a ``C``.

    A subclass names its draft class and implements ``summarize`` and ``forward(batch, generator)``,
    which returns a ``LossOutput``. By default, ``num_supervised`` counts the rows before an
    assistant token. The target is no submodule, so it gets no optimizer state and is never saved.
    """

    draft_class: ClassVar[type[Draft]]
    noted: ClassVar[tuple[str, ...]] = ()
    """Configuration fields recorded in the checkpoint's training note."""
    config: C
    """Draft architecture and loss, as the method's dataclass."""
    draft: Draft
    card: Callable[[Values], str] | None = None
    """Creates a checkpoint's README.md from its config.json."""
    done: float = 1.0
    """Share of the run's optimizer steps that is done. The training loop sets it."""
    features: Features | None = None
    """Hidden states computed earlier or elsewhere; the target then needs no layers."""

    def __init__(
        self,
        config: C,
        target: PreTrainedModel,
        *,
        target_name: str,
        revision: str | None,
        data: TokenizedData,
        fingerprint: dict[str, int | str] | None = None,
    ) -> None:
        """
        Args:
            fingerprint: the target's fingerprint, by default computed from its weights.
        """
        super().__init__()
        # In a list: as an attribute the target would become a submodule, trained and saved.
        self.config, self._target, self._data = config, [target], data
        self.measure, self.feature_weight = LossKind(), 0.0
        if isinstance(config, DivergenceConfig):
            self.measure, self.feature_weight = config.measure, config.feature_weight
        self.layer_config = LayerConfig.from_target(target.get_decoder().config)
        self.reference = TargetReference(
            name=target_name,
            revision=revision,
            fingerprint=fingerprint or self.draft_class.fingerprint(target),
        )
        note = {name: getattr(config, name) for name in self.noted}
        self.training_note = {"data": data.report.to_dict(), **note}
        draft_ids = None
        if (size := self.draft_vocab_size) is not None:
            counts = label_counts(data, int(self.reference.fingerprint["vocab_size"]))
            draft_ids = draft_vocabulary(counts, size)
        self.draft = self.make_draft(config, self.layer_config, self.reference)
        self.draft.initialize(target, draft_ids)
        # On the meta device (--plan) there is nothing to load into.
        if config.init_from is not None and not next(self.draft.parameters()).is_meta:
            self._start_from(config.init_from)

    def _start_from(self, place: str) -> Draft:
        """Load the weights of a trained draft, and return it."""
        start = load_start(place, self.draft_class)
        start.reference.check_fingerprint(dict(self.reference.fingerprint))
        pairs = (start.config, self.draft.config), (start.layer_config, self.draft.layer_config)
        differing = [
            f"{name} {found}, this run {value}"
            for given, own in pairs
            for name, value in vars(own).items()
            # Not vars(given), which lacks defaults missing in the file.
            if (found := getattr(given, name)) != value
        ]
        if differing:
            raise ValueError(
                f"model.init_from: {place!r} has {'; '.join(differing)}; configure this run as it "
                "is, or leave it out"
            )
        # A head shared with the target is not in the file; the state loaded next must have it.
        start.attach(self.target)
        self.draft.load_state_dict(self.draft.state_dict() | start.state_dict())
        return start

    @classmethod
    def check_start(cls, config: C) -> None:
        """Raise ValueError if init_from holds another method's draft. The check needs no data."""
        if config.init_from is not None:
            load_start(config.init_from, cls.draft_class)

    @staticmethod
    def check(config: C, target: PreTrainedModel) -> None:
        """Raise ValueError if a setting does not match the target. The check needs no data."""

    @classmethod
    def make_draft(cls, config: C, layer: LayerConfig, reference: TargetReference) -> Draft:
        """Build a configuration's draft from the target's shapes alone."""
        kind = cls.draft_class.config_class
        known: Values = {f.name: getattr(config, f.name) for f in fields(kind)}
        # The target decides this field; no option sets it.
        if "num_target_layers" in known:
            known["num_target_layers"] = reference.fingerprint["num_layers"]
        return cls.draft_class(kind(**known), layer, reference)

    @classmethod
    def num_auxiliary(cls, config: C, layer: LayerConfig) -> int:
        """Return the number of parameters trained in addition to the draft."""
        return 0

    @property
    def draft_vocab_size(self) -> int | None:
        """Size of the draft vocabulary, which has the data's most frequent labels. None: all."""
        return vars(self.config).get("draft_vocab_size")

    @property
    def target(self) -> PreTrainedModel:
        return self._target[0]

    @property
    def num_steps(self) -> int:
        """Number S of draft tokens per chain in evaluations."""
        return EVALUATED_DEPTH

    @property
    def num_target_layers(self) -> int:
        return int(self.reference.fingerprint["num_layers"])

    def hidden(self, batch: Batch) -> dict[int, Tensor]:
        """Return raw hidden states [B, T, H] for the draft's layers and the target's last layer.

        The teacher reads the last layer. The target computes the states, unless the batch has them
        or ``features`` has them stored.
        """
        if batch.features:
            return batch.features
        ids_BT, layers = batch.ids_BT, {*self.draft.taps, self.num_target_layers}
        if self.features is None:
            return capture_hidden(self.target, ids_BT, layers, batch.documents)
        decoder = self.target.get_decoder()
        # Layer 0, the embedding, follows from the ids and is not stored.
        hidden = self.features.read(batch, layers - {0}, decoder.norm.weight.dtype)
        if 0 in layers:
            hidden[0] = embed(decoder.embed_tokens, decoder.config, ids_BT)
        return hidden

    def teacher(self, last_BTH: Tensor, labeled_BT: Tensor) -> Tensor:
        """Return LM head inputs [M, H] on labeled rows, from the last layer's raw states."""
        with torch.no_grad():
            return self._normed(pick(last_BTH, labeled_BT))

    def _normed(self, last_LH: Tensor) -> Tensor:
        """Apply the target's final norm. The LM head turns the result into the target's logits."""
        decoder = self.target.get_decoder()
        # The loss only multiplies by the LM head: dividing its input divides the logits.
        return decoder.norm(last_LH) / logits_divisor(decoder.config)

    @property
    def pair_UR(self) -> Tensor | None:
        """Return the draft's second LM head (see ``chunked_distillation``), if it has one."""
        return None

    def distil(
        self,
        hidden_MH: Tensor,
        teacher_LH: Tensor,
        *,
        measure: LossKind | None = None,
        teacher_index_M: Tensor | None = None,
        weights_M: Tensor | None = None,
    ) -> DistillationLoss:
        """Return the divergence between the draft's and the target's LM head outputs.

        Args:
            measure: by default the configured one.
            teacher_index_M, weights_M: see ``chunked_distillation``.
        """
        draft: Any = self.draft  # any class with an LM head
        head_VH: Any = self.target.get_output_embeddings().weight
        rows_U = None if self.draft_vocab_size is None else draft.draft_ids
        # Not in evaluations, whose metrics must count the target tokens that the draft lacks.
        if rows_U is not None and self.skips_outside and torch.is_grad_enabled():
            head_VH, rows_U = head_VH[rows_U], None
        result = chunked_distillation(
            hidden_MH,
            draft.lm_head.weight,
            teacher_LH,
            head_VH,
            pair_weight_UR=self.pair_UR,
            measure=measure or self.measure,
            teacher_index_M=teacher_index_M,
            teacher_rows_U=rows_U,
            weights_M=weights_M,
        )
        weight = self.feature_weight if measure is None and torch.is_grad_enabled() else 0
        if not weight:
            return result
        gap_M = feature_gap(hidden_MH, teacher_LH, teacher_index_M)
        if weights_M is not None:
            gap_M = gap_M * weights_M.to(gap_M.dtype)
        return replace(result, loss=result.loss + weight * gap_M.sum())

    @property
    def skips_outside(self) -> bool:
        return vars(self.config).get("teacher_vocabulary") == "draft"

    def use_checkpointing(self) -> None:
        """Save only each layer's input and recompute the rest in backward."""
        self.draft.checkpointing = True

    def num_supervised(self, batch: Batch) -> int:
        """Return the number of tokens ``forward`` will count. Only the host works for it."""
        return int(labeled_rows(batch).sum())

    def notes(self) -> Iterator[str]:
        """Yield lines that explain a run's table of losses."""
        if self.feature_weight:
            yield (
                f"the table's loss includes {self.feature_weight:g} times a regression "
                "(model.feature_weight); the held-out loss is without it"
            )

    def start_on(self, batches: Iterable[Batch]) -> None:
        """Fit initial weights from training batches, which are made on demand."""

    def evaluation_options(self) -> Values:
        """Return ``forward``'s options in validation."""
        return {}

    @abstractmethod
    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Compute metrics from sums. The highest ``score`` selects the best checkpoint."""

    def draft_with(self, weights: dict[str, Tensor]) -> Draft:
        """Return a copy of the draft for decoding. The draft in training stays as it is."""
        place = self.target.get_input_embeddings().weight.device
        devices = [] if place.type == "cpu" else [place]
        # A new network draws initial weights; the run's own random numbers must not move.
        with torch.random.fork_rng(devices=devices, device_type=place.type), place:
            copy = self.draft_class(self.draft.config, self.layer_config, self.reference)
        copy.load_state_dict(own_weights(weights))
        copy.attach(self.target)
        return place_draft(copy.eval().requires_grad_(False), self.target)

    def layout(self) -> Layout:
        """Return the tensors that ``save`` writes. Call this before the network is sharded."""
        state = self.draft.state_dict()
        return layout_of({name: x for name, x in state.items() if self.draft.is_saved(name)})

    def save(self, folder: Path, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        """Write a checkpoint. ``weights`` is the whole state, gathered from all processes."""
        note = {**self.training_note, "metrics": metrics}
        self.draft.save(folder, training=note, weights=own_weights(weights))
        if self.card is not None:
            (folder / "README.md").write_text(self.card(read_description(folder)))


def own_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the draft's part of an objective's state, without other trained modules."""
    prefix = "draft."
    return {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}


class ChainObjective(DraftObjective[C]):
    """Base class for heads with a loss on each draft token i of a chain, which is called step i."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number S of draft tokens trained per chain."""

    def distil_labels(
        self,
        hidden_MH: Tensor,
        label_M: Tensor,
        taps: Mapping[int, Tensor],
        *,
        measure: LossKind | None = None,
        weights_M: Tensor | None = None,
    ) -> DistillationLoss:
        """Return the divergence for rows that predict the tokens ``label_M``, in row order.

        Args:
            hidden_MH: input to the draft's LM head.
            label_M: place of each row's predicted token, as b T + t, on the host.
            measure: by default the configured one.
            weights_M: factor for each row in the loss, on any device.
        """
        # Sort by label: rows predicting the same token share the target's distribution for it.
        sorted_M, order_M = label_M.sort(stable=True)
        label_L, teacher_index_M = sorted_M.unique_consecutive(return_inverse=True)
        with torch.no_grad():
            last_PH = taps[self.num_target_layers].flatten(0, 1)
            # The target predicts a token from the position before it.
            teacher_LH = self._normed(last_PH.index_select(0, put(label_L - 1, last_PH)))
        order_M = put(order_M, hidden_MH)
        result = self.distil(
            hidden_MH.index_select(0, order_M),
            teacher_LH,
            measure=measure,
            teacher_index_M=teacher_index_M,
            weights_M=None if weights_M is None else put(weights_M, hidden_MH)[order_M],
        )
        # The inverse permutation: callers get their own row order back.
        place_M = torch.empty_like(order_M).index_copy_(
            0, order_M, torch.arange(len(order_M), device=order_M.device)
        )
        rows = {f.name: getattr(result, f.name) for f in fields(result)}
        return replace(result, **{n: x[place_M] for n, x in rows.items() if n.endswith("_M")})

    def by_step(self, result: DistillationLoss, step_M: Tensor, counts_S: Tensor) -> LossOutput:
        """Return the loss and each step's sums, with the first step's rows as supervised tokens.

        Args:
            step_M: each row's step, on the host.
            counts_S: rows in each step, on the host.
        """
        zeros_S, step_M = result.loss.new_zeros(len(counts_S)), put(step_M, result.loss)
        sums_S = {
            "count": counts_S,
            "acceptance": zeros_S.index_add(0, step_M, result.acceptance_M),
            "agreement": zeros_S.index_add(0, step_M, result.agreement_M),
        }
        sums = {"mass_outside": result.mass_outside_M.sum()}
        for name, values_S in sums_S.items():
            sums |= {f"{name}_{step}": value for step, value in enumerate(values_S, 1)}
        return LossOutput(result.loss, counts_S[0], sums)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Return each draft token's rates (given that earlier ones accept) and tokens per round.

        While training has shorter chains, tokens per round count later draft tokens as accepted as
        often as the last one, so that the figure does not jump when chains get longer.
        """
        metrics = {"loss": sums["loss"] / max(sums["count"], 1)}
        steps = [step for step in range(1, self.num_steps + 1) if f"count_{step}" in sums]
        if self.draft_vocab_size:
            rows = sum(sums[f"count_{step}"] for step in steps)
            metrics["mass_outside"] = sums["mass_outside"] / max(rows, 1)
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            rates = [sums[f"{key}_{step}"] / max(sums[f"count_{step}"], 1) for step in steps]
            metrics |= {f"{key}_{step}": rate for step, rate in zip(steps, rates, strict=True)}
            rates += rates[-1:] * (self.num_steps - len(rates))
            metrics[f"acceptance_length_T{temperature}"] = acceptance_length(rates)
        return metrics | {"score": metrics["acceptance_length_T0"]}


class StagedObjective(DraftObjective[StagedC]):
    """Base class for drafts on a staged target. Row t predicts the token at t + 1."""

    noted: ClassVar[tuple[str, ...]] = ("loss", "feature_weight")
    draft: StagedDraft

    @staticmethod
    def check(config: StagedC, target: PreTrainedModel) -> None:
        num_stages = StagedTarget(target, config.boundaries or config.num_stages).num_stages
        if num_stages != config.num_stages:
            raise ValueError(
                f"model.boundaries: {list(config.boundaries)} make {num_stages} stages, "
                f"model.num_stages is {config.num_stages}; give {config.num_stages + 1} numbers"
            )

    def compare(self, stream_MH: Tensor, teacher_MH: Tensor) -> DistillationLoss:
        """Return the divergence between the draft's and the teacher's rows, at temperature 1."""
        return self.distil(self.draft.norm(stream_MH), teacher_MH)

    def add_rates(
        self, metrics: dict[str, float], rates: Mapping[str, list[float]], tokens_per_step: int = 1
    ) -> dict[str, float]:
        """Add teacher-forced rates and the L' to expect if draft tokens were independent.

        Args:
            rates: agreement and acceptance with 1, 2 .. tokens in flight, or one rate for all.
        """
        for key, temperature in (("agreement", 0), ("acceptance", 1)):
            # The last rate is that of a full pipeline, the usual state in decoding.
            metrics[key] = rates[key][-1]
            simulated = continuous_acceptance_length(
                rates[key], self.config.num_stages, tokens_per_step
            )
            metrics[f"equivalent_acceptance_length_T{temperature}"] = simulated
        return metrics | {"score": metrics["equivalent_acceptance_length_T0"]}


def label_counts(data: TokenizedData, vocab_size: int) -> Tensor:
    """Count how often each token is an assistant token in the training rows, as int64 [V]."""
    real = torch.device("cpu")  # also inside a meta-device context
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=real)
    # In pieces: the whole columns as Python lists would need many times their memory.
    for start in range(0, len(data.train), 1000):
        rows = data.train[start : start + 1000]
        for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True):
            chosen = torch.as_tensor(mask, dtype=torch.bool, device=real)
            supervised = torch.as_tensor(ids, device=real)[chosen]
            counts += torch.bincount(supervised, minlength=vocab_size)
    return counts
