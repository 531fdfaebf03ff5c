"""Answers from a target in this process, by transformers' own generation, in batches."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from pipedraft.data_recipes.dialogue import (
    Answer,
    Dialogue,
    Messages,
    RowFailed,
    Sampling,
    kept_text,
)
from pipedraft.pretrained import load_model, load_tokenizer

# B rows, T positions

BATCHES_SORTED_TOGETHER = 16


class LocalTarget:
    """A chat model and its tokenizer, on the GPU if there is one."""

    def __init__(self, name: str, dtype: str, sampling: Sampling) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(name, field="--target", dtype=getattr(torch, dtype))
        self.model: Any = model.eval().to(device)
        self.tokenizer: Any = load_tokenizer(name, field="--target")
        self.sampling = sampling
        if not self.tokenizer.chat_template:
            raise ValueError(f"--target: {name!r} has no chat template; name a chat model")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        ends = self.model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [ends]
        self.ends = sorted({*listed, self.tokenizer.eos_token_id} - {None})
        self.max_positions = self.model.config.get_text_config().max_position_embeddings

    def render(self, question: Messages) -> str:
        """The prompt as the target reads it, which must leave room for an answer."""
        try:
            text = self.tokenizer.apply_chat_template(
                question, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise RowFailed(f"chat template refused: {error}") from error
        num_tokens = len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if num_tokens + self.sampling.max_tokens > self.max_positions:
            raise RowFailed(
                f"{num_tokens} tokens and --max-tokens {self.sampling.max_tokens} exceed the "
                f"target's {self.max_positions} positions"
            )
        return text

    @torch.inference_mode()
    def answer_batch(self, prompts: list[str], *, is_greedy: bool) -> list[tuple[str, bool]]:
        """(text, was cut at --max-tokens) for every rendered prompt, padded on the left.

        Sampling is from the target's own distribution: what its generation_config.json adds
        (top-k, a repetition penalty) is switched off.
        """
        batch = self.tokenizer(
            prompts,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.model.device)
        sampling = self.sampling
        draw = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        output_BT = self.model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=sampling.max_tokens,
            do_sample=not is_greedy,
            repetition_penalty=1.0,
            eos_token_id=self.ends or None,
            pad_token_id=self.tokenizer.pad_token_id,
            **({} if is_greedy else draw),
        )
        answer_BT: Tensor = output_BT[:, batch.input_ids.shape[1] :].cpu()
        ended_B = torch.isin(answer_BT, torch.tensor(self.ends)).any(1)
        texts = self.tokenizer.batch_decode(answer_BT, skip_special_tokens=True)
        return list(zip(texts, (~ended_B).tolist(), strict=True))


def answer_dialogues(
    target: LocalTarget,
    dialogues: Iterator[Dialogue],
    settle: Callable[[Dialogue, str], None],
    *,
    batch_size: int,
) -> None:
    """Answer every dialogue; greedy and sampled ones, short and long ones in batches of their own.

    Args:
        settle: gets each dialogue when it is complete, with "", or cannot be, with the reason.
    """
    sampling = target.sampling
    while window := list(itertools.islice(dialogues, batch_size * BATCHES_SORTED_TOGETHER)):
        window.sort(key=length_of_prompts)
        for is_greedy in (True, False):
            chosen = [d for d in window if sampling.is_greedy(d.row) == is_greedy]
            for first in range(0, len(chosen), batch_size):
                answer_together(
                    target, chosen[first : first + batch_size], settle, is_greedy=is_greedy
                )


def answer_together(
    target: LocalTarget,
    dialogues: list[Dialogue],
    settle: Callable[[Dialogue, str], None],
    *,
    is_greedy: bool,
) -> None:
    """All turns of one batch; it shrinks as its shorter dialogues are complete."""
    while dialogues:
        prompts: dict[int, str] = {}
        for index, dialogue in enumerate(dialogues):
            try:
                prompts[index] = target.render(dialogue.question())
            except RowFailed as error:
                settle(dialogue, str(error))
        if not prompts:
            return
        asked = [dialogues[index] for index in prompts]
        torch.manual_seed(target.sampling.seed_of(asked[0].row, asked[0].num_answers))
        with explained_memory():
            answers = target.answer_batch(list(prompts.values()), is_greedy=is_greedy)
        dialogues = []
        for dialogue, prompt, (text, is_cut) in zip(asked, prompts.values(), answers, strict=True):
            if prompt.rstrip().endswith("<think>"):
                text = "<think>\n" + text
            try:
                kept = kept_text(text, "", thinking=target.sampling.thinking)
            except RowFailed as error:
                settle(dialogue, str(error))
                continue
            dialogue.add(Answer(kept, is_cut))
            if dialogue.is_complete:
                settle(dialogue, "")
            else:
                dialogues.append(dialogue)


def length_of_prompts(dialogue: Dialogue) -> int:
    return sum(len(message["content"]) for prompt in dialogue.prompts for message in prompt)


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError("--batch: it does not fit into the GPU's memory; give less") from error
