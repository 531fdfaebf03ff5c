"""Greedy losslessness: the decoded tokens are the ones that `transformers` generates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel

from pipedraft.eval.traces import TraceFile
from pipedraft.inference.result import DecodeResult


@contextmanager
def _plain_greedy(target: PreTrainedModel, max_new_tokens: int) -> Iterator[None]:
    """Put a bare greedy configuration in place of the target's.

    generate() fills what its argument leaves open from the target's own configuration, where
    sampling penalties may stand; only the EOS tokens are taken from there.
    """
    own = target.generation_config
    eos = own.eos_token_id if own.eos_token_id is not None else target.config.eos_token_id
    pad = eos[0] if isinstance(eos, list | tuple) else eos
    target.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) if isinstance(eos, tuple) else eos,
        pad_token_id=0 if pad is None else pad,
    )
    try:
        yield
    finally:
        target.generation_config = own


@torch.inference_mode()
def generate_greedy(
    target: PreTrainedModel, prompt_ids: list[int], *, max_new_tokens: int
) -> list[int]:
    """New tokens of `generate(do_sample=False)`, the EOS token included if one was drawn."""
    input_ids = torch.tensor([prompt_ids], device=target.device)
    with _plain_greedy(target, max_new_tokens):
        # PreTrainedModel does not declare generate; every causal LM has it.
        output = target.generate(  # type: ignore[operator]
            input_ids, attention_mask=torch.ones_like(input_ids)
        )
    return output[0, len(prompt_ids) :].tolist()


class GreedyReference:
    """Greedy texts of one target, each generated once however many methods are checked."""

    def __init__(
        self, target: PreTrainedModel, max_new_tokens: int, traces: TraceFile | None = None
    ) -> None:
        """
        Args:
            traces: texts in there are not generated again, and generated ones are added.
        """
        self.target, self.max_new_tokens, self.traces = target, max_new_tokens, traces
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def matches(self, result: DecodeResult) -> bool:
        """True if ``result`` is token for token the greedy continuation of its prompt.

        A result that ran into the target's context length is compared as far as it goes.
        """
        key = tuple(result.prompt_ids)
        if key not in self._texts:
            self._texts[key] = self._text(result.prompt_ids)
        expected = self._texts[key]
        if result.stop_reason == "max_length":
            expected = expected[: len(result.token_ids)]
        return result.token_ids == expected

    def _text(self, prompt_ids: list[int]) -> list[int]:
        text = None if self.traces is None else self.traces.get(prompt_ids)
        if text is None:
            text = generate_greedy(self.target, prompt_ids, max_new_tokens=self.max_new_tokens)
            if self.traces is not None:
                self.traces.add(prompt_ids, text)
        return text

    def check(self, results: Sequence[DecodeResult]) -> dict[str, int]:
        """{"checked", "mismatches"}: turns compared, and turns that differ."""
        mismatches = sum(not self.matches(result) for result in results)
        return {"checked": len(results), "mismatches": mismatches}
