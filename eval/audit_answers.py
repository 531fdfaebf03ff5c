"""Send an audit's requests to both servers, read the answers, and list what a server lacks."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from tokenizers.decoders import ByteLevel

from ..data_recipes.answers import AnswerSampling, RowFailed
from ..data_recipes.chat_client import ChatServer, ChatServerOptions, TryAgain, read_choice
from ..errors import Failure
from ..files import Values
from .tasks import Prompt

TOP_LOGPROBS = (20, 10, 5, 1)
"""``top_logprobs`` values to request: OpenAI's maximum first, then the next if it is refused."""
NUM_REPEATS = 4
"""Number of sampled answers to request again with the same seed."""
SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
"""Special token names, for example <|im_end|>."""
UNKNOWN_CHARACTER = "\ufffd"
BYTE_LEVEL = ByteLevel()
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: str(BYTE_LEVEL.decode([name])),  # GPT-2's raw pieces, as mlx_lm.server names them
    lambda name: name.replace("\u2581", " "),  # SentencePiece's raw pieces
)


def is_incomplete(name: str) -> bool:
    """Return True if a token is only part of a character. Servers name these tokens differently."""
    return not name or UNKNOWN_CHARACTER in name


def spell(names: Sequence[str], text: str) -> list[str] | None:
    """Return each token's text, or None if the names do not add up to the answer's text.

    If a character has several tokens, the last one gets the character and the others get "".
    """
    tokens, place, num_waiting = list[str](), 0, 0
    for name in names:
        if is_incomplete(name):
            num_waiting += 1
            continue
        at = text.find(name, place) if num_waiting else place
        is_found = at >= 0 and text.startswith(name, at)
        # A server may strip the spaces around its text.
        is_space = place in (0, len(text)) and text.startswith(name.strip(), place)
        if not (is_found or is_space):
            if not SPECIAL.fullmatch(name):
                return None
            # Servers leave special tokens out of the text.
            tokens += [""] * num_waiting + [name]
            num_waiting = 0
            continue
        if num_waiting:
            tokens += [""] * (num_waiting - 1) + [text[place:at]]
        num_waiting, place = 0, (at + len(name) if is_found else place + len(name.strip()))
        tokens.append(name)
    rest = text[place:].strip().strip(UNKNOWN_CHARACTER)
    if num_waiting:
        return [*tokens, *[""] * (num_waiting - 1), rest]
    return None if rest else tokens


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer from a server."""

    text: str
    """Thinking, if any, and content."""
    ended: bool
    """False if --max-new-tokens cut the answer."""
    tokens: list[str] = field(default_factory=list)
    """Token texts, from the log-probabilities; empty if the server returns none."""
    logprobs: list[dict[str, float]] = field(default_factory=list)
    """Log-probabilities by token for each position: the chosen token, and the most likely ones."""
    fewest_listed: int | None = None
    """Length of the shortest ``top_logprobs``; None if the server returns none."""
    is_spelled: bool = True
    """False if the tokens in the log-probabilities do not add up to the text."""
    has_thinking: bool = False
    """True if there was thinking; the server removed the marks around it from ``text``."""

    @property
    def names_tokens(self) -> bool:
        """Return True if ``tokens`` has the whole answer, which may be empty."""
        return bool(self.tokens) or not self.text

    def parts(self, by_tokens: bool) -> list[str]:
        """Return the tokens, or the words, each with the spaces before it."""
        return self.tokens if by_tokens else re.findall(r"\s*\S+", self.text)


def read_answer(payload: Values) -> Answer:
    """Return the answer in a chat completion; its text may be empty.

    Raises:
        TryAgain: the payload is no complete chat completion.
    """
    text, reasoning, finish_reason = read_choice(payload, is_call=True)  # a call may have no text
    try:
        entries = (payload["choices"][0].get("logprobs") or {}).get("content") or []
        listed = [
            [(one["token"], float(one["logprob"])) for one in (*(e.get("top_logprobs") or ()), e)]
            for e in entries
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TryAgain(f"log-probabilities in another form ({error!r})") from error
    names, ended = [pairs[-1][0] for pairs in listed], finish_reason != "length"
    # Some servers list the end token, although the text does not have it.
    if ended and names and SPECIAL.fullmatch(names[-1]) and not text.endswith(names[-1]):
        names.pop()
    tokens: list[str] | None = names
    respell = SPELLINGS[0]
    if text and names and not reasoning:  # thinking marks and calls are not in the text
        tokens = None
        for respell in SPELLINGS:
            texts = [*map(respell, names)]
            # A wrong spelling can turn a name into an empty text.
            if all(texts) or respell is SPELLINGS[0]:
                tokens = spell(texts, text)
            if tokens is not None:
                break
    return Answer(
        text=reasoning + text,
        ended=ended,
        tokens=tokens or [],
        # Sorted, so the most likely of several tokens with the same name is kept.
        logprobs=[
            {respell(name): x for name, x in sorted(pairs, key=itemgetter(1))} for pairs in listed
        ],
        fewest_listed=min((len(pairs) - 1 for pairs in listed), default=None),
        is_spelled=tokens is not None,
        has_thinking=bool(reasoning),
    )


@dataclass(frozen=True, kw_only=True)
class Heard:
    """All answers from one server."""

    greedy: list[Answer]
    """Greedy answers [prompts]."""
    sampled: list[list[Answer]]
    """Sampled answers [prompts][samples]."""
    repeats: list[tuple[Answer, Answer]] = field(default_factory=list)
    """The first sampled answer to some prompts, requested twice more without other requests."""

    @property
    def answers(self) -> list[Answer]:
        return [*self.greedy, *(answer for answers in self.sampled for answer in answers)]

    @property
    def is_sampled(self) -> bool:
        """Return True if a prompt has different answers with different seeds."""
        return any(len({answer.text for answer in answers}) > 1 for answers in self.sampled)


class FieldRefused(Exception):
    """Raised if a server rejects a request for a reason no retry can change."""


class Endpoint:
    """Client for one of the two servers.

    If the server refuses ``top_logprobs``, the client requests fewer, and finally none.
    """

    def __init__(
        self, name: str, address: str, model: str, options: ChatServerOptions, max_tokens: int
    ) -> None:
        self.name, self.model, self.max_tokens = name, model, max_tokens
        self.client = ChatServer(address, options, AnswerSampling(), field=name)
        self.num_top = TOP_LOGPROBS[0]
        """Requested ``top_logprobs``; 0 if the server refuses log-probabilities."""
        self._free = asyncio.Semaphore(options.concurrency)

    async def ask(
        self, prompt: Prompt, temperature: float = 0.0, seed: int | None = None
    ) -> Answer:
        """Return one answer, greedy by default."""
        body: Values = {
            "model": self.model,
            "messages": prompt.messages(),
            "max_tokens": self.max_tokens,
            "temperature": temperature,
        }
        if seed is not None:
            body |= {"seed": seed, "top_p": 1.0}

        async def complete(attempt: int) -> Answer:
            asked = {"logprobs": True, "top_logprobs": self.num_top} if self.num_top else {}
            try:
                payload = await self.client.post("/chat/completions", body | asked)
            except RowFailed as error:
                raise FieldRefused(str(error)) from error
            return read_answer(payload)

        async with self._free:
            while True:
                had = self.num_top
                try:
                    return await self.client.retried(complete)
                except RowFailed as error:  # no attempt has succeeded
                    raise Failure(f"{self.name}: {error}") from error
                except FieldRefused as error:
                    if not had:
                        raise Failure(f"{self.name}: {error}") from error
                # Requests run concurrently, so only the first refusal of this number lowers it.
                if self.num_top == had:
                    self.num_top = max((n for n in TOP_LOGPROBS if n < had), default=0)

    async def answers(
        self, prompts: Sequence[Prompt], temperature: float, size: int, seed: int
    ) -> Heard:
        """Return a greedy answer and ``size`` sampled answers for each prompt."""
        greedy = await asyncio.gather(*map(self.ask, prompts))
        # Every answer has its own seed. With a common seed, the answers to two prompts would not be
        # independent, and the tests would count one random event several times.
        asked = [prompt for prompt in prompts for _ in range(size)]
        drawn = await asyncio.gather(
            *(self.ask(prompt, temperature, seed + i) for i, prompt in enumerate(asked))
        )
        repeats = [
            (
                await self.ask(prompt, temperature, seed + i * size),
                await self.ask(prompt, temperature, seed + i * size),
            )
            for i, prompt in enumerate(prompts[:NUM_REPEATS])
        ]
        sampled = [list(drawn[i : i + size]) for i in range(0, len(drawn), size)]
        return Heard(greedy=list(greedy), sampled=sampled, repeats=repeats)

    def remarks(self, heard: Heard, temperature: float, tie: float) -> list[str]:
        """Return one sentence for each request feature the server ignores."""
        found = [*self._of_logprobs(heard, tie), *_of_seeds(heard, temperature)]
        return [f"{self.name}: {sentence}" for sentence in found]

    def _of_logprobs(self, heard: Heard, tie: float) -> list[str]:
        answers, found = heard.answers, list[str]()
        if not self.num_top:
            return ["refuses log-probabilities"]
        if self.num_top < TOP_LOGPROBS[0]:
            found.append(
                f"refuses top_logprobs {TOP_LOGPROBS[0]}; asked for {self.num_top} instead"
            )
        if any(not answer.is_spelled for answer in answers):
            found.append("its log-probabilities do not name the tokens of its text")
        elif missing := sum(not answer.names_tokens for answer in answers):
            return [*found, f"ignores logprobs: {missing} of {len(answers)} answers have none"]
        listed = [one.fewest_listed for one in answers if one.fewest_listed is not None]
        fewest = min(listed, default=self.num_top)
        if fewest < self.num_top:
            found.append(f"lists {fewest} tokens where top_logprobs {self.num_top} was asked for")
        chosen = [
            pair
            for answer in heard.greedy
            for pair in zip(answer.tokens, answer.logprobs, strict=False)  # the end has no token
        ]
        odd = sum(max(known.values()) - known.get(token, 0.0) > tie for token, known in chosen)
        if odd:
            found.append(
                f"{odd} of {len(chosen)} greedy tokens are not its most likely ones: it does not "
                "decode greedily at temperature 0, or changes logits (penalties in "
                "generation_config.json?)"
            )
        return found


def _of_seeds(heard: Heard, temperature: float) -> list[str]:
    if not heard.is_sampled:
        return [
            f"all seeds give the same text at temperature {temperature:g}: it does not sample, or "
            "ignores seed and draws with a fixed one; the four tests say nothing about it"
        ]
    firsts = [answers[0].text for answers in heard.sampled]
    pairs = [(first, a.text, b.text) for first, (a, b) in zip(firsts, heard.repeats, strict=False)]
    if any(a != b for _, a, b in pairs):
        other = sum(a != b for _, a, b in pairs)
        return [f"ignores seed: {other} of {len(pairs)} answers differ when repeated with it"]
    if other := sum(first != a for first, a, _ in pairs):
        return [
            f"seed repeats an answer only without other requests: {other} of {len(pairs)} answers "
            "differ among them"
        ]
    return []
