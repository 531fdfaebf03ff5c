"""Decode with a small copy of a target as schedules do, and compare with its own cached forward.

Rows pass a cut one by one and as a tree, and are kept and dropped. The weights are random, and
large enough for each state, position and mask to move the logits.
"""

# l rows in a segment, V vocabulary

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...pretrained import auto_class
from ..transformer.decoder import choose_attention, finish_logits
from ..transformer.rotary_lengths import forget_lengths
from ..transformer.small_copy import VOCAB, small_copy
from ..transformer.stage_cache import KeepRows, Segment
from .stage import Stage

NUM_PROMPT, CHUNK_ROWS = 7, 4
TOLERANCE = 2e-3
"""Largest difference of a logit, in standard deviations of all logits: float32 sums in another
order differ by less than a hundredth of it."""
PARENTS = (-1, 0, 0, 1, 2)
"""A tree: a root with two children, each with one child."""
LONG_MEMORY = {"dt_bias": -2.0, "A_log": -3.0}
"""Values with which recurrent layers forget slowly."""


_results: dict[str, str | None] = {}  # most configurations of a family have the same small copy


@torch.inference_mode()
def trial(config: PreTrainedConfig) -> str | None:
    """Return how a small copy decodes otherwise than `transformers`, None if it does not."""
    try:
        small = small_copy(config)
        key = f"{type(small)} {small.to_json_string(use_diff=False)}"
        if key in _results:
            return _results[key]
        model = _random_model(small)
        own = _OwnForward(model)
        own.logits(list(range(NUM_PROMPT + 1)))
    except Exception as error:  # any fault in a model's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"a small copy of it does not run in transformers ({reason[:200]})"
    _results[key] = _Trial(model, own).run()
    return _results[key]


def _random_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = auto_class(config).from_config(
            config,
            dtype=torch.float32,
            attn_implementation=choose_attention(config),
            trust_remote_code=False,
        )
    model.eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        last = name.rpartition(".")[2]
        if last in LONG_MEMORY:
            weight.fill_(LONG_MEMORY[last]).add_(torch.randn_like(weight), alpha=0.1)
        elif weight.ndim > 1:
            weight.normal_(0, 0.2)
        else:
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


class _OwnForward:
    """The model's forward, a prompt at once and then row by row on its own cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], tuple[Tensor, Any]] = {}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return logits [V] after the last token."""
        return self._after(tuple(tokens))[0]

    def _after(self, tokens: tuple[int, ...]) -> tuple[Tensor, Any]:
        if tokens not in self._known:
            new, cache = tokens, None
            if len(tokens) > NUM_PROMPT:
                new, cache = tokens[-1:], deepcopy(self._after(tokens[:-1])[1])
            forget_lengths(self._model)  # the last text may have been longer
            out = self._model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
            self._known[tokens] = out.logits[0, -1], out.past_key_values
        return self._known[tokens]


class _Trial:
    """Two stages, and the text that they hold."""

    def __init__(self, model: PreTrainedModel, own: _OwnForward) -> None:
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        self._own, self._model, self._decoder, self._head = own, model, decoder, head
        num_layers = len(decoder.layers)
        cuts = (0, num_layers // 2, num_layers)
        self._stages = [Stage(model, *cuts[:2]), Stage(model, *cuts[1:])]
        self._random = torch.Generator().manual_seed(1)
        self._text: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        """The speculative rows' tokens and parents."""
        self._found: list[tuple[str, float]] = []
        """What was compared, and the largest difference."""

    def run(self) -> str | None:
        self._prefill(self._draw(NUM_PROMPT))
        for _ in range(3):
            self._rows("a row", (-1,))
            self._keep((0,), 1)
        self._rows("a tree", PARENTS)
        self._keep((0, 2, 4), 3)
        self._rows("rows after dropped ones", (-1, 0, 1))
        self._keep((), 0)
        self._rows("a row after a rollback", (-1,))
        self._rows("a row behind others in flight", (0,), first=1)
        self._keep((0, 1), 1)
        self._rows("a row", (0,), first=1)
        scale = torch.stack([x for x, _ in self._own._known.values()]).std()
        for what, difference in self._found:
            if not difference <= TOLERANCE * scale:
                return (
                    f"{what} of a small copy has other logits than in transformers (by "
                    f"{difference / scale:.2g} standard deviations)"
                )
        return None

    def _draw(self, count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=self._random).tolist()

    def _logits(self, hidden_lH: Tensor) -> Tensor:
        return finish_logits(self._decoder.config, self._head(self._decoder.norm(hidden_lH)))

    def _prefill(self, ids: list[int]) -> None:
        self._text = ids
        ids_P = torch.tensor(ids)
        positions = torch.arange(len(ids)).split(CHUNK_ROWS)
        for rows, at in zip(ids_P.split(CHUNK_ROWS), positions, strict=True):
            for stage in self._stages:
                rows, _ = stage.prefill(rows, at, length=len(ids))
        self._compare("a prompt", self._logits(rows[-1:]), [ids])

    def _rows(self, what: str, parents: Sequence[int], *, first: int = 0) -> None:
        """Run rows of a tree, and compare each with the model's forward over its own path.

        Args:
            parents: as ``Segment.parents``.
            first: speculative rows that the stages hold already.
        """
        tokens = self._draw(len(parents))
        self._tokens = self._tokens[:first] + tokens
        self._parents = self._parents[:first] + list(parents)
        paths = [self._path(row) for row in range(first, len(self._tokens))]
        visible = torch.zeros(len(parents), len(self._tokens), dtype=torch.bool)
        for row, path in enumerate(paths):
            visible[row, path] = True
        depths = torch.tensor([len(path) - 1 for path in paths])
        segment = Segment(len(self._text) + depths, visible, ids=torch.tensor(tokens))
        for stage in self._stages:
            segment = stage.forward(segment)
        assert segment.hidden is not None
        texts = [self._text + [self._tokens[i] for i in path] for path in paths]
        self._compare(what, self._logits(segment.hidden), texts)

    def _path(self, row: int) -> list[int]:
        parent = self._parents[row]
        return [*(self._path(parent) if parent >= 0 else []), row]

    def _keep(self, rows: tuple[int, ...], num_committed: int) -> None:
        keep = KeepRows(rows, num_committed)
        for stage in self._stages:
            stage.keep(keep)
        self._text = self._text + [self._tokens[row] for row in rows[:num_committed]]
        left = rows[num_committed:]
        places = {row: place for place, row in enumerate(left)}
        self._parents = [places.get(self._parents[row], -1) for row in left]
        self._tokens = [self._tokens[row] for row in left]

    def _compare(self, what: str, logits_lV: Tensor, texts: Sequence[Sequence[int]]) -> None:
        for logits_V, text in zip(logits_lV, texts, strict=True):
            difference = (logits_V - self._own.logits(text)).abs().max()
            # NaN compares as a difference, too.
            self._found.append((what, float(difference)))
