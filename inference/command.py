"""Load target, draft and engine from options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from ..chats import encode_chat, set_template_variables, warn_of_variables
from ..devices import place_draft, resolve_device, resolve_dtype
from ..errors import UsageError
from ..files import Values
from ..models import load_draft
from ..models.heads.draft import read_description, resolve_folder
from ..models.heads.language_model import load_draft_model
from ..models.target import choose_decoding_threads, load_target, load_tokenizer
from ..pretrained import load_config, quieten, unapplied_settings
from .arguments import EngineOptions, PlaceOptions
from .config import DecodeConfig
from .cost_model import CostModel
from .cut import AUTO, cut_layers
from .defaults import choose_way
from .engine import DraftNetwork, Engine
from .pipelines.local import LocalPipeline
from .ranks.cluster import Cluster
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
    draft_type: str | None
    num_stages: int | None
    boundaries: tuple[int, ...]


def describe(options: EngineOptions) -> EngineChoice:
    """Choose target, draft and stages from the options and the checkpoint's description."""
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
        return EngineChoice(options.target, None, kind, stages, cut)
    description = read_description(resolve_folder(options.checkpoint))
    reference, architecture = description["target"], description["architecture"]
    return EngineChoice(
        options.target or reference["name"],
        # The recorded revision belongs to the draft's own target, not to another one.
        reference.get("revision") if options.target is None else None,
        description["draft_type"],
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
    options: EngineOptions,
    cluster: Cluster | None,
    settings: Values,
    *,
    traces: bool = False,
    says_loading: bool = False,
) -> Engine:
    """Load target and draft, and make their engine.

    Args:
        settings: for the engine's ``DecodeConfig``.
        traces: let the ranks record their time spans.
        says_loading: print a line before the weights are loaded, which may take minutes.
    """
    quieten()
    choice = describe(options)
    num_stages = 1 if choice.num_stages is None else choice.num_stages
    if cluster is not None:
        num_stages = cluster.num_stages(choice.num_stages)
    way = choose_way(
        choice.draft_type,
        schedule=options.schedule,
        num_stages=num_stages,
        settings=settings,
        in_processes=cluster is not None,
    )
    cost = settings.get("cost", CostModel())
    cut = resolve_cut(choice.boundaries, cost, choice.target, choice.revision, num_stages)
    # Before loading anything, so bad values are refused at once.
    config = DecodeConfig.of(way.schedule, num_stages=num_stages, boundaries=cut, **way.settings)
    tokenizer = load_tokenizer(choice.target, revision=choice.revision)
    set_template_variables(tokenizer, options.chat_template_kwargs)
    if options.checkpoint is not None:
        description = read_description(resolve_folder(options.checkpoint))
        warn_of_variables(options.checkpoint, description, options.chat_template_kwargs)
    device = place_of(options, cluster)
    dtype = resolve_dtype(options.dtype, device, choice.target, choice.revision)
    if says_loading:
        print(f"loading {choice.target} ...", flush=True)
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
