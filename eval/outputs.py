"""Write OUT/outputs.html, which shows each method's output with accepted draft tokens in color."""

from collections.abc import Mapping, Sequence
from html import escape

from transformers import PreTrainedTokenizerBase

from ..inference.generation import TextPieces, colored, tokens_of
from ..inference.result import shown
from .tasks import Prompt
from .traces import Recording, TurnKey

MAX_TURNS = 5
"""Turns shown per benchmark."""
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root {{ color-scheme: light dark }}
body {{ margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; font: 1rem/1.6 system-ui;
  overflow-wrap: anywhere }}
h2 {{ margin: 2.5rem 0 .5rem; font-size: 1.1rem }} h3 {{ margin: 1rem 0 .2rem; font-size: .9rem }}
.prompt {{ white-space: pre-wrap; border-left: 3px solid #8886; padding-left: .8rem }}
small {{ opacity: .75 }}</style></head><body><h1>{title}</h1>
<p>The first {most} answers of each benchmark. A colored token was drafted: point at it to see
its round.</p>
"""


def outputs_page(
    recordings: Sequence[Recording],
    benchmarks: Mapping[str, Sequence[Prompt]],
    tokenizer: PreTrainedTokenizerBase,
    title: str,
) -> str:
    """Return a page with the first answers from every method with a draft."""
    drafted = [recording for recording in recordings if recording.draft_type is not None]
    parts = [HEAD.format(title=escape(title), most=MAX_TURNS)]
    for name, prompts in benchmarks.items():
        turns = [(p, turn) for p in prompts for turn in range(len(p.turns))][:MAX_TURNS]
        for prompt, turn in turns:
            parts.append(f"<h2>{escape(f'{name}, {prompt.id}')}</h2>")
            parts.append(f'<p class="prompt">{escape(prompt.turns[turn])}</p>')
            for recording in drafted:
                label = f"{recording.name}, T={recording.config.sampling}"
                text = _answer(recording, (name, prompt.id, turn), tokenizer)
                parts += [f"<h3>{escape(label)}</h3>", text] if text else []
    return "\n".join([*parts, "</body></html>\n"])


def _answer(recording: Recording, key: TurnKey, tokenizer: PreTrainedTokenizerBase) -> str:
    result = recording.turns.get(key)
    if result is None:
        return ""
    pieces = TextPieces(tokenizer, None)
    for token in result.token_ids:
        pieces.token(token, False)
    tokens = tokens_of(result, pieces.finish(result.text))
    figures = (
        f"{len(tokens)} tokens in {result.num_steps} pipeline steps, "
        f"L' {shown(result.equivalent_acceptance_length)}, "
        f"tau {shown(result.mean_acceptance_length)}, alpha {shown(result.draft_acceptance_rate)}"
    )
    return colored(tokens, figures)
