"""Check parsed requests against the limits, and decode their sequences."""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...chats import ChatRefused, check_template_variables, encode_chat
from ...files import Values
from ...responses import reader_for
from ..pipelines.local import LocalPipeline
from .answers import Choice, Piece
from .decoder import SequenceDecoder
from .errors import RequestError
from .metrics import Metrics
from .options import HttpLimits
from .requests import (
    ApiRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
)

MAX_RETRY_S = 120
NOT_AGAIN = {"x-should-retry": "false"}
"""Header against automatic retries by OpenAI clients."""


class Admissions:
    """Open requests, and the rules for admitting another request."""

    def __init__(
        self,
        decoder: SequenceDecoder,
        *,
        names: Sequence[str],
        limits: HttpLimits,
        metrics: Metrics,
    ) -> None:
        self.decoder, self.names, self.limits, self.metrics = decoder, names, limits, metrics
        self.tokenizer, self.target = decoder.engine.tokenizer, decoder.engine.target
        if self.tokenizer.chat_template is not None:
            reader_for(self.tokenizer, "")  # refuses a bad response template before any request
        self.is_draining = False
        self.num_open = self.num_answered = 0
        """Number of requests open now, and answered so far."""
        self.of_client: Counter[str] = Counter()
        """Open sequences per client."""

    def admit(
        self, client: str, asked: ApiRequest, tell: Callable[[Piece], None]
    ) -> Sequence[Choice]:
        """Check a request's model, limits and room, then tokenize it and return its choices.

        The decoding thread calls ``tell`` with the choices' pieces.
        """
        count, new_tokens = self._check_size(asked)
        self._check_room(client, count)  # before tokenizing: a busy server has no time for it
        prompts = self._encode(asked)
        demands, engine = asked.demands(), self.decoder.engine
        if demands.needs_logits and not isinstance(engine.pipeline, LocalPipeline):
            name = "min_tokens" if demands.min_tokens else "logprobs"
            said = f"{name}: not with --backend process; leave it out"
            raise RequestError(said, code="unsupported_parameter")
        # The answer reports the seed, so that a client can repeat it.
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        return [
            Choice(
                index=index,
                prompt_ids=prompts[index // asked.n],
                config=asked.config(
                    self.decoder.base,
                    # Each choice for a prompt has its own seed, wrapped to the int64 range.
                    seed=(seed + index % asked.n + 2**63) % 2**64 - 2**63,
                    new_tokens=new_tokens,
                ),
                asked=asked,
                demands=demands,
                end_ids=frozenset(demands.ends(self.target.eos_token_ids)),
                tokenizer=self.tokenizer,
                metrics=self.metrics,
                tell=tell,
            )
            for index in range(count)
        ]

    @contextmanager
    def running(self, client: str, choices: Sequence[Choice]) -> Iterator[None]:
        """Decode a client's choices in a ``with`` block. Leaving the block ends open ones."""
        self.of_client[client] += len(choices)
        self.num_open += 1
        try:
            for choice in choices:
                try:
                    self.decoder.submit(choice)
                except ValueError as error:
                    raise RequestError(str(error)) from error
                except RuntimeError as error:
                    raise pipeline_failed() from error
            yield
        finally:
            for choice in choices:
                # The client left or an error ended the answer: free its places in the batch.
                if not choice.has_ended:
                    self.decoder.cancel(choice)
            self.num_open -= 1
            self.num_answered += 1
            self.of_client[client] -= len(choices)
            self.of_client += Counter()  # drops clients without open sequences

    def check_model(self, model: str | None) -> None:
        """Raise RequestError for a model name that is not accepted."""
        if model not in (None, *self.names):
            said = f"model: {str(model)[:128]!r} is not here; this is {self.names[0]!r}"
            raise RequestError(said, status=404, code="model_not_found")

    def _check_size(self, asked: ApiRequest) -> tuple[int, int]:
        """Return the number of outputs, and the maximum new tokens per output."""
        limits = self.limits
        self.check_model(asked.model)
        most, wanted = limits.max_new_tokens, asked.longest()
        if wanted is not None and wanted > most:
            raise RequestError(f"max_tokens: {wanted}; give at most {most}")
        if asked.min_tokens > (wanted or most):
            raise RequestError(
                f"min_tokens: {asked.min_tokens}; give at most {wanted or most}, max_tokens"
            )
        size = self.target.vocab_size
        if any(token >= size for token in asked.stop_token_ids):
            raise RequestError(
                f"stop_token_ids: {max(asked.stop_token_ids)} is no token; give 0 to {size - 1}"
            )
        count = asked.num_prompts * asked.n
        # Requests that can never fit must fail for good, not be told to retry.
        room = min(limits.max_client_sequences, self.decoder.capacity + limits.max_waiting)
        most = min(limits.max_choices, room)
        if count > most:
            raise RequestError(f"n: {count} outputs; ask for at most {most}")
        return count, wanted or limits.max_new_tokens

    def _check_room(self, client: str, count: int) -> None:
        """Raise RequestError if ``count`` further sequences do not fit now."""
        if self.is_draining:
            raise RequestError(
                "the server is about to end", status=503, headers={"retry-after": "5"}
            )
        decoder, batch = self.decoder, self.decoder.batch
        if decoder.failure is not None:
            raise pipeline_failed()
        # A free place counts, too: some of the outputs may start at once.
        waiting = batch.num_waiting + batch.num_live + count - decoder.capacity
        if waiting > self.limits.max_waiting:
            raise self._busy(f"{batch.num_waiting} sequences wait")
        if self.of_client[client] + count > self.limits.max_client_sequences:
            raise self._busy(f"{self.of_client[client]} sequences of this client are open")

    def _busy(self, said: str) -> RequestError:
        # At least 1, or the client would return at once. At most a limit: this is only an estimate.
        retry_s = min(max(math.ceil(self.decoder.wait_s), 1), MAX_RETRY_S)
        return RequestError(
            f"{said}; come again in {retry_s} s",
            status=429,
            code="rate_limit_exceeded",
            headers={"retry-after": str(retry_s)},
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids."""
        return self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids

    def encode_messages(
        self, messages: Sequence[ChatMessage], variables: Values | None = None
    ) -> list[int]:
        """Return a conversation's token ids, or raise RequestError if the template refuses it."""
        if self.tokenizer.chat_template is None:
            raise RequestError("messages: this model has no chat template; use /v1/completions")
        try:
            check_template_variables(variables or {}, "chat_template_kwargs")
            return encode_chat(self.tokenizer, [turn.turn() for turn in messages], variables or {})
        except ChatRefused as error:
            raise RequestError(f"messages: {error}") from error
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _encode(self, asked: ApiRequest) -> list[list[int]]:
        """Return token ids per prompt."""
        if isinstance(asked, ChatRequest):
            variables = asked.chat_template_kwargs
            param, prompts = "messages", [self.encode_messages(asked.messages, variables)]
        else:
            assert isinstance(asked, CompletionRequest)
            param, given = "prompt", asked.prompts()
            special = asked.add_special_tokens
            prompts = [self.encode(p, special) if isinstance(p, str) else p for p in given]
        # One position stays free for the first new token.
        most = min(self.limits.max_prompt_tokens, self.target.max_positions - 1)
        size = self.target.vocab_size
        for prompt in prompts:
            if not 0 < len(prompt) <= most:
                raise RequestError(
                    f"{param}: {len(prompt)} tokens; give 1 to {most}",
                    code="context_length_exceeded" if prompt else "invalid_value",
                )
            if max(prompt) >= size:
                raise RequestError(f"{param}: {max(prompt)} is no token; give 0 to {size - 1}")
        return prompts


def pipeline_failed() -> RequestError:
    return RequestError("the pipeline has failed", status=503, headers=NOT_AGAIN)
