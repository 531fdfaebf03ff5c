"""Record which run a checkpoint belongs to, and compare it with the run that resumes it.

Every checkpoint, best/ included, has the record as run.json. A run resumes only from a checkpoint
with the same target, tokenizer, data, method, network, loss, optimizer and seed. Other changes,
such as a new learning rate, are printed.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from transformers import PreTrainedTokenizerBase

from ..data_recipes.config import Source
from ..data_recipes.recipe import TokenizedData
from ..files import Values, read_json, to_json
from ..models.heads.draft import TargetReference
from ..models.target_part import weights_identity
from ..models.transformer.fingerprint import template_hash, vocabulary_hash
from ..version import __version__
from .config import RunConfig
from .features.shards import data_identity

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RECORD = "run.json"
FIXED = ("optim.name", "seed")
"""Settings that must stay the same on resume, besides all under model."""
UNTOLD = {
    *("target", "target_revision", "method", "output_dir", "resume", "max_minutes"),
    *("save_every_steps", "keep_checkpoints", "log_every_steps", "peak_tflops"),
    *("trackers", "wandb_artifact", "checkpointing", "shard_target"),
    *("evaluation.every_steps", "evaluation.patience"),
}
"""Settings not printed: they do not affect the weights, or are compared separately."""
START = "model.init_from"
"""Setting under model that may change, because a resumed run ignores it."""


class RunTarget(Struct, frozen=True):
    name: str
    weights: str
    """See ``weights_identity``."""
    fingerprint: dict[str, int | str]


class Identity(Struct, frozen=True):
    """Contents of run.json."""

    version: str
    """Version of pipedraft that wrote it."""
    target: RunTarget
    vocabulary: str
    template: str
    """``vocabulary``, ``template``: hashes of the tokenizer's tokens, and of tokens and chat
    template together."""
    data: dict[str, int | str]
    """Rows, tokens, and hashes of token ids and loss masks, for both sets."""
    sources: list[str]
    settings: dict[str, Any]
    """The whole configuration, as {"optim.lr": 0.0001}. A folder may move, so its own place is
    not part of it."""

    def write(self, folder: Path) -> None:
        (folder / RECORD).write_bytes(to_json(self))


def record_of(
    run: RunConfig,
    model: "DataclassInstance",
    reference: TargetReference,
    tokenizer: PreTrainedTokenizerBase,
    data: TokenizedData,
) -> Identity:
    """Record a run. This reads all token ids and samples of the target's weights."""
    settings = {**_flat(run), **_flat(model, "model.")}
    del settings["output_dir"]
    return Identity(
        version=__version__,
        target=RunTarget(
            name=str(run.target),
            weights=weights_identity(str(run.target), run.target_revision),
            fingerprint=dict(reference.fingerprint),
        ),
        vocabulary=vocabulary_hash(tokenizer),
        template=template_hash(tokenizer),
        data={
            **data_identity("train", data.train, masks=True),
            **data_identity("valid", data.valid, masks=True),
        },
        sources=[source.name for source in run.data.sources],
        # As it will be read back: tuples become lists.
        settings=json.loads(json.dumps(settings, default=_plain)),
    )


def _flat(part: "DataclassInstance", prefix: str = "") -> Values:
    """Return a configuration's settings by full name. A setting's own mapping stays one value."""
    found: Values = {}
    for name, value in vars(part).items():
        is_part = is_dataclass(value)
        found |= _flat(value, f"{prefix}{name}.") if is_part else {prefix + name: value}
    return found


def _plain(value: Any) -> object:
    return asdict(value) if isinstance(value, Source) else str(value)


