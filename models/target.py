"""The target model, cut into pipeline stages.

Layer index, everywhere in this package: 0 = embeddings, i = raw output of decoder layer i - 1.
This is the Hugging Face ``hidden_states`` convention, except that index L is before the final norm.

Shape suffixes: l rows of a segment, P prompt rows, C rows in use (new ones included), S speculative
rows up to and including the segment, H hidden, V vocabulary, B batch, T positions.
"""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..pretrained import (
    check_whole,
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    read_config,
)
from . import bitwise, cpu, rounded, stage_boundaries, stage_calls
from .cuda_graphs import Graphs, TokenChoice, borrow_for, padded_rows
from .families import (
    LayerPositions,
    check_packable,
    check_target,
    choose_attention,
    embed,
    finish_logits,
    is_tied,
    layer_kinds,
    untie,
)
from .fingerprint import fingerprint_mismatch, target_fingerprint
from .layers import packed_call
from .plain_layers import PlainLayers
from .rotary_lengths import recompute_length
from .stage_cache import (
    Abandoned,
    KeepRows,
    Segment,
    StageCache,
    additive_mask,
    prune_segment,
)
from .stage_calls import StageGraphs
from .together import forward_bitwise, forward_together

__all__ = [
    "KeepRows",
    "Segment",
    "Stage",
    "StagedTarget",
    "fingerprint_mismatch",
    "load_target",
    "load_tokenizer",
    "prune_segment",
    "read_config",
    "stage_boundaries",
    "target_fingerprint",
]

THREADED_HIDDEN_SIZE = 1024
"""Smallest hidden size at which several threads decode faster than one."""
NO_INPUT = "stage 0 needs token ids, later stages hidden states"
ATTENTION_KERNELS = ("sdpa", "eager")  # those that honor an explicit additive mask


def load_target(
    name_or_path: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str | None = None,
    quantization: QuantizationConfigMixin | None = None,
    may_round: bool = True,
) -> PreTrainedModel:
    """Load a frozen decoder-only model for inference, from safetensors weights only.

    Args:
        name_or_path: a folder, or a repository name on the Hub.
        dtype: on a CPU, dtypes other than float32 usually round only the linear layers' weights, as
            ``rounded.rounds`` decides.
        may_round: False for code that reads these weights. Then ``dtype`` is the whole model's.
        attention: "sdpa" or "eager"; other kernels ignore the tree mask or reject it. None: "sdpa"
            if the model supports it.
        quantization: a transformers quantization_config.

    Raises:
        ValueError: no model there, an unsupported model, custom code, or safetensors files with
            missing or unknown weights.
    """
    _check_attention(attention or "sdpa")
    check_whole(read_config(name_or_path, revision), name_or_path, revision)
    config = load_config(name_or_path, revision)
    check_target(config, name_or_path)
    is_rounded = may_round and rounded.rounds(dtype, config, device)
    if is_rounded and attention == "eager":
        raise ValueError("attention: 'eager' cannot have rounded weights; leave it out")
    model = load_model(
        name_or_path,
        revision=revision,
        dtype=torch.float32 if is_rounded else dtype,
        attention=attention or choose_attention(config),
        quantization=quantization,
        device=device,
    )
    if not is_tied(model):
        untie(model)  # config.json may tie an LM head that its files hold
    if is_rounded:
        model.config.loaded_revision = revision  # exact weights are read again for FlexSpec
        rounded.round_target(model, dtype)
    return model.eval().requires_grad_(False)


def choose_decoding_threads(target: PreTrainedModel) -> None:
    """Decode a small target with one thread, unless OMP_NUM_THREADS is set.

    A matrix product for one token takes about as long as starting a second thread. Threads also
    wait by spinning, so decoding is several times slower once another process uses a core.
    """
    is_small = target.config.get_text_config().hidden_size < THREADED_HIDDEN_SIZE
    if is_small and target.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _check_attention(attention: str) -> None:
    if attention not in ATTENTION_KERNELS:
        raise ValueError(
            f"attention: {attention!r} does not honor tree masks; "
            f"choose one of {', '.join(ATTENTION_KERNELS)}"
        )


