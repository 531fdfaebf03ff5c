"""Conversations that a chat model makes up by itself: the text a draft for it will have to guess.

    python -m pipedraft.data_recipes.sample --target assets/target --rows 4000 --out answers.jsonl

Every row starts at the beginning of a user turn and is sampled on until the model ends the text.
User turns are drawn at temperature 1; a share of the rows has greedy answers, the rest sampled
ones, so that a draft sees both kinds of decoding. With ``--prompts FILE`` the user's side is given,
one row each of {"prompt": text} or {"messages": [...]} that ends with the user, and only the last
answer is the model's.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pipedraft.errors import run_command

# B rows, T positions, V vocabulary

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Markers:
    """Token ids that open and close turns, read off the tokenizer's chat template."""

    user: tuple[int, ...]
    assistant: tuple[int, ...]
    end_of_turn: int
    end_of_text: int

    @classmethod
    def of(cls, tokenizer: Any) -> "Markers":
        content = "CONTENT"
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, _, after = rendered.partition(content)
        opening = after.split(tokenizer.eos_token, 1)[-1].lstrip("\n")
        if not before or tokenizer.eos_token not in after or not opening:
            raise ValueError(
                "target: its chat template does not close a turn with the EOS token; sample from a "
                "model whose template does"
            )
        encode = lambda text: tuple(tokenizer(text, add_special_tokens=False).input_ids)  # noqa: E731
        return cls(encode(before), encode(opening), tokenizer.eos_token_id, tokenizer.pad_token_id)


