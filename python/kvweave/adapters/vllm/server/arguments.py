"""Segments that a client has counted itself, `vllm_xargs={"kvweave": "…"}`, held to its prompt.

The engine cannot refuse a request any more when it knows the prompt's length and the model's
layers: it would compute the prompt as if it had no marks, and nobody would be told.
"""

from __future__ import annotations

import json
from typing import Any

from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.segments.markers import SECTION, Markers, markers_of
from kvweave.adapters.vllm.server.chat_apis import CHAT, COHERE, ChatApi
from kvweave.adapters.vllm.server.marks import XARGS, acting
from kvweave.adapters.vllm.server.prompts import prompt_of
from kvweave.adapters.vllm.server.renderings import completion_prompts
from kvweave.adapters.vllm.server.replies import BadRequest

COMPLETIONS = "/v1/completions"


async def check_arguments(state: Any, api: ChatApi | None, body: dict[str, Any]) -> Markers | None:
    """Refuses arguments that the engine would pass over; `api` None: a request of completions.

    Returns what they say, if there are any.

    Errors: `InvalidArgument` naming the field.
    """
    if api is None and SECTION in body:
        # Nobody would read it: there are no messages that it could be about.
        raise BadRequest(SECTION, f"{XARGS}.{SECTION} for prompts of completions", body[SECTION])
    markers = markers_of(body.get(XARGS))
    if markers is None:
        return None
    check_model(state, markers)
    if not markers.segments:
        return markers
    for prompt in await prompts_of(state, api, body):
        markers.check_within(len(prompt["prompt_token_ids"]))
    return markers


def passed_on(body: dict[str, Any]) -> dict[str, Any]:
    """A request as the engine takes it whose arguments have nothing to act on."""
    given = body[XARGS]
    section = given.get(SECTION)
    if section is None:
        return body
    section = json.loads(section) if isinstance(section, str) else section
    return {**body, XARGS: {**given, SECTION: json.dumps(acting(section))}}


async def prompts_of(state: Any, api: ChatApi | None, body: dict[str, Any]) -> list[Any]:
    """The prompts of a request whose tokens are known; none where vLLM refuses it."""
    if api is None:
        found = await _of_completion(state, body)
    elif api == COHERE:
        # vLLM alone knows what it makes of one.
        found = []
    elif api.lists_chats:
        chats = [{**body, api.messages: chat} for chat in api.chats(body)]
        found = [await prompt_of(state, CHAT, chat) for chat in chats]
    else:
        found = [await prompt_of(state, api, body)]
    return [one for one in found if one is not None and one.get("prompt_token_ids") is not None]


def has_several(body: dict[str, Any]) -> bool:
    """Whether a request of completions has several prompts: texts, or lists of tokens."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def check_model(state: Any, markers: Markers) -> None:
    """Refuses a policy that asks layers which the server's model does not have.

    Errors: `InvalidArgument` naming the setting.
    """
    markers.check_layers(state.vllm_config.model_config.hf_text_config.num_hidden_layers)


async def _of_completion(state: Any, body: dict[str, Any]) -> list[Any]:
    try:
        return await completion_prompts(state, body)
    except versions.refusals():
        return []
