"""Upload a checkpoint, or an export for a serving engine, to the Hub.

Existing content is not sent again: huggingface_hub compares every file with the branch, and the
large-file storage already has the files sent by an interrupted upload.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelInfo, get_token
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...files import file_sha256, make_readable
from ...hub_link import hub_link
from ...version import __version__
from ..heads.draft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TargetReference,
    load_untied,
    read_description,
)
from ..transformer.fingerprint import read_target
from .card import CARD, CHART, MADE, CardSource, Measured, render_card
from .export import ORIGIN_FILE, Origin

WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


def check_repo_id(repo: str) -> None:
    """Raise ValueError unless ``repo`` is a valid user/name, without paths such as ``..``."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--repo: {repo!r} is no name on the Hub; give user/name") from error
    if repo.count("/") != 1:
        raise ValueError(f"--repo: {repo!r} names no owner; give user/name")


# -- the files ------------------------------------------------------------------------------


def fill_upload(
    out: Path,
    folder: Path,
    *,
    repo: str,
    revision: str | None = None,
    results: Path | None = None,
    target: str | None = None,
    is_half: bool = False,
) -> None:
    """Write the files for the Hub, but not the training state, into ``out``.

    A hand-written README.md is kept unchanged.

    Args:
        folder: checkpoint or export.
        revision: branch named on the card; None: the main one.
        results: results.json from an evaluation of this checkpoint, for the card.
        target: the target's Hub id, if training used a folder.
        is_half: write weights in fp16. Loading converts them back to float32.

    Raises:
        ValueError: no complete checkpoint or export, damaged or non-finite weights, another target
            than the draft's, results for other weights, or results for a hand-written card.
    """
    weights = folder / WEIGHTS_FILE
    if (folder / ORIGIN_FILE).is_file():
        if target is not None:
            raise ValueError(
                f"--target: {target!r} for an export, whose configuration names it too; give it "
                "to pipedraft models export"
            )
        origin = Origin.read(folder)
        if not (folder / CONFIG_FILE).is_file():
            raise ValueError(f"checkpoint: {folder / CONFIG_FILE} is missing; export it again")
        _check_export(weights)
        source, digest = origin.card_source(repo), origin.weights_sha256
        for name in (CONFIG_FILE, ORIGIN_FILE):
            shutil.copyfile(folder / name, out / name)
    else:
        description = read_description(folder)
        load_untied(folder)  # refuses weights that nobody could load
        if target is not None:  # may only be another address of the same weights
            reference = TargetReference(**description["target"])
            reference.check_fingerprint(read_target(target, None).fingerprint)
            description["target"] |= {"name": target, "revision": None}
        source = CardSource(description=description, place=repo)
        digest = file_sha256(weights)
        (out / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n")
    if is_half:
        save_file(_halved(weights), out / WEIGHTS_FILE, metadata={"format": "pt"})
        make_readable(out / WEIGHTS_FILE)
    else:
        shutil.copyfile(weights, out / WEIGHTS_FILE)
    _write_card(out, folder, replace(source, revision=revision), results, digest)


def _check_export(path: Path) -> None:
    """Refuse an export's damaged or non-finite weights, as ``load_untied`` does for checkpoints."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if not file.get_tensor(name).isfinite().all():
                    raise ValueError(f"checkpoint: {name} in {path} is not finite; export it again")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint: {path} is damaged ({error}); export it again") from error


def _write_card(
    out: Path, folder: Path, source: CardSource, results: Path | None, digest: str
) -> None:
    path = folder / CARD
    if path.is_file() and not path.read_text().rstrip().endswith(MADE):
        if results is not None:
            raise ValueError(
                f"--results: {path} was written by hand and is kept as it is; move it away for a "
                "card with the measured table, or leave --results out"
            )
        shutil.copyfile(path, out / CARD)
        return
    measured = None if results is None else Measured.read(results, digest)
    card = render_card(replace(source, measured=measured), asks_hub=True)
    (out / CARD).write_text(card)
    if measured is not None and measured.chart is not None:
        shutil.copyfile(measured.chart, out / CHART)


def _halved(path: Path) -> dict[str, Tensor]:
    """Return weights in fp16, which keeps 11 significant bits, while bf16 keeps 8.

    Raises:
        ValueError: a weight outside the fp16 range.
    """
    weights = load_file(path)
    for name, value in weights.items():
        if value.is_floating_point():
            weights[name] = value.half()
            if not weights[name].isfinite().all():  # too large for fp16
                raise ValueError(
                    f"--dtype: {name} reaches {value.abs().max():.3g}, fp16 65504; leave --dtype "
                    "out"
                )
    return weights


# -- the upload -----------------------------------------------------------------------------


def push(
    folder: Path,
    repo: str,
    *,
    revision: str | None = None,
    private: bool = False,
    message: str | None = None,
) -> str:
    """Create the repository and the branch if needed and upload a folder.

    Args:
        folder: filled by ``fill_upload``.
        message: commit message; None: pipedraft's version.

    Returns:
        Address of the commit, or of the newest one if nothing changed.

    Raises:
        ValueError: no token or permission, a card that the Hub refuses, other content in the
            repository, or a public repository for a private upload.
        Failure: the Hub is unreachable, breaks off or stays silent.
    """
    api = HfApi()
    with hub_link(f"--repo: {repo!r}"):
        if get_token() is None:
            raise ValueError(
                f"HF_TOKEN: missing, and {repo!r} needs one that may write; set it, or run "
                "hf auth login"
            )
        ModelCard.load(folder / CARD).validate()  # before a repository exists
        api.create_repo(repo, private=private or None, exist_ok=True)
        info, is_new_branch = api.model_info(repo), False
        if private and not info.private:
            raise ValueError(
                f"--private: {repo!r} exists and is public; make it private in its settings, give "
                "another --repo, or leave --private out"
            )
        if revision is not None:
            try:
                info = api.model_info(repo, revision=revision)
            except RevisionNotFoundError:
                is_new_branch = True
        _check_content(api, folder, info, is_new_branch=is_new_branch)
        if is_new_branch:
            api.create_branch(repo, branch=str(revision), exist_ok=True)
        commit = api.create_commit(
            repo_id=repo,
            operations=[CommitOperationAdd(x.name, x) for x in sorted(folder.iterdir())],
            revision=revision,
            commit_message=message or f"Upload with pipedraft {__version__}",
        )
    return str(commit.commit_url)


def _check_content(api: HfApi, folder: Path, info: ModelInfo, *, is_new_branch: bool) -> None:
    """Refuse to overwrite other content, or to mix files with another model's.

    A new branch begins with the main branch's files, and may replace them by another draft.
    """
    names = {sibling.rfilename for sibling in info.siblings or ()}
    if not any(name == CONFIG_FILE or name.endswith(WEIGHTS_SUFFIXES) for name in names):
        return
    known = (CONFIG_FILE, ORIGIN_FILE)
    there = {
        name: Path(api.hf_hub_download(info.id, name, revision=info.sha))  # info's own commit
        for name in known
        if name in names
    }
    here = {name: folder / name for name in known if (folder / name).is_file()}
    theirs, ours = _draft_in(there), _draft_in(here)
    if theirs == ours or (is_new_branch and theirs):
        return
    raise ValueError(
        f"--repo: {info.id!r} holds {theirs or 'another model'}, which is not this one; give "
        "another --repo" + ("" if is_new_branch or not theirs else ", or a new --revision")
    )


def _draft_in(files: Mapping[str, Path]) -> str:
    """Describe a draft by type, layout, stages and target, or return "" for another model."""
    try:
        content = {name: json.loads(path.read_bytes()) for name, path in files.items()}
        description, form = content[CONFIG_FILE], ""
        if ORIGIN_FILE in content:
            origin = content[ORIGIN_FILE]
            description, form = origin["description"], f" for {origin['layout']}"
        stages = description["architecture"].get("num_stages")
        form += f" for {stages} stages" if stages else ""
        target = description["target"]["fingerprint"]["hash"]
        return f"a draft of type {description['draft_type']!r}{form}, of the target {target}"
    except (KeyError, TypeError, AttributeError, ValueError):
        return ""
