"""Log-probabilities for emitted tokens, in OpenAI's formats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import Json

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenLogprob:
    """Token text and log-probability before temperature and filters, as in vLLM."""

    text: str
    logprob: float
    top: tuple["TokenLogprob", ...] = ()
    """Most likely tokens at this place, most likely first."""


def measure(
    tokenizer: "PreTrainedTokenizerBase", token: int, logits_V: "Tensor", num_top: int
) -> TokenLogprob:
    """Return the log-probabilities for a token and for the ``num_top`` most likely tokens."""
    # Sums over a vocabulary lose probability mass in 16 bits.
    logp_V = logits_V.float().log_softmax(-1)
    best = logp_V.topk(min(num_top, len(logp_V)))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(
        token_text(tokenizer, token),
        float(logp_V[token]),
        tuple(TokenLogprob(token_text(tokenizer, one), value) for one, value in top),
    )


def token_text(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """Return one token's text, with SentencePiece's leading space."""
    text = str(tokenizer.decode([token]))
    # Decoding a single token drops the space, which SentencePiece writes as U+2581.
    piece = tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if str(piece).startswith("\u2581") and text[:1] != " " else text


def as_chat(found: Sequence[TokenLogprob]) -> Json:
    """Return ``logprobs`` for a chat choice."""
    return {
        "content": [_entry(one) | {"top_logprobs": [*map(_entry, one.top)]} for one in found],
        "refusal": None,
    }


def _entry(one: TokenLogprob) -> Json:
    return {"token": one.text, "logprob": one.logprob, "bytes": [*one.text.encode()]}


def as_completion(found: Sequence[TokenLogprob], first: int) -> Json:
    """Return ``logprobs`` for a completion choice. ``first`` characters precede the tokens."""
    offsets = [first]
    for one in found:
        offsets.append(offsets[-1] + len(one.text))
    return {
        "tokens": [one.text for one in found],
        "token_logprobs": [one.logprob for one in found],
        # Include the emitted token, as OpenAI does.
        "top_logprobs": [{other.text: other.logprob for other in (*one.top, one)} for one in found],
        "text_offset": offsets[:-1],
    }
