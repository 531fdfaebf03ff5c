"""The target model, cut into pipeline stages.

Layer index, everywhere in this package: 0 = embeddings, i = raw output of decoder layer i - 1.
This is the Hugging Face ``hidden_states`` convention, except that index L is before the final norm.

Shape suffixes: l rows of a segment, P prompt rows, C rows in use (new ones included), S speculative
rows up to and including the segment, H hidden, V vocabulary, B batch, T positions.
"""

import os
from collections.abc import Collection, Sequence
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
from .families import check_target
from .speed import cpu, rounded
from .speed.causal import multiplying
from .speed.cuda_graphs import Graphs, TokenChoice, borrow_for, padded_rows
from .stages import bitwise, stage_graphs
from .stages.stage import Stage
from .transformer.boundaries import stage_boundaries
from .transformer.decoder import (
    check_packable,
    choose_attention,
    embed,
    finish_logits,
    is_tied,
    untie,
)
from .transformer.fingerprint import fingerprint_mismatch, target_fingerprint
from .transformer.layers import packed_call
from .transformer.rotary_lengths import recompute_length
from .transformer.stage_cache import (
    KeepRows,
    Segment,
    prune_segment,
)

__all__ = [
    "KeepRows",
    "Segment",
    "StagedTarget",
    "fingerprint_mismatch",
    "load_target",
    "load_tokenizer",
    "prune_segment",
    "read_config",
    "target_fingerprint",
]

THREADED_HIDDEN_SIZE = 1024
"""Smallest hidden size at which several threads decode faster than one."""
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
                stage.cache.reserve(num_rows + stage_graphs.MAX_ROWS, stage.device)

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
            self._graphs is not None and not self._is_bitwise and num_rows <= stage_graphs.MAX_ROWS
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
    with ExitStack() as hooks, within, multiplying(input_ids_BT.device, lengths):
        for index in set(layers):
            module = decoder.layers[max(index - 1, 0)]
            hook = module.register_forward_hook if index else module.register_forward_pre_hook
            hooks.enter_context(hook(partial(capture, index)))
        model(input_ids=input_ids_BT, use_cache=False, logits_to_keep=no_rows, **packed)
    return captured
