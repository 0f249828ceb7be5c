"""The server's own rendering of a chat, asked for its text and its tokens' places."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.server import text_ranges
from kvweave.adapters.vllm.server.chat_apis import ChatApi
from kvweave.adapters.vllm.server.marks import Mark, Marked, sentinels
from kvweave.adapters.vllm.server.renderings import EnginePrompt, engine_prompt
from kvweave.adapters.vllm.server.replies import BadRequest


@dataclass(frozen=True)
class Rendered:
    """A prompt of T tokens: its text, and the characters [start, end) of each token."""

    text: str
    offsets: list[text_ranges.Range]


async def prompt_of(state: Any, api: ChatApi, body: dict[str, Any]) -> EnginePrompt:
    """What vLLM makes of a chat request; None where it refuses it, and will say so itself.

    `state` is that of the server's app.
    """
    try:
        return await engine_prompt(state, api, body)
    except versions.refusals():
        return None


async def rendered(state: Any, api: ChatApi, body: dict[str, Any]) -> Rendered | None:
    """The text of a request's prompt and its tokens' places; None as for `prompt_of`.

    Errors: `BadRequest` where the prompt's tokens have no places in its text: a slow tokenizer,
    images, prompts that are cut.
    """
    prompt = await prompt_of(state, api, body)
    if prompt is None:
        return None
    text, offsets = prompt.get("prompt"), prompt.get("prompt_token_offsets")
    if text is None or offsets is None or len(offsets) != len(prompt["prompt_token_ids"]):
        expected = "a prompt of text alone, uncut, from a fast tokenizer, where parts are marked"
        raise BadRequest(api.messages, expected, "another")
    return Rendered(text, list(offsets))


async def segments(state: Any, marked: Marked) -> list[list[Any]] | None:
    """Segments [start, end(, name)] in tokens of the prompt; None where vLLM refuses the request.

    A text too short for a token of its own is left out.

    Errors: `BadRequest` naming the part that the chat template changed, or a chat so near to the
    model's length that the texts by which marks are found do not fit.
    """
    if not marked.marks:
        return []
    prompt = await rendered(state, marked.api, marked.body)
    stand_ins = list(sentinels(len(marked.marks), secrets.token_hex(8)))
    if prompt is None:
        return None
    template = await rendered(state, marked.api, marked.with_texts(stand_ins))
    if template is None:
        expected = f"room for a few tokens more a mark, of which there are {len(stand_ins)}"
        raise BadRequest(marked.api.messages, expected, "a chat about as long as the model takes")
    # A prompt may have its texts in another order: what is said of the system comes first.
    in_order = sorted(zip(stand_ins, marked.marks, strict=True), key=_place_in(template.text))
    stand_ins, marks = [list(column) for column in zip(*in_order, strict=True)]
    texts = [mark.text for mark in marks]
    try:
        places = text_ranges.character_ranges(prompt.text, template.text, stand_ins, texts)
    except ValueError as error:
        where = marks[error.args[0]].where
        expected = "a text that the chat template leaves as it is"
        raise BadRequest(where, expected, "one that it changes") from None
    found = []
    for mark, place in zip(marks, places, strict=True):
        span = text_ranges.token_range(prompt.offsets, place)
        if span is not None:
            found.append([*span] if mark.name is None else [*span, mark.name])
    return found


def _place_in(text: str) -> Callable[[tuple[str, Mark]], int]:
    return lambda pair: text.find(pair[0])
