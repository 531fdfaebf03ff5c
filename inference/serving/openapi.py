"""OpenAPI document for the server's paths, generated from the request types."""

from importlib.metadata import version
from typing import Any

import msgspec

from pipedraft.inference.serving.errors import Json
from pipedraft.inference.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

POSTS = {
    ChatRequest.PATH: ChatRequest,
    CompletionRequest.PATH: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/version", "/openapi.json")


def openapi_document() -> Json:
    """Return the description of all paths; answers have OpenAI's formats."""
    schemas, components = msgspec.json.schema_components(
        POSTS.values(), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"get": _operation()} for path in GETS}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    for path, schema in zip(POSTS, schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        paths[path] = {"post": _operation() | {"requestBody": {"content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pipedraft", "version": version("pipedraft")},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation() -> dict[str, Any]:
    return {"responses": {"200": {"description": "the answer"}}}
