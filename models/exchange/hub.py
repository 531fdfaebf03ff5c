"""Upload a checkpoint, or an export for a serving engine, to the Hub.

Existing content is not sent again: huggingface_hub compares every file with the branch, and the
large-file storage already has the files sent by an interrupted upload.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelInfo, get_token
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from pipedraft import __version__
from pipedraft.files import file_sha256
from pipedraft.models.draft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Description,
    TargetReference,
    load_untied,
    read_description,
)
from pipedraft.models.exchange.card import CARD, CHART, MADE, CardSource, Measured, render_card
from pipedraft.models.exchange.export import ORIGIN_FILE, Origin
from pipedraft.models.fingerprint import read_target
from pipedraft.pretrained import hub_link

Files = dict[str, str | bytes | Path]
"""Uploaded file's name -> its content, or the file to send."""
WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Upload options."""

    repo: str
    revision: str | None = None
    """Branch to upload to; None: the main one."""
    private: bool = False
    message: str | None = None
    results: Path | None = None
    """results.json from an evaluation of this checkpoint."""
    target: str | None = None
    """The target's Hub id, if training used a folder."""
    is_half: bool = False
    """Upload weights in fp16; loading makes them float32 again."""


def model_card(description: Description) -> str:
    """Return the card for a checkpoint not yet on the Hub; read only local files.

    Args:
        description: the checkpoint's config.json.
    """
    return render_card(CardSource(description=description).licensed(asks_hub=False))


# -- the files ------------------------------------------------------------------------------


