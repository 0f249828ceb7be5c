"""Marks in a chat request: which texts are segments, in the shape of Anthropic's `cache_control`.

    {"type": "text", "text": "…", "cache_control": {"type": "ephemeral"}, "kvweave": {"name": "a"}}

Either field marks the part. `kvweave` beside the messages says the same for the whole request, and
marks nothing: `{"namespace": "acme", "policy": "sparsex", "discover": true}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvweave.adapters.vllm.segments.markers import FIELDS, SECTION, parse
from kvweave.adapters.vllm.server.replies import BadRequest
from kvweave.errors import InvalidArgument

CONTROL = "cache_control"
XARGS = "vllm_xargs"
LIFETIMES = ("5m", "1h")
WHOLE = tuple(name for name in FIELDS if name != "segments")
"""What holds for a request, wherever it is said."""


@dataclass(frozen=True)
class Mark:
    """A marked text: content part `part` of message `message`, and what refusals call it."""

    message: int
    part: int
    text: str
    name: str | None = None

    @property
    def where(self) -> str:
        """The field of the request."""
        return f"messages[{self.message}].content[{self.part}]"


@dataclass
class Marked:
    """A request without its marks, the marks in order, and what holds for all of them."""

    body: dict[str, Any]
    marks: list[Mark] = field(default_factory=list)
    whole: dict[str, Any] = field(default_factory=dict)

    @property
    def asks(self) -> bool:
        """Whether anything was said of segments."""
        return bool(self.marks or self.whole)

    def arguments(self, spans: list[list[Any]]) -> dict[str, Any]:
        """The request with segments [start, end(, name)] as an argument of vLLM's."""
        section = {**self.whole, "segments": spans}
        return {**self.body, XARGS: {**(self.body.get(XARGS) or {}), SECTION: json.dumps(section)}}

    def with_texts(self, texts: list[str]) -> dict[str, Any]:
        """The request with other texts in the marked parts, one for each mark."""
        messages = list(self.body["messages"])
        for mark, text in zip(self.marks, texts, strict=True):
            message = messages[mark.message]
            content = list(message["content"])
            content[mark.part] = {**content[mark.part], "text": text}
            messages[mark.message] = {**message, "content": content}
        return {**self.body, "messages": messages}


def read(body: dict[str, Any]) -> Marked:
    """Takes the marks out of a chat request; what else is wrong with it is left for vLLM to say.

    Errors: `BadRequest` naming the field.
    """
    found = Marked({name: value for name, value in body.items() if name != SECTION})
    _whole(found, SECTION, body.get(SECTION))
    messages = body.get("messages")
    if isinstance(messages, list):
        cleaned = [_message(found, index, message) for index, message in enumerate(messages)]
        found.body["messages"] = cleaned
    given = body.get(XARGS)
    if found.asks and given is not None and not isinstance(given, dict):
        raise BadRequest(XARGS, "an object", given)
    if found.asks and given is not None and SECTION in given:
        where = f"{XARGS}.{SECTION}"
        raise BadRequest(where, "no marks beside it in the messages or the request", "some")
    return found


def _message(found: Marked, index: int, message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [_part(found, index, number, part) for number, part in enumerate(content)]
    return {**message, "content": parts}


def _part(found: Marked, message: int, number: int, part: Any) -> Any:
    if not isinstance(part, dict) or not {CONTROL, SECTION} & part.keys():
        return part
    cleaned = {name: value for name, value in part.items() if name not in (CONTROL, SECTION)}
    control, section = part.get(CONTROL), part.get(SECTION)
    if control is None and section is None:
        return cleaned
    where = f"messages[{message}].content[{number}]"
    _control(f"{where}.{CONTROL}", control)
    name = _whole(found, f"{where}.{SECTION}", section, ("name",)).get("name")
    if name is not None and not isinstance(name, str):
        raise BadRequest(f"{where}.{SECTION}.name", "a string", name)
    if part.get("type") != "text":
        raise BadRequest(f"{where}.type", '"text" where a part is marked', part.get("type"))
    text = part.get("text")
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(f"{where}.text", "some text where a part is marked", text)
    found.marks.append(Mark(message, number, text, name))
    return cleaned


def _control(where: str, control: Any) -> None:
    if control is None:
        return
    if not isinstance(control, dict):
        raise BadRequest(where, 'an object {"type": "ephemeral"}', control)
    if control.get("type") != "ephemeral":
        raise BadRequest(f"{where}.type", '"ephemeral"', control.get("type"))
    if control.get("ttl", LIFETIMES[0]) not in LIFETIMES:
        raise BadRequest(f"{where}.ttl", f"one of {', '.join(LIFETIMES)}", control["ttl"])
    for name in control.keys() - {"type", "ttl"}:
        raise BadRequest(f"{where}.{name}", "the fields type and ttl", name)


def _whole(found: Marked, where: str, section: Any, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Notes what holds for the request."""
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise BadRequest(where, "an object", section)
    for name, value in section.items():
        if name in others:
            continue
        if name not in WHOLE:
            raise BadRequest(f"{where}.{name}", f"the fields {', '.join(others + WHOLE)}", name)
        try:
            parse({name: value})
        except InvalidArgument as error:
            raise BadRequest(f"{where}.{name}", error.expected or "another value", value) from None
        if found.whole.setdefault(name, value) != value:
            expected = f"{found.whole[name]!r}, as elsewhere in the request"
            raise BadRequest(f"{where}.{name}", expected, value)
    return section


def sentinels(count: int, nonce: str) -> Iterator[str]:
    """Texts that no template changes and no prompt contains: letters, digits and a nonce."""
    for number in range(count):
        yield f"kvweave{nonce}x{number}x"
