"""Architecture settings for the heads.

This module does not import torch, so commands can check their options quickly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from ...errors import UsageError, check_ranges
from ...files import Values
from ...model_kinds import HEAD_ROPES
from ..transformer.boundaries import stage_boundaries


def check_layers(layers: Sequence[int], last: int) -> None:
    """Raise UsageError for a fused layer above ``last``, the target's layer count (0: unknown)."""
    if last and not all(0 <= layer <= last for layer in layers):
        raise UsageError(
            f"model.feature_layers: {list(layers)} are not all in 0..{last}; the target has {last} "
            "layers"
        )


@dataclass(frozen=True, kw_only=True)
class StagedDraftConfig:
    num_stages: int = 4
    """n: pipeline stages in the target."""
    boundaries: tuple[int, ...] = ()
    """Stage boundaries from 0 to L, for an uneven split; empty: as even as possible."""
    num_target_layers: int = 0
    """L, the target's layer count; filled in from the target."""
    draft_vocab_size: int | None = None
    """U: draft vocabulary size (most frequent training tokens); None: the target's vocabulary."""
    share_head: bool = False
    """Use the target's LM head, restricted to the draft vocabulary: not trained, not saved."""

    @property
    def cut(self) -> tuple[int, ...]:
        """Stage boundaries from 0 to L, computed if none are given."""
        return self.boundaries or stage_boundaries(self.num_target_layers, self.num_stages)


@dataclass(frozen=True, kw_only=True)
class SPDConfig(StagedDraftConfig):
    """Architecture of the SPD head, which drafts while the stages run."""

    num_layers: int = 2
    """Decoder layers in the head (Ls)."""
    features: Literal["paper", "anchors", "listed"] = "paper"
    """Layers fused into the feature at each depth, up to l, the last layer passed. paper: 0, l // 2
    and l. anchors: 0 and the ``anchors`` up to l. listed: the layers in ``depth_layers``."""
    anchors: tuple[int, ...] = ()
    """Layer indices for ``features: anchors``, ascending."""
    depth_layers: tuple[tuple[int, ...], ...] = ()
    """Layer indices for each depth 1 .. n, for ``features: listed``."""
    layer_projections: bool = False
    """Add a projection per layer to the features at each depth 1 .. n, as in the authors' version
    10; requires ``query: newest``."""
    normed_last: bool = False
    """Layer L is the state after the target's final norm, as in the authors' releases."""
    query: Literal["newest", "all"] = "newest"
    """Streams sent through the head's layers. newest: only the newest token's. all: the streams at
    all depths."""
    timing: Literal["input_states", "output_states"] = "input_states"
    """States read by the head. input_states: before a step. output_states: after it, when each
    token is one stage deeper and depth 0 is missing. Decode with the same timing."""
    tokens_per_step: int = 1
    """Draft tokens per branch and step, with one forward each. Several help if Ls < L / n leaves
    time. They enter together at the same depth. Decode with the same number."""

    def __post_init__(self) -> None:
        check_ranges(self, {"num_stages": "[1, inf)", "num_layers": "[1, inf)"}, "model.")
        # The head drafts while the stages run. With output states, the stages wait for every token.
        most = 1 if self.lead else self.num_target_layers or "inf"  # 0 layers: not known yet
        check_ranges(self, {"tokens_per_step": f"[1, {most}]"}, "model.")
        if self.max_in_flight < 1:
            raise ValueError(
                "model.timing: 'output_states' with 1 stage, after which no token is in flight; "
                "give model.num_stages 2 or more"
            )
        if (self.features == "anchors") != bool(self.anchors):
            raise ValueError(
                f"model.anchors: {list(self.anchors)} with features {self.features!r}; anchors are "
                "given exactly when features is 'anchors'"
            )
        if len(self.depth_layers) != (self.num_stages if self.features == "listed" else 0):
            raise ValueError(
                f"model.depth_layers: {len(self.depth_layers)} depths with features "
                f"{self.features!r}; features 'listed' takes {self.num_stages}, others none"
            )
        if self.layer_projections and self.query != "newest":
            raise ValueError("model.layer_projections: True with query 'all'; give query newest")
        if list(self.anchors) != sorted(set(self.anchors)):
            raise ValueError(f"model.anchors: {list(self.anchors)} are not ascending and distinct")
        passed = (self.num_target_layers, *self.cut[1:]) if self.num_target_layers else ()
        for given, last in zip((self.anchors, *self.depth_layers), passed, strict=False):
            if not all(0 <= layer <= last for layer in given):
                name = "depth_layers" if self.depth_layers else "anchors"
                raise ValueError(f"model.{name}: {[*given]} are not in 0..{last}, passed by then")

    @property
    def lead(self) -> int:
        """Stages that the newest token has passed: 1 with output states, else 0."""
        return int(self.timing == "output_states")

    @property
    def max_in_flight(self) -> int:
        """Maximum number of rows in flight before the newest row. Earlier rows are committed.

        With m tokens per step, the maximum is m n + m - 1, where m - 1 rows were just drafted.
        With output states, the maximum is one less.
        """
        return self.num_stages * self.tokens_per_step + self.tokens_per_step - 1 - self.lead


