"""Decoding a prompt with a draft on this machine and the target on a server: ``--server``."""

import ipaddress
import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipedraft.errors import one_line
from pipedraft.files import read_optional, read_text
from pipedraft.inference.arguments import Stream, encode, place_of
from pipedraft.options import Options, flag_name, option

if TYPE_CHECKING:
    from pipedraft.inference.__main__ import DecodeOptions
    from pipedraft.inference.pipelines.remote import LocalDraft, RemotePipeline
    from pipedraft.inference.result import DecodeResult
    from pipedraft.inference.transport.stream import Access

TOKEN_VARIABLE = "PIPEDRAFT_TOKEN"
TOKEN = re.compile(r"[!-~]{1,4096}")
MAX_TOKEN_BYTES = 2**20
ELSEWHERE = ("target", "stages", "boundaries", "backend", "trace")
"""Options of a target on this machine."""


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is no time; give seconds above 0")
    return value


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """a target on a server (inference serve)"""

    server: str | None = option(None, metavar="HOST:PORT")
    """the target is there, the draft here"""
    status: bool = False
    """print what the server says of itself, as JSON"""
    tokenizer: str | None = None
    """folder or Hub id; default: that of the draft"""
    keep_drafting: bool = False
    """also where the target alone would be faster"""
    tls: bool = False
    """TLS; its certificate signed as the system wants it"""
    tls_ca: Path | None = option(None, metavar="FILE")
    """TLS; its certificate signed by this one (PEM)"""
    token_file: Path | None = option(None, metavar="FILE")
    """what the server wants to be sent"""
    connect_s: float = option(10.0, metavar="S", parse=seconds)
    """for one attempt"""
    answer_s: float = option(30.0, metavar="S", parse=seconds)
    """without an answer for so long the connection is made again"""
    give_up_s: float = option(60.0, metavar="S", parse=seconds)
    """without a server for so long the output ends, status 1"""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ELSEWHERE if self.server else [part.name for part in fields(ServerOptions)]
        defaults = {part.name: part.default for part in fields(self)}
        for name in names:
            if name != "server" and getattr(self, name) != defaults[name]:
                if self.server is None:
                    raise ValueError(f"{flag_name(name)}: it needs --server HOST:PORT")
                where = self.server
                raise ValueError(f"{flag_name(name)}: the target is on {where}; leave it out")


def read_tokens(
    file: Path | None, *, option: str = "--token-file", variable: str = TOKEN_VARIABLE
) -> tuple[str, ...]:
    """From the file, a line each, or the environment; never from the command line, which others
    can list.

    Raises:
        ValueError: what is there is no token, as a secret that was not filled in.
    """
    place, text = f"${variable}", os.environ.get(variable)
    if file is not None:
        place = f"{option}: {str(file)!r}"
        text = read_text(file, option, MAX_TOKEN_BYTES).strip()
    if text is None:
        return ()
    tokens = tuple(text.split("\n"))
    if not all(TOKEN.fullmatch(token) for token in tokens):
        raise ValueError(
            f"{place} holds no printable ASCII text without spaces; write one, or unset it"
        )
    return tokens


def read_access(options: ServerOptions) -> "Access":
    from pipedraft.inference.transport.stream import Access

    tokens, uses_tls = read_tokens(options.token_file), options.tls or options.tls_ca is not None
    if len(tokens) > 1:
        raise ValueError(f"--token-file: {len(tokens)} lines; an edge has one token, give its line")
    host = str(options.server).rpartition(":")[0]
    if tokens and not uses_tls and not is_loopback(host):
        print(
            f"warning: the token crosses the network to {one_line(host)} in plain text; give --tls "
            "or --tls-ca",
            file=sys.stderr,
        )
    return Access(
        server=str(options.server),
        uses_tls=uses_tls,
        root_certificates=read_optional(options.tls_ca, "--tls-ca"),
        token=tokens[0] if tokens else "",
        connect_s=options.connect_s,
        answer_s=options.answer_s,
        give_up_s=options.give_up_s,
    )


def print_status(access: "Access") -> None:
    from pipedraft.inference.transport.stream import Connection

    with Connection(access) as connection:
        about, round_trip_s = connection.describe()
    status = msgspec.to_builtins(about) | {"round_trip_s": round_trip_s}
    print(msgspec.json.encode(status).decode())


