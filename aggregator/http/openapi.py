"""The endpoints of the JSON API, and its OpenAPI document."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aggregator.http.access import OPEN

JSON_TYPE = "application/json"

Handler = Callable[[Request], Awaitable[Response]]


class Problem(msgspec.Struct, frozen=True):
    """Why a request was refused."""

    error: str


@dataclass(frozen=True)
class Endpoint:
    """A path, the function that answers its requests, and its entry in the OpenAPI document."""

    path: str
    handler: Handler
    summary: str
    reply: type[msgspec.Struct] | str
    """The struct of a JSON reply, or the media type of another one."""
    arguments: type[msgspec.Struct] | None = None
    """The struct of the request's body; with it the method is POST."""

    @property
    def method(self) -> str:
        return "GET" if self.arguments is None else "POST"


def openapi_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """Return the document, OpenAPI 3.1."""
    named = [each for endpoint in endpoints for each in (endpoint.reply, endpoint.arguments)]
    structs = dict.fromkeys([Problem, *(each for each in named if isinstance(each, type))])
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "protofleet aggregator", "version": version},
        "paths": {each.path: {each.method.lower(): _operation(each)} for each in endpoints},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content = {endpoint.reply: {}} if isinstance(endpoint.reply, str) else _content(endpoint.reply)
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": endpoint.summary, "content": content},
            "default": {"description": "Refused, with the reason.", "content": _content(Problem)},
        },
    }
    if endpoint.path in OPEN:
        operation["security"] = []
    if endpoint.arguments is not None:
        operation["requestBody"] = {"required": True, "content": _content(endpoint.arguments)}
    return operation


def _content(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {JSON_TYPE: {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}}
