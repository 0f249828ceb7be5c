"""The server's own rendering of a chat, asked for its text and its tokens' places."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.server import text_ranges
from kvweave.adapters.vllm.server.marks import Marked, sentinels
from kvweave.adapters.vllm.server.replies import BadRequest


@dataclass(frozen=True)
class Rendered:
    """A prompt of T tokens: its text, and the characters [start, end) of each token."""

    text: str
    offsets: list[text_ranges.Range]


async def rendered(state: Any, body: dict[str, Any]) -> Rendered | None:
    """What vLLM makes of a chat request; None where it refuses it, and will say so itself.

    `state` is that of the server's app. Errors: `BadRequest` where the prompt's tokens have no
    places in its text: a slow tokenizer, images, prompts that are cut.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        request = ChatCompletionRequest.model_validate({**body, "return_token_offsets": True})
        found = await state.online_renderer.render_chat(request, skip_mm_cache=True)
    except versions.refusals():
        return None
    if not isinstance(found, tuple):
        return None
    (prompt,) = found[1]
    text, offsets = prompt.get("prompt"), prompt.get("prompt_token_offsets")
    if text is None or offsets is None or len(offsets) != len(prompt["prompt_token_ids"]):
        expected = "a prompt of text alone, uncut, from a fast tokenizer, where parts are marked"
        raise BadRequest("messages", expected, "another")
    return Rendered(text, list(offsets))


async def segments(state: Any, marked: Marked) -> list[list[Any]] | None:
    """Segments [start, end(, name)] in tokens of the prompt; None where vLLM refuses the request.

    A text too short for a token of its own is left out.

    Errors: `BadRequest` naming the part that the chat template changed, or a chat so near to the
    model's length that the texts by which marks are found do not fit.
    """
    if not marked.marks:
        return []
    prompt = await rendered(state, marked.body)
    stand_ins = list(sentinels(len(marked.marks), secrets.token_hex(8)))
    if prompt is None:
        return None
    template = await rendered(state, marked.with_texts(stand_ins))
    if template is None:
        expected = f"room for a few tokens more a mark, of which there are {len(stand_ins)}"
        raise BadRequest("messages", expected, "a chat about as long as the model takes")
    texts = [mark.text for mark in marked.marks]
    try:
        places = text_ranges.character_ranges(prompt.text, template.text, stand_ins, texts)
    except ValueError as error:
        where = marked.marks[error.args[0]].where
        expected = "a text that the chat template leaves as it is"
        raise BadRequest(where, expected, "one that it changes") from None
    found = []
    for mark, place in zip(marked.marks, places, strict=True):
        span = text_ranges.token_range(prompt.offsets, place)
        if span is not None:
            found.append([*span] if mark.name is None else [*span, mark.name])
    return found
