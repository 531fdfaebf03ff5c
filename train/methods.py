"""Training settings of each method: head, loss and initial weights.

No torch: commands check their options before importing it.
"""

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError, check_ranges
from ..models.heads.configs import (
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    FlexSpecConfig,
    PPSDConfig,
    SPDConfig,
    StagedDraftConfig,
)

Divergence = Literal["kl", "tv", "lk", "lk_hybrid", "ce", "ce_l1", "rkl", "jsd", "topk_kl"]


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """Loss per row, computed from the target's and the draft's distribution."""

    kind: Divergence = "kl"
    eta: float = 3.0
    """eta in lk_hybrid: a larger one moves from kl to tv at a lower acceptance."""
    top_k: int = 10
    """Number of most likely tokens in topk_kl."""
    ce_share: float = 0.1
    """Share of ce in ce_l1."""
    drops_outside: bool = False
    """Ignore rows whose top target token is missing from the draft vocabulary."""


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Initial weights for a draft."""

    init_from: str | None = None
    """Trained draft (folder or Hub id) with the same method, architecture and target. This run
    starts with its weights and draft vocabulary. None: a new draft."""


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig(StartConfig):
    """Loss for heads trained by distillation alone."""

    loss: Divergence = "kl"
    """kl: KL(target || draft), as in the papers. tv, lk: total variation and -log of the acceptance
    probability, which determine decoding speed. lk_hybrid: kl if little is accepted, tv if much is.
    ce: the target's most likely token as the label. rkl, jsd: reverse KL and Jensen-Shannon.
    topk_kl: kl over the target's most likely tokens only."""
    loss_eta: float = 3.0
    """lk_hybrid: a larger value moves from kl to tv at a lower acceptance; 3 in its paper."""
    loss_top_k: int = 10
    """topk_kl: number of most likely tokens to compare."""
    loss_ce: float = 0.1
    """ce_l1: share of ce; the rest is l1, the sum of |p - q|. 0.1 in DSpark."""
    outside: Literal["count", "drop"] = "count"
    """Rows whose top target token is missing from the draft vocabulary: count them in the loss, or
    drop them as SpecForge and SPD's authors do."""
    teacher_vocabulary: Literal["target", "draft"] = "target"
    """draft: training computes teacher logits over the draft vocabulary only, so its metrics ignore
    all other tokens; validation computes the whole target vocabulary's."""
    feature_weight: float = 0.0
    """Weight of a regression in training: the squared distance between the LM heads' inputs, the
    draft's and the target's, relative to the target's squared norm. 0: none, as in the papers.
    Validation has the divergence alone."""

    @property
    def measure(self) -> LossKind:
        """Return the divergence selected by these settings.

        Raises:
            ValueError: a setting is out of range.
        """
        ranges = {"loss_eta": "[0, inf)", "loss_top_k": "[1, inf)", "loss_ce": "[0, 1]"}
        check_ranges(self, ranges | {"feature_weight": "[0, inf)"}, "model.")
        return LossKind(
            kind=self.loss,
            eta=self.loss_eta,
            top_k=self.loss_top_k,
            ce_share=self.loss_ce,
            drops_outside=self.outside == "drop",
        )


@dataclass(frozen=True, kw_only=True)
class StagedTrainConfig(StagedDraftConfig, DivergenceConfig):
    """Loss for drafts on a staged target."""


@dataclass(frozen=True, kw_only=True)
class SPDTrainConfig(SPDConfig, StagedTrainConfig):
    """SPD head and its loss."""

    full_probability: float = 0.5
    """Share of examples with a full pipeline; the others have fewer tokens in flight, at least 1.
    Full: n tokens, n - 1 with output states, m n to m n + m - 1 with m tokens per step."""
    fills: int = 1
    """Fill samples per batch: the head runs once for each, the target once for all."""
    start: Literal["deepest", "ridge"] = "deepest"
    """Initial weights. deepest: the stream starts as the newest token's embedding, and attention is
    random. ridge: the embedding, and the states of the tokens before it, which the first layer's
    heads begin by reading, have the best linear fit to the target's normed final state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"full_probability": "[0, 1]", "fills": "[1, inf)"}, "model.")


@dataclass(frozen=True, kw_only=True)
class PPSDTrainConfig(PPSDConfig, StagedTrainConfig):
    """PPSD head and its loss."""


@dataclass(frozen=True, kw_only=True)
class EagleTrainConfig(EagleConfig, StartConfig):
    """EAGLE-1 head and its loss."""

    noise: float = 0.2
    """Add U(-1/2, 1/2) * noise * 512 / T to hidden states in training; T: sequence length."""
    distillation_weight: float = 0.1
    """Weight of the distillation relative to the regression."""
    rows: Literal["turn", "official"] = "turn"
    """Supervised rows t. turn: x_{t+1} and x_{t+2} are in one assistant turn. official: x_t is an
    assistant token, as in the authors' code."""

    def __post_init__(self) -> None:
        check_ranges(self, {"noise": "[0, inf)", "distillation_weight": "[0, inf)"}, "model.")


