"""Conversations that a chat model makes up by itself: what a draft for it will have to draft.

    python -m pipedraft.data_recipes.sample --target assets/target --rows 4000 --out answers.jsonl

Every row starts at the beginning of a user turn and is sampled on until the model ends it.
User turns are drawn at temperature 1; a share of the rows has greedy answers, the rest sampled
ones, so that a draft sees both kinds of decoding. ``data_recipes.regenerate`` answers given users.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipedraft.cli import (
    Failure,
    Options,
    UsageError,
    leave_at_interrupts,
    option,
    run_command,
)

if __name__ == "__main__":
    leave_at_interrupts()

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from pipedraft.data_recipes.answers import (
    AnswerSampling,
    Dialogue,
    Messages,
    RowFailed,
    TargetAnswer,
    kept_text,
)
from pipedraft.files import make_place, publish
from pipedraft.pretrained import (
    ChatRefused,
    load_model,
    load_tokenizer,
    render_chat,
    resolve_device,
)

# B rows, T positions, V vocabulary


@dataclass(frozen=True)
class Markers:
    """Token ids that open and close turns, read off the tokenizer's chat template."""

    user: tuple[int, ...]
    assistant: tuple[int, ...]
    end_of_turn: int
    end_of_text: int
    """-1: there is none, and rows go on until --max-tokens."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Markers":
        content = "CONTENT"
        messages = [{"role": "user", "content": content}]
        end = tokenizer.eos_token or content  # which does not stand behind itself
        rendered = render_chat(tokenizer, messages) if tokenizer.chat_template else ""
        before, _, after = rendered.partition(content)
        opening = after.split(end, 1)[-1].lstrip("\n")
        if not before or end not in after or not opening:
            raise ValueError(
                "target: its chat template does not close a turn with the EOS token; sample from a "
                "model whose template does"
            )
        user, assistant = (
            tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in (before, opening)
        )
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        return cls(user, assistant, eos, -1 if pad in (None, eos) else pad)


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
        greedy_B: rows whose assistant turns are greedy; on the model's device, as the generator.
    """
    num_rows, opening, device = len(greedy_B), len(markers.assistant), greedy_B.device
    sequences: list[list[int]] = [list(markers.user) for _ in range(num_rows)]
    alive = torch.arange(num_rows, device=device)
    answering_B = torch.zeros(num_rows, dtype=torch.bool, device=device)
    cache = DynamicCache(config=model.config)
    assistant = torch.tensor(markers.assistant, device=device)
    recent_BT = torch.full((num_rows, opening), -1, device=device)
    step_BT = torch.tensor([markers.user] * num_rows, device=device)
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


