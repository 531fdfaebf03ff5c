"""Overfit gate: train on one conversation until decoding accepts every draft token.

    pipedraft train --config configs/eagle/tiny_eagle3.yaml --overfit-one

If a head cannot learn one answer by heart, something is wrong, and more data would only hide it:
the target's states, the labels, the optimizer, or a difference between training and decoding.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data_recipes.recipe import TokenizedData, usable_rows
from ..data_recipes.table import Rows
from ..errors import Failure, UsageError
from ..files import Values
from ..inference.config import DecodeConfig
from ..inference.custom_generate import NoText
from ..inference.engine import Engine
from ..inference.result import DecodeResult, Observer
from ..inference.tree import TokenTree
from ..inference.verdict import Verdict
from ..pretrained import context_length
from .config import RunConfig
from .decoding import NEW_TOKENS, decode_prompts, first_turns
from .loop import Trainer
from .run import build_trainer, load_tokenizer_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CANDIDATES = 16
"""Prompts to try, until the target's answer to one is clear."""
LEAST_TOKENS = 16
"""Minimum length of an answer."""
CLEAR = 0.5
"""Minimum gap between the two highest logits. In training, bfloat16 rounding may swap closer ones,
and the head would learn another token than the target decodes."""
DOCUMENT_PROMPT = 16
"""For a text without roles, use this many tokens as the prompt."""
NUM_CHECKS = 10
"""Decoding attempts, if none is accepted wholly."""