def load(options: "DecodeOptions") -> tuple["LocalDraft | None", Any]:
    """The draft, None without one, and the tokenizer."""
    from pipedraft.inference.pipelines.remote import LocalDraft
    from pipedraft.models.draft import read_description, resolve_folder
    from pipedraft.models.flexspec import FlexSpec
    from pipedraft.models.language_model import LanguageModelDraft, model_folder
    from pipedraft.models.placement import resolve_dtype
    from pipedraft.models.target import load_target, load_tokenizer

    if options.draft_model is not None:
        name, device = model_folder(options.draft_model), place_of(options)
        dtype = resolve_dtype(options.dtype, device, name)
        model = load_target(name, dtype=dtype, device=device)
        tokenizer = load_tokenizer(options.tokenizer or name)
        return LocalDraft(network=LanguageModelDraft(model, model)), tokenizer
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
    draft.to(place_of(options))
    revision = reference.revision if options.tokenizer is None else None
    tokenizer = load_tokenizer(options.tokenizer or reference.name, revision=revision)
    own = reference.fingerprint
    return (
        LocalDraft(network=draft, target=str(own["hash"]), anchor=str(own["anchor"])),
        tokenizer,
    )


def run(options: "DecodeOptions") -> None:
    access = read_access(options)
    if options.status:
        print_status(access)
        return
    from transformers.utils import logging

    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.pipelines.remote import RemotePipeline
    from pipedraft.inference.transport.stream import Connection
    from pipedraft.inference.verify import RULES
    from pipedraft.models.fingerprint import vocabulary_hash

    text, settings = options.read_prompt(), options.decode_settings()
    has_draft = options.checkpoint is not None or options.draft_model is not None
    name = options.schedule or ("flexspec" if has_draft else "autoregressive")
    config = DecodeConfig.of(name, num_stages=1, **settings)
    if config.schedule.grows is not None and not has_draft:
        raise ValueError(f"--schedule: {name} drafts; give --checkpoint or --draft-model")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    draft, tokenizer = load(options)
    if config.schedule.grows is not None and RULES[config.rule].caveat:
        print(f"warning: {RULES[config.rule].caveat}", file=sys.stderr)
    stream = Stream(tokenizer)
    with Connection(access) as connection:
        pipeline = RemotePipeline(
            connection,
            draft,
            keeps_drafting=options.keep_drafting,
            tokenizer=vocabulary_hash(tokenizer),
            warn=lambda line: print(f"warning: {one_line(line)}", file=sys.stderr),
        )
        network = None if draft is None else draft.network
        engine = Engine(pipeline.target, tokenizer, config, network, connect=lambda _: pipeline)
        result = engine.decode(encode(tokenizer, text, options.raw), on_token=stream)
    stream.finish_line(result.text)
    if not options.quiet:
        print_figures(name, result, pipeline)


def print_figures(name: str, result: "DecodeResult", pipeline: "RemotePipeline") -> None:
    sent = pipeline.connection.bytes
    elapsed_s = result.token_times_s[-1] - result.token_times_s[0]
    round_trip_s = pipeline.estimates.link.state.round_trip_s
    print(
        f"[{name}] {result.num_tokens} tokens after the first: "
        f"{elapsed_s * 1e3 / max(result.num_tokens, 1):.1f} ms a token, "
        f"{result.prefill_s * 1e3:.0f} ms to the first; tokens per target pass L' "
        f"{result.equivalent_acceptance_length:.2f}, tokens per round tau "
        f"{result.mean_acceptance_length:.2f}, acceptance {result.draft_acceptance_rate:.2f}; "
        f"{sent.up} bytes up in {sent.messages_up} messages, {sent.down} down in "
        f"{sent.messages_down}; round trip {round_trip_s * 1e3:.1f} ms "
        f"({result.stop_reason})",
        file=sys.stderr,
    )
    num_breaks, num_reopened = pipeline.connection.num_breaks, pipeline.num_reopened
    if num_breaks:
        print(
            f"{num_breaks} connections broke, {num_reopened} sessions began again",
            file=sys.stderr,
        )
