"""What the edge knows of the text: certain tokens, guesses behind them, and when it ends."""

from typing import Any

from pipedraft.inference.edge_cloud.messages import Open, Opened, prefix_hash
from pipedraft.inference.result import DecodeResult
from pipedraft.inference.verify import DraftToken


class EdgeText:
    """``result`` holds what the user gets; ``token_times_s`` are the times passed in here."""

    def __init__(self, opening: Open) -> None:
        self.opening = opening
        self.tokens = list(opening.prompt_ids)
        self.num_certain = 0
        """Of the last tokens: drawn on the edge, and the cloud does not know them yet."""
        self.guesses: list[DraftToken] = []
        self.limits: Opened | None = None
        """What the cloud has said of its target."""
        self.result = DecodeResult(list(opening.prompt_ids), [], "", "", num_stages=1)
        self._round_length = 0

    @property
    def has_ended(self) -> bool:
        return bool(self.result.stop_reason)

    @property
    def length(self) -> int:
        """Of tokens and guesses."""
        return len(self.tokens) + len(self.guesses)

    @property
    def end_is_guessed(self) -> bool:
        """If all guesses are right, the text ends with them."""
        assert self.limits is not None
        longest = len(self.opening.prompt_ids) + self.opening.settings.max_new_tokens
        ends = self.limits.eos_token_ids
        return self.length >= min(longest, self.limits.max_positions) or any(
            guess.token in ends for guess in self.guesses
        )

    def prefix(self, num_guesses: int) -> dict[str, Any]:
        """Fields of a message that continues the tokens and the first guesses."""
        known = self.tokens[: len(self.tokens) - self.num_certain]
        certain = self.tokens[len(known) :]
        known = known + [guess.token for guess in self.guesses[:num_guesses]]
        return {"base": len(known), "prefix_hash": prefix_hash(known), "certain": certain}

    def num_accepted(self, length: int) -> int:
        """Guesses that are right if the text has so many tokens.

        Raises:
            ValueError: it cannot have.
        """
        count = length - len(self.tokens)
        if not 0 <= count <= len(self.guesses):
            raise ValueError(
                f"cloud: a verdict on {length} tokens, but there are {len(self.tokens)} and "
                f"{len(self.guesses)} guesses"
            )
        return count

    def open(self, limits: Opened, now_s: float) -> None:
        """The first token has come."""
        self.limits = limits
        self._emit(limits.token, now_s)

    def extend(
        self, num_accepted: int, token: int | None, now_s: float, *, is_miss: bool = False
    ) -> None:
        """Guesses become text; ``token`` follows them in place of the others."""
        emitted = [guess.token for guess in self.guesses[:num_accepted]]
        tests = [True] * num_accepted + [False] * is_miss
        del self.guesses[:num_accepted]
        if token is not None:
            emitted.append(token)
            self.guesses.clear()
        for index, new in enumerate(emitted):
            if index < len(tests):
                self.result.count_test(self._round_length, tests[index])
            self._round_length += 1
            self._emit(new, now_s)
            if self.has_ended:
                break
        if token is not None or self.has_ended:
            self.result.round_lengths.append(self._round_length)
            self._round_length = 0

    def _emit(self, token: int, now_s: float) -> None:
        assert self.limits is not None
        self.tokens.append(token)
        self.result.emit(
            token,
            now_s,
            eos_token_ids=self.limits.eos_token_ids,
            max_new_tokens=self.opening.settings.max_new_tokens,
            limit=self.limits.max_positions,
        )
