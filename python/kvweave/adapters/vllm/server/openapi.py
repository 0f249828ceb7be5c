"""The plugin's routes in the server's OpenAPI schema."""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm.server import documents
from kvweave.adapters.vllm.server.knowledge import PATH

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
NAMESPACE = {
    "name": "namespace",
    "in": "query",
    "required": False,
    "schema": {**TEXT, "default": ""},
    "description": "Whose documents: those of other namespaces are neither listed nor found.",
}
DOCUMENT = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {**TEXT, "minLength": 1, "maxLength": 256},
        "text": {**TEXT, "description": "The document; or else `tokens`."},
        "tokens": {"type": "array", "items": COUNT, "minItems": 1},
        "namespace": {**TEXT, "maxLength": 256, "default": ""},
    },
}
COUNTS = ("tokens", "blocks", "resident_blocks", "references")
KEPT = {"type": "boolean", "description": "Beside a folder: whether the document survives there."}
ENTRY: dict[str, Any] = {
    "type": "object",
    "required": ["name", "namespace", *COUNTS],
    "properties": {
        "name": TEXT,
        "namespace": TEXT,
        **dict.fromkeys(COUNTS, COUNT),
        "kept": KEPT,
    },
}
INSERTED = {
    **ENTRY,
    "properties": {
        **ENTRY["properties"],
        "not_kept": {**TEXT, "description": "Why the folder does not have it, where it has not."},
    },
}
ENTRIES = {
    "type": "object",
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": ENTRY}},
}
NAMED = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "hash": {**TEXT, "pattern": "^[0-9a-f]{64}$"},
                    "tokens": {"type": "integer", "minimum": 1},
                },
            },
        },
    },
}
DELETED = {
    "type": "object",
    "properties": {"name": TEXT, "namespace": TEXT, "deleted": {"const": True}},
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": COUNT,
            },
        }
    },
}
REFUSED = {
    "400": "A field that can never be right; `param` names it.",
    "401": "Without one of the server's keys.",
    "501": "An engine that does not reuse segments.",
    "503": "An engine that sleeps or is paused, or a folder's disk that cannot be used.",
}


def _answers(schema: dict[str, Any], **others: str) -> dict[str, Any]:
    """Answers by status; `others`: refusals besides those of every route, by `_` and status."""
    known = {**REFUSED, **{status.strip("_"): says for status, says in others.items()}}
    refusals = {status: _json(says, ERROR) for status, says in sorted(known.items())}
    return {"200": _json("Done.", schema), **refusals}


def _json(says: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": says, "content": {"application/json": {"schema": schema}}}


GONE = "No document of that name in that namespace."
FULL = "No room in the store: its frozen share, a quota, or the device's memory."
PATHS: dict[str, dict[str, Any]] = {
    PATH: {
        "get": {
            "tags": ["kvweave"],
            "summary": "List the documents of one namespace",
            "operationId": "kvweave_knowledge_list",
            "parameters": [NAMESPACE],
            "responses": _answers(ENTRIES),
        },
        "post": {
            "tags": ["kvweave"],
            "summary": "Encode a document and keep it until it is deleted",
            "operationId": "kvweave_knowledge_insert",
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": DOCUMENT}},
            },
            "responses": _answers(INSERTED, _413="A body beyond what is read.", _507=FULL),
        },
    },
    f"{PATH}/{{name}}": {
        "delete": {
            "tags": ["kvweave"],
            "summary": "Take a document out",
            "operationId": "kvweave_knowledge_delete",
            "parameters": [
                {"name": "name", "in": "path", "required": True, "schema": TEXT},
                NAMESPACE,
            ],
            "responses": _answers(DELETED, _404=GONE),
        },
    },
}

PATHS |= {
    f"{documents.PATH}{route}": {
        "post": {
            "tags": ["kvweave"],
            "summary": f"Name the documents of a request to {route}, as KV events do",
            "operationId": f"kvweave_documents{route.replace('/', '_')}",
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            "responses": {
                "200": _json("Done.", NAMED),
                "400": _json(REFUSED["400"], ERROR),
                "401": _json(REFUSED["401"], ERROR),
                "413": _json("A body beyond what is read.", ERROR),
            },
        },
    }
    for route in documents.ROUTES
}


def describe(app: Any) -> None:
    """Adds the routes to the schema of vLLM's app, which keeps what it has made of itself."""
    app.openapi()["paths"].update(PATHS)
