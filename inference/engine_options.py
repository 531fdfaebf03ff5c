"""The target, draft and schedule that a command asks for, and the engine of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipedraft.inference.arguments import BackendOptions, Rule, ScheduleOptions, place_of
from pipedraft.inference.costs import read_cost
from pipedraft.options import Values, option

if TYPE_CHECKING:
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.transport.cluster import Cluster
    from pipedraft.models.draft import Draft
    from pipedraft.models.language_model import LanguageModelDraft
    from pipedraft.models.lookup import Lookup

SHARED_SETTINGS = ("verifier", "payload_tokens", "tail_samples", "bitwise")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(BackendOptions, ScheduleOptions):
    """target, draft and schedule"""

    AT_MOST_ONE = (("checkpoint", "draft_model", "draft"), ("draft_model", "beside"))

    checkpoint: str | None = None
    """folder or Hub id of a trained draft"""
    draft_model: str | None = None
    """folder or Hub id of a language model with the target's tokenizer, as the draft (its own
    schedule is pipeinfer)"""
    draft: Literal["ngram", "suffix"] | None = None
    """a draft without a network: what followed the same tokens before in the text"""
    beside: Literal["ngram", "suffix"] | None = None
    """such a draft's chain as one more branch of the checkpoint's trees"""
    target: str | None = None
    """folder or Hub id; default: the one the draft names"""
    schedule: str | None = None
    """name of a schedule; default: the draft's own"""
    stages: int | None = None
    """pipeline stages; default: the draft's"""
    verifier: Rule = "auto"
    """acceptance rule at temperatures above 0"""
    payload_tokens: int = option(10, metavar="K")
    """the target's best tokens in a rejection, by topk and tail_escape"""
    tail_samples: int = option(4, metavar="M")
    """drawn tokens in a rejection, by tail_escape"""
    bitwise: bool = False
    """the target computes each row as plain decoding would, to the last bit: in bfloat16, too, the
    text is then plain decoding's; slower"""
    cost: str | None = option(None, metavar="PRESET|FILE")
    """cost model by which automatic budgets are chosen: h100, a100, rtx4090, jetson_orin, this_cpu,
    or a file of eval --calibrate; default: rows, links and verification free"""

    def engine_settings(self) -> Values:
        """Settings of the schedule, and those shared ones that are no prompt's own."""
        shared = {name: getattr(self, name) for name in SHARED_SETTINGS}
        cost = {} if self.cost is None else {"cost": read_cost(self.cost)}
        return shared | cost | self.settings


@dataclass(frozen=True)
class Choice:
    target: str
    revision: str | None
    schedule: str
    num_stages: int | None
    boundaries: tuple[int, ...]


def describe(options: EngineOptions) -> Choice:
    """Which target and schedule the options and the checkpoint's description ask for."""
    from pipedraft.inference.sources import default_schedule
    from pipedraft.models.draft import read_description, resolve_folder

    stages, cut = options.stages, options.boundaries
    if options.checkpoint is None:
        if options.target is None:
            if options.draft_model is None:
                raise ValueError("--checkpoint: missing; give a trained draft, or --target for AR")
            raise ValueError(f"--target: missing; --draft-model {options.draft_model} names none")
        if options.draft_model is not None or options.draft is not None:
            kind = options.draft or "language_model"
            schedule = options.schedule or default_schedule(kind)
            return Choice(options.target, None, schedule, stages, cut)
        if options.schedule not in (None, "autoregressive"):
            raise ValueError(
                f"--schedule: {options.schedule!r} needs a draft; give --checkpoint DIR, "
                "--draft-model DIR, --draft ngram, or --schedule autoregressive"
            )
        return Choice(options.target, None, "autoregressive", stages, cut)
    description = read_description(resolve_folder(options.checkpoint))
    reference, architecture = description["target"], description["architecture"]
    return Choice(
        options.target or reference["name"],
        reference.get("revision") if options.target is None else None,
        options.schedule or default_schedule(description["draft_type"]),
        architecture.get("num_stages") if stages is None else stages,
        cut or tuple(architecture.get("boundaries") or ()),
    )


def load_engine(
    options: EngineOptions, cluster: "Cluster | None", settings: Values, *, traces: bool = False
) -> "Engine":
    """
    Args:
        settings: of the engine's ``DecodeConfig``.
        traces: the ranks keep their spans.

    Raises:
        ValueError: options that do not fit each other, the draft or the target.
    """
    if options.beside is not None and options.checkpoint is None:
        raise ValueError(f"--beside: {options.beside!r} without --checkpoint; give one, or --draft")
    from transformers.utils import logging

    from pipedraft.inference.config import DecodeConfig
    from pipedraft.inference.engine import Engine
    from pipedraft.inference.pipelines.local import LocalPipeline
    from pipedraft.inference.sources import make_source
    from pipedraft.inference.sources.lookup import beside
    from pipedraft.models import load_draft
    from pipedraft.models.language_model import load_draft_model
    from pipedraft.models.lookup import make_lookup
    from pipedraft.models.placement import place_draft, resolve_dtype
    from pipedraft.models.target import choose_decoding_threads, load_target, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    choice = describe(options)
    num_stages = 1 if choice.num_stages is None else choice.num_stages
    if cluster is not None:
        num_stages = cluster.num_stages(choice.num_stages)
    # Before anything is loaded, so that bad values are refused at once.
    config = DecodeConfig.of(
        choice.schedule,
        num_stages=num_stages,
        boundaries=choice.boundaries,
        **settings,
    )
    tokenizer = load_tokenizer(choice.target, revision=choice.revision)
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
            boundaries=choice.boundaries,
            dtype=dtype,
            traces=traces,
        )
    draft: Draft | LanguageModelDraft | Lookup | None = None
    if options.checkpoint is not None:
        draft = place_draft(load_draft(options.checkpoint, target), target)
    elif options.draft_model is not None:
        draft = load_draft_model(options.draft_model, target, tokenizer)
    elif options.draft is not None:
        draft = make_lookup(options.draft, target)
    source = None
    if options.beside is not None:
        source = beside(make_source(draft), options.beside)
    connect = LocalPipeline if cluster is None else cluster.connect
    return Engine(target, tokenizer, config, draft, source=source, connect=connect)
