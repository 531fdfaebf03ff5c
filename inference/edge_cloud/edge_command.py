"""Decode a prompt with a draft on this machine and the target on another one.

Text is streamed as it becomes certain, then come the figures. The text is the target's own.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipedraft.errors import Parser
from pipedraft.inference.arguments import positive, temperature
from pipedraft.inference.config import RULE_NAMES
from pipedraft.inference.edge_cloud.methods import METHODS, Wishes
from pipedraft.inference.edge_cloud.serve_command import read_token
from pipedraft.inference.edge_cloud.wish_arguments import add_wish_arguments, wish_settings
from pipedraft.inference.prompts import Stream, encode

EXAMPLE = """example:
  python -m pipedraft.inference edge --checkpoint out/flexspec \\
      --server 127.0.0.1:50051 --prompt "Hi"
  python -m pipedraft.inference edge --draft-model out/draft_model --method picospec \\
      --server cloud.example:50051 --tls-ca server.pem --token-file token --prompt "Hi"
  python -m pipedraft.inference edge --server 127.0.0.1:50051 --status

Without a draft (--method cloud) give --tokenizer, a folder or Hub id with the target's tokenizer.
"""
REMOTE = [name for name, method in METHODS.items() if method.drafts_in in (None, "both")]


def build_parser() -> Parser:
    parser = Parser(
        prog="pipedraft inference edge",
        description=__doc__,
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--checkpoint", help="folder or Hub id of a FlexSpec draft")
    drafts.add_argument(
        "--draft-model", help="folder or Hub id of a language model with the target's tokenizer"
    )
    add("--tokenizer", help="folder or Hub id; default: that of the draft")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", help="the user's message; - reads stdin")
    asked.add_argument(
        "--status", action="store_true", help="print what the server says of itself, as JSON"
    )
    add("--raw", action="store_true", help="do not apply the chat template")
    add("--quiet", action="store_true", help="only the text, no figures")
    _add_decoding_arguments(parser)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--server", required=True, metavar="HOST:PORT")
    add("--tls", action="store_true", help="TLS; its certificate signed as the system wants it")
    add("--tls-ca", type=Path, metavar="FILE", help="TLS; its certificate signed by this one (PEM)")
    add("--token-file", type=Path, metavar="FILE", help="what the server wants to be sent")
    add("--connect-s", type=seconds, default=10.0, metavar="S", help="for one attempt (10)")
    add(
        "--answer-s",
        type=seconds,
        default=30.0,
        metavar="S",
        help="without an answer for so long the connection is made again (30)",
    )
    add(
        "--give-up-s",
        type=seconds,
        default=60.0,
        metavar="S",
        help="without a server for so long the text ends, status 1 (60)",
    )
    return parser


def _add_decoding_arguments(parser: Parser) -> None:
    wishes = Wishes()
    add = parser.add_argument_group("decoding").add_argument
    add("--method", choices=REMOTE, help="default: flexspec with a draft, else cloud")
    add(
        "--rule",
        choices=RULE_NAMES,
        help="acceptance at temperatures above 0; topk and argmax are not lossless (default: "
        "the method's)",
    )
    add("--max-length", type=positive, default=wishes.max_length, metavar="K", help="longest (8)")
    add(
        "--fixed-length",
        type=positive,
        default=wishes.fixed_length,
        metavar="K",
        help="draft length of stop_and_wait and dssd (4)",
    )
    add("--temperature", type=temperature, default=0.0, help="0 is greedy (default)")
    add_wish_arguments(add)
    add(
        "--keep-drafting",
        action="store_true",
        help="also where the cloud alone would be faster",
    )


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds above 0")
    return value


def run(argv: Sequence[str]) -> None:
    options = build_parser().parse_args(argv)
    from pipedraft.inference.edge_cloud.connection import Access

    access = Access(
        server=options.server,
        uses_tls=options.tls or options.tls_ca is not None,
        root_certificates=None if options.tls_ca is None else options.tls_ca.read_bytes(),
        token=read_token(options.token_file),
        connect_s=options.connect_s,
        answer_s=options.answer_s,
        give_up_s=options.give_up_s,
    )
    if options.status:
        asyncio.run(_print_status(access))
        return
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text.strip():
        raise ValueError(f"--prompt: {text!r} is empty; give at least one word")
    has_draft = options.checkpoint is not None or options.draft_model is not None
    name = options.method or ("flexspec" if has_draft else "cloud")
    if METHODS[name].drafts_in is not None and not has_draft:
        raise ValueError(f"--method: {name} drafts; give --checkpoint or --draft-model")
    draft, tokenizer = _load(options)
    asyncio.run(_decode(options, access, METHODS[name], draft, tokenizer, text))


async def _print_status(access: Any) -> None:
    import msgspec

    from pipedraft.inference.edge_cloud.connection import Connection

    async with Connection(access) as connection:
        about, round_trip_s = await connection.describe()
    status = msgspec.to_builtins(about) | {"round_trip_s": round_trip_s}
    print(msgspec.json.encode(status).decode())


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The draft, None without one, and the tokenizer."""
    from transformers.utils import logging

    from pipedraft.inference.edge_cloud.client import EdgeDraft
    from pipedraft.inference.edge_cloud.drafter import ChainDrafter
    from pipedraft.models.draft import read_description, resolve_folder
    from pipedraft.models.flexspec import FlexSpec
    from pipedraft.models.language_model import LanguageModelDraft, model_folder
    from pipedraft.models.target import load_target, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.draft_model is not None:
        name = model_folder(options.draft_model)
        model = load_target(name)
        network = LanguageModelDraft(model, model)
        tokenizer = load_tokenizer(options.tokenizer or name)
        return EdgeDraft(make=lambda: ChainDrafter.of(network)), tokenizer
    if options.checkpoint is None:
        if options.tokenizer is None:
            raise ValueError("--tokenizer: missing; without a draft nothing names the target's")
        return None, load_tokenizer(options.tokenizer)
    folder = resolve_folder(options.checkpoint)
    description = read_description(folder)
    if description["draft_type"] != FlexSpec.draft_type:
        raise ValueError(
            f"--checkpoint: a {description['draft_type']} draft reads hidden states of the target, "
            "which do not cross the link; give a FlexSpec draft, or a language model by "
            "--draft-model"
        )
    draft = FlexSpec.load(folder, description)
    reference = draft.reference
    revision = reference.revision if options.tokenizer is None else None
    tokenizer = load_tokenizer(options.tokenizer or reference.name, revision=revision)
    return (
        EdgeDraft(
            make=lambda: ChainDrafter.of(draft),
            target=str(reference.fingerprint["hash"]),
            anchor=str(reference.fingerprint["anchor"]),
        ),
        tokenizer,
    )