class Stage:
    """Layers [start, end) of a target, with their cache for one sequence.

    A stage references its own layers, the rotary tables and, if first, the embedding. A process
    with one stage can drop the rest of the model.
    """

    def __init__(self, model: PreTrainedModel, start: int, end: int):
        decoder = model.get_decoder()
        self.config: PreTrainedConfig = decoder.config
        self.start = start
        self.end = end
        self.layers = list(decoder.layers[start:end])
        self.places = LayerPositions(decoder)
        self.embedding: Callable[[Tensor], Tensor] | None = None
        if start == 0:
            self.embedding = partial(embed, decoder.embed_tokens, decoder.config)
        kinds = layer_kinds(decoder.config)
        self.kinds = kinds[start:end]
        self.plain = PlainLayers(self.layers, self.kinds)
        recurrent = [start + i for i, kind in enumerate(self.kinds) if kind == "linear_attention"]
        self.window = decoder.config.sliding_window if "sliding_attention" in self.kinds else None
        self.device = next(self.layers[0].parameters()).device
        self.cache = StageCache(recurrent)
        self.is_rounded = rounded.rounded_dtype(self.layers[0]) is not None
        self.is_bitwise = False
        can_capture = stage_calls.can_capture(decoder.config)
        on_gpu = self.device.type == "cuda"
        self.groups = stage_calls.shared_heads(decoder.config, self.device)
        self.graphs: StageGraphs | None = None
        """Graphs that run speculative rows; None: rows run layer by layer."""
        if on_gpu and can_capture:
            self.graphs = stage_calls.lend_graphs(self)
            self.cache = self.graphs.stage.cache  # graphs write to this cache

    @property
    def num_committed(self) -> int:
        return self.cache.num_committed

    @property
    def num_speculative(self) -> int:
        return self.cache.num_speculative

    def reset(self) -> None:
        self.cache.reset()
        self.plain.reset()

    @torch.inference_mode()
    def keep(self, keep: KeepRows) -> None:
        """Apply a KeepRows to the cached rows. For waiting rows, use ``prune_segment``."""
        self.cache.keep(keep, None if self.graphs is None else self.graphs.move)

    @torch.inference_mode()
    def skip(self, segment: Segment) -> None:
        """Count a segment's rows without computing them. A later KeepRows drops them all."""
        self.cache.skip(segment.positions.to(self.device))

    @torch.inference_mode()
    def forward(
        self,
        segment: Segment,
        taps: Collection[int] = (),
        is_wanted: Callable[[], bool] | None = None,
    ) -> Segment:
        """Run a segment and append its rows as speculative.

        Args:
            is_wanted: called before every layer, except in graphs and with ``bitwise``.

        Returns:
            The segment with ``hidden`` after layer ``end``, and taps for indices in (start, end]
            (also 0 from the first stage).

        Raises:
            Abandoned: ``is_wanted`` returned False. The segment counts as not run.
        """
        assert segment.lo == self.num_speculative, (
            f"stage [{self.start}, {self.end}) holds {self.num_speculative} speculative rows, "
            f"the segment starts at row {segment.lo}"
        )
        if self.is_rounded:
            return forward_together([self], [segment], taps, is_wanted)[0]
        if self.is_bitwise:
            return forward_bitwise(self, segment, taps)
        entering = segment.ids if self.embedding is not None else segment.hidden
        if self.graphs is not None and segment.num_rows <= stage_calls.MAX_ROWS:
            assert entering is not None, NO_INPUT
            call = (entering, segment.positions, segment.visible, taps)
            hidden_lH, collected = self.graphs.forward(*call)
        else:
            visible_lS = segment.visible.to(self.device)
            parents = segment.parents if self.cache.recurrent_layers else None  # attention: masks
            positions_C = self.cache.begin(segment.positions.to(self.device), parents)
            rows_lH = self._enter(entering)
            hidden_lH, collected = self._run(rows_lH, positions_C, visible_lS, taps, is_wanted)
        self.cache.advance(committed=False)
        return segment.after(hidden_lH, collected)

    @torch.inference_mode()
    def prefill(
        self,
        hidden_or_ids: Tensor,
        positions: Tensor,
        taps: Collection[int] = (),
        *,
        length: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run and commit rows, where each row sees itself and all rows before it.

        Args:
            hidden_or_ids: int64 [P] for the first stage, [P, H] for the others.
            positions: int64 [P], continuing the committed positions.
            length: length of the whole prompt. None: it ends with these rows.

        Returns:
            hidden_PH after layer ``end``, and the tapped states as in ``forward``.
        """
        assert self.num_speculative == 0, "committed rows cannot follow speculative ones"
        num_rows = positions.shape[0]
        positions_C = self.cache.begin(positions.to(self.device))
        causal_PP = torch.ones(num_rows, num_rows, dtype=torch.bool, device=self.device).tril_()
        rows_PH = self._enter(hidden_or_ids)
        length = length or int(positions[-1]) + 1
        hidden_PH, collected = self._run(rows_PH, positions_C, causal_PP, taps, length=length)
        self.cache.advance(committed=True)
        return hidden_PH, collected

    def _enter(self, hidden_or_ids: Tensor | None) -> Tensor:
        assert hidden_or_ids is not None, NO_INPUT
        rows = hidden_or_ids.to(self.device)
        return rows if self.embedding is None else self.embedding(rows)

    def masks(
        self, visible_lS: Tensor, positions_C: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor | None]:
        """Return attention masks, as ``additive_mask`` makes them, by layer kind."""
        build = partial(additive_mask, visible_lS, positions_C, dtype=dtype, groups=self.groups)
        windows = {"full_attention": None, "sliding_attention": self.window}
        masks = {kind: build(window=windows[kind]) for kind in windows.keys() & {*self.kinds}}
        return {"linear_attention": None} | masks

    def _run(
        self,
        hidden_lH: Tensor,
        positions_C: Tensor,
        visible_lS: Tensor,
        taps: Collection[int],
        is_wanted: Callable[[], bool] | None = None,
        *,
        length: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        masks = self.masks(visible_lS, positions_C, hidden_lH.dtype)
        hidden_1lH = hidden_lH[None]
        places = self.places(hidden_1lH, positions_C[-len(hidden_lH) :], self.kinds, length)
        collected = {0: hidden_lH} if self.start == 0 and 0 in taps else {}
        attends = {k: partial(stage_calls.masked, mask=mask) for k, mask in masks.items()}
        calls = self.plain.calls(
            len(hidden_lH), places=places, cache=self.cache, attends=attends, masks=masks
        )
        with stage_calls.folding_heads(self.groups):
            for index, call in enumerate(calls, start=self.start + 1):
                if is_wanted is not None and not is_wanted():
                    raise Abandoned
                if self.kinds[index - 1 - self.start] == "linear_attention":
                    hidden_1lH = self._call_recurrent(call, hidden_1lH)
                else:
                    hidden_1lH = call(hidden_1lH)
                if index in taps:
                    collected[index] = hidden_1lH[0]
        return hidden_1lH[0], collected

    def _call_recurrent(self, call: Callable[[Tensor], Tensor], hidden_1lH: Tensor) -> Tensor:
        """Run speculative rows as a batch of one-row sequences, each from its parent's state."""
        parts, order = [], []
        for rows in self.cache.recurrent_calls():
            if rows is None:
                return call(hidden_1lH)
            parts.append(call(hidden_1lH[0, rows, None])[:, 0])
            order += rows
        # Rows were run by tree depth; put them back in segment order.
        in_order = torch.tensor(order, device=hidden_1lH.device).argsort()
        return torch.cat(parts)[in_order][None]


class StagedTarget:
    """A decoder-only model as n contiguous stages in one process.

    Run one after another, the stages compute the model's own forward, also after any KeepRows.
    """

    def __init__(self, model: PreTrainedModel, num_stages: int | Sequence[int]):
        """Cut at the boundaries ``num_stages`` (0, b1, .., L), or near-evenly if it is a count."""
        decoder = model.get_decoder()
        config = decoder.config
        check_target(model.config, model.name_or_path or type(model).__name__)
        _check_attention(config._attn_implementation)
        if isinstance(num_stages, int):
            self.boundaries = stage_boundaries(config.num_hidden_layers, num_stages)
        else:
            self.boundaries = _checked_boundaries(num_stages, config.num_hidden_layers)
        self.model = model
        self.num_layers: int = config.num_hidden_layers
        self.num_stages = len(self.boundaries) - 1
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = context_length(config)
        self.recompute_length = recompute_length(model)
        self.eos_token_ids = _eos_token_ids(model)
        self.stages = [
            Stage(model, start, end)
            for start, end in zip(self.boundaries, self.boundaries[1:], strict=False)
        ]
        self._config, self._norm = config, decoder.norm
        self._lm_head = model.lm_head
        cpu.lay_out(model)
        self._is_rounded = rounded.rounded_dtype(model) is not None
        self._is_bitwise = False
        self._graphs: Graphs | None = None
        """Graphs from the last hidden states to tokens; None: not on a GPU."""
        last = self.stages[-1]
        if last.graphs is not None:
            read = (*self._norm.parameters(), *self._lm_head.parameters())
            read += tuple(self._lm_head.buffers())  # a quantized head may have only buffers
            # Graphs read these addresses, so other weights need other graphs.
            key = ("choose", *((id(weight), weight.data_ptr()) for weight in read))
            self._graphs = borrow_for(last.layers[0], self, key, partial(Graphs, last.device))

    @property
    def device(self) -> torch.device:
        """Device for the embedding and a draft."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def prompt_rows(self) -> int | None:
        """Rows per prompt chunk if another size would change a row's bits, else None."""
        return bitwise.PROMPT_ROWS if self._is_bitwise or self._is_rounded else None

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()

    def set_bitwise(self, is_on: bool) -> None:
        """Choose whether every row's bits depend only on its own past (see ``bitwise.py``)."""
        if is_on:
            bitwise.check_bitwise(self.model.get_decoder().config)
        # Rounded weights do this always, and without padding.
        self._is_bitwise = is_on and not self._is_rounded
        for stage in self.stages:
            stage.is_bitwise = self._is_bitwise

    def reserve(self, num_rows: int) -> None:
        """Reset and make room for a sequence, so that decoding it captures no new graphs."""
        self.reset()
        for stage in self.stages:
            if stage.graphs is not None:
                stage.cache.reserve(num_rows + stage_calls.MAX_ROWS, stage.device)

    def prefill(
        self,
        input_ids: Tensor,
        taps: Collection[int] = (),
        *,
        chunk_rows: int = bitwise.PROMPT_ROWS,
        length: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Reset and commit a prompt.

        Args:
            input_ids: int64 [P].
            chunk_rows: rows per forward; bounds the [chunk_rows, P] mask.
            length: as in ``Stage.prefill``, for a text computed again.

        Returns:
            logits_V for the last row (float32), and tapped states {layer index: [P, H]}.

        Raises:
            ValueError: the prompt is empty or longer than the target's positions.
        """
        num_rows = input_ids.shape[0]
        if not 1 <= num_rows <= self.max_positions:
            raise ValueError(
                f"prompt: {num_rows} tokens do not fit the target's {self.max_positions} "
                f"positions; give 1 to {self.max_positions} tokens"
            )
        if int(input_ids.max()) >= self.vocab_size or int(input_ids.min()) < 0:
            raise ValueError(
                f"prompt: token {int(input_ids.max())} is beyond the target's {self.vocab_size} "
                "embeddings; its tokenizer has tokens that the model does not, give the model's own"
            )
        self.reset()  # after the checks: a refused prompt changes nothing
        parts: dict[int, list[Tensor]] = {index: [] for index in taps}
        for ids, positions in zip(
            input_ids.split(chunk_rows), torch.arange(num_rows).split(chunk_rows), strict=True
        ):
            rows = ids
            for stage in self.stages:
                rows, collected = stage.prefill(rows, positions, taps, length=length or num_rows)
                for index, tapped_lH in collected.items():
                    parts[index].append(tapped_lH)
        return self.logits(rows[-1:])[0], {index: torch.cat(part) for index, part in parts.items()}

    @torch.inference_mode()
    def embed(self, ids_l: Tensor) -> Tensor:
        """Return layer index 0, the embeddings [l, H] of token ids, on the embedding's device."""
        return embed(self.model.get_input_embeddings(), self._config, ids_l.to(self.device))

    @torch.inference_mode()
    def logits(self, hidden_lH: Tensor) -> Tensor:
        """Return float32 logits [l, V] from raw hidden states (layer index L)."""
        if self._is_bitwise:
            count = bitwise.rows_of_a_pass(hidden_lH.device)
            parts = (bitwise.pad(x) for x in hidden_lH.split(count))
            padded = (self._lm_head(self._norm(x)) for x in parts)
            return torch.cat(list(padded))[: len(hidden_lH)].float()
        return _logits(self._norm, self._lm_head, self._config, hidden_lH)

    def can_choose(self, num_rows: int) -> bool:
        """Return True if ``choose`` accepts this many rows. It needs CUDA graphs and few rows."""
        return (
            self._graphs is not None and not self._is_bitwise and num_rows <= stage_calls.MAX_ROWS
        )

    @torch.inference_mode()
    def choose(self, hidden_lH: Tensor, choice: TokenChoice) -> Tensor:
        """Compute logits and choose from them in one CUDA graph.

        Returns:
            A view [l, ...] of a buffer that the next call overwrites.
        """
        assert self._graphs is not None
        numbers = torch.zeros(1 + padded_rows(len(hidden_lH)), dtype=torch.float64)
        numbers[: len(choice.numbers)] = choice.numbers
        # Graphs outlive this object, so they must not refer to it.
        logits, choose = partial(_logits, self._norm, self._lm_head, self._config), choice.choose

        def compute(packed: Tensor, rows_PH: Tensor | None) -> Tensor:
            assert rows_PH is not None
            return choose(logits(rows_PH), packed.view(torch.float64))

        chosen_P = self._graphs.run(choice.key, numbers.view(torch.int64), [hidden_lH], compute)
        return chosen_P[: len(hidden_lH)]


def _logits(
    norm: nn.Module, lm_head: nn.Module, config: PreTrainedConfig, hidden_lH: Tensor
) -> Tensor:
    return finish_logits(config, lm_head(norm(hidden_lH))).float()


def _checked_boundaries(boundaries: Sequence[int], num_layers: int) -> tuple[int, ...]:
    cuts = tuple(boundaries)
    ascending = all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != num_layers or not ascending:
        raise ValueError(
            f"num_stages: boundaries {cuts} do not cut {num_layers} layers; "
            f"give strictly ascending numbers from 0 to {num_layers}"
        )
    return cuts


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Read EOS ids from the generation config, as ``generate`` does, else from the model config."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ValueError(
            f"target: eos_token_id {eos!r} is no token id; fix its generation_config.json"
        )
    return tuple(ids)


# -- hidden states for training ---------------------------------------------------------------


@torch.no_grad()
def capture_hidden(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    layers: Collection[int],
    lengths: Sequence[int] | None = None,
) -> dict[int, Tensor]:
    """Run a batch without cache and logits, and return its raw hidden states for training.

    Rows may be padded on the right only. Every layer is causal, so padding reaches no other token.
    The call goes through the model's root, so sharded (FSDP, ZeRO-3) targets gather their weights.

    Args:
        layers: indices in [0, L]. Index L is before the final norm.
        lengths: document lengths in a packed row [1, T]. Each document then sees only itself.

    Returns:
        {index: hidden_BTH}, detached, in the model's dtype.

    Raises:
        ValueError: packing for a target with recurrent layers.
    """
    decoder = model.get_decoder()
    most = decoder.config.num_hidden_layers
    assert all(0 <= index <= most for index in layers), f"layers {layers} outside 0..{most}"
    if lengths is not None:
        check_packable(decoder.config)
    captured: dict[int, Tensor] = {}

    def capture(index: int, module: nn.Module, inputs: tuple, output: Tensor | None = None) -> None:
        captured[index] = inputs[0] if output is None else output

    # Compute logits for no row: the LM head is expensive, and nothing reads them here.
    no_rows = torch.empty(0, dtype=torch.long, device=input_ids_BT.device)
    packed, within = packed_call(decoder.config, input_ids_BT, lengths)
    # Use hooks: output_hidden_states would keep every layer's states.
    with ExitStack() as hooks, within:
        for index in set(layers):
            module = decoder.layers[max(index - 1, 0)]
            hook = module.register_forward_hook if index else module.register_forward_pre_hook
            hooks.enter_context(hook(partial(capture, index)))
        model(input_ids=input_ids_BT, use_cache=False, logits_to_keep=no_rows, **packed)
    return captured
