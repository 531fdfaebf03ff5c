"""Judge every token of a greedy answer, given the tokens before it (teacher forcing).

Behind the first difference two answers cannot be compared. But the baseline can be asked how
likely each of the endpoint's tokens is after the endpoint's own tokens. A correct answer has the
baseline's most likely token everywhere, apart from ties.
"""

# N answer tokens, V vocabulary entries

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..data_recipes.answers import RowFailed, TargetLost
from ..data_recipes.chat_client import TryAgain
from ..files import Values
from .audit_answers import SPECIAL, TOP_LOGPROBS, Answer, Endpoint, is_incomplete, spell
from .tasks import Prompt


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One token of an answer, judged by the baseline."""

    place: int
    token: str
    """The answer's token; "": the answer has ended."""
    best: str
    """The baseline's most likely token."""
    gap: float
    """Log-probability of ``best`` minus that of ``token``."""
    is_exact: bool
    """False if ``token`` is not listed, so that ``gap`` is only a lower bound."""

    def is_tie(self, tie: float) -> bool:
        """Return True if rounding may choose between the two tokens. A lower bound never tells."""
        return self.is_exact and abs(self.gap) <= tie


def place_of(place: int, token: str, known: Mapping[str, float], best: str | None = None) -> Judged:
    """Compare a token with the most likely one among listed log-probabilities.

    Args:
        best: token to compare with, instead of the most likely one.
    """
    other = max(known, key=lambda name: known[name]) if best is None else best
    # A token missing from the best ones is below all of them.
    lowest = min(known.values())
    gap = known[other] - known.get(token, lowest)
    is_exact = token in known and not is_incomplete(token)
    return Judged(place=place, token=token, best=other, gap=gap, is_exact=is_exact)


def end_of(place: int, known: Mapping[str, float], has_ended: bool) -> Judged:
    """Judge an answer's end.

    Args:
        known: log-probabilities of the token that the baseline would write there.
        has_ended: the baseline ends there, too.
    """
    if has_ended or not known:
        gap = 0.0 if has_ended else float("inf")
        return Judged(place=place, token="", best="", gap=gap, is_exact=has_ended)
    # End tokens have no text. Servers list them by name.
    names = [name for name in known if SPECIAL.fullmatch(name)]
    end = max(names, key=lambda name: known[name], default="")
    found = place_of(place, end, known)
    return Judged(place=place, token="", best=found.best, gap=found.gap, is_exact=found.is_exact)


class NotOffered(Exception):
    """Raised if a server does not offer a way to judge an answer."""


WRONG = (NotOffered, TryAgain, RowFailed, TargetLost, KeyError, IndexError, TypeError, ValueError)
"""A refusal, or an answer in another form. A server may ignore a field that it does not know."""
Way = Callable[[Prompt, Answer, int], Awaitable[list[Judged]]]