@dataclass(frozen=True, kw_only=True)
class PPSDConfig(StagedDraftConfig):
    """Architecture of the PPSD head, which reads the first stage's output."""

    num_layers: int = 1
    """Decoder layers in the head (Ls). Every step waits for them: the speed-up is L' L / (Ls n + L)
    with L target layers, n stages and acceptance length L'."""

    def __post_init__(self) -> None:
        # With one stage no token is in flight during a draft.
        check_ranges(self, {"num_stages": "[2, inf)", "num_layers": "[1, inf)"}, "model.")


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Architecture of the EAGLE-1 head."""

    num_target_layers: int = 0
    """L, the target's layer count; filled in from the target."""
    fc_bias: bool = True
    """Give the projection a bias. Some of the authors' heads have none."""
    attention_bias: bool = False
    """Biases in the query, key and value projections."""

    @property
    def num_layers(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Architecture of the EAGLE-3 head."""

    feature_layers: tuple[int, ...] = ()
    """Target layers whose raw hidden states are fused, 0 = embedding; empty: 2, L // 2, L - 3."""
    num_target_layers: int = 0
    """L, the target's layer count; filled in from the target."""
    draft_vocab_size: int | None = None
    """U: draft vocabulary size (most frequent training tokens); None: the target's vocabulary."""
    share_head: bool = False
    """Use the target's LM head, restricted to the draft vocabulary: not trained, not saved."""
    norm_output: bool = False
    """EAGLE-3.1: feed back the normed state instead of the raw one."""
    fc_norm: bool = False
    """EAGLE-3.1: apply RMSNorm to each fused hidden state before the projection."""
    norm_before_fc: bool = False
    """Apply one RMSNorm to the joined hidden states before the projection, as in gpt-oss heads."""
    norm_before_residual: bool = False
    """Start the layer's residual stream from the normed state instead of the raw one."""
    query_key_norm: bool = False
    """Apply RMSNorm to each query and key head, as in heads built from Qwen3's layer."""
    attention_bias: bool = False
    """Biases in the query, key and value projections."""
    sliding_window: int | None = None
    """Attention window in positions, including the row's own; None: all positions."""
    rope_theta: float | None = None
    """Base of the head's rotary positions; None: the target's."""
    rope_scaling: dict[str, Any] | None = None
    """Scaling of the head's rotary positions, as in transformers; None: the target's."""

    def __post_init__(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("model.norm_before_fc: True with model.fc_norm; give one of them")
        check_ranges(self, {"sliding_window": "[1, inf)"}, "model.")
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        if kind not in HEAD_ROPES:
            raise ValueError(
                f"model.rope_scaling: rope_type {kind!r}; give one of {', '.join(HEAD_ROPES)}"
            )
        check_layers(self.feature_layers, self.num_target_layers)

    @property
    def num_layers(self) -> int:
        return 1

    def rope(self, parameters: Values) -> Values:
        """Return the head's rotary parameters, given the target's."""
        if self.rope_scaling is not None:
            theta = parameters.get("rope_theta", 1e4)
            parameters = {"rope_type": "default", "rope_theta": theta} | self.rope_scaling
        own = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return parameters | own

    def for_target(self, num_layers: int) -> "Eagle3Config":
        """Return the configuration with the target's layer count and the fused layers filled in."""
        layers = self.feature_layers or three_feature_layers(num_layers)
        return replace(self, num_target_layers=num_layers, feature_layers=layers)


def three_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return the authors' layers (2, L // 2, L - 3), or fewer for a target with few layers."""
    if num_layers < 6:  # 2, L // 2 and L - 3 would not be distinct and ascending
        return tuple(sorted({min(1, num_layers), num_layers // 2, num_layers}))
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Architecture of the MTP layer."""

    num_target_layers: int = 0
    """L, the target's layer count; filled in from the target."""
    native: bool = False
    """True: Qwen3.5's MTP layer, with an output gate in the attention, and norms with factor 1 +
    weight. False: a Llama layer, or a Qwen3 layer for a Qwen3 target. `models import` sets this."""

    @property
    def num_layers(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Architecture of the DFlash head."""

    num_layers: int = 5
    """Decoder layers in the head."""
    block_size: int = 16
    """Rows per block: the anchor and a row for each draft token."""
    feature_layers: tuple[int, ...] = ()
    """Target layers whose raw hidden states are fused, 0 = embedding; empty: five, 2 to L - 2."""
    mask_token_id: int | None = None
    """Token id of the masked rows; None: the last id in the vocabulary."""
    draft_vocab_size: int | None = None
    """U: draft vocabulary size (most frequent training tokens); None: the target's vocabulary."""
    num_target_layers: int = 0
    """L, the target's layer count; filled in from the target."""

    def __post_init__(self) -> None:
        check_ranges(self, {"num_layers": "[1, inf)", "block_size": "[2, 256]"}, "model.")
        check_layers(self.feature_layers, self.num_target_layers)

    @property
    def first_row(self) -> int:
        """Row of a block that predicts the first draft token."""
        return 1

    @property
    def num_tokens(self) -> int:
        """S: draft tokens per block."""
        return self.block_size - self.first_row

    def for_target(self, num_layers: int, vocab_size: int) -> Self:
        """Return the configuration with the target's values filled in."""
        mask = vocab_size - 1 if self.mask_token_id is None else self.mask_token_id
        if not 0 <= mask < vocab_size:
            raise ValueError(
                f"model.mask_token_id: {mask} is not in 0..{vocab_size - 1}, the target's "
                "vocabulary; leave it out for the last token"
            )
        layers = self.feature_layers or five_feature_layers(num_layers)
        return replace(
            self, num_target_layers=num_layers, feature_layers=layers, mask_token_id=mask
        )


def five_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return the authors' five evenly spaced layers from 2 to L - 2, or fewer for few layers."""
    if num_layers < 6:
        return tuple(sorted({min(1, num_layers), num_layers // 2, num_layers}))
    return tuple(sorted({round(2 + part * (num_layers - 4) / 4) for part in range(5)}))


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Architecture of the DSpark head."""

    block_size: int = 7
    """Rows per block. Each predicts a draft token; the anchor's only with sample_from_anchor."""
    markov_rank: int = 256
    """r, rank of the token-pair table; 0: no table, as in DFlash."""
    confidence: Literal["pair", "state", "none"] = "pair"
    """Input for the predicted acceptance. state: the output at the token's place. pair: also the
    table's row for the previous token. none: no prediction."""
    sample_from_anchor: bool = True
    """True: every row, also the anchor's, predicts the next position's token. False: each masked
    row predicts its own position's token, as in DFlash."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"markov_rank": "[0, inf)"}, "model.")
        if self.confidence == "pair" and not self.markov_rank:
            raise ValueError(
                "model.confidence: 'pair' with model.markov_rank 0; give state or none"
            )

    @property
    def first_row(self) -> int:
        return int(not self.sample_from_anchor)


@dataclass(frozen=True, kw_only=True)
class FlexSpecConfig:
    """Architecture of the FlexSpec draft. The preset sets the fields you leave out."""

    preset: Literal["paper", "practical"] = "practical"
    """paper: the anchor reads the embeddings, and the MLP reads the anchor's raw output. practical:
    a linear map and an RMSNorm come before the anchor, the target's final norm after it."""
    residual: bool | None = None
    """Add the MLP's output to its input. Default: no for paper, yes for practical."""
    head_init: Literal["random", "target"] | None = None
    """Initial weights of the vocabulary projection; target: the target's LM head. Default: random
    for paper, target for practical."""
    stem_layers: int = 0
    """Trainable decoder layers between stem and anchor; only for practical."""
    feature_source: Literal["none", "self"] = "none"
    """self: read the sequence twice. The second time, the stem gets the embedding and the first
    reading's output at the previous position. Only for practical."""
    draft_vocab_size: int | None = None
    """U: draft vocabulary size (most frequent training tokens); None: the target's vocabulary."""

    def __post_init__(self) -> None:
        check_ranges(
            self, {"stem_layers": "[0, 2]; for a deeper draft, train a language model"}, "model."
        )
        for name, plain in (("stem_layers", 0), ("feature_source", "none")):
            value = getattr(self, name)
            if self.preset == "paper" and value != plain:
                raise ValueError(
                    f"model.{name}: {value} needs a stem, which preset paper lacks; give "
                    "--model.preset practical"
                )
        practical = self.preset == "practical"
        if self.residual is None:
            object.__setattr__(self, "residual", practical)
        if self.head_init is None:
            object.__setattr__(self, "head_init", "target" if practical else "random")

    @property
    def num_readings(self) -> int:
        return 2 if self.feature_source == "self" else 1

    @property
    def num_layers(self) -> int:
        """Decoder layers per reading, including the anchor."""
        return self.stem_layers + 1
