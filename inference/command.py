"""Load target, draft and engine from options, or only a draft if the target is on a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from ..chats import encode_chat, set_template_variables, warn_of_variables
from ..devices import place_draft, resolve_device, resolve_dtype
from ..errors import UsageError, blaming, one_line
from ..files import Values, read_optional
from ..models import load_draft
from ..models.draft import read_description, resolve_folder
from ..models.fingerprint import vocabulary_hash
from ..models.flexspec import FlexSpec
from ..models.language_model import LanguageModelDraft, load_draft_model, model_folder
from ..models.target import choose_decoding_threads, load_target, load_tokenizer
from ..pretrained import load_config, quieten, unapplied_settings
from .arguments import EngineOptions, PlaceOptions, RemoteOptions
from .clock import CostModel
from .config import DecodeConfig
from .cut import AUTO, cut_layers
from .edge.engine import LinkEngine
from .edge.remote import LocalDraft, RemotePipeline
from .edge.stream import Access, Connection
from .engine import DraftNetwork, Engine
from .pipelines.local import LocalPipeline
from .ranks.cluster import Cluster
from .result import DecodeResult, shown
from .rules.sampled import RULES
from .servers import is_loopback, read_tokens
from .sources import default_schedule
from .sources.lookup import make_lookup
from .text_stream import PrintedAnswer

if TYPE_CHECKING:
    from .decode_options import DecodeOptions


def encode(tokenizer: PreTrainedTokenizerBase, text: str, raw: bool) -> list[int]:
    """Return a prompt's token ids, with the chat template unless ``raw``."""
    if raw or tokenizer.chat_template is None:
        return tokenizer(text).input_ids
    return encode_chat(tokenizer, [{"role": "user", "content": text}])


def printed_answer(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], options: DecodeOptions
) -> PrintedAnswer:
    """Return a printer for the answer. --raw prints all text, --quiet the content alone."""
    prompt = None if options.raw else ids
    return PrintedAnswer(tokenizer, prompt, shows_thinking=not options.quiet)


def place_of(options: PlaceOptions, cluster: Cluster | None = None) -> torch.device:
    """Return the device for the draft and for this process's part of the target."""
    if cluster is None:
        return resolve_device(options.device)
    if options.device not in ("auto", "cpu"):
        raise ValueError(
            f"--device: {options.device!r} is for one process; with --backend process every "
            "rank takes an accelerator of its own: leave it out, or give cpu"
        )
    return cluster.device


@dataclass(frozen=True)
class EngineChoice:
    target: str
    revision: str | None
    schedule: str
    num_stages: int | None
    boundaries: tuple[int, ...]


def describe(options: EngineOptions) -> EngineChoice:
    """Choose target, schedule and stages from the options and the checkpoint's description."""
    stages, cut = options.stages, options.boundaries
    if options.checkpoint is None:
        kind = "language_model" if options.draft_model else options.draft
        if options.target is None:
            if options.draft_model is None:
                raise ValueError("--checkpoint: missing; give a trained draft, or --target for AR")
            raise ValueError(f"--target: missing; --draft-model {options.draft_model} names none")
        if kind is None and options.schedule not in (None, "autoregressive"):
            raise ValueError(
                f"--schedule: {options.schedule!r} needs a draft; give --checkpoint DIR, "
                "--draft-model DIR, --draft ngram, or --schedule autoregressive"
            )
        schedule = options.schedule or (default_schedule(kind) if kind else "autoregressive")
        return EngineChoice(options.target, None, schedule, stages, cut)
    description = read_description(resolve_folder(options.checkpoint))
    reference, architecture = description["target"], description["architecture"]
    return EngineChoice(
        options.target or reference["name"],
        # The recorded revision belongs to the draft's own target, not to another one.
        reference.get("revision") if options.target is None else None,
        options.schedule or default_schedule(description["draft_type"]),
        architecture.get("num_stages") if stages is None else stages,
        cut or tuple(architecture.get("boundaries") or ()),
    )


def resolve_cut(
    boundaries: Sequence[int], cost: CostModel, target: str, revision: str | None, num_stages: int
) -> tuple[int, ...]:
    """Return the given boundaries, or for auto compute them with the cost model."""
    if AUTO not in boundaries:
        return tuple(boundaries)
    if len(boundaries) > 1:
        raise UsageError("--boundaries: auto stands alone; leave the layer numbers out")
    num_layers = load_config(target, revision).get_text_config().num_hidden_layers
    try:
        return cut_layers(cost, num_layers, num_stages)
    except ValueError as error:
        raise UsageError(f"--boundaries: auto: {error}") from error


def load_engine(
    options: EngineOptions, cluster: Cluster | None, settings: Values, *, traces: bool = False
) -> Engine:
    """Load target and draft, and make their engine.

    Args:
        settings: for the engine's ``DecodeConfig``.
        traces: let the ranks record their time spans.
    """
    quieten()
    choice = describe(options)
    num_stages = 1 if choice.num_stages is None else choice.num_stages
    if cluster is not None:
        num_stages = cluster.num_stages(choice.num_stages)
    cost = settings.get("cost", CostModel())
    cut = resolve_cut(choice.boundaries, cost, choice.target, choice.revision, num_stages)
    # Before loading anything, so bad values are refused at once.
    config = DecodeConfig.of(choice.schedule, num_stages=num_stages, boundaries=cut, **settings)
    tokenizer = load_tokenizer(choice.target, revision=choice.revision)
    set_template_variables(tokenizer, options.chat_template_kwargs)
    if options.checkpoint is not None:
        description = read_description(resolve_folder(options.checkpoint))
        warn_of_variables(options.checkpoint, description, options.chat_template_kwargs)
    device = place_of(options, cluster)
    dtype = resolve_dtype(options.dtype, device, choice.target, choice.revision)
    if cluster is None:
        target = load_target(choice.target, revision=choice.revision, dtype=dtype, device=device)
        choose_decoding_threads(target)
    else:
        target = cluster.load_target(
            choice.target,
            revision=choice.revision,
            num_stages=num_stages,
            boundaries=cut,
            dtype=dtype,
            traces=traces,
        )
    for line in unapplied_settings(target):
        print(f"note: {line}", file=sys.stderr)
    draft: DraftNetwork | None = None
    if options.checkpoint is not None:
        own = load_draft(options.checkpoint, target, dtype=options.draft_dtype)
        draft = place_draft(own, target)
    elif options.draft_model is not None:
        draft = load_draft_model(options.draft_model, target, tokenizer, dtype=options.draft_dtype)
    elif options.draft is not None:
        draft = make_lookup(options.draft, target)
    connect = LocalPipeline if cluster is None else cluster.connect
    return Engine(target, tokenizer, config, draft, connect=connect)


# -- a target on a server


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


def load_edge(options: DecodeOptions) -> tuple[LocalDraft | None, PreTrainedTokenizerBase]:
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


def decode_remotely(options: DecodeOptions) -> None:
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
        f"{down.messages}; round trip {round_trip_s * 1e3:.1f} ms ({result.stop_reason})",
        file=sys.stderr,
    )
    if pipeline.num_reopened:
        print(f"{pipeline.num_reopened} sessions broke and were opened again", file=sys.stderr)
