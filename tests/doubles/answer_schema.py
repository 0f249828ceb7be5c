"""Answers of routes beside what the OpenAPI schema says of them."""

from __future__ import annotations

from typing import Any

KINDS = {"string": str, "boolean": bool, "array": list, "object": dict}


def undescribed(answer: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """What of an answer is not as its schema has it: fields, kinds and constants, by their place.

    A field that the schema does not name is one too, whether it forbids others or not.
    """
    if "const" in schema:
        return [] if answer == schema["const"] else [f"{at}: {answer!r}"]
    kind = schema["type"]
    if kind == "integer":
        whole = type(answer) is int and answer >= schema.get("minimum", answer)
        return [] if whole else [f"{at}: {answer!r}"]
    if not isinstance(answer, KINDS[kind]):
        return [f"{at}: {answer!r}"]
    if kind == "array":
        return [what for one in answer for what in undescribed(one, schema["items"], f"{at}[]")]
    if kind == "object":
        fields = schema["properties"]
        wrong = [f"{at}.{name}" for name in sorted(answer.keys() - fields.keys())]
        wrong += [
            f"{at} without {name}" for name in schema.get("required", ()) if name not in answer
        ]
        for name in sorted(answer.keys() & fields.keys()):
            wrong += undescribed(answer[name], fields[name], f"{at}.{name}")
        return wrong
    return []


def answered(paths: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    """The schema of what a route answers where all is well."""
    said = paths[path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    schema: dict[str, Any] = said
    return schema