class ServerJudge:
    """Judge answers with a baseline server, by the first way that it offers."""

    def __init__(self, server: Endpoint, tie: float) -> None:
        self.server, self.tie = server, tie
        self._ways: dict[str, Way] = {
            "prompt_logprobs": self._by_prompt_logprobs,
            "completions of one token": self._by_completions,
            "continue_final_message": self._by_continuing,
        }
        self.way: str | None = None
        """Name of the way in use, once ``find_way`` has returned."""
        self._names: dict[int, str] = {}

    async def find_way(self, prompt: Prompt, own: Answer) -> None:
        """Choose the first way that confirms the baseline's own greedy answer."""
        for name, way in self._ways.items():
            try:
                places = await way(prompt, own, 0)
            except WRONG:
                continue
            if places and all(x.is_tie(self.tie) for x in places):
                self.way = name
                return

    async def judge(self, prompt: Prompt, answer: Answer, first: int) -> list[Judged] | None:
        """Return the answer's tokens from index ``first`` on, judged; None if that fails."""
        if self.way is None:
            return None
        try:
            return await self._ways[self.way](prompt, answer, first)
        except WRONG:
            return None

    async def _post(self, path: str, body: Values) -> Values:
        client, asked = self.server.client, {"model": self.server.model, **body}
        if self.way is None:
            found = await client.post(path, asked)
        else:
            found = await client.retried(lambda _: client.post(path, asked))
        if not isinstance(found, dict):
            raise NotOffered(path)
        return found

    async def _ids(self, body: Values) -> list[int]:
        return [int(one) for one in (await self._post("/../tokenize", body))["tokens"]]

    async def _encode(self, prompt: Prompt, answer: Answer) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt and of the answer's text.

        Raises:
            NotOffered: the server does not tokenize, or in other tokens than the answer's.
        """
        if answer.has_thinking:
            raise NotOffered("the thinking's marks are unknown")
        prompt_ids = await self._ids({"messages": prompt.messages()})
        text = {"prompt": answer.text, "add_special_tokens": False}
        ids = await self._ids(text) if answer.text else []
        if answer.tokens and len(ids) != len(answer.tokens):
            raise NotOffered("the text has other tokens")
        return prompt_ids, ids

    async def _by_prompt_logprobs(self, prompt: Prompt, answer: Answer, first: int) -> list[Judged]:
        """Judge all tokens in one request, as vLLM offers it."""
        prompt_ids, ids = await self._encode(prompt, answer)
        size = TOP_LOGPROBS[0]
        found = await self._complete([*prompt_ids, *ids], {"prompt_logprobs": size})
        entries, places = found["prompt_logprobs"][len(prompt_ids) :], []
        for place, (token, entry) in enumerate(zip(map(str, ids), entries, strict=True)):
            names = {number: str(one["decoded_token"]) for number, one in entry.items()}
            known = {number: float(one["logprob"]) for number, one in entry.items()}
            name = answer.tokens[place] if answer.tokens else names[token]
            if not is_incomplete(name) and name.strip() != names[token].strip():
                raise NotOffered("the text has other tokens")
            judged = place_of(place, token, known)
            places.append(replace(judged, token=name, best=names[judged.best]))
        if answer.ended:
            places.append(self._end(found, len(ids)))
        return places[first:]

    async def _complete(self, prompt_ids: list[int], more: Values) -> Values:
        """Return the choice that continues token ids by one token."""
        body = {"prompt": prompt_ids, "max_tokens": 1, "temperature": 0.0}
        found = await self._post("/completions", body | {"logprobs": TOP_LOGPROBS[0], **more})
        choice: Values = found["choices"][0]
        return choice

    def _end(self, choice: Values, place: int) -> Judged:
        known = (choice["logprobs"]["top_logprobs"] or [{}])[0]
        return end_of(place, known, choice.get("finish_reason") == "stop")

    async def _by_completions(self, prompt: Prompt, answer: Answer, first: int) -> list[Judged]:
        """Judge each token by a request that continues the ids before it."""
        prompt_ids, ids = await self._encode(prompt, answer)
        names = answer.tokens or [await self._name(one) for one in ids]

        async def judge(place: int) -> Judged:
            choice = await self._complete([*prompt_ids, *ids[:place]], {})
            if place == len(ids):
                return self._end(choice, place)
            return place_of(place, names[place], choice["logprobs"]["top_logprobs"][0])

        return await self._gather(judge, first, [*names, *["end"] * answer.ended])

    async def _name(self, token: int) -> str:
        if token not in self._names:
            found = await self._post("/../detokenize", {"tokens": [token]})
            self._names[token] = str(found.get("prompt", ""))
        return self._names[token]

    async def _by_continuing(self, prompt: Prompt, answer: Answer, first: int) -> list[Judged]:
        """Judge each token by a chat request that continues the assistant's last message."""
        if answer.has_thinking or not answer.names_tokens:
            raise NotOffered("no tokens to continue")

        async def judge(place: int) -> Judged:
            body: Values = {"messages": prompt.messages(), "max_tokens": 1, "temperature": 0.0}
            body |= {"logprobs": True, "top_logprobs": self.server.num_top}
            if place:
                said = {"role": "assistant", "content": "".join(answer.tokens[:place])}
                body["messages"].append(said)
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            choice = (await self._post("/chat/completions", body))["choices"][0]
            entries = choice["logprobs"]["content"]
            if len(entries) > 1:
                raise NotOffered("max_tokens 1")
            known = {
                one["token"]: float(one["logprob"])
                for entry in entries
                for one in [*entry["top_logprobs"], entry]
            }
            if place == len(answer.tokens):
                return end_of(place, known, choice["finish_reason"] == "stop")
            return place_of(place, answer.tokens[place], known)

        return await self._gather(judge, first, [*answer.tokens, *["end"] * answer.ended])

    async def _gather(
        self, judge: Callable[[int], Awaitable[Judged]], first: int, names: Sequence[str]
    ) -> list[Judged]:
        """Judge the places from ``first`` on.

        Parts of characters are left out: servers list several under one name.
        """
        places = [i for i in range(first, len(names)) if not is_incomplete(names[i])]
        # The first request alone: most servers that do not offer a way refuse it.
        found = [await judge(place) for place in places[:1]]
        return found + await asyncio.gather(*map(judge, places[1:]))