def check_repo_id(repo: str) -> None:
    """Raise ValueError for an invalid repository name; a valid one has no path such as ``..``."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--repo: {repo!r} is no name on the Hub; give user/name") from error
    if repo.count("/") != 1:
        raise ValueError(f"--repo: {repo!r} names no owner; give user/name")


def prepare_upload(folder: Path, upload: Upload) -> Files:
    """Return the files for the Hub by name, each as text or as a file to send.

    The training state is never among them. A hand-written README.md is kept unchanged.

    Raises:
        ValueError: no complete checkpoint or export, another target than the draft's, results for
            other weights, or results for a hand-written card.
    """
    origin = Origin.read(folder) if (folder / ORIGIN_FILE).is_file() else None
    description = read_description(folder) if origin is None else origin.description
    _check_weights(folder, is_export=origin is not None)
    if upload.target is not None:
        description = _with_target(description, upload.target, is_export=origin is not None)
    files: Files = {WEIGHTS_FILE: folder / WEIGHTS_FILE}
    if upload.is_half:
        files[WEIGHTS_FILE] = save(_halved(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    if origin is None:
        files[CONFIG_FILE] = json.dumps(description, indent=2) + "\n"
    else:
        files |= {name: (folder / name).read_text() for name in (CONFIG_FILE, ORIGIN_FILE)}
    files[CARD], measured = _card(folder, origin, description, upload)
    if measured is not None and measured.chart is not None:
        files[CHART] = measured.chart
    return files


def fill_folder(folder: Path, files: Files) -> None:
    """Write the files from ``prepare_upload``."""
    for name, content in files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_bytes(_bytes(content))


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _check_weights(folder: Path, *, is_export: bool) -> None:
    """Refuse weights unfit for loading or decoding."""
    path = folder / WEIGHTS_FILE
    for needed in (folder / CONFIG_FILE, path):
        if not needed.is_file():
            raise ValueError(f"checkpoint: {needed} is missing; give a complete checkpoint")
    if not is_export:  # export has loaded its checkpoint
        load_untied(folder)
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if not torch.isfinite(file.get_tensor(name)).all():
                    raise ValueError(
                        f"checkpoint: {name} in {path} is not finite; give another checkpoint"
                    )
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint: {path} is damaged ({error}); give another checkpoint"
        ) from error


def _with_target(description: Description, name: str, *, is_export: bool) -> Description:
    """Return the description with another name for the same target."""
    if is_export:
        raise ValueError(
            f"--target: {name!r} for an export, whose configuration names it too; give it to "
            "pipedraft models export"
        )
    reference = TargetReference(**description["target"])
    # A new name may only be another address of the very same weights.
    reference.check_fingerprint(read_target(name, None).fingerprint)
    return description | {"target": description["target"] | {"name": name, "revision": None}}


def _card(
    folder: Path, origin: Origin | None, description: Description, upload: Upload
) -> tuple[str, Measured | None]:
    path = folder / CARD
    if path.is_file() and not (text := path.read_text()).rstrip().endswith(MADE):
        if upload.results is not None:
            raise ValueError(
                f"--results: {path} was written by hand and is kept as it is; move it away for a "
                "card with the measured table, or leave --results out"
            )
        return text, None
    if origin is None:
        source, digest = CardSource(description=description), file_sha256(folder / WEIGHTS_FILE)
    else:
        source, digest = origin.card_source(upload.repo), origin.weights_sha256
    measured = None if upload.results is None else Measured.read(upload.results, digest)
    source = replace(source, place=upload.repo, revision=upload.revision, measured=measured)
    return render_card(source.licensed(asks_hub=True)), measured


def _halved(path: Path) -> dict[str, Tensor]:
    """Return weights in fp16, with 11 significant bits (bf16: 8).

    Raises:
        ValueError: a weight outside the fp16 range.
    """
    weights = load_file(path)
    floats = {name: value for name, value in weights.items() if value.is_floating_point()}
    for name, value in floats.items():  # fp16 would turn large weights into infinity
        if not bool(value.half().isfinite().all()):
            largest = float(value.abs().max())
            raise ValueError(
                f"--dtype: {name} reaches {largest:.3g}, fp16 65504; leave --dtype out"
            )
    return weights | {name: value.half() for name, value in floats.items()}


# -- the upload -----------------------------------------------------------------------------


def identity_of(texts: Mapping[str, object]) -> tuple[object, ...]:
    """Return the fields that must match within one folder: draft layout, type, stages and target.

    Args:
        texts: config.json and pipedraft.json, if present. Another model's files give ().
    """
    try:
        layout, description = None, json.loads(str(texts[CONFIG_FILE]))
        if ORIGIN_FILE in texts:
            origin = json.loads(str(texts[ORIGIN_FILE]))
            layout, description = origin["layout"], origin["description"]
        stages = description["architecture"].get("num_stages")
        target = description["target"]["fingerprint"]["hash"]
        return layout, description["draft_type"], stages, target
    except (KeyError, TypeError, AttributeError, ValueError):
        return ()


def push(files: Files, upload: Upload) -> str:
    """Create the repository and the branch if needed and upload ``files``.

    Returns:
        Address of the commit, or of the newest one if nothing changed.

    Raises:
        ValueError: no token or permission, a card that the Hub refuses, other content in the
            repository, or a public repository for a private upload.
        Failure: the Hub is unreachable, breaks off or stays silent.
    """
    api, repo, revision = HfApi(), upload.repo, upload.revision
    with hub_link(f"--repo: {repo!r}"):
        if get_token() is None:
            raise ValueError(
                f"HF_TOKEN: missing, and {repo!r} needs one that may write; set it, or run "
                "hf auth login"
            )
        ModelCard(str(files[CARD])).validate()  # before a repository exists: the Hub may refuse it
        api.create_repo(repo, private=upload.private or None, exist_ok=True)
        info, is_new_branch = api.model_info(repo), False
        if upload.private and not info.private:
            raise ValueError(
                f"--private: {repo!r} exists and is public; make it private in its settings, give "
                "another --repo, or leave --private out"
            )
        if revision is not None:
            try:
                info = api.model_info(repo, revision=revision)
            except RevisionNotFoundError:
                _check_content(api, files, upload, info, is_new_branch=True)
                api.create_branch(repo, branch=revision, exist_ok=True)
                is_new_branch = True
        if not is_new_branch:
            _check_content(api, files, upload, info, is_new_branch=False)
        commit = api.create_commit(
            repo_id=repo,
            operations=[
                CommitOperationAdd(name, content if isinstance(content, Path) else _bytes(content))
                for name, content in sorted(files.items())
            ],
            revision=revision,
            commit_message=upload.message or f"Upload with pipedraft {__version__}",
        )
    return str(commit.commit_url)


def _check_content(
    api: HfApi, files: Files, upload: Upload, info: ModelInfo, *, is_new_branch: bool
) -> None:
    """Refuse to overwrite other content, or to mix files with another model's.

    A new branch begins with the main branch's files, and may become another draft.
    """
    names = {sibling.rfilename for sibling in info.siblings or ()}
    if not any(name == CONFIG_FILE or name.endswith(WEIGHTS_SUFFIXES) for name in names):
        return
    found = {}
    for name in names & {CONFIG_FILE, ORIGIN_FILE}:
        path = api.hf_hub_download(upload.repo, name, revision=info.sha)  # info's own commit
        found[name] = Path(path).read_text(errors="replace")
    theirs, ours = identity_of(found), identity_of(files)
    if theirs == ours or (is_new_branch and theirs):
        return
    told = "another model"
    if theirs:
        layout, kind, stages, target = theirs
        told = f"a draft of type {kind!r}" + (f" for {layout}" if layout else "")
        told += (f" for {stages} stages" if stages else "") + f", of the target {target}"
    raise ValueError(
        f"--repo: {upload.repo!r} holds {told}, which is not this one; give another --repo"
        + ("" if is_new_branch or not theirs else ", or a new --revision")
    )
