"""Base class for drafts, with checkpoint folder, reference to one target, and draft vocabulary."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeVar, TypeVarTuple, cast

import msgspec
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...errors import first_line
from ...files import Values, make_readable, packaged, read_bounded
from ...hub_link import hub_link
from ...model_kinds import check_adapter, find_in
from ...model_names import check_checkpoint
from ...weights import check_finite, tensor_shapes
from ..speed.cpu import lay_out
from ..speed.rounded import round_head
from ..target import StagedTarget, fingerprint_mismatch, target_fingerprint
from ..transformer.decoder import norm_factor
from ..transformer.fingerprint import HEAD
from ..transformer.layers import DecoderLayer, LayerConfig, RMSNorm, RotaryEmbedding
from .configs import StagedDraftConfig

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 2**22  # a checkpoint may come from anybody: bound what is parsed
WEIGHTS_FILE = "model.safetensors"

DRAFTS = {
    "spd": "pipedraft.models.heads.spd:SPD",
    "ppsd": "pipedraft.models.heads.ppsd:PPSD",
    "eagle": "pipedraft.models.heads.eagle:Eagle",
    "eagle3": "pipedraft.models.heads.eagle3:Eagle3",
    "mtp": "pipedraft.models.heads.mtp:MTP",
    "dflash": "pipedraft.models.heads.dflash:DFlash",
    "dspark": "pipedraft.models.heads.dspark:DSpark",
    "flexspec": "pipedraft.models.heads.flexspec:FlexSpec",
}
"""draft_type in a checkpoint -> name of the draft's module and class. These modules import this
one, so it cannot import them."""

Inputs = TypeVarTuple("Inputs")
Result = TypeVar("Result")

Description = Values
"""A checkpoint's config.json; `read_description` has checked the fields common to all drafts."""


class _NamedTarget(msgspec.Struct):
    name: str
    revision: str | None = None


class _Stages(msgspec.Struct):
    num_stages: int | None = None
    boundaries: list[int] | None = None


class _Source(msgspec.Struct):
    rows_kept: int
    tokens: int


class _Data(msgspec.Struct):
    tokens: int = 0
    supervised_tokens: int = 0
    sources: dict[str, _Source] = {}
    licenses: dict[str, int] = {}
    hub_datasets: list[str] = []


class _Import(msgspec.Struct):
    place: str = msgspec.field(name="from")


class _Training(msgspec.Struct):
    data: _Data = msgspec.field(default_factory=_Data)
    metrics: dict[str, float] = {}
    imported: _Import | None = None


class _Checkpoint(msgspec.Struct):
    """Checkpoint fields read by commands and cards before the draft is built."""

    draft_type: str
    target: _NamedTarget
    architecture: _Stages
    training: _Training = msgspec.field(default_factory=_Training)


@dataclass(frozen=True, kw_only=True)
class TargetReference:
    """Target that a draft was trained for, identified by fingerprint and located by name."""

    name: str
    revision: str | None = None
    fingerprint: Values = field(default_factory=dict)

    def check_fingerprint(
        self, fingerprint: dict[str, int | str], *, allow_evolved: bool = False
    ) -> None:
        """Raise ValueError unless the fingerprint matches the target the draft was trained for.

        Args:
            allow_evolved: compare only sizes, so hashes may differ.
        """
        if allow_evolved:
            fingerprint = {name: x for name, x in fingerprint.items() if isinstance(x, int)}
        difference = fingerprint_mismatch(self.fingerprint, fingerprint)
        if difference is not None:
            raise ValueError(
                f"target: does not match this draft, which was trained for {self.name}: "
                f"{difference}; give that target or train a draft for this one"
            )


