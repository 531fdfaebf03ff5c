"""Compare a draft's rows in training and in decoding, and explain a difference."""

# T text tokens, R rows (roots), Q and a rows at once, H hidden, U draft vocabulary, V vocabulary

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..inference.config import DecodeConfig
from ..inference.engine import Engine
from ..inference.sources import default_schedule, make_source
from ..inference.tree import TokenTree
from ..models.heads.dflash import DFlash
from ..models.heads.draft import Draft
from ..models.heads.eagle import EagleHead
from ..models.heads.flexspec import FlexSpec
from ..models.heads.ppsd import PPSD
from ..models.heads.spd import SPD
from ..models.target import capture_hidden

ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Tolerated difference by dtype, relative to the largest compared value."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first place of disagreement, and its most likely cause."""

    what: str
    detail: str
    prompt: str | None = None
    root: int | None = None
    """The round's root: the index of the text token before its draft tokens."""
    draft_position: int | None = None

    def __str__(self) -> str:
        row = f", row {self.root}, draft position {self.draft_position}" if self.root else ""
        place = "at every prompt" if self.prompt is None else f"first at prompt {self.prompt}{row}"
        return f"differ {place}: {self.what}: {self.detail}"


@dataclass(kw_only=True)
class Check:
    """One comparison with the training forward pass."""

    name: str
    unit: str = "rows"
    rows: int = 0
    ties: int = 0
    largest_difference: float = 0.0
    first: Parting | None = None
    remark: str = ""

    def __str__(self) -> str:
        if self.first or self.remark:
            return f"{self.name}: {self.first or self.remark}"
        within = f", logits within {self.largest_difference:.1e}" if self.unit == "rows" else ""
        ties = f", {self.ties} ties" if self.ties else ""
        return f"{self.name}: equal at every one of {self.rows} {self.unit}{within}{ties}"


# -- the training forward pass --------------------------------------------------------------


def trained_depth(draft: Draft, depth: int) -> int:
    """Return draft tokens per round. SPD and PPSD fix this number, and DFlash limits ``depth``."""
    if isinstance(draft, SPD):
        return draft.config.max_in_flight
    if isinstance(draft, PPSD):
        return draft.num_stages - 1  # drafted after a step, when one stage is done
    return min(depth, draft.config.num_tokens) if isinstance(draft, DFlash) else depth


class Text:
    """Text with the target's teacher-forced hidden states and tokens, and the drafts' outputs."""

    def __init__(self, target: PreTrainedModel, ids: Sequence[int], layers: set[int]) -> None:
        self.target, self.ids_T = target, torch.tensor(ids, device=target.device)
        last = int(target.get_decoder().config.num_hidden_layers)
        self.taps = capture_hidden(target, self.ids_T[None], layers | {last})
        head, norm = target.get_output_embeddings(), target.get_decoder().norm
        self.teacher_T = head(norm(self.taps[last][0])).argmax(-1)  # type: ignore[misc]

    def states(self, draft: Draft, depth: int) -> list[Tensor]:
        """Return the LM head's inputs in training, one [T, ...] per draft token 1 .. depth.

        Row t belongs to the round with the token at t as its root. Rows without a round contain
        arbitrary values.
        """
        taps, ids_T, ids_BT = self.taps, self.ids_T, self.ids_T[None]
        if isinstance(draft, EagleHead):
            rows = [torch.arange(len(ids_T), device=ids_T.device)] * depth
            states, shifts = draft.unroll(draft.feature(taps), ids_BT, rows), [1] * depth
        elif isinstance(draft, DFlash):
            blocks_ASH = draft(taps, ids_BT, [torch.arange(1, len(ids_T))])
            blocks_TSH = F.pad(blocks_ASH, (0, 0, 0, 0, 1, 0))
            states, shifts = list(blocks_TSH.unbind(1)[:depth]), [0] * depth
        else:
            # Row t predicts the token at t + 1; draft token i is drafted with i tokens in flight.
            shifts = [-step for step in range(depth)]
            if isinstance(draft, SPD):
                states = [draft(taps, [step])[0] for step in range(1, depth + 1)]
            else:
                states = [draft(ids_BT if isinstance(draft, FlexSpec) else taps)[0]] * depth
        # Move each state to its root's row: pad in front if ``by`` is positive, else cut there.
        pads = [(0, 0) * (x.ndim - 1) + (by, -by) for x, by in zip(states, shifts, strict=True)]
        return [F.pad(x, pad) for x, pad in zip(states, pads, strict=True)]


