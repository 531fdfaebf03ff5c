"""Decode with a target on a server. The draft and the tokenizer are here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from transformers import PreTrainedTokenizerBase

from ...chats import set_template_variables
from ...devices import resolve_device, resolve_dtype
from ...errors import blaming, one_line
from ...files import read_optional
from ...models.heads.draft import read_description, resolve_folder
from ...models.heads.flexspec import FlexSpec
from ...models.heads.language_model import LanguageModelDraft, model_folder
from ...models.target import load_target, load_tokenizer
from ...models.transformer.fingerprint import vocabulary_hash
from ...pretrained import quieten
from ..command import encode, printed_answer
from ..config import DecodeConfig
from ..result import DecodeResult, shown
from ..rules.sampled import RULES
from ..server_options import is_loopback, read_tokens
from .arguments import RemoteOptions
from .engine import LinkEngine
from .remote import LocalDraft, RemotePipeline
from .stream import Access, Connection

if TYPE_CHECKING:
    from ..decode_options import DecodeOptions

    class RemoteDecodeOptions(RemoteOptions, DecodeOptions): ...


def read_access(options: RemoteOptions) -> Access:
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


def print_status(access: Access) -> None:
    with Connection(access) as connection:
        about, round_trip_s = connection.describe()
    status = msgspec.to_builtins(about) | {"round_trip_s": round_trip_s}
    print(msgspec.json.encode(status).decode())


def load_edge(options: RemoteDecodeOptions) -> tuple[LocalDraft | None, PreTrainedTokenizerBase]:
    """Load the draft (None without one) and the tokenizer for a target on a server."""
    if options.draft_model is not None:
        name, device = model_folder(options.draft_model), resolve_device(options.device)
        with blaming("--draft-model"):
            dtype = resolve_dtype(options.dtype, device, name)
            model = load_target(name, dtype=dtype, device=device)
        field = "--tokenizer" if options.tokenizer else "--draft-model"
        tokenizer = load_tokenizer(options.tokenizer or name, field=field)
        # The target is elsewhere, so the draft takes its place; connecting compares tokenizers.
        return LocalDraft(network=LanguageModelDraft(model, model)), tokenizer
    if options.checkpoint is None:
        if options.tokenizer is None:
            raise ValueError("--tokenizer: missing; without a draft nothing names the target's")
        return None, load_tokenizer(options.tokenizer, field="--tokenizer")
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
    draft.to(resolve_device(options.device))
    # The recorded revision belongs to the target's own repository.
    revision = reference.revision if options.tokenizer is None else None
    with blaming("--tokenizer" if options.tokenizer else f"--checkpoint: its target in {folder}"):
        tokenizer = load_tokenizer(options.tokenizer or reference.name, revision=revision)
    own = {name: str(reference.fingerprint[name]) for name in ("hash", "anchor")}
    return LocalDraft(network=draft, target=own["hash"], anchor=own["anchor"]), tokenizer


def decode_remotely(options: RemoteDecodeOptions) -> None:
    access = read_access(options)
    # Before the prompt is read: the status needs none.
    if options.status:
        print_status(access)
        return
    text, settings = options.read_prompt(), options.decode_settings()
    has_draft = options.checkpoint is not None or options.draft_model is not None
    name = options.schedule or ("flexspec" if has_draft else "autoregressive")
    # From here a remote target is one stage, even if the server runs several.
    config = DecodeConfig.of(name, num_stages=1, **settings)
    if config.schedule.grows is not None and not has_draft:
        raise ValueError(f"--schedule: {name} drafts; give --checkpoint or --draft-model")
    quieten()
    draft, tokenizer = load_edge(options)
    set_template_variables(tokenizer, options.chat_template_kwargs)
    if config.schedule.grows is not None and RULES[config.rule].caveat:
        print(f"warning: {RULES[config.rule].caveat}", file=sys.stderr)
    ids = encode(tokenizer, text, options.raw)
    stream = printed_answer(tokenizer, ids, options)
    with Connection(access) as connection:
        pipeline = RemotePipeline(
            connection,
            draft,
            keeps_drafting=options.keep_drafting,
            tokenizer=vocabulary_hash(tokenizer),
            warn=lambda line: print(f"warning: {one_line(line)}", file=sys.stderr),
        )
        network = None if draft is None else draft.network
        engine = LinkEngine(pipeline, tokenizer, config, network)
        result = engine.decode(ids, on_token=stream)
    stream.finish_line()
    if not options.quiet:
        print_figures(name, result, pipeline)


def print_figures(name: str, result: DecodeResult, pipeline: RemotePipeline) -> None:
    up, down = pipeline.connection.up, pipeline.connection.down
    # Without the prefill, which no draft shortens.
    elapsed_s = result.token_times_s[-1] - result.token_times_s[0]
    round_trip_s = pipeline.estimates.link.state.round_trip_s
    print(
        f"[{name}] {result.num_tokens} tokens after the first: "
        f"{elapsed_s * 1e3 / max(result.num_tokens, 1):.1f} ms a token, "
        f"{result.prefill_s * 1e3:.0f} ms to the first; tokens per target pass L' "
        f"{shown(result.equivalent_acceptance_length)}, tokens per round tau "
        f"{shown(result.mean_acceptance_length)}, acceptance "
        f"{shown(result.draft_acceptance_rate)}; "
        f"{up.payload_bytes} bytes up in {up.messages} messages, {down.payload_bytes} down in "
        f"{down.messages}; round trip {round_trip_s * 1e3:.1f} ms; {result.ending}",
        file=sys.stderr,
    )
    if pipeline.num_reopened:
        print(f"{pipeline.num_reopened} sessions broke and were opened again", file=sys.stderr)
