"""Greedy losslessness: the decoded tokens are the ones that `transformers` generates.

In float32 every difference is a fault. In half precision two tokens may have logits closer to each
other than rounding moves them between one matrix shape and another, and greedy decoding of the same
target then depends on how many rows were computed together. So a difference is a tie if the
target's margin between the two tokens at the first of them is within the noise, else a fault.
"""

# N new tokens, V target vocabulary, W best tokens, R rows of a chunk
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from pipedraft.eval.record import LosslessRecord, is_known
from pipedraft.eval.traces import TraceFile
from pipedraft.files import Values
from pipedraft.inference.result import DecodeResult

if TYPE_CHECKING:
    from pipedraft.eval.turns import DecodedTurn

CHUNK_ROWS = 256  # rows whose float32 log-probabilities are held at a time
CONTENDERS = 8
"""Best tokens whose margins measure the noise: those of two tokens alone may move together."""


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


class BestFew(LogitsProcessor):
    """Notes the best tokens of every step, and changes nothing."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.margins: list[Tensor] = []
        """[W - 1] each: from the best logit down to the others."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores[0].topk(min(CONTENDERS, scores.shape[-1]))
        self.tokens.append(best.indices)
        self.margins.append(best.values[0] - best.values[1:])
        return scores


@torch.no_grad()  # no inference mode, in which decoding reads laid-out copies: models/cpu.py
def generate_greedy(
    target: PreTrainedModel,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    best_few: BestFew | None = None,
) -> list[int]:
    """New tokens of `generate(do_sample=False)`, the EOS token included if one was drawn."""
    input_ids = torch.tensor([prompt_ids], device=target.device)
    with _plain_greedy(target, max_new_tokens):
        # PreTrainedModel does not declare generate; every causal LM has it.
        output = target.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            logits_processor=None if best_few is None else LogitsProcessorList([best_few]),
        )
    return output[0, len(prompt_ids) :].tolist()


@dataclass(frozen=True)
class GreedyOutput:
    """Greedy output of `transformers` for a prompt."""

    tokens: list[int]
    margins: list[float]
    """Between the two best tokens of every step; empty in float32."""
    noise: float
    """Largest change of the margin between the best token and another of the best few, when the
    output is computed in a single pass; 0 in float32."""


def pool_checks(checks: Sequence[LosslessRecord]) -> LosslessRecord:
    """The checks of several benchmarks, all in the same precision, as one."""
    counts = ["checked", "mismatches"]
    measured: Values = {}
    noises = [check.noise for check in checks if is_known(check.noise)]
    if noises:
        counts += ["faults", "near_ties", "positions", "ties"]
        margins = [margin for check in checks for margin in check.margins or ()]
        measured = {"noise": max(noises), "margins": margins}
    totals = {name: sum(getattr(check, name) for check in checks) for name in counts}
    return LosslessRecord(**totals, **measured)


def check_equal(turns: "Sequence[DecodedTurn]", plain: "Sequence[DecodedTurn]") -> LosslessRecord:
    """Compare outputs with plain decoding's, drawn with the same noise.

    Do not use it in half precision without --bitwise: rounding may change a draw, and nothing would
    distinguish this from a fault.
    """
    expected = {(turn.conversation, turn.turn): turn.result.token_ids for turn in plain}
    outputs = {(turn.conversation, turn.turn): turn.result.token_ids for turn in turns}
    wrong = sum(tokens != expected.get(turn) for turn, tokens in outputs.items())
    return LosslessRecord(checked=len(outputs), mismatches=wrong)


