"""The OpenAPI document of the JSON API, from the structs that it sends."""

from typing import Any

import msgspec

from aggregator.http.commands import COMMANDS, EnrollCommand, Outcome
from aggregator.http.readiness import Readiness
from aggregator.status.details import Details
from aggregator.status.model import Status
from aggregator.status.projection import Projection

JSON_TYPE = "application/json"


class Problem(msgspec.Struct, frozen=True):
    """Why a request was refused."""

    error: str


class Session(msgspec.Struct, frozen=True):
    """The rights of the client, by its token."""

    read: bool
    command: bool


_STRUCTS = (
    Status, Details, Projection, Readiness, Problem, Session, Outcome, EnrollCommand,
    *dict.fromkeys(command.arguments for command in COMMANDS.values()),
)  # fmt: skip


def openapi_document(version: str) -> dict[str, Any]:
    """Return the document, OpenAPI 3.1."""
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {
        "/api/v1/status": {"get": _reading("The fleet's status, as `aggregator status --json`.", "Status")},
        "/api/v1/details": {
            "get": _reading("Figures by device and class, and by head and class.", "Details")
        },
        "/api/v1/prototypes": {"get": _reading("The prototypes in two dimensions.", "Projection")},
        "/api/v1/events": {"get": _stream()},
        "/api/v1/openapi.json": {"get": _reading("This document.", None)},
        "/api/v1/session": {"get": _reading("The rights of the client.", "Session")},
        "/healthz": {"get": _text("The HTTP server answers.", "text/plain")},
        "/readyz": {"get": _reading("200 if the fleet is served; 503 otherwise.", "Readiness")},
        "/metrics": {"get": _text("Metrics for Prometheus.", "text/plain")},
        "/api/v1/files/head.onnx": {"get": _text("The current head.", "application/octet-stream")},
        "/api/v1/files/model.onnx": {"get": _text("Head and backbones in one.", "application/octet-stream")},
        "/api/v1/commands/enroll": {"post": _enrollment()},
    }
    for name, command in COMMANDS.items():
        paths[f"/api/v1/commands/{name}"] = {
            "post": _command(command.summary, command.arguments.__name__, "Outcome")
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "protofleet aggregator", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _schema(name: str) -> dict[str, Any]:
    return {JSON_TYPE: {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _content(description: str, name: str | None) -> dict[str, Any]:
    content = _schema(name) if name is not None else {JSON_TYPE: {"schema": {"type": "object"}}}
    return {"description": description, "content": content}


def _operation(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    failed = {"description": "Refused, with the reason.", "content": _schema("Problem")}
    return {"summary": summary, "responses": {**responses, "default": failed}}


def _reading(summary: str, name: str | None) -> dict[str, Any]:
    return _operation(summary, {"200": _content(summary, name)})


def _text(summary: str, kind: str) -> dict[str, Any]:
    return _operation(summary, {"200": {"description": summary, "content": {kind: {}}}})


def _stream() -> dict[str, Any]:
    summary = "Server-sent events: `change`, with the version of the newest state, at each change."
    return _text(summary, "text/event-stream")


def _command(summary: str, arguments: str, result: str) -> dict[str, Any]:
    operation = _operation(summary, {"200": _content(summary, result)})
    return {**operation, "requestBody": {"required": True, "content": _schema(arguments)}}


def _enrollment() -> dict[str, Any]:
    summary = "Enroll a device, which closes the fleet; answers its enrollment folder, with its private keys."
    operation = _text(summary, "application/zip")
    return {**operation, "requestBody": {"required": True, "content": _schema("EnrollCommand")}}