class Draft(nn.Module):
    """Base class for draft networks.

    A subclass has a config dataclass, is built from shapes alone as ``cls(config, layer,
    reference)``, and is listed in ``DRAFTS``.
    """

    draft_type: ClassVar[str]
    config_class: ClassVar[type]
    removed: ClassVar[tuple[str, ...]] = ()
    """Settings of earlier versions, which a file may have as null."""
    joins_rows: ClassVar[bool] = False
    """True if rows from several sequences can share one forward pass (``draft_calls``)."""
    shift: ClassVar[int] = 0
    """A row's token position minus its rotary position."""
    reads_rows: ClassVar[bool] = False
    """True if tree rows read the target's states instead of the draft's own previous state."""
    checkpointing: bool = False
    """Save only each layer's input in training; recompute the rest in backward."""

    def __init__(self, config: Any, layer: LayerConfig, reference: TargetReference) -> None:
        super().__init__()
        self.config, self.layer_config, self.reference = config, layer, reference

    @property
    def num_stages(self) -> int | None:
        """Number of stages the draft was trained for, or None if any number works."""
        return None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Stage boundaries the draft was trained for, if uneven."""
        return ()

    @property
    def initial_layers(self) -> Sequence[int]:
        """Target decoder layers copied by ``initialize``."""
        return ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layer indices that the draft reads (0: the embedding, L: the last raw output)."""
        return ()

    @property
    def num_caches(self) -> int:
        """Number of layers with keys and values."""
        return self.config.num_layers

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.layer_config.hidden_size,)

    @property
    def target_vocab_size(self) -> int:
        return self.reference.fingerprint["vocab_size"]

    def logits(self, state_H: Tensor) -> Tensor:
        """Return logits [..., U] for the draft's outputs. Entry u is for token draft_ids[u]."""
        raise NotImplementedError

    def compute(self, function: Callable[[*Inputs], Result], *inputs: *Inputs) -> Result:
        """Return function(*inputs), recomputed identically in backward if ``checkpointing``."""
        if not (self.checkpointing and torch.is_grad_enabled()):
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def relative_cost(self, target: StagedTarget) -> float:
        """Return a draft forward's cost relative to a one-token target pass, by layer counts."""
        return self.config.num_layers / target.num_layers

    @staticmethod
    def fingerprint(target: PreTrainedModel) -> dict[str, int | str]:
        """Hash the target weights that a draft needs.

        Training stores the hash, and loading compares it. A subclass that needs more weights adds
        their hash under another name.
        """
        return target_fingerprint(target)

    @property
    def shares_head(self) -> bool:
        """True if the LM head is taken from the target, restricted to the draft vocabulary.

        It is then neither trained nor saved.
        """
        return getattr(self.config, "share_head", False)

    def attach(self, target: PreTrainedModel) -> None:
        """Attach target modules that the draft uses but does not save. Most drafts need none."""
        if self.shares_head:
            copy_head(self, target.get_output_embeddings().weight)

    def save(
        self,
        folder: Path,
        *,
        training: Mapping[str, object] | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        """Write config.json and model.safetensors into an existing folder.

        Args:
            weights: full state for a draft sharded over processes.
        """
        description = {
            "draft_type": self.draft_type,
            "target": asdict(self.reference),
            "architecture": asdict(self.config),
            "layer": asdict(self.layer_config),
            "training": training or {},
        }
        (folder / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n")
        weights = self.state_dict() if weights is None else weights
        weights = {n: x.cpu().contiguous() for n, x in weights.items() if self.is_saved(n)}
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        make_readable(folder / WEIGHTS_FILE)

    def is_saved(self, name: str) -> bool:
        return not (self.shares_head and name == HEAD)

    @classmethod
    def load(cls, folder: Path, description: Description) -> "Draft":
        path = folder / WEIGHTS_FILE
        for name in cls.removed:
            if (value := description["architecture"].pop(name, None)) is not None:
                raise ValueError(
                    f"checkpoint: {folder / CONFIG_FILE}: {name} {value} is a setting of earlier "
                    "versions; use a head without it"
                )
        try:
            shapes = tensor_shapes(path)
            parts = cls._read_parts(description, len(shapes))
            with torch.device("meta"):  # allocate nothing based on config.json alone
                empty = cls(*parts)
                state = {n: x for n, x in empty.state_dict().items() if empty.is_saved(n)}
                wanted = {name: tuple(x.shape) for name, x in state.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(_damaged(path, str(error))) from error
        except Exception as error:  # a network may fail on a wrong shape in any way
            raise ValueError(
                f"checkpoint: {folder / CONFIG_FILE} is damaged ({type(error).__name__}: "
                f"{first_line(error)}); train or copy it again"
            ) from error
        for name in sorted(wanted.keys() | shapes.keys()):
            if wanted.get(name) != shapes.get(name):
                found = f"{shapes[name]}" if name in shapes else "missing"
                due = f"{wanted[name]}" if name in wanted else "unexpected"
                raise ValueError(_damaged(path, f"{name} is {found}, by {CONFIG_FILE} {due}"))
        draft = cls(*parts)
        draft.load_state_dict(load_file(path), strict=False)  # names were compared above
        check_finite(draft, "checkpoint", str(path))
        ids = getattr(draft, "draft_ids", torch.zeros(1))
        if not 0 <= int(ids.min()) <= int(ids.max()) < draft.target_vocab_size:
            raise ValueError(
                _damaged(path, f"draft_ids outside the {draft.target_vocab_size} of the target")
            )
        return draft.eval().requires_grad_(False)

    @classmethod
    def _read_parts(
        cls, description: Description, num_tensors: int
    ) -> "tuple[Any, LayerConfig, TargetReference]":
        """Read the constructor arguments, refusing bad sizes such as more layers than tensors."""
        architecture, layer = description["architecture"], description["layer"]
        kinds = (cls.config_class, architecture), (LayerConfig, layer)
        for kind, values in kinds:
            unknown = values.keys() - {part.name for part in fields(kind)}
            if unknown:
                raise ValueError(f"{min(unknown)!r} is unknown")
        for part in (architecture, layer, description["target"]["fingerprint"]):
            for name, value in part.items():
                is_own = part is architecture
                most = num_tensors if is_own and name == "num_layers" else 2**31
                if type(value) is int and not (0 if is_own else 1) <= value <= most:
                    raise ValueError(f"{name}: {value} is no size")
        config: Any = msgspec.convert(architecture, cls.config_class)
        shape = msgspec.convert(layer, LayerConfig)
        return config, shape, msgspec.convert(description["target"], TargetReference)


def _damaged(path: Path, reason: str) -> str:
    return (
        f"checkpoint: {path} is missing or damaged ({reason}); use another checkpoint of the run "
        "or train it again"
    )


@torch.no_grad()
def initialize_head(draft: Draft, target: PreTrainedModel, draft_ids: Tensor | None) -> None:
    """Copy the target's final norm, and its LM head rows for the draft vocabulary."""
    draft.norm.weight.copy_(norm_factor(target.config, target.get_decoder().norm.weight))
    if draft_ids is not None:
        draft.draft_ids.copy_(draft_ids)
    copy_head(draft, target.get_output_embeddings().weight)


@torch.no_grad()
def copy_head(draft: Draft, head_VH: Tensor) -> None:
    """Copy the target's LM head rows for the draft vocabulary."""
    draft.lm_head.weight.copy_(head_VH[cast(Tensor, draft.draft_ids)])


def read_description(folder: Path) -> Description:
    """Read a checkpoint folder's config.json, or raise ValueError with a fix."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        check_adapter(str(folder), find_in(folder), "checkpoint")
        raise ValueError(
            f"checkpoint: no {CONFIG_FILE} in {folder}; give a folder written by pipedraft train"
        )
    try:
        description = msgspec.json.decode(read_bounded(path, "checkpoint", MAX_CONFIG_BYTES))
        if not isinstance(description, dict) or "draft_type" not in description:
            raise ValueError(
                f"checkpoint: {path} names no draft_type; give a target as --target; for a head "
                "trained elsewhere, run pipedraft models import --from"
            )
        msgspec.convert(description, _Checkpoint)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"checkpoint: {path} is damaged ({error}); train or copy it again"
        ) from error
    return description


def load_draft(
    path_or_repo: str,
    target: PreTrainedModel,
    *,
    revision: str | None = None,
    allow_evolved: bool = False,
    dtype: str = "auto",
) -> Draft:
    """Load a draft of any type and check that it belongs to ``target``.

    Args:
        path_or_repo: checkpoint folder, a run's output folder (its best checkpoint, else its
            newest), or Hub id.
        allow_evolved: accept a target with the same sizes but other weights, to measure the draft
            on it.
        dtype: as in ``round_head``.

    Raises:
        ValueError: missing or damaged checkpoint, unknown type, another target's draft, or a dtype
            that does not run here.
    """
    draft = load_untied(resolve_folder(path_or_repo, revision=revision))
    draft.reference.check_fingerprint(draft.fingerprint(target), allow_evolved=allow_evolved)
    draft.attach(target)
    round_head(draft, dtype, target)
    lay_out(draft)
    return draft


def load_untied(folder: Path) -> Draft:
    """Load a draft of any type without its target, and check only the weights.

    Raises:
        ValueError: missing or damaged checkpoint, or unknown type.
    """
    description = read_description(folder)
    kind = description["draft_type"]
    if kind not in DRAFTS:
        raise ValueError(
            f"checkpoint: draft_type {kind!r} in {folder} is unknown; known: {', '.join(DRAFTS)}"
        )
    return resolve_name(DRAFTS[kind]).load(folder, description)


def resolve_folder(path_or_repo: str, *, revision: str | None = None) -> Path:
    """Return a checkpoint folder, a run's head, or a folder downloaded from the Hub.

    Raises:
        ValueError: folder, repository or revision not found, no access, not cached while offline,
            or a run that has saved nothing yet.
        Failure: the Hub is unavailable and nothing is cached.
    """
    folder = Path(packaged(path_or_repo))
    if folder.is_dir():
        found = head_of_run(folder)
        if found is None and (folder / "metrics.jsonl").exists():
            raise ValueError(
                f"checkpoint: the run in {folder} has saved no head yet; let it reach its first "
                "evaluation, or stop it with Ctrl-C, which saves"
            )
        return found or folder
    check_checkpoint(path_or_repo)
    files = ["*.json", "*.safetensors", "README.md"]
    with hub_link(f"checkpoint: {path_or_repo!r}"):
        return Path(snapshot_download(path_or_repo, revision=revision, allow_patterns=files))


def head_of_run(folder: Path) -> Path | None:
    """Return the checkpoint to use from a run's output folder, or None for another folder.

    This is the best one. A stopped run may have none yet: then the newest. A note on stderr says
    which.
    """
    if (folder / CONFIG_FILE).exists():
        return None
    if (folder / "best" / CONFIG_FILE).exists():
        _tell_head(folder / "best", "the run's best head")
        return folder / "best"
    # Steps have leading zeros, and a folder gets its name when it is complete.
    saved = sorted(folder.glob(f"checkpoints/step-*/{CONFIG_FILE}"))
    if not saved:
        return None
    newest = saved[-1].parent
    _tell_head(newest, "the run's newest head, as it has no best/ yet")
    return newest


@cache
def _tell_head(folder: Path, which: str) -> None:
    """Print the note once per process, because commands look for a checkpoint several times."""
    print(f"note: {folder} is used, {which}", file=sys.stderr)


def draft_vocabulary(token_counts_V: Tensor, size: int) -> Tensor:
    """Return ids of the ``size`` most frequent tokens, ascending. Smaller ids win ties.

    Args:
        token_counts_V: label count per target token in the training data.
    """
    if not 0 < size <= len(token_counts_V):
        raise ValueError(
            f"model.draft_vocab_size: {size} is not between 1 and the target's vocabulary "
            f"{len(token_counts_V)}; leave it out for the full vocabulary"
        )
    order = torch.argsort(token_counts_V, descending=True, stable=True)
    return order[:size].sort().values


# -- drafts of a target cut into stages -------------------------------------------------------

# H hidden, U draft vocabulary


class StagedDraft(Draft):
    """Base class for drafts with decoder layers, norm and LM head, and a fixed number of stages."""

    joins_rows: ClassVar[bool] = True
    config: StagedDraftConfig
    draft_ids: Tensor

    def make_layers(self, num_layers: int) -> None:
        layer = self.layer_config
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(num_layers))
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.rotary = RotaryEmbedding(layer)
        size = self.config.draft_vocab_size or self.target_vocab_size
        self.lm_head = nn.Linear(layer.hidden_size, size, bias=False)
        self.lm_head.requires_grad_(not self.shares_head)
        self.register_buffer("draft_ids", torch.arange(size))

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.config.boundaries

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def logits(self, stream_H: Tensor) -> Tensor:
        """Return logits [..., U] for output rows [..., H]. Entry u is for token draft_ids[u]."""
        return self.lm_head(self.norm(stream_H))
