"""Generate answers with a chat model in this process."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopPLogitsWarper,
)

from ..chats import END_THINK, check_template_variables, render_chat
from ..devices import resolve_device
from ..pretrained import context_length, load_model, load_tokenizer
from ..responses import Response, read_response, reader_for
from .answers import (
    AnswerSampling,
    Dialogue,
    RowFailed,
    kept_response,
)
from .bulk import preallocate

# B rows, T positions, V vocabulary

BATCHES_SORTED_TOGETHER = 16


def load_on(name: str, device: str, dtype: str) -> PreTrainedModel:
    """Load the chat model given by ``--target``, ``--device`` and ``--dtype``."""
    place, weights = resolve_device(device), getattr(torch, dtype)
    return load_model(name, field="--target", dtype=weights, device=place).eval()


class LocalTarget:
    """A chat model and its tokenizer."""

    def __init__(self, name: str, device: str, dtype: str, sampling: AnswerSampling) -> None:
        self.model: Any = load_on(name, device, dtype)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(name, field="--target")
        self.sampling = sampling
        if not self.tokenizer.chat_template:
            raise ValueError(f"--target: {name!r} has no chat template; name a chat model")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        ends = self.model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [ends]
        self.ends = sorted({*listed, self.tokenizer.eos_token_id} - {None})
        self.max_positions = context_length(self.model.config)

    def render(self, dialogue: Dialogue) -> tuple[str, int]:
        """Return the next prompt as the target reads it, and the maximum tokens for its answer."""
        turns = dialogue.question()
        try:
            check_template_variables(dialogue.variables, "chat_template_kwargs")
            text = render_chat(
                self.tokenizer, turns, tools=dialogue.tools, variables=dialogue.variables
            )
        except ValueError as error:
            raise RowFailed(str(error)) from error
        num_tokens = len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        room = self.max_positions - num_tokens
        if room < 1:
            raise RowFailed(
                f"{num_tokens} tokens exceed the target's {self.max_positions} positions"
            )
        return text, min(room, self.sampling.max_tokens)

    @torch.inference_mode()
    def answer_batch(
        self, prompts: list[str], rooms: list[int], *, is_greedy: bool
    ) -> list[list[int]]:
        """Answer rendered prompts in one batch. Return each answer's tokens.

        Only ``sampling`` changes the target's distribution. Settings in generation_config.json,
        such as top-k or a repetition penalty, are ignored.
        """
        batch = self.tokenizer(
            prompts,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.model.device)
        return decode_batch(
            self.model,
            batch.input_ids,
            batch.attention_mask,
            ends=self.ends,
            sampling=None if is_greedy else self.sampling,
            max_tokens=rooms,
        )


def stored_answer(
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogue,
    prompt: str,
    ids: list[int],
    *,
    thinking: Literal["keep", "strip"],
    end: int | None = None,
) -> Response:
    """Return an answer's fields for the row.

    Of several ways to store the answer, take the first that the template renders into the tokens
    that the target wrote.

    Args:
        ids: the answer's tokens without the end token.
        end: the end token, or None if the answer was cut.

    Raises:
        RowFailed: the answer is empty, it is thinking alone, or its format is unknown.
    """
    reader = reader_for(tokenizer, prompt, tools=dialogue.tools)
    marks = {} if reader is None else reader.marks
    read = read_response(tokenizer, prompt, ids, tools=dialogue.tools)
    kept = kept_response(read, thinking=thinking)
    if thinking == "strip":
        return kept
    text = prompt + str(tokenizer.decode(ids))
    ending = "" if end is None else str(tokenizer.decode([end]))
    almost: Response | None = None
    # Special tokens that the chat template names, too, are part of a format.
    chat, special = tokenizer.get_chat_template(), {*ids} & {*tokenizer.all_special_ids}
    named = {x for x in special if str(tokenizer.decode([x])) in chat}
    whole = [
        behind_thinking(str(tokenizer.decode(ids, skip_special_tokens=skips)), kept.thinking)
        for skips in ((True, False) if named else (True,))
    ]
    for response in (kept, replace(kept, content=read.content), *whole):
        try:
            rendered = render_chat(
                tokenizer,
                [*dialogue.question(), response.message()],
                prompt=False,
                tools=dialogue.tools,
                variables=dialogue.variables,
            )
        except ValueError:  # the template refuses such a turn
            continue
        if rendered.startswith(text + ending):
            return response
        if rendered.startswith(text):
            almost = almost or response
    if named - {*marks}:
        raise RowFailed("the answer has special tokens that no response_template explains")
    return almost or kept


def behind_thinking(text: str, thinking: str) -> Response:
    """Return an answer's whole text as its content, without thinking that is known already."""
    if not thinking or END_THINK not in text:
        return Response(content=text)
    return Response(thinking, text.partition(END_THINK)[2].lstrip())


