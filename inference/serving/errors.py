"""HTTP server errors in OpenAI's format."""

import re
from collections.abc import Mapping
from typing import TypeAlias

from ...errors import one_line

Json: TypeAlias = dict[str, object]


class RequestError(Exception):
    """Refused request, reported in OpenAI's error format.

    A message about a field begins with the field's name and a colon.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.status = code, status
        self.headers = dict(headers or {})

    def to_dict(self) -> Json:
        field = re.match(r"(?!content-type)([\w.\[\]-]+): ", str(self))
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": one_line(str(self)),
                "type": "server_error" if self.status >= 500 else kind,
                "param": field and field[1],
                "code": self.code,
            }
        }
