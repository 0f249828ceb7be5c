"""Marks in a chat request: which texts are segments, in the shape of Anthropic's `cache_control`.

    {"type": "text", "text": "…", "cache_control": {"type": "ephemeral"}, "kvweave": {"name": "a"}}

Either field marks the part, on any route of `chat_apis`. `kvweave` beside the messages says the
same for the whole request, and marks nothing: `{"namespace": "acme", "policy": "sparsex"}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvweave.adapters.vllm.segments.markers import CARRIED, FIELDS, SECTION, parse
from kvweave.adapters.vllm.server.chat_apis import CHAT, ChatApi, Steps, at, replaced, where
from kvweave.adapters.vllm.server.replies import BadRequest
from kvweave.errors import InvalidArgument

CONTROL = "cache_control"
XARGS = "vllm_xargs"
LIFETIMES = ("5m", "1h")
WHOLE = tuple(name for name in FIELDS if name != "segments")
"""What holds for a request, wherever it is said."""


@dataclass(frozen=True)
class Mark:
    """A marked text: the content part that `steps` lead to, and what refusals call it."""

    steps: Steps
    text: str
    name: str | None = None

    @property
    def where(self) -> str:
        """The field of the request."""
        return where(self.steps)


@dataclass
class Marked:
    """A request without its marks, the marks in order, and what holds for all of them."""

    body: dict[str, Any]
    api: ChatApi = CHAT
    marks: list[Mark] = field(default_factory=list)
    whole: dict[str, Any] = field(default_factory=dict)

    @property
    def asks(self) -> bool:
        """Whether anything was said of segments."""
        return bool(self.marks or self.whole)

    @property
    def is_idle(self) -> bool:
        """Whether what was said has nothing to act on: no mark, and nothing is to be discovered."""
        return bool(self.whole) and not (self.marks or self.whole.get("discover"))

    def section(self, spans: list[list[Any]]) -> dict[str, Any]:
        """What is said to the engine, with segments [start, end(, name)]."""
        return acting({**self.whole, "segments": spans})

    def arguments(self, spans: list[list[Any]], carrier: str = XARGS) -> dict[str, Any]:
        """The request with segments as an argument of vLLM's, or in another field of its."""
        name = SECTION if carrier == XARGS else CARRIED
        carried = {**(self.body.get(carrier) or {}), name: json.dumps(self.section(spans))}
        return {**self.body, carrier: carried}

    def with_texts(self, texts: list[str]) -> dict[str, Any]:
        """The request with other texts in the marked parts, one for each mark."""
        body = self.body
        for mark, text in zip(self.marks, texts, strict=True):
            body = replaced(body, (*mark.steps, "text"), text)
        return body


def read(body: dict[str, Any], api: ChatApi = CHAT) -> Marked:
    """Takes the marks out of a chat request; what else is wrong with it is left for vLLM to say.

    Errors: `BadRequest` naming the field; any mark on a route that refuses them.
    """
    found = Marked({name: value for name, value in body.items() if name != SECTION}, api)
    _whole(found, SECTION, body.get(SECTION))
    for steps in api.contents(found.body):
        parts = at(found.body, steps)
        cleaned = [_part(found, (*steps, number), part) for number, part in enumerate(parts)]
        found.body = replaced(found.body, steps, cleaned)
    if found.asks and api.instead:
        here = found.marks[0].where if found.marks else SECTION
        raise BadRequest(here, api.instead, "one")
    given = body.get(XARGS)
    if found.asks and given is not None and not isinstance(given, dict):
        raise BadRequest(XARGS, "an object", given)
    if found.asks and given is not None and SECTION in given:
        raise BadRequest(
            f"{XARGS}.{SECTION}", "no marks beside it in the messages or the request", "some"
        )
    return found


def _part(found: Marked, steps: Steps, part: Any) -> Any:
    if not isinstance(part, dict) or not {CONTROL, SECTION} & part.keys():
        return part
    cleaned = {name: value for name, value in part.items() if name not in (CONTROL, SECTION)}
    control, section = part.get(CONTROL), part.get(SECTION)
    if control is None and section is None:
        return cleaned
    here, kind = where(steps), part.get("type")
    _control(f"{here}.{CONTROL}", control)
    if kind != found.api.text and section is None and found.api.passes_over:
        return cleaned
    name = _whole(found, f"{here}.{SECTION}", section, ("name",)).get("name")
    if name is not None and not isinstance(name, str):
        raise BadRequest(f"{here}.{SECTION}.name", "a string", name)
    if kind != found.api.text:
        raise BadRequest(f"{here}.type", f'"{found.api.text}" where a part is marked', kind)
    text = part.get("text")
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(f"{here}.text", "some text where a part is marked", text)
    if not found.api.drops(text):
        found.marks.append(Mark(steps, text, name))
    return cleaned


def _control(here: str, control: Any) -> None:
    if control is None:
        return
    if not isinstance(control, dict):
        raise BadRequest(here, 'an object {"type": "ephemeral"}', control)
    if control.get("type") != "ephemeral":
        raise BadRequest(f"{here}.type", '"ephemeral"', control.get("type"))
    if control.get("ttl", LIFETIMES[0]) not in LIFETIMES:
        raise BadRequest(f"{here}.ttl", f"one of {', '.join(LIFETIMES)}", control["ttl"])
    for name in control.keys() - {"type", "ttl"}:
        raise BadRequest(f"{here}.{name}", "the fields type and ttl", name)


def _whole(found: Marked, here: str, section: Any, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Notes what holds for the request."""
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise BadRequest(here, "an object", section)
    for name, value in section.items():
        if name in others:
            continue
        if name not in WHOLE:
            raise BadRequest(f"{here}.{name}", f"the fields {', '.join(others + WHOLE)}", name)
        try:
            parse({name: value})
        except InvalidArgument as error:
            raise BadRequest(f"{here}.{name}", error.expected or "another value", value) from None
        if found.whole.setdefault(name, value) != value:
            expected = f"{found.whole[name]!r}, as elsewhere in the request"
            raise BadRequest(f"{here}.{name}", expected, value)
    return section


def acting(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section for the engine, which refuses a policy that has nothing to act on: without it."""
    acts = section.get("segments") or section.get("discover")
    return {name: value for name, value in section.items() if acts or name != "policy"}


def sentinels(count: int, nonce: str) -> Iterator[str]:
    """Texts that no template changes and no prompt contains: letters, digits and a nonce."""
    for number in range(count):
        yield f"kvweave{nonce}x{number}x"