def read_record(folder: Path) -> Identity:
    """Read a checkpoint's record.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if not (folder / RECORD).exists():
        raise ValueError(
            f"resume: {folder} has no {RECORD}, as an earlier version wrote it: nothing tells its "
            "target, data and settings; give another --output_dir, and --model.init_from "
            f"{folder} to start from its weights"
        )
    return read_json(folder / RECORD, "resume", Identity)


@dataclass(frozen=True)
class Change:
    """A difference between a checkpoint and a run."""

    name: str
    then: object
    now: object
    note: str = ""
    is_refused: bool = True

    def __str__(self) -> str:
        then, now = (_shown(value) for value in (self.then, self.now))
        return f"{then} then, {now} now{self.note and f' ({self.note})'}"


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def check_record(folder: Path, now: Identity) -> list[Change]:
    """Compare a checkpoint with this run, and return the changes to print.

    Raises:
        ValueError: the checkpoint belongs to another run. The message begins with the difference.
    """
    changes = [*changes_between(read_record(folder), now)]
    refused = [change for change in changes if change.is_refused]
    if not refused:
        return changes
    first = refused[0]
    others = {change.name: None for change in changes if change.name != first.name}
    also = f" (also {', '.join(others)})" if others else ""
    # init_from needs the same target and the same network.
    can_start = first.name in ("data", "seed", "optim.name") or first.name.startswith("model.loss")
    start = f" with --model.init_from {folder}, which keeps its weights" if can_start else ""
    raise ValueError(
        f"{first.name}: {first}; {folder} is of another run{also}; give "
        f"another --output_dir{start}, or remove this run's folder to start afresh"
    )


def changes_between(then: Identity, now: Identity) -> Iterator[Change]:
    """Yield the differences, most important first."""
    yield from _target_changes(then.target, now.target)
    yield from _settings_changes(then, now, ("target_quantization",), is_refused=True)
    if then.vocabulary != now.vocabulary:
        hashes = _short(then.vocabulary), _short(now.vocabulary)
        yield Change("tokenizer", *hashes, "hashes of its tokens")
    yield from _data_changes(then, now)
    yield from _settings_changes(then, now, ("method",), is_refused=True)
    fixed = [name for name in now.settings if name.startswith("model.") and name != START]
    yield from _settings_changes(then, now, (*fixed, *FIXED), is_refused=True)
    known = {"target_quantization", *fixed, *FIXED, *UNTOLD}
    told = [x for x in now.settings if x not in known and not x.startswith("data.")]
    yield from _settings_changes(then, now, told, is_refused=False)


def _target_changes(then: RunTarget, now: RunTarget) -> Iterator[Change]:
    kinds = [record.weights.partition(":")[0] for record in (then, now)]
    names = repr(then.name), repr(now.name)
    for name in now.fingerprint:
        if then.fingerprint.get(name) != now.fingerprint[name]:
            found = (_short(part.fingerprint.get(name)) for part in (then, now))
            yield Change("target", *names, f"{name} {' and '.join(map(str, found))}")
            return
    if then.weights == now.weights:
        if then.name != now.name:
            yield Change("target", *names, "the same weights", is_refused=False)
    elif kinds[0] != kinds[1]:  # a Hub repository and a copy of it
        note = "equal embedding, norm and LM head; its layers cannot be compared"
        yield Change("target", *names, note, is_refused=False)
    elif kinds[0] == "commit":
        commits = " and ".join(part.weights.partition(":")[2] for part in (then, now))
        yield Change("target", *names, f"commit {commits}; see target_revision")
    else:
        yield Change("target", *names, "other weights in its layers")


def _data_changes(then: Identity, now: Identity) -> Iterator[Change]:
    if then.data == now.data:
        return
    values = _data_in_words(then), _data_in_words(now)
    names = [x for x in now.settings if x.startswith("data.") and not x.startswith("data.sources")]
    notes = [
        f"{change.name} {change}" for change in _settings_changes(then, now, names, is_refused=True)
    ]
    if then.template != now.template:
        notes.append("another chat template")
    if values[0] == values[1] and not notes:
        notes.append("the same sources hold other text")
    yield Change("data", *values, "; ".join(notes))


def _data_in_words(record: Identity) -> str:
    rows, tokens = (
        sum(int(record.data.get(f"{split}_{what}", 0)) for split in ("train", "valid"))
        for what in ("rows", "tokens")
    )
    return f"{rows} rows with {tokens} tokens from {', '.join(record.sources)}"


def _settings_changes(
    then: Identity, now: Identity, names: Sequence[str], *, is_refused: bool
) -> Iterator[Change]:
    for name in names:
        # A setting that only one version of pipedraft knows cannot be compared.
        if name in then.settings and then.settings[name] != now.settings[name]:
            yield Change(name, then.settings[name], now.settings[name], is_refused=is_refused)


def _short(value: object) -> object:
    return value[:12] if isinstance(value, str) else value
