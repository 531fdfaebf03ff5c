"""Client of the server: its model, its way of telling acceptance, its answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...data_recipes.answers import AnswerSampling, RowFailed, TargetLost
from ...data_recipes.chat_client import NO_ROOM, ChatServer, TryAgain
from ...errors import Failure, UsageError
from ...files import Values
from ...inference.result import DecodeResult
from .answers import (
    Completion,
    Counters,
    SpeculativeDecoding,
    decode_result,
    read_completion,
    read_counters,
)
from .arguments import EndpointOptions

PROBE_TOKENS = 16
COUNTER_TRIES, COUNTER_WAIT_S = 50, 0.1
"""How often, and after which time, to read counters again that lag behind an answer."""
CHANGING = ("created", "permission")
"""Fields of a listed model that differ from call to call."""
FLAG = "--per-request-spec-decode-metrics detailed"
IN_ANSWER, IN_COUNTERS = "answers", "counters"


@dataclass
class EndpointClient:
    """Client of one server. ``open`` comes first."""

    options: EndpointOptions
    server: ChatServer = field(init=False)
    model: str = ""
    source: str = ""
    """Where acceptance comes from: ``IN_ANSWER`` or ``IN_COUNTERS``."""
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.server = ChatServer(
            self.options.endpoint, self.options, AnswerSampling(), field="--endpoint"
        )

    async def open(self, probe: Sequence[int]) -> Values:
        """Ask one short question, and return the facts about the server.

        Raises:
            UsageError: the server tells no acceptance, or cannot answer such questions.
            Failure: the server is lost.
        """
        entry = await self._find_model()
        page = await self._page()
        before, base = read_counters(page), self.server.base
        try:
            said = await self.server.retried(lambda _: self._complete(probe, 0.0, 0, PROBE_TOKENS))
        except TargetLost as error:
            raise UsageError(str(error)) from error
        except RowFailed as error:
            kind = Failure if isinstance(error.__cause__, TryAgain) else UsageError
            raise kind(f"--endpoint: {base}/completions: {error}; check the server") from error
        ids = said.choices[0].token_ids
        if ids is None:
            raise UsageError(
                f"--endpoint: {base} returns no token ids for return_token_ids: true; serve with "
                "vLLM or pipedraft serve"
            )
        if said.acceptance is not None:
            self.source = IN_ANSWER
        elif before is None:
            raise UsageError(f"--endpoint: {base} {missing(page)}")
        elif self.options.concurrency > 1:
            raise UsageError(
                f"--concurrency: {self.options.concurrency}, but {base} tells acceptance in "
                f"counters over all requests; give 1, or start vLLM with {FLAG}"
            )
        else:
            self.source = IN_COUNTERS
            try:  # the first question must not find what the probe adds
                await self._counted(before, len(ids))
            except TryAgain as error:
                raise Failure(f"--endpoint: {base}: {error}") from error
        facts = {name: value for name, value in entry.items() if name not in CHANGING}
        return {"name": base, "model": self.model, "acceptance": self.source, "served": facts}

    async def _find_model(self) -> Values:
        try:
            listing = await self.server.models()
        except TargetLost as error:
            raise Failure(str(error)) from error
        if listing is None:
            raise Failure(f"--endpoint: {self.server.base} does not list its models; try later")
        entries = {str(entry["id"]): entry for entry in listing}
        known = ", ".join(entries) or "none"
        wanted = self.options.model or (next(iter(entries)) if len(entries) == 1 else None)
        if wanted is None:
            raise UsageError(f"--model: missing; {self.server.base} has {known}")
        if wanted not in entries:
            raise UsageError(
                f"--model: {wanted!r} is not served at {self.server.base}; it has {known}"
            )
        self.model = wanted
        return entries[wanted]

    async def ask(
        self, prompt_ids: list[int], temperature: float, prompt_index: int
    ) -> DecodeResult | None:
        """Return an answer with its acceptance, or None if the prompt is too long.

        Raises:
            Failure: the server is lost, or refuses for another reason.
        """
        most = self.options.max_new_tokens

        async def attempt(_: int) -> DecodeResult:
            before = await self._counters() if self.source == IN_COUNTERS else None
            said = await self._complete(prompt_ids, temperature, prompt_index, most)
            ids = said.choices[0].token_ids
            if not ids or len(ids) > most:
                raise TryAgain(f"answer has {len(ids or ())} token ids, {most} were allowed")
            found = said.acceptance
            if before is not None:
                found = await self._counted(before, len(ids))
            if found is None:
                raise TryAgain("answer tells no acceptance")
            return decode_result(prompt_ids, said, found)

        try:
            result = await self.server.retried(attempt)
        except RowFailed as error:
            if NO_ROOM.search(str(error)):
                return None
            raise Failure(f"--endpoint: {error}; the answers so far are kept") from error
        except TargetLost as error:
            raise Failure(f"{error}; the answers so far are kept") from error
        self.num_asked += 1
        return result

    async def _complete(
        self, prompt_ids: Sequence[int], temperature: float, seed: int, most: int
    ) -> Completion:
        body: Values = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": most,
            "temperature": temperature,
            "return_token_ids": True,
        }
        if temperature:
            # Else vLLM filters as the model's generation_config.json says.
            body |= {"seed": self.options.seed + seed, "top_p": 1.0, "top_k": -1}
        return read_completion(await self.server.post("/completions", body))

    async def _page(self) -> str:
        """Return the metrics page, or "" if there is none."""
        try:
            return (await self.server.get("/../metrics")).decode(errors="replace")
        except (TargetLost, RowFailed, TryAgain):
            return ""

    async def _counters(self) -> Counters:
        counters = read_counters(await self._page())
        if counters is None:
            raise TryAgain("/metrics has no counters of draft tokens any more")
        return counters

    async def _counted(self, before: Counters, num_tokens: int) -> SpeculativeDecoding:
        """Return what the counters gained by an answer.

        Raises:
            TryAgain: they lag behind it, or count other requests, too.
        """
        for _ in range(COUNTER_TRIES):
            after = await self._counters()
            if len(after.accepted) != len(before.accepted):
                break
            gained = after - before
            if gained.generated == num_tokens and min(gained.histogram) >= 0:
                return SpeculativeDecoding(gained.histogram)
            if not 0 <= gained.generated < num_tokens:
                break
            await asyncio.sleep(COUNTER_WAIT_S)
        raise TryAgain(
            f"its counters do not fit an answer of {num_tokens} tokens; leave the server to this "
            f"command alone, or start vLLM with {FLAG}"
        )


def missing(page: str) -> str:
    """Return what a server has to be started with, given its metrics page."""
    if "vllm:" in page and "spec_decode" not in page:
        return "is a vLLM without draft; start it with --speculative-config"
    return (
        f"tells no acceptance; start vLLM with {FLAG} (older versions without "
        "--disable-log-stats), or use pipedraft serve"
    )
