"""Decode the turns in conversations, one conversation after the other or many at once."""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..inference.batch import BatchEngine, Handle
from ..inference.result import DecodeResult
from ..responses import format_marks, read_response
from .answer import Score
from .tasks import Prompt, encode_turn
from .traces import TraceFile, turn_key


@dataclass(frozen=True, kw_only=True)
class DecodedTurn:
    """One decoded turn."""

    conversation: tuple[str, int]
    """The turn's conversation: benchmark, and the prompt's index there."""
    prompt: Prompt
    turn: int
    result: DecodeResult
    answer: str
    score: Score | None = None
    """Score of the answer; None: no known correct answer, or no --score."""
    entropies: list[float] | None = None
    """The target's entropy at every token; None: not computed."""
    groups: dict[str, list[int]] | None = None
    """Counts by text group; None: autoregressive decoding."""

    @property
    def question(self) -> str:
        return self.prompt.turns[self.turn]


def prompt_seed(prompt: Prompt, turn: int) -> int:
    """Return a turn's 31-bit ``prompt_index``, a hash of the prompt's name and the turn.

    So a prompt draws the same random numbers for any --limit, benchmark order and method.
    """
    name = f"{prompt.form}/{prompt.id}/{turn}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "big") >> 1


def any_fits(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> bool:
    """Return True if any prompt's first turn fits within the given number of tokens."""
    return any(len(encode_turn(tokenizer, prompt, [])) <= max_prompt_tokens for prompt in prompts)


def check_room(
    benchmarks: Mapping[str, Sequence[Prompt]],
    tokenizer: PreTrainedTokenizerBase,
    num_positions: int,
    max_new_tokens: int,
) -> None:
    """Refuse benchmarks without a prompt short enough for the new tokens."""
    room = num_positions - max_new_tokens
    for name, prompts in benchmarks.items():
        if any_fits(prompts, tokenizer, room):
            continue
        shortest = min(len(encode_turn(tokenizer, prompt, [])) for prompt in prompts)
        if shortest >= num_positions:
            raise ValueError(
                f"--benchmarks: the shortest prompt of {name} has {shortest} tokens, the target "
                f"{num_positions} positions; leave {name} out"
            )
        raise ValueError(
            f"--max-new-tokens: {max_new_tokens} leaves {room} of the target's {num_positions} "
            f"positions, too few for any prompt of {name}; lower it"
        )


class PromptDecoder(Protocol):
    """Decodes prompts: an engine, or a method on a simulated link."""

    def decode(self, prompt_ids: list[int], *, prompt_index: int) -> DecodeResult: ...


def evaluate(
    engine: PromptDecoder | BatchEngine,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int | None = None,
    first_index: int = 0,
    description: str = "",
    traces: TraceFile | None = None,
    bar: tqdm | None = None,
) -> list[DecodedTurn]:
    """Decode every turn in every prompt. A later turn follows the earlier generated answers.

    Args:
        engine: a ``BatchEngine`` decodes as many conversations at once as fit. Wall-clock times are
            left out then, because they depend on the batch.
        max_prompt_tokens: skip a turn with a longer prompt, and the turns after it. ``compare``
            reports how many records are missing.
        first_index: place of the first prompt in its benchmark.
        description: text to the left of the progress bar.
        traces: file with turns to reuse. New turns are added.
        bar: a whole evaluation's progress bar. None makes a new one.
    """
    traces = traces or TraceFile()
    num_turns = sum(len(prompt.turns) for prompt in prompts)
    own = tqdm(total=num_turns, unit="turn", disable=None) if bar is None else nullcontext(bar)
    with own as bar:
        bar.set_description(description)
        conversations = [
            OpenConversation(
                (prompt.task, index), prompt, tokenizer, max_prompt_tokens, traces, bar
            )
            for index, prompt in enumerate(prompts, first_index)
        ]
        if isinstance(engine, BatchEngine):
            _decode_together(engine, conversations)
        else:
            for one in conversations:
                while (prompt_ids := one.next_prompt()) is not None:
                    one.add(engine.decode(prompt_ids, prompt_index=one.prompt_index))
    return [record for conversation in conversations for record in conversation.records]


@dataclass
class OpenConversation:
    """A prompt's turns so far."""

    name: tuple[str, int]
    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int | None
    traces: TraceFile
    bar: tqdm
    records: list[DecodedTurn] = field(default_factory=list)

    def next_prompt(self) -> list[int] | None:
        """Return the token ids of the next turn's prompt, or None if no turn is left or fits.

        Turns found in the traces are added to ``records``, and not decoded again.
        """
        while len(self.prompt.turns) > len(self.records):
            answers = [record.answer for record in self.records]
            prompt_ids = encode_turn(self.tokenizer, self.prompt, answers)
            if self.max_prompt_tokens is not None and len(prompt_ids) > self.max_prompt_tokens:
                self.leave_out_rest()
                return None
            known = self.traces.get(turn_key(self.prompt, len(self.records), prompt_ids))
            if known is None:
                return prompt_ids
            self._append(DecodeResult(**known))
        return None

    def leave_out_rest(self) -> None:
        """Count turns without room as done."""
        self.bar.update(len(self.prompt.turns) - len(self.records))

    @property
    def prompt_index(self) -> int:
        """Return the index that seeds the next turn's random numbers."""
        return prompt_seed(self.prompt, len(self.records))

    def add(self, result: DecodeResult) -> None:
        key = turn_key(self.prompt, len(self.records), result.prompt_ids)
        self._append(DecodeResult(**self.traces.find(key, lambda: asdict(result))))

    def _append(self, result: DecodeResult) -> None:
        ids = result.token_ids
        if format_marks(self.tokenizer):
            # A format with channels: later turns and scores read the answer alone.
            read = read_response(self.tokenizer, result.prompt_ids, ids)
            answer = read.content or read.thinking
        else:
            answer = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        self.records.append(
            DecodedTurn(
                conversation=self.name,
                prompt=self.prompt,
                turn=len(self.records),
                result=result,
                answer=answer,
            )
        )
        self.bar.update()


def _decode_together(batch: BatchEngine, conversations: Iterable[OpenConversation]) -> None:
    """Decode one turn per conversation at a time. When one ends, the next conversation joins."""
    waiting = deque(conversations)
    live: dict[Handle, OpenConversation] = {}

    def go_on(conversation: OpenConversation) -> None:
        prompt_ids = conversation.next_prompt()
        if prompt_ids is not None:
            handle = batch.submit(prompt_ids, prompt_index=conversation.prompt_index)
            live[handle] = conversation

    while waiting or live:
        while waiting and len(live) < batch.limits.sequences:
            go_on(waiting.popleft())
        batch.step()
        for handle in [handle for handle in live if handle.future.done()]:
            conversation = live.pop(handle)
            # Times for one conversation mean nothing next to others in the batch.
            conversation.add(replace(handle.future.result(), prefill_s=0.0, token_times_s=[]))
            go_on(conversation)