class GreedyReference:
    """Greedy outputs of one target, each generated once however many methods are checked."""

    def __init__(
        self, target: PreTrainedModel, max_new_tokens: int, traces: TraceFile | None = None
    ) -> None:
        """
        Args:
            traces: outputs in there are not generated again, and generated ones are added.
        """
        self.target, self.max_new_tokens = target, max_new_tokens
        self.traces = traces or TraceFile()
        self.is_exact = target.dtype == torch.float32

    def output(self, prompt_ids: list[int]) -> GreedyOutput:
        found = self.traces.find(prompt_ids, lambda: asdict(self._generate(prompt_ids)))
        return GreedyOutput(**found)

    def _generate(self, prompt_ids: list[int]) -> GreedyOutput:
        best = None if self.is_exact else BestFew()
        tokens = generate_greedy(
            self.target, prompt_ids, max_new_tokens=self.max_new_tokens, best_few=best
        )
        if best is None:
            return GreedyOutput(tokens, [], 0.0)
        logits_NV = output_logits(self.target, prompt_ids, tokens).float()
        best_NW = logits_NV.gather(1, torch.stack(best.tokens))
        margins_NW = torch.stack(best.margins)
        change = (best_NW[:, :1] - best_NW[:, 1:] - margins_NW).abs().max()
        return GreedyOutput(tokens, margins_NW[:, 0].tolist(), float(change))

    def check(self, results: Sequence[DecodeResult]) -> LosslessRecord:
        """Compare every result with the greedy continuation of its prompt.

        One that ran into the target's context length is compared as far as it goes.
        """
        outputs = [self.output(result.prompt_ids) for result in results]
        wrong = [
            (result, output.tokens, place)
            for result, output in zip(results, outputs, strict=True)
            for place in [_first_difference(result, output.tokens)]
            if place is not None
        ]
        if self.is_exact:
            return LosslessRecord(checked=len(results), mismatches=len(wrong))
        noise = max((output.noise for output in outputs), default=0.0)
        is_near = [margin <= noise for output in outputs for margin in output.margins]
        found = [self._margin(*difference) for difference in wrong]
        faults = sum(not margin <= max(noise, spacing) for margin, spacing in found)
        return LosslessRecord(
            checked=len(results),
            mismatches=len(wrong),
            faults=faults,
            near_ties=sum(is_near),
            positions=len(is_near),
            noise=noise,
            margins=[margin for margin, _ in found],
            ties=len(wrong) - faults,
        )

    def _margin(self, result: DecodeResult, expected: list[int], place: int) -> tuple[float, float]:
        """Logits between the best token and the worse of two tokens that differ.

        Infinite where one of the outputs ends and the other goes on.

        Returns:
            The margin, and the distance of neighboring numbers of the dtype at the best logit:
            either logit is rounded by up to half of it, however little the rest is off.
        """
        if place >= min(len(result.token_ids), len(expected)):
            return float("inf"), 0.0
        tokens = [result.token_ids[place], expected[place]]
        logits_NV = output_logits(self.target, result.prompt_ids, expected[: place + 1])
        logits_V = logits_NV[-1].float()
        best = float(logits_V.max())
        spacing = abs(best) * torch.finfo(self.target.dtype).eps
        return best - float(logits_V[tokens].min()), spacing


def _first_difference(result: DecodeResult, expected: list[int]) -> int | None:
    """Index of the first token that differs; None: the outputs are equal."""
    found = result.token_ids
    if result.stop_reason == "max_length":
        expected = expected[: len(found)]
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        if ours != theirs:
            return place
    return None if len(found) == len(expected) else min(len(found), len(expected))


# -- what the target says at every token of a finished sequence: one forward pass over all of it ---


@torch.no_grad()
def output_logits(target: PreTrainedModel, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
    """Logits [N, V] from which each token of the output was, or could have been, chosen.

    In the target's own dtype, and without a cache: other matrix shapes than those of decoding.
    """
    input_ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=target.device)
    output = target(input_ids, logits_to_keep=len(token_ids), use_cache=False)
    return output.logits[0]


def entropies(logits_NV: Tensor) -> list[float]:
    """-sum p log p in nats of every row, at temperature 1 whatever the output was drawn at."""
    chunks = [
        torch.special.entr(chunk_RV.float().softmax(-1)).sum(-1)
        for chunk_RV in logits_NV.split(CHUNK_ROWS)
    ]
    return torch.cat(chunks).tolist()


def output_entropies(
    target: PreTrainedModel, result: DecodeResult, traces: TraceFile
) -> list[float]:
    """The target's entropy at each of the ``token_ids``.

    The same output has the same entropies, whatever decoded it: each is computed once.
    """
    output = json.dumps([result.prompt_ids, result.token_ids]).encode()

    def compute() -> list[float]:
        logits_NV = output_logits(target, result.prompt_ids, result.token_ids)
        return [round(entropy, 6) for entropy in entropies(logits_NV)]

    return traces.find([hashlib.sha256(output).hexdigest()], compute)
