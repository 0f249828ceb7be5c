"""What vLLM itself makes of the chats of each route: a prompt, with the places of its tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from kvweave.adapters.vllm.server.chat_apis import CHAT, MESSAGES, RESPONSES, ChatApi
from kvweave.adapters.vllm.server.marks import XARGS

EnginePrompt = Any
"""vLLM's own dictionary of a prompt; None where it refuses the request."""


async def engine_prompt(state: Any, api: ChatApi, body: dict[str, Any]) -> EnginePrompt:
    """The prompt of a request, as `api` renders it; `state` is that of the server's app.

    Errors: whatever vLLM raises for a request that is none.
    """
    render: Callable[[Any, dict[str, Any]], Awaitable[EnginePrompt]]
    render = {CHAT: _chat, MESSAGES: _messages, RESPONSES: _responses}[api]
    # vLLM's models complete what they are given.
    return await render(state, deepcopy(body))


def carrier(api: ChatApi) -> str:
    """The field of a request in which vLLM takes arguments that it passes on."""
    if api != MESSAGES:
        return XARGS
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    # 0.26 has none there but what is meant for connectors.
    return XARGS if XARGS in AnthropicMessagesRequest.model_fields else "kv_transfer_params"


async def completion_prompts(state: Any, body: dict[str, Any]) -> list[EnginePrompt]:
    """The prompts of a request to `/v1/completions`; none where vLLM refuses it.

    Errors: whatever vLLM raises for a request that is none.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate(deepcopy(body))
    found = await state.online_renderer.render_completion(request, skip_mm_cache=True)
    return found if isinstance(found, list) else []


async def _chat(state: Any, body: dict[str, Any]) -> EnginePrompt:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return await _of_chat(state, ChatCompletionRequest.model_validate(body))


async def _messages(state: Any, body: dict[str, Any]) -> EnginePrompt:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    handler = state.anthropic_serving_messages
    if handler is None:
        return None
    request = AnthropicMessagesRequest.model_validate(body)
    # 0.26 has another name for it.
    convert = getattr(handler, "to_chat_completion_request", None)
    convert = convert or handler._convert_anthropic_to_openai_request
    options = {"merge_inline_system": handler._merge_inline_system}
    efforts = getattr(handler, "disabled_thinking_effort_resolver", None)
    if efforts is not None:
        options["disabled_thinking_effort"] = await efforts.resolve_for(request)
    return await _of_chat(state, convert(request, **options))


async def _of_chat(state: Any, request: Any) -> EnginePrompt:
    request.return_token_offsets = True
    found = await state.online_renderer.render_chat(request, skip_mm_cache=True)
    return found[1][0] if isinstance(found, tuple) else None


async def _responses(state: Any, body: dict[str, Any]) -> EnginePrompt:
    handler = state.openai_serving_responses
    if handler is None:
        return None
    before = None
    if body.get("previous_response_id") is not None:
        before = handler.response_store.get(body["previous_response_id"])
        if before is None:
            return None
    request = _with_offsets().model_validate(body)
    if not hasattr(handler, "_render_resolved_response_inputs"):  # 0.26
        return (await handler._make_request(request, before))[1][0]
    found = await handler._render_resolved_response_inputs(request, before, skip_mm_cache=True)
    return getattr(found, "engine_input", None)


@cache
def _with_offsets() -> Any:
    """VLLM's class of requests; it has no field that asks for the places of tokens."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    class WithOffsets(ResponsesRequest):
        """A request that asks for them."""

        def build_tok_params(self, model_config: Any) -> Any:
            """How the prompt is tokenized."""
            return replace(super().build_tok_params(model_config), return_token_offsets=True)

    return WithOffsets
