"""One prompt's answer, for Python: text, origin of each token, numbers and picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..models.target import StagedTarget
from .engine import Engine
from .pipelines import Pipeline
from .result import DecodeResult, Observer, shown
from .step_picture import SHOWN_STEPS, RecordingPipeline, draw
from .text_stream import TextStream

Connect = Callable[[StagedTarget], Pipeline]
COLORS = {"accepted": "#1f8f4e40", "rejected": "#c2570c40", "plain": "transparent"}
"""CSS backgrounds by token kind, readable on light and dark pages."""
MEANINGS = {
    "accepted": "accepted draft token",
    "rejected": "the target's token after a rejected draft token",
    "plain": "no draft token was tested",
}


@dataclass(frozen=True, kw_only=True)
class GeneratedToken:
    """One new token and its place in the verification rounds."""

    id: int
    text: str
    """Characters completed by this token; "" if the character needs further tokens."""
    drafted: bool
    """True if a draft token was tested at this place in the output."""
    accepted: bool
    """True if the draft token was accepted."""
    round: int
    """Verification round, counted from 1. The token from the prompt's forward pass has round 0."""
    position: int
    """Place in its round, counted from 1. For an accepted token, this is its depth in the draft."""

    @property
    def kind(self) -> str:
        if self.accepted:
            return "accepted"
        return "rejected" if self.drafted else "plain"


class Picture(str):
    """SVG text that notebooks show as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file."""
        Path(path).write_text(self)


class TextPieces(Observer):
    """Collect the text completed by each token and pass it to ``write``."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object] | None
    ) -> None:
        self._stream, self._write = TextStream(tokenizer), write
        self.pieces: list[str] = []

    def token(self, token: int, is_drafted: bool) -> bool:
        self.pieces.append(self._stream.add(token))
        self._say(self.pieces[-1])
        return False

    def _say(self, piece: str) -> None:
        if piece and self._write is not None:
            self._write(piece)

    def finish(self, text: str) -> list[str]:
        """Return one text piece per token. The last piece includes any incomplete character."""
        rest = self._stream.finish(text)
        self.pieces[-1] += rest
        self._say(rest)
        return self.pieces


def tokens_of(result: DecodeResult, pieces: list[str]) -> list[GeneratedToken]:
    """Return the new tokens with their rounds.

    A round ends at the first token outside the tree, so all its tokens but the last are accepted
    draft tokens. ``DecodeResult.round_ends`` gives the kind for the last one.
    """
    places = [(0, 0, "u")]
    rounds = zip(result.round_lengths, result.round_ends, strict=True)
    for index, (length, end) in enumerate(rounds, start=1):
        ends = ["a"] * (length - 1) + [end] * (length > 0)
        places += [(index, position, end) for position, end in enumerate(ends, start=1)]
    return [
        GeneratedToken(
            id=token, text=piece, drafted=end != "u", accepted=end == "a", round=at, position=place
        )
        for token, piece, (at, place, end) in zip(result.token_ids, pieces, places, strict=True)
    ]


def colored(tokens: Sequence[GeneratedToken], note: str) -> str:
    """Return HTML of a text with its accepted draft tokens colored, a legend and a note."""

    def span(kind: str, text: str, about: str) -> str:
        style = f"background:{COLORS[kind]};border-radius:3px"
        return f'<span style="{style}" title="{escape(about)}">{escape(text)}</span>'

    spans = []
    for token in tokens:
        about = f"round {token.round}, position {token.position}: {MEANINGS[token.kind]}"
        spans.append(span(token.kind, token.text, about))
    legend = " &nbsp; ".join(
        span(kind, words, "") for kind, words in MEANINGS.items() if kind != "plain"
    )
    return (
        f'<div><div style="white-space:pre-wrap">{"".join(spans)}</div>'
        f"<small>{legend}<br>{escape(note)}</small></div>"
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation:
    """Answer to one prompt."""

    result: DecodeResult
    """Result with all counts and times."""
    tokens: list[GeneratedToken]
    schedule: str
    make_engine: Callable[[Connect], Engine] = field(compare=False)
    """Builds an engine to decode the same prompt again, for ``timeline``."""

    @property
    def text(self) -> str:
        return self.result.text

    @property
    def ids(self) -> list[int]:
        return self.result.token_ids

    @property
    def tau(self) -> float:
        """Tokens per verification round."""
        return self.result.mean_acceptance_length

    @property
    def alpha(self) -> float:
        """Fraction of the tested draft tokens that were accepted, NaN without draft tokens."""
        return self.result.draft_acceptance_rate

    @property
    def equivalent_acceptance_length(self) -> float:
        """L' = n N / K, the number of tokens per target pass."""
        return self.result.equivalent_acceptance_length

    @property
    def speedup(self) -> float:
        """S, the modeled speed-up over autoregressive decoding on the same pipeline."""
        return self.result.theoretical_speedup

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second in this process, from the second token on; NaN for a single token."""
        return self.result.tokens_per_second

    @property
    def figures(self) -> str:
        return (
            f"{len(self.tokens)} tokens, L' {shown(self.equivalent_acceptance_length)}, tau "
            f"{shown(self.tau)}, alpha {shown(self.alpha)}, S {shown(self.speedup)}, "
            f"{self.tokens_per_second:.0f} tokens/s"
        )

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"Generation({text!r}, {self.schedule}, {self.figures})"

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Return the text for a notebook, accepted draft tokens colored."""
        return colored(self.tokens, f"{self.schedule}: {self.figures}")

    def timeline(self, num_steps: int = SHOWN_STEPS) -> Picture:
        """Decode once more, and draw the tokens at each stage in the first steps (docs/methods)."""
        prompt_ids, text = self.result.prompt_ids, [*self.result.prompt_ids, *self.ids]
        engine = self.make_engine(lambda staged: RecordingPipeline(staged, text, len(prompt_ids)))
        pipeline, places = engine.pipeline, iter(range(len(text)))
        assert isinstance(pipeline, RecordingPipeline)

        def on_token(token: int) -> None:
            place = next(places)
            if pipeline.steps:
                pipeline.steps[-1].certain.append(place)

        again = engine.decode(prompt_ids, on_token=on_token)
        if again.token_ids != self.ids:
            raise RuntimeError("the same prompt gave other tokens when it was decoded again")
        if engine.config.schedule.grows is None:
            for step in pipeline.steps:
                step.restarts = False
        title = f"{self.schedule}, {again.num_stages} stages"
        cost = engine.draft_cost
        return Picture(draw(title, pipeline.steps, again, draft_pass=cost, num_shown=num_steps))
