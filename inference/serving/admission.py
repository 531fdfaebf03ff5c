"""Admission of requests: one pass from a parsed request to the sequences decoded for it."""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipedraft.chats import ChatRefused, check_template_variables, encode_chat
from pipedraft.inference.serving import HttpLimits
from pipedraft.inference.serving.answers import Choice, Piece
from pipedraft.inference.serving.decoder import SequenceDecoder
from pipedraft.inference.serving.metrics import Metrics
from pipedraft.inference.serving.requests import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    RequestError,
)

MAX_RETRY_S = 120
NOT_AGAIN = {"x-should-retry": "false"}
"""Tells OpenAI's clients not to ask the same again by themselves."""


class Admissions:
    """Requests that are answered now, and the rules by which one more is."""

    def __init__(
        self, decoder: SequenceDecoder, *, name: str, limits: HttpLimits, metrics: Metrics
    ) -> None:
        """``name``: of the model, as clients call it."""
        self.decoder, self.name, self.limits, self.metrics = decoder, name, limits, metrics
        self.tokenizer, self.target = decoder.engine.tokenizer, decoder.engine.target
        self.is_draining = False
        self.num_open = self.num_answered = 0
        """Requests that are answered now, and those that were."""
        self.of_client: Counter[str] = Counter()
        """Open sequences of each client."""

    def admit(self, client: str, asked: ApiRequest, tell: Callable[[Piece], None]) -> "Admission":
        """Check a request against model, limits and room, tokenize it and make its choices.

        Args:
            tell: gets the choices' pieces, from the thread that decodes.

        Raises:
            RequestError: a value that model or limits do not permit, or no room now.
        """
        count, new_tokens = self._check_size(asked)
        self._check_room(client, count)  # before tokenizing: a busy server has no time for it
        prompts = self._encode(asked)
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        choices = [
            Choice(
                index=index,
                prompt_ids=prompts[index // asked.n],
                # Each choice of a prompt has a seed of its own.
                config=asked.config(
                    self.decoder.base, seed=seed + index % asked.n, new_tokens=new_tokens
                ),
                stop_strings=asked.stop_strings,
                tokenizer=self.tokenizer,
                metrics=self.metrics,
                tell=tell,
            )
            for index in range(count)
        ]
        return Admission(self, client, choices)

    def _check_size(self, asked: ApiRequest) -> tuple[int, int]:
        """Return the number of outputs, and the new tokens of each at most."""
        limits = self.limits
        if asked.model not in (None, self.name):
            raise RequestError(
                f"model: {str(asked.model)[:128]!r} is not here; this is {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        most, wanted = limits.max_new_tokens, asked.longest()
        if wanted is not None and wanted > most:
            raise RequestError(f"max_tokens: {wanted}; give at most {most}", param="max_tokens")
        count = asked.num_prompts * asked.n
        # More than may ever be open would be told to come again for ever.
        room = min(limits.max_client_sequences, self.decoder.capacity + limits.max_waiting)
        most = min(limits.max_choices, room)
        if count > most:
            raise RequestError(f"n: {count} outputs; ask for at most {most}", param="n")
        return count, wanted or limits.max_new_tokens

    def _check_room(self, client: str, count: int) -> None:
        """Raise RequestError if so many further sequences are not taken now."""
        if self.is_draining:
            raise RequestError(
                "the server is about to end", status=503, headers={"retry-after": "5"}
            )
        decoder = self.decoder
        if decoder.failure is not None:
            raise pipeline_failed()
        waiting = decoder.num_waiting + decoder.num_running + count - decoder.capacity
        if waiting > self.limits.max_waiting:
            raise self._busy(f"{decoder.num_waiting} sequences wait")
        if self.of_client[client] + count > self.limits.max_client_sequences:
            raise self._busy(f"{self.of_client[client]} sequences of this client are open")

    def _busy(self, said: str) -> RequestError:
        retry_s = min(max(math.ceil(self.decoder.wait_s), 1), MAX_RETRY_S)
        return RequestError(
            f"{said}; come again in {retry_s} s",
            status=429,
            code="rate_limit_exceeded",
            headers={"retry-after": str(retry_s)},
        )

    def _encode(self, asked: ApiRequest) -> list[list[int]]:
        """Token ids of each prompt."""
        if isinstance(asked, ChatRequest):
            param = "messages"
            if self.tokenizer.chat_template is None:
                raise RequestError(
                    "messages: this model has no chat template; use /v1/completions", param=param
                )
            try:
                variables = asked.chat_template_kwargs
                check_template_variables(variables, "chat_template_kwargs")
                turns = [turn.turn() for turn in asked.messages]
                prompts = [encode_chat(self.tokenizer, turns, variables)]
            except ChatRefused as error:
                raise RequestError(f"messages: {error}", param=param) from error
            except ValueError as error:
                raise RequestError(str(error), param="chat_template_kwargs") from error
        else:
            assert isinstance(asked, CompletionRequest)
            param, given = "prompt", asked.prompts()
            prompts = [self.tokenizer(p).input_ids if isinstance(p, str) else p for p in given]
        most = min(self.limits.max_prompt_tokens, self.target.max_positions - 1)
        size = self.target.vocab_size
        for prompt in prompts:
            if not 0 < len(prompt) <= most:
                raise RequestError(
                    f"{param}: {len(prompt)} tokens; give 1 to {most}",
                    param=param,
                    code="context_length_exceeded" if prompt else "invalid_value",
                )
            if max(prompt) >= size:
                raise RequestError(
                    f"{param}: {max(prompt)} is no token; give 0 to {size - 1}", param=param
                )
        return prompts


@dataclass(frozen=True)
class Admission:
    """A client's admitted request; ``with`` decodes its choices, and ends those that still run."""

    desk: Admissions
    client: str
    choices: Sequence[Choice]

    def __enter__(self) -> "Admission":
        self.desk.of_client[self.client] += len(self.choices)
        self.desk.num_open += 1
        try:
            for choice in self.choices:
                self.desk.decoder.submit(choice)
        except (ValueError, RuntimeError) as error:
            self.__exit__()
            refused = RequestError(str(error))
            raise (refused if isinstance(error, ValueError) else pipeline_failed()) from error
        return self

    def __exit__(self, *error: object) -> None:
        desk = self.desk
        for choice in self.choices:
            if not choice.has_ended:
                desk.decoder.cancel(choice)
        desk.num_open -= 1
        desk.num_answered += 1
        desk.of_client[self.client] -= len(self.choices)
        desk.of_client += Counter()  # forgets clients without one


def pipeline_failed() -> RequestError:
    return RequestError("the pipeline has failed", status=503, headers=NOT_AGAIN)