def load_on(name: str, device: str, dtype: str) -> PreTrainedModel:
    """The chat model of ``--target``, ``--device`` and ``--dtype``."""
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
        self.max_positions = self.model.config.get_text_config().max_position_embeddings

    def render(self, question: Messages) -> str:
        """The prompt as the target reads it, which must leave room for an answer."""
        try:
            text = render_chat(self.tokenizer, question)
        except ChatRefused as error:
            raise RowFailed(str(error)) from error
        num_tokens = len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if num_tokens + self.sampling.max_tokens > self.max_positions:
            raise RowFailed(
                f"{num_tokens} tokens and --max-tokens {self.sampling.max_tokens} exceed the "
                f"target's {self.max_positions} positions"
            )
        return text

    @torch.inference_mode()
    def answer_batch(self, prompts: list[str], *, is_greedy: bool) -> list[tuple[str, bool]]:
        """Answer rendered prompts, padded on the left: (text, was cut at --max-tokens) for each.

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
        answers = decode_batch(
            self.model,
            batch.input_ids,
            batch.attention_mask,
            ends=self.ends,
            sampling=None if is_greedy else self.sampling,
            max_tokens=self.sampling.max_tokens,
        )
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [(text, ids[-1] not in self.ends) for text, ids in zip(texts, answers, strict=True)]


DROPPED_SHARE = 1 / 8
"""Rows that have ended are taken out of the batch when they are this share of it."""
GROWTH = 64
"""Positions by which a cache grows at a time."""


class GrowingLayer(DynamicLayer):
    """Keys and values [B, heads, T, D] that are views of larger buffers: a token writes its own.

    transformers' own layer concatenates, which copies every earlier token for each new one.
    """

    buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if self.buffers is None or self.buffers[0].shape[2] < end:
            size = (*key_states.shape[:2], end + GROWTH, key_states.shape[3])
            self.buffers = (key_states.new_empty(size), value_states.new_empty(size))
            if start:
                assert self.keys is not None and self.values is not None
                for buffer, held in zip(self.buffers, (self.keys, self.values), strict=True):
                    buffer[:, :, :start] = held
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.buffers = None


@torch.inference_mode()
def decode_batch(
    model: PreTrainedModel,
    ids_BT: Tensor,
    mask_BT: Tensor,
    *,
    ends: Sequence[int],
    sampling: AnswerSampling | None,
    max_tokens: int,
) -> list[list[int]]:
    """Token ids of the answers to B prompts padded on the left, each with its end token.

    Args:
        mask_BT: 0 where a prompt is padded.
        sampling: None: greedy.
    """
    answers: list[list[int]] = [[] for _ in ids_BT]
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    warp = TopPLogitsWarper(sampling.top_p) if sampling and sampling.top_p < 1 else None
    ends_E = torch.tensor(ends, device=ids_BT.device)
    rows_B = torch.arange(len(ids_BT))
    has_ended_B = torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    step_BT = ids_BT
    for _ in range(max_tokens):
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
        has_ended_B = has_ended_B | torch.isin(token_B, ends_E)
        if has_ended_B.all():
            break
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], 1)
        step_BT, position_BT = token_B[:, None], position_BT[:, -1:] + 1
        # A row that has ended costs as much as one that goes on; taking it out copies the cache.
        if has_ended_B.float().mean() >= DROPPED_SHARE:
            index = (~has_ended_B).nonzero()[:, 0]
            cache.batch_select_indices(index)
            mask_BT, step_BT, position_BT = mask_BT[index], step_BT[index], position_BT[index]
            rows_B, has_ended_B = rows_B[index.cpu()], has_ended_B[index]
    return answers


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
            dialogue.add(TargetAnswer(kept, is_cut))
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
    device: str = option("auto", metavar="DEVICE")
    """cpu, cuda, cuda:N; auto: the accelerator if any"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """of the weights"""
    seed: int = 0
    """of the sampling"""
    out: Path
    """JSONL file to write"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.greedy_share <= 1:
            raise UsageError(f"--greedy-share: {self.greedy_share:g}; give a number from 0 to 1")


def sampled_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: SampleOptions
) -> Iterator[tuple[bool, Messages]]:
    """Conversations the model makes up: (answers are greedy, messages); no messages: malformed."""
    markers = Markers.of(tokenizer)
    generator = torch.Generator(model.device).manual_seed(options.seed)
    for first in range(0, options.rows, options.batch):
        size = min(options.batch, options.rows - first)
        uniform_B = torch.rand(size, generator=generator, device=model.device)
        greedy_B = uniform_B < options.greedy_share
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
    make_place("--out", options.out, b'{"greedy_answers": ')
    model = load_on(options.target, options.device, options.dtype)
    tokenizer = load_tokenizer(options.target, field="--target")
    torch.manual_seed(options.seed)
    counts = {"written": 0, "malformed": 0}

    def write(place: Path) -> None:
        with place.open("w") as file, tqdm(unit="row") as bar:
            for is_greedy, messages in sampled_rows(model, tokenizer, options):
                counts["written" if messages else "malformed"] += 1
                if messages:
                    row = {"greedy_answers": is_greedy, "messages": messages}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                bar.update(1)
        if not counts["written"]:
            raise Failure(
                f"--target: no row of {counts['malformed']} was well formed; --out is unchanged"
            )

    publish(options.out, write)
    print(f"{counts['written']} rows written, {counts['malformed']} malformed and dropped")


if __name__ == "__main__":
    run_command(main)