@dataclass(frozen=True, kw_only=True)
class UnrolledConfig(DivergenceConfig):
    """Loss settings for heads that are trained on chains of their own states."""

    num_steps: int = 7
    """Draft tokens trained per chain; 7 in the authors' code."""
    step_decay: float = 0.8
    """The loss of draft token i (from 0) is multiplied by step_decay ** i."""
    curriculum_steps: int = 0
    """Draft tokens trained per chain at first, which costs less; at most num_steps count. 0:
    num_steps from the start."""
    curriculum_share: float = 0.9
    """Share of the run with curriculum_steps; num_steps follow."""
    rows: Literal["turn", "speculators", "specforge", "official"] = "turn"
    """Rows t that count at step i. turn: x_{t+1} .. x_{t+2+i} are in one assistant turn.
    speculators: x_{t+1+i} is an assistant token; specforge and official (EAGLE-3's authors):
    x_{t+i} is one."""

    def __post_init__(self) -> None:
        ranges = {"num_steps": "[1, inf)", "step_decay": "(0, 1]"}
        ranges |= {"curriculum_steps": "[0, inf)", "curriculum_share": "[0, 1]"}
        check_ranges(self, ranges, "model.")
        share = self.curriculum_share
        if not self.curriculum_steps and share != UnrolledConfig.curriculum_share:
            raise UsageError(
                f"model.curriculum_share: {share} without model.curriculum_steps; give both"
            )


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainConfig(Eagle3Config, UnrolledConfig):
    """EAGLE-3 head and its loss."""

    start: Literal["deepest", "ridge"] = "deepest"
    """Initial weights. deepest: fc passes the deepest fused state through, and the layer is random.
    ridge: fc and attention's values have the best linear fit to the target's next state, so even an
    untrained head continues a text. init_from replaces both."""

    def __post_init__(self) -> None:
        Eagle3Config.__post_init__(self)
        UnrolledConfig.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class MTPTrainConfig(UnrolledConfig):
    """MTP layer's loss. init_from takes the output of `pipedraft models import --from TARGET`."""

    num_steps: int = 3
    """Draft tokens trained per chain; 3 in the paper."""
    step_decay: float = 0.6
    """Multiply the loss for draft token i (from 0) by step_decay ** i; 0.6 in the paper."""


@dataclass(frozen=True, kw_only=True)
class DFlashTrainConfig(DFlashConfig, DivergenceConfig):
    """DFlash head and its loss."""

    num_anchors: int = 512
    """Maximum blocks per document and step; anchors are sampled anew every time."""
    position_weights: Literal["decay", "dpace"] = "decay"
    """Loss weights within a block. decay: exp(-i / decay_gamma) for draft token i, from 0. dpace:
    D-PACE's weights, from the probabilities of the block's prefixes."""
    decay_gamma: float = 7.0
    """Decay length in draft tokens; the paper has 7 for blocks of 16, 5 for 10, 4 for 8."""
    dpace_alpha: float = 0.5
    """D-PACE's smoothing; at 1 a row's weight is the number of rows from it on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges = {"num_anchors": "[1, inf)", "decay_gamma": "(0, inf)", "dpace_alpha": "[0, 1]"}
        check_ranges(self, ranges, "model.")


@dataclass(frozen=True, kw_only=True)
class DSparkTrainConfig(DSparkConfig, DFlashTrainConfig):
    """DSpark head and its loss."""

    loss: Divergence = "ce_l1"
    """Loss per row, with the same choices as for DFlash. ce_l1 is the paper's: 0.1 ce + 0.9 l1."""
    decay_gamma: float = 4.0
    """Decay length in draft tokens; the paper has 4 for blocks of 7."""
    confidence_weight: float = 1.0
    """Weight for the confidence loss, relative to 1 for the divergence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"confidence_weight": "[0, inf)"}, "model.")


@dataclass(frozen=True, kw_only=True)
class FlexSpecTrainConfig(FlexSpecConfig, StartConfig):
    """FlexSpec draft and its loss."""

    feature_weight: float = 0.1
    """Regression weight (lambda_1 in the paper); 0 turns it off."""
    distillation_weight: float = 1.0
    """Distillation weight (lambda_2)."""
    distillation_temperature: float = 1.0
    """Temperature for both distilled distributions; the loss is multiplied by its square."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without distillation, the vocabulary projection would not be trained.
        ranges = {"feature_weight": "[0, inf)", "distillation_weight": "(0, inf)"}
        check_ranges(self, ranges | {"distillation_temperature": "(0, inf)"}, "model.")


def methods() -> dict[str, type]:
    """Map each method's name to its settings, the keys under ``model`` of a run."""
    return {
        "spd": SPDTrainConfig,
        "ppsd": PPSDTrainConfig,
        "eagle": EagleTrainConfig,
        "eagle3": Eagle3TrainConfig,
        "mtp": MTPTrainConfig,
        "dflash": DFlashTrainConfig,
        "dspark": DSparkTrainConfig,
        "flexspec": FlexSpecTrainConfig,
    }
