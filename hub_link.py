"""The link to the Hugging Face Hub: bounded waits, and errors in one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils import logging as hub_logging

from .errors import Failure, causes

SILENCE_S = 60.0
"""Longest wait for a byte where huggingface_hub would wait forever."""

AGAIN = "the same command goes on where this one ended"


@contextmanager
def hub_link(field: str) -> Iterator[None]:
    """Bound the waits for the Hub, hide retry notes, and explain errors in one line.

    Progress bars appear only in a terminal.

    Args:
        field: prefix for errors, with the option and its value.

    Raises:
        ValueError: the Hub refuses for a reason the user can fix: token, rights, name, revision.
        Failure: the Hub is unreachable, breaks off, stays silent or fails.
    """
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # each retry would be a warning
    if not sys.stderr.isatty():
        disable_progress_bars()
    hooks = get_session().event_hooks["request"]
    hooks.append(_end_waits)
    try:
        yield
    except (OSError, RuntimeError, ValueError, httpx2.HTTPError) as error:
        found = _hub_error(field, error)
        if found is None:
            raise
        raise found from error
    finally:
        hooks.remove(_end_waits)
        hub_logging.set_verbosity(before)


def _end_waits(request: httpx2.Request) -> None:
    """Set a timeout on httpx requests without one, because the library gives most none."""
    timeout = request.extensions["timeout"]
    limited = {part: SILENCE_S if limit is None else limit for part, limit in timeout.items()}
    request.extensions = {**request.extensions, "timeout": limited}


def _hub_error(field: str, error: Exception) -> Exception | None:
    """Return the error to raise instead of a huggingface_hub error, or None for other errors."""
    for cause in causes(error):
        if isinstance(cause, HfHubHTTPError):
            return _refusal(field, cause)
        if isinstance(cause, OfflineModeIsEnabled):
            return ValueError(
                f"{field} is on the Hub and HF_HUB_OFFLINE is set; check the name, or unset it"
            )
        if isinstance(cause, httpx2.TransportError):
            what = str(cause) or type(cause).__name__
            if isinstance(cause, httpx2.TimeoutException):
                what = f"no answer, {type(cause).__name__}"
            return Failure(f"{field}: {constants.ENDPOINT} cannot be used ({what}); {AGAIN}")
        if isinstance(cause, HFValidationError):
            return ValueError(f"{field}: {_line(cause)}; give user/name")
        # hf_xet (storage for large files) has no classes of its own for these.
        if isinstance(cause, ConnectionError | TimeoutError):
            return Failure(f"{field}: {_line(cause)}; {AGAIN}")
        if isinstance(cause, PermissionError) and cause.errno is None:
            return ValueError(f"{field}: {_line(cause)}; set HF_TOKEN to one that may write")
    if isinstance(error, RuntimeError) and not isinstance(error, Failure):
        return Failure(f"{field}: {_line(error)}; {AGAIN}")
    return None


FIXES = {
    401: "no valid token: set HF_TOKEN, or run hf auth login",
    403: "this token may not write here: give your own repository, or another token",
    404: "check the name and the revision, and set HF_TOKEN for a private repository",
}
"""Status of the Hub's answer -> what the user can do about it."""


def _refusal(field: str, error: HfHubHTTPError) -> Exception:
    """Return ValueError for a problem the user can fix, Failure for server trouble."""
    status, host = error.response.status_code, error.response.url.host
    said = " ".join((error.server_message or error.response.reason_phrase).split())
    answer = f"{field}: {host} answered {status} ({said})"
    if status == 401 and "X-Error-Code" in error.response.headers:
        status = 404  # the Hub does not tell a private repository from a missing one
    if 400 <= status < 500 and status not in (408, 409, 412, 429):
        return ValueError(f"{answer}; {FIXES.get(status, 'fix what it says')}")
    return Failure(f"{answer}; {AGAIN}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
