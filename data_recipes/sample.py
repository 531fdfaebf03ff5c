"""Conversations that a chat model makes up by itself: what a draft for it will have to draft.

    python -m pipedraft.data_recipes.sample --target assets/target --rows 4000 --out answers.jsonl

Every row starts at the beginning of a user turn and is sampled on until the model ends it.
User turns are drawn at temperature 1; a share of the rows has greedy answers, the rest sampled
ones, so that a draft sees both kinds of decoding. ``data_recipes.regenerate`` answers given users.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from pipedraft.data_recipes.answers import (
    Answer,
    Dialogue,
    Messages,
    RowFailed,
    Sampling,
    kept_text,
)
from pipedraft.errors import run_command
from pipedraft.files import publish
from pipedraft.options import Options, option
from pipedraft.pretrained import load_model, load_tokenizer

# B rows, T positions, V vocabulary


@dataclass(frozen=True)
class Markers:
    """Token ids that open and close turns, read off the tokenizer's chat template."""

    user: tuple[int, ...]
    assistant: tuple[int, ...]
    end_of_turn: int
    end_of_text: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Markers":
        content = "CONTENT"
        messages = [{"role": "user", "content": content}]
        rendered = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
        before, _, after = rendered.partition(content)
        opening = after.split(tokenizer.eos_token, 1)[-1].lstrip("\n")
        if not before or tokenizer.eos_token not in after or not opening:
            raise ValueError(
                "target: its chat template does not close a turn with the EOS token; sample from a "
                "model whose template does"
            )
        user, assistant = (
            tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in (before, opening)
        )
        return cls(user, assistant, tokenizer.eos_token_id, tokenizer.pad_token_id)


@torch.inference_mode()
def sample_batch(
    model: PreTrainedModel,
    markers: Markers,
    *,
    greedy_B: Tensor,
    max_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Token ids of B sequences, sampled in lock-step without padding.

    Args:
        greedy_B: rows whose assistant turns are greedy.
    """
    num_rows, opening = len(greedy_B), len(markers.assistant)
    sequences: list[list[int]] = [list(markers.user) for _ in range(num_rows)]
    alive = torch.arange(num_rows)
    answering_B = torch.zeros(num_rows, dtype=torch.bool)
    cache = DynamicCache(config=model.config)
    assistant = torch.tensor(markers.assistant)
    recent_BT = torch.full((num_rows, opening), -1)
    step_BT = torch.tensor([markers.user] * num_rows)
    while len(alive) and len(sequences[int(alive[0])]) < max_tokens:
        logits_BV = model(input_ids=step_BT, past_key_values=cache).logits[:, -1].float()
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]
        take_best = answering_B & greedy_B[alive]
        token_B = torch.where(take_best, logits_BV.argmax(-1), drawn_B)
        recent_BT = torch.cat([recent_BT[:, 1:], token_B[:, None]], 1)
        answering_B = (answering_B | (recent_BT == assistant).all(1)) & (
            token_B != markers.end_of_turn
        )
        for row, token in zip(alive.tolist(), token_B.tolist(), strict=True):
            sequences[row].append(token)
        going = token_B != markers.end_of_text
        step_BT = token_B[:, None]
        if not going.all():
            index = going.nonzero()[:, 0]
            cache.batch_select_indices(index)
            alive, answering_B = alive[index], answering_B[index]
            recent_BT, step_BT = recent_BT[index], step_BT[index]
    return sequences


def parse_turns(tokenizer: PreTrainedTokenizerBase, markers: Markers, ids: list[int]) -> Messages:
    """Messages of a sampled sequence: complete turns, from the user's first to an assistant's last.

    Returns:
        An empty list when the sequence does not alternate user and assistant.
    """
    openings = {"user": list(markers.user), "assistant": list(markers.assistant)}
    messages: Messages = []
    rest = ids
    for role in itertools.cycle(openings):
        opening = openings[role]
        start = next((i for i in range(3) if rest[i : i + len(opening)] == opening), None)
        if start is None or markers.end_of_turn not in rest:
            break
        body = rest[start + len(opening) : rest.index(markers.end_of_turn)]
        content = str(tokenizer.decode(body)).strip()
        if not content or set(body) & {markers.end_of_text, opening[0]}:
            break
        messages.append({"role": role, "content": content})
        rest = rest[rest.index(markers.end_of_turn) + 1 :]
    return messages if len(messages) % 2 == 0 else messages[:-1]


# -- answers to given users -----------------------------------------------------------------

BATCHES_SORTED_TOGETHER = 16


class LocalTarget:
    """A chat model and its tokenizer, on the GPU if there is one."""

    def __init__(self, name: str, dtype: str, sampling: Sampling) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(name, field="--target", dtype=getattr(torch, dtype))
        self.model: Any = model.eval().to(device)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(name, field="--target")
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
            text = str(
                self.tokenizer.apply_chat_template(
                    question, tokenize=False, add_generation_prompt=True
                )
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


def num_characters(dialogue: Dialogue) -> int:
    return sum(len(message["content"]) for prompt in dialogue.prompts for message in prompt)


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
        window.sort(key=num_characters)
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
        try:
            answers = target.answer_batch(list(prompts.values()), is_greedy=is_greedy)
        except torch.OutOfMemoryError as error:
            raise ValueError("--batch: it does not fit into the GPU's memory; give less") from error
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


# -- the command ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Options):
    PROG: ClassVar[str] = "python -m pipedraft.data_recipes.sample"
    DESCRIPTION: ClassVar[str] = __doc__ or ""

    target: str
    """folder or Hub id of a chat model"""
    rows: int = option(1000, least=1)
    """rows to sample"""
    batch: int = option(128, least=1)
    """rows at a time"""
    max_tokens: int = option(512, least=1)
    """per row"""
    greedy_share: float = option(0.5, metavar="P")
    """rows with greedy answers"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of the weights"""
    seed: int = 0
    """of the sampling"""
    out: Path
    """JSONL file to write"""


def sampled_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: SampleOptions
) -> Iterator[tuple[bool, Messages]]:
    """(answers are greedy, messages) of sequences the model makes up; no messages: malformed."""
    markers = Markers.of(tokenizer)
    generator = torch.Generator().manual_seed(options.seed)
    for first in range(0, options.rows, options.batch):
        size = min(options.batch, options.rows - first)
        greedy_B = torch.rand(size, generator=generator) < options.greedy_share
        sequences = sample_batch(
            model,
            markers,
            greedy_B=greedy_B,
            max_tokens=options.max_tokens,
            generator=generator,
        )
        for is_greedy, ids in zip(greedy_B.tolist(), sequences, strict=True):
            yield is_greedy, parse_turns(tokenizer, markers, ids)


def main() -> None:
    options = SampleOptions.read(sys.argv[1:])
    dtype = getattr(torch, options.dtype)
    model = load_model(options.target, field="--target", dtype=dtype).eval()
    tokenizer = load_tokenizer(options.target, field="--target")
    torch.manual_seed(options.seed)
    counts = {"written": 0, "malformed": 0}

    def write(place: Path) -> None:
        with place.open("w") as file, tqdm(unit="row") as bar:
            for is_greedy, messages in sampled_rows(model, tokenizer, options):
                counts["written" if messages else "malformed"] += 1
                if messages:
                    row = {"messages": messages, "greedy_answers": is_greedy}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                bar.update(1)

    publish(options.out, write)
    print(f"{counts['written']} rows written, {counts['malformed']} malformed and dropped")


if __name__ == "__main__":
    run_command(main)
