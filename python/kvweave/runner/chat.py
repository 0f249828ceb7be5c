"""Chats as prompts: a tokenizer's template around messages, whose segments stay whole.

A template is a program of the model's makers. It is given a mark where a segment stands, and what
it writes is cut at the marks: so the text around is the template's own, and a segment has the same
tokens in every chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvweave.arguments import several, shown, word
from kvweave.errors import InvalidArgument
from kvweave.runner.prompt import Part, Segment

Content = str | Segment | Sequence[Part]
"""What a message says: text, a segment, or parts of both kinds."""

Messages = str | Sequence[Mapping[str, Any]]
"""One question, or messages `{"role": …, "content": …}` whose contents are `Content`."""

_MARK = re.compile("\x1e<kvweave-(\\d+)>\x1e")
_SAID = "\x1e<kvweave-said>\x1e"


def chat_prompt(
    tokenizer: Any, messages: Messages, documents: Sequence[str | Segment] = ()
) -> list[Part]:
    """The parts of a chat that is to be answered, in the tokenizer's chat template.

    `documents` come before what the last message says, each a segment of its own, a blank line
    behind it. Empty ones are left out.

    # Errors
    `InvalidArgument` for no message, one without a role or of other contents, a tokenizer without
    a chat template, or a template that refuses these messages or leaves a segment out.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    said = [_message(message) for message in several("messages", messages, "messages")]
    if not said:
        raise InvalidArgument("messages: expected at least one, got none")
    if isinstance(documents, str):
        raise InvalidArgument("documents: expected a list of them, got a single text")
    given = [_document(one) for one in several("documents", documents, "documents")]
    said[-1][1][:0] = [part for one in given if one is not None for part in (one, "\n\n")]
    segments: list[Segment] = []
    written = [{"role": role, "content": _marked(parts, segments)} for role, parts in said]
    return _cut(_applied(tokenizer, written), segments)


def chat_parts(tokenizer: Any, parts: Sequence[Part], system: str | None = None) -> list[Part]:
    """Wraps parts as one user message in the tokenizer's chat template.

    The template's text around the message becomes fresh parts, so the segments inside stay whole.

    # Errors
    `InvalidArgument` if the tokenizer has no chat template or the template alters the message.
    """
    before, after = _around(tokenizer, [], system)
    return [before, *parts, after]


def chat_turn_parts(tokenizer: Any, parts: Sequence[Part]) -> list[Part]:
    """Wraps parts as the user message that follows an answer, in the tokenizer's chat template.

    What the template puts behind the answer comes first, so that these parts are a turn behind
    `chat_parts` and its answer.

    # Errors
    As for `chat_parts`; `InvalidArgument` too if the template alters the answer.
    """
    answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    before, after = _around(tokenizer, answered, None)
    if before.count(_SAID) != 1:
        raise InvalidArgument(
            "chat template: expected the answer once and unchanged, "
            f"got it {before.count(_SAID)} times"
        )
    return [before.split(_SAID)[1], *parts, after]


def _around(tokenizer: Any, earlier: list[dict[str, str]], system: str | None) -> tuple[str, str]:
    """The template's text before and behind a user message that follows earlier ones."""
    mark = _mark(0)
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = _applied(tokenizer, [*messages, *earlier, {"role": "user", "content": mark}])
    if text.count(mark) != 1:
        raise InvalidArgument(
            "chat template: expected the message once and unchanged, "
            f"got it {text.count(mark)} times"
        )
    before, after = text.split(mark)
    return before, after


def _applied(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidArgument("chat prompt: expected a tokenizer with a chat template, got none")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        # A template is a program of somebody else's, and raises what it likes.
        roles = ", ".join(message["role"] for message in messages)
        raise InvalidArgument(
            f"chat template: expected messages that it takes, got {roles}: {str(error)[:200]}"
        ) from error
    return str(text)


def _mark(number: int) -> str:
    return f"\x1e<kvweave-{number}>\x1e"


def _message(message: Any) -> tuple[str, list[Part]]:
    """The role and the parts of a message."""
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise InvalidArgument(f"message: expected role and content, got {shown(message)}")
    content = message["content"]
    parts = [content] if isinstance(content, str | Segment) else content
    for part in several("message content", parts, "parts"):
        if not isinstance(part, str | Segment):
            raise InvalidArgument(
                f"message content: expected text and segments, got {type(part).__name__}"
            )
    return word("message role", message["role"]), list(parts)


def _document(given: Any) -> Segment | None:
    """A document as a segment; None for an empty one."""
    if not isinstance(given, str | Segment):
        raise InvalidArgument(f"document: expected a text or a Segment, got {type(given).__name__}")
    one = Segment(text=given) if isinstance(given, str) else given
    held = one.text if one.tokens is None else one.tokens
    return one if held is not None and len(held) else None


def _marked(parts: Sequence[Part], segments: list[Segment]) -> str:
    """What a message says, with marks for its segments, which are added to those before."""
    written = []
    for part in parts:
        if isinstance(part, str):
            if _MARK.search(part):
                raise InvalidArgument("message content: expected no mark of ours, got one")
            written.append(part)
            continue
        written.append(_mark(len(segments)))
        segments.append(part)
    return "".join(written)


def _cut(text: str, segments: Sequence[Segment]) -> list[Part]:
    """A template's text with segments in place of their marks."""
    pieces = _MARK.split(text)
    seen = [int(number) for number in pieces[1::2]]
    if seen != list(range(len(segments))):
        raise InvalidArgument(
            f"chat template: expected {len(segments)} segments, each once and in order, "
            f"got {len(seen)} of them"
        )
    parts: list[Part] = [pieces[0]]
    for number, behind in zip(seen, pieces[2::2], strict=True):
        parts += [segments[number], behind]
    return [part for part in parts if part != ""]
