"""The link to the Hub: no wait without an end, and every failure as one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipedraft.errors import Failure

SILENCE_S = 60.0
"""Longest wait for a byte where huggingface_hub itself would wait for ever."""

AGAIN = "the same command goes on where this one ended"


@contextmanager
def hub_link(field: str) -> Iterator[None]:
    """Talk to the Hub inside: bounded waits, no bars and retry notes of the library.

    Args:
        field: what an error names first, the option and its value.

    Raises:
        ValueError: refused for a reason that the user can fix: token, rights, name, revision.
        Failure: the Hub cannot be reached, breaks off, stays silent or fails.
    """
    import sys

    import httpx2
    from huggingface_hub import get_session
    from huggingface_hub.utils import disable_progress_bars, logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # each retry would be a warning
    if not sys.stderr.isatty():
        disable_progress_bars()
    hooks = get_session().event_hooks["request"]
    hooks.append(_end_waits)
    try:
        yield
    except (OSError, RuntimeError, ValueError, httpx2.HTTPError) as error:
        found = explained(field, error)
        if found is None:
            raise
        raise found from error
    finally:
        hooks.remove(_end_waits)
        logging.set_verbosity(before)


def _end_waits(request: Any) -> None:
    """Hook of httpx: a limit for what has none; the library gives most requests none."""
    timeout = request.extensions["timeout"]
    limited = {part: SILENCE_S if limit is None else limit for part, limit in timeout.items()}
    request.extensions = {**request.extensions, "timeout": limited}


def explained(field: str, error: Exception) -> Exception | None:
    """The error to raise in place of one of huggingface_hub's, None for one of another origin."""
    import httpx2
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError):
            return _refused(field, cause)
        if isinstance(cause, OfflineModeIsEnabled):
            return ValueError(
                f"{field} is on the Hub and HF_HUB_OFFLINE is set; check the name, or unset it"
            )
        if isinstance(cause, httpx2.TransportError):
            what = str(cause) or type(cause).__name__
            if isinstance(cause, httpx2.TimeoutException):
                what = f"no answer, {type(cause).__name__}"
            return Failure(f"{field}: {ENDPOINT} cannot be used ({what}); {AGAIN}")
        if isinstance(cause, HFValidationError):
            return ValueError(f"{field}: {_line(cause)}; give user/name")
        # hf_xet, which stores large files, has no classes of its own for these.
        if isinstance(cause, ConnectionError | TimeoutError):
            return Failure(f"{field}: {_line(cause)}; {AGAIN}")
        if isinstance(cause, PermissionError) and cause.errno is None:
            return ValueError(f"{field}: {_line(cause)}; set HF_TOKEN to one that may write")
    if isinstance(error, RuntimeError) and not isinstance(error, Failure):
        return Failure(f"{field}: {_line(error)}; {AGAIN}")
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _refused(field: str, error: Any) -> Exception:
    """ValueError for what the user can change, Failure for the server's own trouble."""
    status, host = error.response.status_code, error.response.url.host
    said = " ".join((error.server_message or error.response.reason_phrase).split())
    answer = f"{host} answered {status} ({said})"
    if status == 401 and "X-Error-Code" not in error.response.headers:
        return ValueError(f"{field}: {answer}: no valid token; set HF_TOKEN or run hf auth login")
    if status == 403:
        return ValueError(
            f"{field}: {answer}: the token has no right to this; give a repository of yours, or a "
            "token that may write"
        )
    if status in (401, 404):
        return ValueError(
            f"{field}: {answer}; check the name and the revision, and HF_TOKEN if it is private"
        )
    if 400 <= status < 500 and status not in (408, 409, 412, 429):
        return ValueError(f"{field}: {answer}; fix what it says")
    return Failure(f"{field}: {answer}; {AGAIN}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def download_checkpoint(repo: str, revision: str | None) -> Path:
    """The files of a draft on the Hub, from the cache where they have not changed.

    Raises:
        ValueError: no such repository or revision, no right to read it, or nothing cached offline.
        Failure: the Hub cannot be used and nothing is cached.
    """
    from huggingface_hub import snapshot_download

    with hub_link(f"checkpoint: {repo!r}"):
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=["*.json", "*.safetensors", "README.md"]
            )
        )