def over_vocabulary(draft: Draft, logits_RU: Tensor) -> Tensor:
    """Return logits [R, V], with minus infinity for tokens missing from the draft vocabulary."""
    logits_RV = logits_RU.new_full((len(logits_RU), draft.target_vocab_size), -torch.inf)
    return logits_RV.index_copy(1, vocabulary(draft), logits_RU)


def vocabulary(draft: Draft) -> Tensor:
    ids_U = draft.draft_ids
    assert isinstance(ids_U, Tensor)
    return ids_U


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return each row's largest difference [R]. Two values of minus infinity count as equal."""
    return (ours - theirs).nan_to_num(0.0, torch.inf, -torch.inf).abs().flatten(1).amax(1)


def size_of(values: Tensor) -> float:
    return float(values[values.isfinite()].abs().max())


# -- what decoding computes -----------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Hidden states received by the draft from one layer."""

    layer: int
    first: int
    rows_aH: Tensor


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """One draft token from decoding."""

    root: int
    depth: int
    path: list[int]
    """The root and the earlier draft tokens."""
    token: int
    read: list[Read]
    """All draft inputs: the committed text, and these rows in flight."""
    state: Tensor | None = None
    """LM head input. This field and the next two are None under a CUDA graph, as it does not expose
    them."""
    logits_U: Tensor | None = None
    position: int | None = None
    """Rotary position of the draft's last row."""


def _noted(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a method calling ``note(result, *arguments)`` after each call."""

    def call(*arguments: object, **options: object) -> object:
        result = method(*arguments, **options)
        note(result, *arguments)
        return result

    return call


class Decoding:
    """Greedy decoder with chain drafts, recording each draft token and the draft's inputs."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        draft: Draft,
        *,
        depth: int,
        max_new_tokens: int,
    ) -> None:
        self.draft, schedule = draft, default_schedule(draft.draft_type)
        own: dict[str, str | int] = {"tree": f"chain:{depth}"} if schedule == "eagle" else {}
        if isinstance(draft, SPD):
            timing, count = draft.config.timing, draft.config.tokens_per_step
            own = {"timing": timing, "tokens_per_step": count}
            self.source = make_source(draft, timing, count)
        else:
            self.source = make_source(draft)
        stages = draft.num_stages or 1
        config = DecodeConfig.of(schedule, num_stages=stages, max_new_tokens=max_new_tokens, **own)
        self.engine = Engine(target, tokenizer, config, draft, source=self.source)
        self.target, self.tokenizer = target, tokenizer

    def run(self, prompt_ids: list[int]) -> tuple[list[int], list[Drafted]]:
        """Decode a prompt. Return the answer's tokens and all draft tokens."""
        self.drafted: list[Drafted] = []
        self._committed: list[Read] = []
        self._calls: list[tuple[Tensor, Tensor, int | None]] = []
        self._position: int | None = None
        notes: list[tuple[object, str, Callable[..., None]]] = [
            (self.source, "observe", self._observed),
            (self.source, "grow_layer", self._grown),
            (self.source, "grow_tree", self._grown),
            (self.draft, "logits", self._said),
            (self.draft.rotary, "of_heads", self._turned),
        ]
        with ExitStack() as stack:
            for owner, name, note in notes:
                called = _noted(getattr(owner, name), note)
                stack.enter_context(patch.object(owner, name, called))
            self.result = self.engine.decode(prompt_ids)
        return self.result.token_ids, self.drafted

    def _turned(self, result: object, positions_R: Tensor, dtype: torch.dtype) -> None:
        self._position = int(positions_R.flatten()[-1]) if positions_R.numel() else None

    def _said(self, logits_QU: Tensor, state_QH: Tensor) -> None:
        self._calls.append((state_QH, logits_QU, self._position))
        self._position = None

    def _observed(self, _: None, features: Mapping[int, Tensor], tokens: list[int]) -> None:
        for layer, rows_aH in features.items():
            first = sum(len(r.rows_aH) for r in self._committed if r.layer == layer)
            self._committed.append(Read(layer, first, rows_aH))

    def _grown(self, count: int, tree: TokenTree, features: object) -> None:
        calls, self._calls = self._calls, []
        read = list(self._committed)
        if isinstance(features, Mapping):
            read += [Read(index, tree.root_position, x) for index, x in features.items() if len(x)]
        for place, row in enumerate(range(len(tree) - count, len(tree))):
            state, logits, position = calls[place] if len(calls) == count else (None, None, None)
            self.drafted.append(
                Drafted(
                    root=tree.root_position,
                    depth=tree.depths[row],
                    path=tree.tokens[:row],
                    token=tree.tokens[row],
                    read=read,
                    state=state,
                    logits_U=logits,
                    position=position,
                )
            )