@torch.inference_mode()
def sample_batch(
    model: Any,
    markers: Markers,
    *,
    greedy_B: Tensor,
    max_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Token ids of B texts, sampled in lock-step without padding.

    Args:
        greedy_B: rows whose assistant turns are greedy.
    """
    from transformers import DynamicCache

    num_rows, opening = len(greedy_B), len(markers.assistant)
    texts: list[list[int]] = [list(markers.user) for _ in range(num_rows)]
    alive = torch.arange(num_rows)
    answering_B = torch.zeros(num_rows, dtype=torch.bool)
    cache = DynamicCache(config=model.config)
    assistant = torch.tensor(markers.assistant)
    recent_BT = torch.full((num_rows, opening), -1)
    step_BT = torch.tensor([markers.user] * num_rows)
    while len(alive) and len(texts[int(alive[0])]) < max_tokens:
        logits_BV = model(input_ids=step_BT, past_key_values=cache).logits[:, -1].float()
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]
        take_best = answering_B & greedy_B[alive]
        token_B = torch.where(take_best, logits_BV.argmax(-1), drawn_B)
        recent_BT = torch.cat([recent_BT[:, 1:], token_B[:, None]], 1)
        answering_B = (answering_B | (recent_BT == assistant).all(1)) & (
            token_B != markers.end_of_turn
        )
        for row, token in zip(alive.tolist(), token_B.tolist(), strict=True):
            texts[row].append(token)
        going = token_B != markers.end_of_text
        step_BT = token_B[:, None]
        if not going.all():
            index = going.nonzero()[:, 0]
            cache.batch_select_indices(index)
            alive, answering_B = alive[index], answering_B[index]
            recent_BT, step_BT = recent_BT[index], step_BT[index]
    return texts


@torch.inference_mode()
def answer_batch(
    model: Any,
    tokenizer: Any,
    conversations: list[Messages],
    *,
    is_greedy: bool,
    max_new_tokens: int,
) -> list[Messages]:
    """Each conversation with one more answer, by transformers' own generation (padded on the left).

    Returns:
        An empty list where the answer was empty.
    """
    rendered = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in conversations
    ]
    batch = tokenizer(
        rendered, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    output = model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        do_sample=not is_greedy,
        max_new_tokens=max_new_tokens,
    )
    answers = tokenizer.batch_decode(
        output[:, batch.input_ids.shape[1] :], skip_special_tokens=True
    )
    return [
        [*messages, {"role": "assistant", "content": answer.strip()}] if answer.strip() else []
        for messages, answer in zip(conversations, answers, strict=True)
    ]


def parse_turns(tokenizer: Any, markers: Markers, ids: list[int]) -> Messages:
    """Messages of a sampled text: complete turns, from the user's first to an assistant's last.

    Returns:
        An empty list when the text does not alternate user and assistant.
    """
    openings = {"user": list(markers.user), "assistant": list(markers.assistant)}
    messages: Messages = []
    rest = ids
    for role in _alternate():
        opening = openings[role]
        start = next((i for i in range(3) if rest[i : i + len(opening)] == opening), None)
        if start is None or markers.end_of_turn not in rest:
            break
        body = rest[start + len(opening) : rest.index(markers.end_of_turn)]
        content = tokenizer.decode(body).strip()
        if not content or set(body) & {markers.end_of_text, opening[0]}:
            break
        messages.append({"role": role, "content": content})
        rest = rest[rest.index(markers.end_of_turn) + 1 :]
    return messages if len(messages) % 2 == 0 else messages[:-1]


def _alternate() -> Iterator[str]:
    while True:
        yield "user"
        yield "assistant"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pipedraft.data_recipes.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="folder or Hub id of a chat model")
    parser.add_argument("--rows", type=int, default=1000, help="texts to sample (default 1000)")
    parser.add_argument("--batch", type=int, default=128, help="texts at a time (default 128)")
    parser.add_argument("--max-tokens", type=int, default=512, help="per text (default 512)")
    parser.add_argument("--greedy-share", type=float, default=0.5, help="rows with greedy answers")
    parser.add_argument("--prompts", type=Path, help="JSONL file of user turns to answer")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    return parser.parse_args(arguments)


Row = tuple[bool, Messages]


def sampled_rows(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[Row]:
    """(answers are greedy, messages) of texts the model makes up; no messages: malformed."""
    markers = Markers.of(tokenizer)
    generator = torch.Generator().manual_seed(options.seed)
    for first in range(0, options.rows, options.batch):
        size = min(options.batch, options.rows - first)
        greedy_B = torch.rand(size, generator=generator) < options.greedy_share
        texts = sample_batch(
            model,
            markers,
            greedy_B=greedy_B,
            max_tokens=options.max_tokens,
            generator=generator,
        )
        for is_greedy, ids in zip(greedy_B.tolist(), texts, strict=True):
            yield is_greedy, parse_turns(tokenizer, markers, ids)


def read_prompts(path: Path) -> list[Messages]:
    """Conversations that end with the user's turn, the shortest first.

    Raises:
        ValueError: the file is missing, or a row is in neither form; it names file and line.
    """
    if not path.is_file():
        raise ValueError(f"--prompts: no file {path}; give JSONL rows with a prompt")
    conversations: list[Messages] = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
                if messages[-1]["role"] != "user" or not all(m["content"] for m in messages):
                    raise ValueError("the last turn is not the user's, or a turn is empty")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f'--prompts: {path}:{number} is neither {{"prompt": text}} nor '
                    f'{{"messages": [...]}} that ends with the user ({error!r}); mend or drop it'
                ) from error
            conversations.append(messages)
    return sorted(conversations, key=lambda messages: sum(len(m["content"]) for m in messages))


def answered_rows(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[Row]:
    """(answer is greedy, messages) for every given prompt, in batches of similar length."""
    conversations = read_prompts(options.prompts)
    share = options.greedy_share
    for first in range(0, len(conversations), options.batch):
        batch = conversations[first : first + options.batch]
        for is_greedy in (True, False):
            chosen = [
                messages
                for i, messages in enumerate(batch)
                if (int(i * share) < int((i + 1) * share)) == is_greedy
            ]
            if chosen:
                for answered in answer_batch(
                    model, tokenizer, chosen, is_greedy=is_greedy, max_new_tokens=options.max_tokens
                ):
                    yield is_greedy, answered


def main() -> None:
    options = parse(sys.argv[1:])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not Path(options.target).exists() and options.target.count("/") != 1:
        raise ValueError(f"--target: no folder {options.target}; give a chat model")
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    torch.manual_seed(options.seed)
    batches = (
        sampled_rows(model, tokenizer, options)
        if options.prompts is None
        else answered_rows(model, tokenizer, options)
    )
    counts = {"written": 0, "malformed": 0}
    partial = options.out.with_name(f".{options.out.name}.partial")
    with partial.open("w") as file, tqdm(unit="row") as bar:
        for is_greedy, messages in batches:
            counts["written" if messages else "malformed"] += 1
            if messages:
                row = {"messages": messages, "greedy_answers": is_greedy}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            bar.update(1)
    partial.replace(options.out)
    print(f"{counts['written']} rows written, {counts['malformed']} malformed and dropped")


if __name__ == "__main__":
    run_command(main)
