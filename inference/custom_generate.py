"""Decoding loop for ``generate(custom_generate=...)`` in transformers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessor, StoppingCriteria

from ..files import Values
from .engine import Engine
from .result import DecodeResult, Observer

WARPERS = (
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"),
    *("MinPLogitsWarper", "TypicalLogitsWarper"),
)
"""Logits processors for settings a ``DecodeConfig`` also has."""
LIMITS = ("MaxLengthCriteria", "EosTokenCriteria")
"""Stopping criteria applied by the engine itself."""
FILTERS = ("top_k", "top_p", "min_p", "typical_p")
EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class NoText:
    """Tokenizer stand-in returning no text, because transformers uses token ids only."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


class Stopper(Observer):
    """Observer that ends the sequence at a stopping criterion not applied by the engine."""

    def __init__(self, prompt_ids: list[int], criteria: Sequence[StoppingCriteria]) -> None:
        self.ids, self.criteria = list(prompt_ids), criteria

    def token(self, token: int, is_drafted: bool) -> bool:
        if not self.criteria:
            return False
        self.ids.append(token)
        ids_1T, scores = torch.tensor([self.ids]), torch.empty(0)  # the engine has no scores here
        return any(bool(criterion(ids_1T, scores).all()) for criterion in self.criteria)


class CustomGenerate:
    """Decoding loop with a draft, for transformers' ``generate(custom_generate=...)``.

    Args:
        make_engine: builds an engine for a target and ``DecodeConfig`` settings.
    """

    def __init__(self, make_engine: Callable[[PreTrainedModel, Values], Engine]) -> None:
        self._make_engine = make_engine
        self.results: list[DecodeResult] = []
        """Counts for the last call, one entry per sequence."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        generation_config: GenerationConfig | None = None,
        **kwargs: object,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode each prompt in a batch as transformers' own loop would.

        Raises:
            ValueError: the engine does not support the ``generate`` setting in the message.
        """
        model_kwargs: Values = kwargs
        config = generation_config or GenerationConfig()
        _refuse(config, logits_processor, model_kwargs)
        # transformers counts the padded prompt against max_length; so does this loop.
        max_new_tokens = int(config.max_length) - input_ids.shape[1]
        settings = sampling_settings(config) | {"max_new_tokens": max_new_tokens}
        engine = self._make_engine(model, settings)
        engine.target.eos_token_ids = _end_ids(config)
        further = [c for c in stopping_criteria if type(c).__name__ not in LIMITS]
        mask_BT = model_kwargs.get("attention_mask")
        self.results = []
        for index, ids_T in enumerate(input_ids):
            prompt = (ids_T if mask_BT is None else ids_T[mask_BT[index].bool()]).tolist()
            stopper = Stopper(prompt, further)
            self.results.append(engine.decode(prompt, prompt_index=index, observer=stopper))
        sequences_BT = _joined(input_ids, [result.token_ids for result in self.results], config)
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences_BT)  # type: ignore[arg-type]
        return sequences_BT


def sampling_settings(config: GenerationConfig) -> Values:
    """Return ``DecodeConfig`` settings to sample as transformers would.

    The seed is drawn from torch's generator, so ``torch.manual_seed`` repeats an output.
    """
    if not config.do_sample:
        return {"temperature": 0.0}
    given = {name: getattr(config, name, None) for name in FILTERS}
    filters = {name: value for name, value in given.items() if value is not None}
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    return {"temperature": temperature, "seed": int(torch.randint(2**31, ()))} | filters


def _end_ids(config: GenerationConfig) -> tuple[int, ...]:
    ends = config.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _refuse(
    config: GenerationConfig, processors: Sequence[LogitsProcessor], model_kwargs: Values
) -> None:
    """Reject unsupported settings if they would change the output."""
    one = {name: getattr(config, name, None) or 1 for name in ("num_beams", "num_return_sequences")}
    found: list[tuple[str, object]] = [(name, n) for name, n in one.items() if n != 1]
    found += [(name, True) for name in EXTRA_OUTPUTS if getattr(config, name, None)]
    names = [type(processor).__name__ for processor in processors]
    found += [("logits_processor", name) for name in names if name not in WARPERS]
    if model_kwargs.get("inputs_embeds") is not None:
        found.append(("inputs_embeds", "a tensor"))
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        found.append(("past_key_values", f"a cache of {cache.get_seq_length()} tokens"))
    if found:
        name, value = found[0]
        raise ValueError(f"{name}: {value} is not supported by this decoding loop; leave it out")


def _joined(input_ids: Tensor, new_ids: list[list[int]], config: GenerationConfig) -> Tensor:
    """Return prompts joined with outputs [B, T], shorter outputs padded at the end."""
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(_end_ids(config)), 0)
    longest = max(map(len, new_ids))
    padded = [ids + [pad] * (longest - len(ids)) for ids in new_ids]
    new_BN = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, new_BN], dim=1)
