"""Answers in OpenAI's shapes, whole or in chunks, of the choices of one request."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from pipedraft.inference.serving.choice import Choice, Piece
from pipedraft.inference.serving.requests import ChatRequest, Json, Request, RequestError


class Answer:
    """The answer to one request, made of the pieces that its choices tell of."""

    def __init__(
        self,
        asked: Request,
        model: str,
        choices: Sequence[Choice],
        pieces: "asyncio.Queue[Piece]",
    ) -> None:
        self.asked, self.choices, self.pieces = asked, choices, pieces
        self.is_blocked = False
        """A chunk is on its way to a reader that does not take it."""
        self._is_chat = isinstance(asked, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head: Json = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if asked.stream and self._is_chat else kind,
            "created": int(time.time()),
            "model": model,
        }
        self._seed = choices[0].config.seed

    async def _read(self) -> AsyncIterator[Piece]:
        """Pieces until every choice has ended.

        Raises:
            RequestError: one has failed, or was ended by the server.
        """
        left = len(self.choices)
        while left:
            piece = await self.pieces.get()
            left -= piece.is_last
            if piece.is_last and piece.choice.finish_reason == "abort":
                if piece.choice.error is not None:
                    raise RequestError("the sequence failed; the server's log says why", status=500)
                raise RequestError("the server ended the sequence", status=503)
            yield piece

    async def whole(self) -> None:
        """Until all of it is there."""
        async for _ in self._read():
            pass

    def body(self) -> Json:
        """All of it, once it is there."""
        return self._head | {
            "choices": [self._choice(choice, choice.text) for choice in self.choices],
            **self._end(),
        }

    def _choice(self, choice: Choice, text: str) -> Json:
        said: Json = {"index": choice.index, "logprobs": None}
        if self._is_chat:
            said["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            said["text"] = text
        return said | {"finish_reason": choice.finish_reason}

    def _usage(self) -> Json:
        first = {choice.index // self.asked.n: choice for choice in self.choices}
        prompt = sum(len(choice.prompt_ids) for choice in first.values())
        new = sum(choice.num_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _end(self) -> Json:
        """Figures of one sequence are no figures of several."""
        report = self.choices[0].report() if len(self.choices) == 1 else None
        return {"usage": self._usage(), "seed": self._seed, "metrics": report}

    async def chunks(self) -> AsyncIterator[Json]:
        options = self.asked.stream_options
        rest: Json = {"usage": None} if options.include_usage else {}
        if self._is_chat:
            for choice in self.choices:
                yield self._chunk(choice.index, {"role": "assistant", "content": ""}) | rest
        left = len(self.choices)
        async for piece in self._read():
            index = piece.choice.index
            events: Json = {}
            if self.asked.pipedraft_events:
                origin = "draft" if piece.is_drafted else "target"
                events = {"pipedraft": {"origin": origin, "steps": piece.steps}}
            if piece.text or (events and not piece.is_last):
                yield self._chunk(index, {"content": piece.text}) | events | rest
            if piece.is_last:
                left -= 1
                is_end = not left and not options.include_usage
                end = {"seed": self._seed, "metrics": self._end()["metrics"]} if is_end else {}
                yield self._chunk(index, {}, piece.choice.finish_reason) | rest | end
        if options.include_usage:
            yield self._head | {"choices": []} | self._end()

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        said: Json = {"index": index, "logprobs": None, "finish_reason": finish_reason}
        said |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._head | {"choices": [said]}
