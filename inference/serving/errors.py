"""HTTP server errors in OpenAI's format."""

from collections.abc import Mapping
from typing import TypeAlias

from pipedraft.cli import one_line

Json: TypeAlias = dict[str, object]


class RequestError(Exception):
    """Refused request, reported in OpenAI's error format."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status
        self.headers = dict(headers or {})

    def to_dict(self) -> Json:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": one_line(str(self)),
                "type": "server_error" if self.status >= 500 else kind,
                "param": self.param,
                "code": self.code,
            }
        }