DROPPED_SHARE = 1 / 8
"""Remove finished rows from the batch once they reach this share."""


@torch.inference_mode()
def decode_batch(
    model: PreTrainedModel,
    ids_BT: Tensor,
    mask_BT: Tensor,
    *,
    ends: Sequence[int],
    sampling: AnswerSampling | None,
    max_tokens: Sequence[int],
) -> list[list[int]]:
    """Return the token ids of B answers, end tokens included, for prompts padded on the left.

    Args:
        mask_BT: 0 where a prompt is padded.
        sampling: None for greedy decoding.
        max_tokens: maximum tokens for each answer.
    """
    answers: list[list[int]] = [[] for _ in ids_BT]
    cache = DynamicCache(config=model.config)
    longest = ids_BT.shape[1] + max(max_tokens)
    preallocate(cache, longest)
    warp = TopPLogitsWarper(sampling.top_p) if sampling and sampling.top_p < 1 else None
    ends_E = torch.tensor(ends, device=ids_BT.device)
    rows_B = torch.arange(len(ids_BT))
    has_ended_B = torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    step_BT = ids_BT
    rooms_B = torch.tensor(max_tokens, device=ids_BT.device)
    for num_tokens in range(1, max(max_tokens) + 1):
        logits_BV = model(
            input_ids=step_BT,
            attention_mask=mask_BT,
            position_ids=position_BT,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        if sampling is None:
            token_B = logits_BV.argmax(-1)
        else:
            logits_BV = logits_BV.float() / sampling.temperature
            if warp is not None:
                logits_BV = warp(None, logits_BV)  # type: ignore[arg-type]  # reads scores only
            token_B = torch.multinomial(logits_BV.softmax(-1), 1)[:, 0]
        told = zip(rows_B.tolist(), token_B.tolist(), has_ended_B.tolist(), strict=True)
        for row, token, has_ended in told:
            if not has_ended:
                answers[row].append(token)
        has_ended_B = has_ended_B | torch.isin(token_B, ends_E) | (rooms_B <= num_tokens)
        if has_ended_B.all():
            break
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], 1)
        step_BT, position_BT = token_B[:, None], position_BT[:, -1:] + 1
        # A finished row costs as much as an active one; removing it copies the cache.
        if has_ended_B.float().mean() >= DROPPED_SHARE:
            index = (~has_ended_B).nonzero()[:, 0]
            cache.batch_select_indices(index)
            mask_BT, step_BT, position_BT = mask_BT[index], step_BT[index], position_BT[index]
            rows_B, has_ended_B = rows_B[index.cpu()], has_ended_B[index]
            rooms_B = rooms_B[index]
    return answers


def answer_dialogues(
    target: LocalTarget,
    dialogues: Iterator[Dialogue],
    settle: Callable[[Dialogue, str], None],
    *,
    batch_size: int,
) -> None:
    """Answer every dialogue. Batches are greedy or sampled, and join dialogues of similar length.

    Args:
        settle: called with each completed dialogue and "", or each failed dialogue and the reason.
    """
    sampling = target.sampling
    while window := list(itertools.islice(dialogues, batch_size * BATCHES_SORTED_TOGETHER)):
        window.sort(key=lambda d: sum(len(turn["content"]) for x in d.prompts for turn in x))
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
    """Answer all turns of these dialogues in one batch. The batch shrinks as dialogues complete."""
    while dialogues:
        prompts: dict[int, tuple[str, int]] = {}
        for index, dialogue in enumerate(dialogues):
            try:
                prompts[index] = target.render(dialogue)
            except RowFailed as error:
                settle(dialogue, str(error))
        if not prompts:
            return
        asked = [dialogues[index] for index in prompts]
        torch.manual_seed(target.sampling.seed_of(asked[0].row, asked[0].num_answers))
        try:
            texts, rooms = (list(x) for x in zip(*prompts.values(), strict=True))
            answers = target.answer_batch(texts, rooms, is_greedy=is_greedy)
        except torch.OutOfMemoryError as error:
            raise ValueError("--batch: it does not fit into the GPU's memory; give less") from error
        dialogues = []
        for dialogue, prompt, ids in zip(asked, texts, answers, strict=True):
            try:
                is_cut = ids[-1] not in target.ends
                own = ids if is_cut else ids[:-1]
                thinking = target.sampling.thinking
                answer = stored_answer(
                    target.tokenizer,
                    dialogue,
                    prompt,
                    own,
                    thinking=thinking,
                    end=None if is_cut else ids[-1],
                )
                dialogue.add(answer, is_cut=is_cut)
            except RowFailed as error:
                settle(dialogue, str(error))
                continue
            if dialogue.is_complete:
                settle(dialogue, "")
            else:
                dialogues.append(dialogue)