def check_gate(run: RunConfig) -> None:
    """Raise UsageError if this process does not hold the whole target."""
    if run.features is not None:
        raise UsageError(
            f"features: {run.features!r} with --overfit-one, which decodes with the whole target; "
            "leave it out"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError(
            f"num_processes: {os.environ['WORLD_SIZE']} with --overfit-one, which runs in one "
            "process; start it without a launcher"
        )


# -- the conversation -------------------------------------------------------------------------


def one_conversation(
    run: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedModel,
    side_file: Path | None,
) -> TokenizedData:
    """Return one row, for training and validation: a prompt and the target's greedy answer.

    Not the data's answer: in decoding the head continues what the target itself writes.

    Raises:
        ValueError: the target answers no prompt with enough tokens.
    """
    room = context_length(target.config)
    rows = _with_prompts(usable_rows(run.data, tokenizer))
    prompt, answer = clearest(target, first_turns(rows, CANDIDATES, max_positions=room))
    if not answer:
        raise ValueError(
            f"data.sources: the target answers none of the first {CANDIDATES} prompts with "
            f"{LEAST_TOKENS} tokens; give a chat model, other data or a larger data.max_length"
        )
    row = {
        "input_ids": [[*prompt, *answer]],
        "loss_mask": [[0] * len(prompt) + [1] * len(answer)],
    }
    rows_alone = Rows([pyarrow.RecordBatch.from_pydict(row)])
    report: Any = SimpleNamespace(to_dict=dict)
    return TokenizedData(train=rows_alone, valid=rows_alone, report=report)


def _with_prompts(rows: Iterator[Values]) -> Iterator[Values]:
    """Give rows a prompt if they begin with a supervised token, as documents do."""
    for row in rows:
        mask = row["loss_mask"]
        if mask[0]:
            row = row | {"loss_mask": [0] * DOCUMENT_PROMPT + mask[DOCUMENT_PROMPT:]}
        yield row


def clearest(target: PreTrainedModel, prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Return the first prompt with a clear answer, or else the one with the clearest.

    Returns:
        Prompt and answer. Both are empty if every answer is short.
    """
    config = DecodeConfig.of("autoregressive", max_new_tokens=NEW_TOKENS)
    engine = Engine(target, NoText(), config)
    best: tuple[float, list[int], list[int]] = -1.0, [], []
    for prompt in prompts:
        answer = engine.decode(prompt).token_ids
        if len(answer) < LEAST_TOKENS:
            continue
        if (found := margin(target, prompt, answer)) > best[0]:
            best = found, prompt, answer
        if best[0] >= CLEAR:
            break
    return best[1:]


@torch.inference_mode()
def margin(target: PreTrainedModel, prompt: list[int], answer: list[int]) -> float:
    """Return the smallest gap between the two highest logits over the answer's tokens."""
    ids_BT = torch.tensor([[*prompt, *answer]]).to(target.device)
    # The last token's logits are for a token behind the answer.
    logits_TV = target(ids_BT, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    highest_T, second_T = logits_TV.topk(2).values.unbind(-1)
    return float((highest_T - second_T).min())


# -- the gate ---------------------------------------------------------------------------------


class FirstRejection(Observer):
    """Notes the first rejected draft token."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.place = 0
        """The token's number in the answer, from 1; 0: nothing was rejected."""
        self.drafted: list[int] = []
        self.wanted = -1

    def token(self, token: int, is_drafted: bool) -> bool:
        self.num_tokens += 1
        return False

    def verified(self, tree: TokenTree, walk: Verdict) -> None:
        if self.place or not walk.tests or walk.tests[-1]:
            return
        parent = walk.path[-1]
        # The root was emitted before; the rest of the path comes before the rejected token.
        self.place = self.num_tokens + len(walk.path)
        rows = range(1, len(tree))
        self.drafted = [tree.tokens[row] for row in rows if tree.parents[row] == parent]
        self.wanted = walk.next_token


@dataclass(frozen=True)
class Attempt:
    """One decoding attempt."""

    result: DecodeResult
    rejection: FirstRejection
    step: int
    loss: float

    @property
    def is_accepted(self) -> bool:
        result = self.result
        return 0 < result.num_tested == result.num_accepted

    def figures(self, first_loss: float) -> str:
        result = self.result
        return (
            f"{result.num_accepted} of {result.num_tested} draft tokens accepted after {self.step} "
            f"steps: tau {result.mean_acceptance_length:.2f}, L' "
            f"{result.equivalent_acceptance_length:.2f}, loss {first_loss:.4g} to {self.loss:.4g}, "
            f"answer of {len(result.token_ids)} tokens"
        )


def run_gate(run: RunConfig, model: "DataclassInstance", num_steps: int) -> str:
    """Train on one conversation, and return one line of figures once it is accepted wholly.

    Checkpoints, best/ and metrics.jsonl of the run stay as they are.

    Raises:
        Failure: a draft token is still rejected after the last step. The message says where to
            look.
    """
    check_gate(run)
    alone = replace(run, max_steps=num_steps, trackers=[], wandb_artifact=False)
    trainer = build_trainer(alone, model, one_conversation)
    batch = trainer.load(trainer.data.train, [0])
    first_loss, every = 0.0, max(1, num_steps // NUM_CHECKS)
    for step in range(1, num_steps + 1):
        loss = trainer.optimize([batch])["loss"]
        first_loss = first_loss or loss
        if step % every == 0 or step == num_steps:
            attempt = _decode(trainer, step, loss)
            if attempt.is_accepted:
                return f"overfit-one: {attempt.figures(first_loss)}"
    reason = _reason(trainer, attempt, first_loss)
    raise Failure(f"overfit-one: only {attempt.figures(first_loss)}; {reason}")


def _decode(trainer: Trainer, step: int, loss: float) -> Attempt:
    row = trainer.data.train[0]
    prompt = row["input_ids"][: row["loss_mask"].index(1)]
    weights = trainer.accelerator.get_state_dict(trainer.module)
    rejection = FirstRejection()
    (result,) = decode_prompts(trainer.objective, weights, [prompt], rejection)
    return Attempt(result, rejection, step, loss)


def _reason(trainer: Trainer, attempt: Attempt, first_loss: float) -> str:
    """Say which draft token is rejected, and what to look at."""
    run, rejection = trainer.config, attempt.rejection
    tokenizer = load_tokenizer_of(run)
    drafted, wanted = (
        repr(tokenizer.decode(ids)) for ids in (rejection.drafted[:1], [rejection.wanted])
    )
    where = f"token {rejection.place} of the answer is {wanted}, the head drafted {drafted}; "
    metrics = trainer.evaluate()
    rates = [value for name, value in metrics.items() if name.startswith("agreement")]
    # In a chain, the first rate is that of the first draft token.
    if min(rates) == 1:
        return where + (
            "in training it predicts every token, so training and decoding differ: train a few "
            "steps, then run pipedraft eval parity on the checkpoint"
        )
    if attempt.loss > first_loss / 2:
        return where + f"the loss hardly falls: give another --optim.lr (now {run.optim.lr:g})"
    return where + (
        f"in training it predicts {rates[0]:.0%} of the tokens: give more steps "
        f"(--overfit-one {2 * attempt.step}) or a higher --optim.lr (now {run.optim.lr:g})"
    )
