"""The routes of vLLM's server whose chats may have marks: where their texts are.

| route | marked parts |
|---|---|
| `/v1/chat/completions` | `messages[…].content[…]` of type `text` |
| `/v1/messages` | the same, and `system[…]` |
| `/v1/responses` | `input[…].content[…]` of type `input_text` |

`/v1/chat/completions/batch` has chats that share all that is passed on, so a mark there is refused,
and so is one in `/cohere/v2/chat`, whose prompts are made of more than its messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Steps: TypeAlias = tuple[str | int, ...]
"""The way to a field of a request: names in objects, numbers in lists."""

ATTRIBUTION = "x-anthropic-billing-header"
"""What vLLM leaves out of Anthropic's prompts: texts that begin so, another for each request."""


@dataclass(frozen=True)
class ChatApi:
    """A route. `messages`: the field that lists messages; `lists`: fields that are lists of parts.

    `text`: the type of a part that may be marked. `passes_over`: clients put `cache_control` on
    parts of other types too, where it is read and does nothing. `lists_chats`: `messages` is a list
    of chats, each a list of messages. `instead`: what is expected of who marks something, where
    that is refused.
    """

    path: str
    messages: str = "messages"
    lists: tuple[str, ...] = ()
    text: str = "text"
    passes_over: bool = False
    lists_chats: bool = False
    instead: str = ""

    def contents(self, body: dict[str, Any]) -> Iterator[Steps]:
        """The lists of parts of a request."""
        for name in self.lists:
            if isinstance(body.get(name), list):
                yield (name,)
        for number, messages in enumerate(self.chats(body)):
            chat: Steps = (self.messages, number) if self.lists_chats else (self.messages,)
            for index, message in enumerate(messages if isinstance(messages, list) else ()):
                if isinstance(message, dict) and isinstance(message.get("content"), list):
                    yield *chat, index, "content"

    def chats(self, body: dict[str, Any]) -> list[Any]:
        """The messages of each chat of a request, whatever they are."""
        messages = body.get(self.messages)
        if not self.lists_chats:
            return [messages]
        return messages if isinstance(messages, list) else []

    def drops(self, text: str) -> bool:
        """Whether vLLM leaves a text out of the prompt."""
        return self.passes_over and text.startswith(ATTRIBUTION)


CHAT = ChatApi("/v1/chat/completions")
MESSAGES = ChatApi("/v1/messages", lists=("system",), passes_over=True)
RESPONSES = ChatApi("/v1/responses", messages="input", text="input_text")
BATCH = ChatApi(
    "/v1/chat/completions/batch",
    lists_chats=True,
    instead=f"a request to {CHAT.path} for each marked chat, as chats here share arguments",
)
COHERE = ChatApi(
    "/cohere/v2/chat", instead=f"a request to {CHAT.path} for a marked chat, as none is read here"
)
APIS = {api.path: api for api in (CHAT, MESSAGES, RESPONSES)}


def where(steps: Steps) -> str:
    """A field as refusals name it: `messages[0].content[1]`."""
    named = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return named.removeprefix(".")


def at(value: Any, steps: Steps) -> Any:
    """What a request has there."""
    for step in steps:
        value = value[step]
    return value


def replaced(value: Any, steps: Steps, new: Any) -> Any:
    """The request with something else there; what is not on the way is shared."""
    if not steps:
        return new
    step, *rest = steps
    copied: Any = list(value) if isinstance(value, list) else dict(value)
    copied[step] = replaced(value[step], tuple(rest), new)
    return copied