# -- why they part ------------------------------------------------------------------------


def why_decoding_parts(
    draft: Draft, found: Drafted, text: Text, state: Tensor, rounding: float
) -> tuple[str, str]:
    """Name the first input that makes a row in decoding differ from its row in training."""
    for read in found.read:
        ours_aH = text.taps[read.layer][0, read.first : read.first + len(read.rows_aH)]
        differ_a = difference(ours_aH, read.rows_aH)
        # Row by row: a first token's states may be 1,000 times as large as the others'.
        wrong = (differ_a > rounding * ours_aH.abs().amax(1)).nonzero().flatten().tolist()
        if wrong:
            at, layers = read.first + wrong[0], range(len(text.target.get_decoder().layers) + 1)
            states = capture_hidden(text.target, text.ids_T[None], layers)
            alike = [
                layer
                for layer, x in states.items()
                if float(difference(x[:, at], read.rows_aH[wrong[0]]))
                < rounding * size_of(x[0, at])
            ]
            whose = f"; they are those of layer {min(alike)}" if alike else ""
            return "hidden states", (
                f"those of layer {read.layer} at token {at} differ by {differ_a[wrong[0]]:.2g} in "
                f"decoding{whose}; the draft was trained on layers {list(draft.taps)}"
            )
    if isinstance(draft, DFlash):
        wanted = found.root + draft.config.block_size - 1
    else:
        wanted = found.root + found.depth - 1 - int(isinstance(draft, EagleHead))
    if found.position not in (None, wanted):
        return "positions", (
            f"the draft's row stands at {found.position} in decoding, at {wanted} in training"
        )
    if found.logits_U is None or found.state is None:
        return "the draft", "its tokens differ, and a CUDA graph shows no more; --device cpu"
    if bool((difference(state[None], found.state) > rounding * size_of(state)).any()):
        return "attention", (
            "tokens, hidden states and positions are equal, what the LM head reads is not: other "
            "rows are visible in decoding, or cached keys and values are not those of the text"
        )
    best = int(found.logits_U[0].argmax())
    token = int(vocabulary(draft)[best])
    if token != found.token:
        return "vocabulary map", (
            f"draft id {best} is token {found.token} in decoding, {token} in training"
        )
    return "norm or LM head", "what they read is equal, the logits are not"


def why_files_part(draft: Draft, other: Draft) -> tuple[str, str]:
    """Find the first setting or weight that differs between exported files and checkpoint."""
    kinds = {"feature_layers": "hidden states", "rope_parameters": "positions"}
    for ours, theirs in ((draft.config, other.config), (draft.layer_config, other.layer_config)):
        for part in fields(ours):
            values = getattr(ours, part.name), getattr(theirs, part.name)
            if values[0] != values[1] and part.name != "max_positions":
                kind = kinds.get(part.name, "norm" if "norm" in part.name else "settings")
                return kind, f"{part.name} is {values[1]} in the files, {values[0]} in training"
    ours_U, theirs_U = vocabulary(draft), vocabulary(other)
    if not torch.equal(ours_U, theirs_U):
        best = int((ours_U != theirs_U).nonzero()[0])
        return "vocabulary map", (
            f"draft id {best} is token {theirs_U[best]} in the files, {ours_U[best]} in training"
        )
    weights = other.state_dict()
    for name, weight in draft.state_dict().items():
        if not torch.equal(weight, weights[name]):
            kind = "norm" if "norm" in name else "LM head" if "lm_head" in name else "weights"
            apart = float((weight - weights[name]).abs().max())
            return kind, f"{name} differs by {apart:.2g} in the files"
    return "the draft", "settings and weights are equal, the logits are not"
