"""Sample conversations in which a chat model writes both the user turn and the answer.

As in Magpie (arXiv:2406.08464), the prompt is only the chat template's opening of a user turn.
``regenerate --self-prompt N`` samples N rows to train a head on the target's own text.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chats import render_chat, set_template_variables, template_variables
from ..responses import Response, read_response
from .answers import WAS_CUT, AnswerFile, AnswerSampling, Messages
from .bulk import Opening, SampledRow, repeats_itself, sample_rows
from .overlap import Benchmarks, read_benchmarks

CONTENT = "CONTENT"
MIN_ANSWER = 8
"""Minimum answer tokens per row."""


@dataclass(frozen=True)
class TurnMarkers:
    """Token ids that a chat template puts around a user turn and its answer."""

    user: tuple[int, ...]
    """Tokens before the first user turn, with any default system prompt."""
    assistant: tuple[int, ...]
    """Tokens from the user turn's end token (excluded) to the answer."""
    end: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TurnMarkers":
        """Extract the markers from a template.

        Raises:
            ValueError: there is no template, or it does not close a user turn with the EOS token.
        """
        messages = [{"role": "user", "content": CONTENT}]
        rendered = render_chat(tokenizer, messages) if tokenizer.chat_template else ""
        before, _, after = rendered.partition(CONTENT)
        end = tokenizer.eos_token or CONTENT
        closes, _, opening = after.partition(end)
        if not before or closes.strip() or not opening.strip():
            raise ValueError(
                "--target: its chat template does not close a user's turn with the EOS token, so "
                "that a self-made turn has no end; give --data with questions"
            )
        user, assistant = (
            tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in (before, opening)
        )
        return cls(user, assistant, int(tokenizer.eos_token_id))


class SelfPrompting:
    """Samples rows in batches. Each row becomes a conversation, or fails with a reason."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: AnswerSampling,
        benchmarks: Sequence[str] = (),
        *,
        drops_cut: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        set_template_variables(tokenizer, sampling.chat_template_kwargs)
        self.markers, self.sampling = TurnMarkers.of(tokenizer), sampling
        self.drops_cut = drops_cut
        self.model = model
        ends = model.generation_config.eos_token_id if model.generation_config else None
        self.ends = {self.markers.end, *(ends if isinstance(ends, list) else [ends])} - {None}
        self.benchmarks: Benchmarks | None = read_benchmarks(benchmarks) if benchmarks else None
        self.seen: set[str] = set()
        """User turns so far; a repeated one is dropped."""
        self.num_tokens = 0

    def fill(self, answers: AnswerFile, num_rows: int, batch_size: int, bar: tqdm) -> None:
        """Sample all unsettled rows in batches of ``batch_size``."""
        pending = [row for row in range(num_rows) if answers.is_pending(row)]
        for first in range(0, len(pending), batch_size):
            rows = pending[first : first + batch_size]
            started = time.monotonic()
            sampled = self._sample(rows)
            seconds = time.monotonic() - started
            tokens = sum(len(row.ids) for row in sampled.values())
            self.num_tokens += tokens
            for row in rows:
                messages, reason = self._read(sampled.get(row))
                if reason:
                    answers.fail(row, reason, "{}")
                else:
                    is_greedy = self.sampling.is_greedy(row)
                    line = {"messages": messages, "greedy_answers": is_greedy}
                    line["cut_answers"] = int(not sampled[row].has_ended)
                    if variables := template_variables(self.tokenizer):
                        line["chat_template_kwargs"] = variables
                    answers.add(row, line)
            rate = f"{tokens / seconds:.0f}"
            bar.set_postfix({"left out": answers.num_failed, "tokens/s": rate}, refresh=False)
            bar.update(len(rows))

    def _sample(self, rows: Sequence[int]) -> dict[int, SampledRow]:
        """Sample a batch. The seed and the batch's first row decide the random numbers."""
        openings = [
            Opening(self.markers.user, self.sampling.is_greedy(row), writes_user=True)
            for row in rows
        ]
        generator = torch.Generator(self.model.device)
        generator.manual_seed(self.sampling.seed_of(rows[0], 0))
        found = sample_rows(
            self.model,
            openings,
            assistant=self.markers.assistant,
            ends=self.ends,
            max_length=len(self.markers.user) + self.sampling.max_tokens,
            generator=generator,
        )
        return {rows[row.place]: row for row in found}

    def _read(self, row: SampledRow | None) -> tuple[Messages, str]:
        """Return a row's messages, or the reason for dropping it."""
        if row is None:
            return [], "the user's turn has no end"
        answer = row.ids[row.answer_start :]
        if len(answer) < MIN_ANSWER:
            return [], f"the answer has fewer than {MIN_ANSWER} tokens"
        if repeats_itself(row.ids):
            return [], "four tokens repeat in a loop"
        if self.drops_cut and not row.has_ended:
            return [], WAS_CUT
        first, last = len(self.markers.user), row.answer_start - len(self.markers.assistant) - 1
        user = str(self.tokenizer.decode(row.ids[first:last], skip_special_tokens=True)).strip()
        read = read_response(self.tokenizer, row.ids[: row.answer_start].tolist(), answer.tolist())
        said = Response(read.thinking, read.content.strip())
        if not user or not said.content:
            return [], "a turn is empty"
        if user in self.seen:
            return [], "the user's turn came before"
        if self.benchmarks is not None and self.benchmarks.find(f"{user}\n{said.content}")[0]:
            return [], "contains a prompt of a benchmark"
        self.seen.add(user)
        return [{"role": "user", "content": user}, said.message()], ""