class TargetJudge:
    """Judge answers with a target in this process: one forward pass per answer, in float32."""

    way = "one forward pass of --target"

    def __init__(self, target: str) -> None:
        from ..devices import resolve_device
        from ..models.target import load_target
        from ..pretrained import load_tokenizer

        self.tokenizer = load_tokenizer(target, field="--target")
        self.model = load_target(target, device=resolve_device("auto"))
        self._ids: dict[str, int] = {}

    def judge(self, prompt: Prompt, answer: Answer, first: int) -> list[Judged] | None:
        """Return the answer's tokens from index ``first`` on, judged; None if they are unknown."""
        import torch

        from ..chats import encode_chat
        from ..inference.serving.logprobs import token_text
        from ..models.target import StagedTarget
        from .lossless import output_logits

        ids = self._tokens_of(answer)
        if ids is None:
            return None
        ends = list(StagedTarget(self.model, 1).eos_token_ids)
        prompt_ids = encode_chat(self.tokenizer, prompt.messages())
        with torch.no_grad():
            # One row more than tokens: it decides about the end.
            logits_NV = output_logits(self.model, prompt_ids, [*ids, 0])
        places = []
        for place, logits_V in enumerate(logits_NV.float()):
            is_end = place == len(ids)
            if place < first or (is_end and not (answer.ended and ends)):
                continue
            best = int(logits_V.argmax())
            value = logits_V[ends].max() if is_end else logits_V[ids[place]]
            is_over = is_end and best in ends
            places.append(
                Judged(
                    place=place,
                    token="" if is_end else token_text(self.tokenizer, ids[place]),
                    best="" if is_over else token_text(self.tokenizer, best),
                    gap=float(logits_V[best] - value),
                    is_exact=True,
                )
            )
        return places

    def _tokens_of(self, answer: Answer) -> list[int] | None:
        """Return the ids of the answer's tokens, or of its text if it does not name them."""
        from ..inference.serving.logprobs import token_text

        if answer.has_thinking and not answer.tokens:
            return None
        ids: list[int] = self.tokenizer(answer.text, add_special_tokens=False).input_ids
        named = spell([token_text(self.tokenizer, token) for token in ids], answer.text)
        if not answer.tokens or named == answer.tokens:
            return ids
        # A model may write other tokens than the tokenizer makes of their text.
        if not self._ids:
            for token in reversed(range(len(self.tokenizer))):
                self._ids[token_text(self.tokenizer, token)] = token
        if any(is_incomplete(name) or name not in self._ids for name in answer.tokens):
            return None
        return [self._ids[name] for name in answer.tokens]
