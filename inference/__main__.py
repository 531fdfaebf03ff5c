"""Decode one prompt: text is streamed as it becomes certain, then the figures."""

import argparse
import sys
from dataclasses import replace

from pipedraft.errors import Parser, run_command
from pipedraft.inference.arguments import add_drafting_arguments, drafting_settings
from pipedraft.inference.schedules import SCHEDULES
from pipedraft.inference.shapes import TreeShape

EXAMPLE = """example:
  python -m pipedraft.inference --checkpoint out/spd --prompt "What is 12 + 30?"
  python -m pipedraft.inference --checkpoint out/eagle3 --schedule flowspec --stages 4 --prompt "Hi"
  python -m pipedraft.inference --target assets/target --schedule autoregressive --prompt "Hi"
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pipedraft inference",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", help="folder or Hub id of a trained draft")
    parser.add_argument("--target", help="folder or Hub id; default: the one the draft names")
    parser.add_argument("--prompt", required=True, help="the user's message; - reads stdin")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--schedule", help=f"{', '.join(SCHEDULES)}; default: the draft's own")
    parser.add_argument("--stages", type=int, help="pipeline stages; default: the draft's")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--tree-width", type=int, help="guesses per step (default 1; 16 for pipedec)"
    )
    parser.add_argument(
        "--tree", default="dynamic", help="chain:M, static, dynamic[:LEVELS:BEAMS:TOKENS] (default)"
    )
    add_drafting_arguments(parser)
    parser.add_argument("--verifier", default="auto", choices=["auto", "match", "rejection"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="only the text, no figures")
    return parser.parse_args(arguments)


class Stream:
    """Prints text as tokens arrive, only up to the last complete character."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.printed = tokenizer, 0
        self.ids: list[int] = []

    def __call__(self, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(text[self.printed :])
            sys.stdout.flush()
            self.printed = len(text)

    def finish(self, text: str) -> None:
        """Print what was held back, an incomplete last character included."""
        print(text[self.printed :])


def encode(tokenizer, text: str, raw: bool) -> list[int]:
    if raw or tokenizer.chat_template is None:
        return tokenizer(text).input_ids
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(rendered, add_special_tokens=False).input_ids


def main() -> None:
    options = parse(sys.argv[1:])
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text.strip():
        raise ValueError(f"--prompt: {text!r} is empty; give at least one word")
    from transformers.utils import logging

    from pipedraft.inference.engine import Engine, EngineConfig
    from pipedraft.inference.sources import default_schedule
    from pipedraft.models import load_draft
    from pipedraft.models.draft import read_description, resolve_folder
    from pipedraft.models.target import load_target, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.checkpoint is None and options.target is None:
        raise ValueError("--checkpoint: missing; give a trained draft, or --target alone for AR")
    name, revision, own_schedule = options.target, None, "autoregressive"
    if options.checkpoint is not None:
        description = read_description(resolve_folder(options.checkpoint))
        own_schedule = default_schedule(description["draft_type"])
        if name is None:
            name = description["target"]["name"]
            revision = description["target"].get("revision")
    elif options.schedule not in (None, "autoregressive"):
        raise ValueError(
            f"--schedule: {options.schedule!r} needs a draft; give --checkpoint DIR, or "
            "--schedule autoregressive"
        )
    # Before anything is loaded, so that bad values are refused at once.
    config = EngineConfig(
        schedule=options.schedule or own_schedule,
        num_stages=1 if options.stages is None else options.stages,
        temperature=options.temperature,
        verifier=options.verifier,
        tree_width=options.tree_width,
        tree=TreeShape.parse(options.tree),
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        **drafting_settings(options),
    )
    tokenizer = load_tokenizer(name, revision=revision)
    target = load_target(name, revision=revision)
    draft = load_draft(options.checkpoint, target) if options.checkpoint else None
    if options.stages is None and draft is not None and draft.num_stages is not None:
        config = replace(config, num_stages=draft.num_stages)
    engine = Engine(target, tokenizer, config, draft)
    stream = Stream(tokenizer)
    result = engine.decode(encode(tokenizer, text, options.raw), on_token=stream)
    stream.finish(result.text)
    if not options.quiet:
        elapsed = result.token_times_s[-1] - result.prefill_s
        print(
            f"[{config.schedule}, n = {result.num_stages}] {result.num_tokens} tokens after the "
            f"first in {result.num_steps} steps: equivalent acceptance length "
            f"{result.equivalent_acceptance_length:.2f}, acceptance rate "
            f"{result.draft_acceptance_rate:.2f}; {result.num_tokens / max(elapsed, 1e-9):.0f} "
            f"tokens/s in one process, {result.prefill_s * 1e3:.0f} ms to the first token "
            f"({result.stop_reason})",
            file=sys.stderr,
        )


if __name__ == "__main__":
    run_command(main)