async def _decode(
    options: argparse.Namespace,
    access: Any,
    method: Any,
    draft: Any,
    tokenizer: Any,
    text: str,
) -> None:
    from pipedraft.inference.edge_cloud.client import EdgeClient
    from pipedraft.inference.edge_cloud.connection import Connection
    from pipedraft.models.fingerprint import vocabulary_hash

    wishes = Wishes(
        temperature=options.temperature,
        max_length=options.max_length,
        fixed_length=options.fixed_length,
        **wish_settings(options),
    )
    if wishes.caveat(method):
        print(f"warning: {wishes.caveat(method)}", file=sys.stderr)
    stream = Stream(tokenizer)
    async with Connection(access) as connection:
        client = EdgeClient(
            connection=connection,
            method=method,
            wishes=wishes,
            draft=draft,
            keeps_drafting=options.keep_drafting,
            tokenizer=vocabulary_hash(tokenizer),
            warn=lambda line: print(f"warning: {line}", file=sys.stderr),
        )
        outcome = await client.decode(encode(tokenizer, text, options.raw), on_token=stream)
    stream.finish(tokenizer.decode(outcome.result.token_ids, skip_special_tokens=True))
    if not options.quiet:
        print_figures(options.method or "default method", outcome)


def print_figures(name: str, outcome: Any) -> None:
    result, sent = outcome.result, outcome.bytes
    elapsed_s = result.token_times_s[-1] - result.token_times_s[0]
    print(
        f"[{name}] {result.num_tokens} tokens after the first: "
        f"{elapsed_s * 1e3 / max(result.num_tokens, 1):.1f} ms a token, "
        f"{result.prefill_s * 1e3:.0f} ms to the first; tokens per target pass L' "
        f"{result.equivalent_acceptance_length:.2f}, tokens per round tau "
        f"{result.mean_acceptance_length:.2f}, acceptance {result.draft_acceptance_rate:.2f}; "
        f"{sent.up} bytes up in {sent.messages_up} messages, {sent.down} down in "
        f"{sent.messages_down}; round trip {outcome.round_trip_s * 1e3:.1f} ms "
        f"({result.stop_reason})",
        file=sys.stderr,
    )
    if outcome.num_breaks:
        print(
            f"{outcome.num_breaks} connections broke, {outcome.num_reopened} sessions began again",
            file=sys.stderr,
        )
