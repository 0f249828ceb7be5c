"""Which requests reuse segments: one answer for all who ask in the scheduler's process."""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm.segments.markers import Markers, markers_of
from kvweave.errors import InvalidArgument


def eligible_markers(request: Any) -> Markers | None:
    """The markers of a scheduler's request, if they are to be followed.

    A request without, one whose markers are malformed or reach beyond its prompt, one of which
    tokens do not say everything (adapters, images, embeddings), one that wants log-probabilities
    of its prompt (no row may be spared), and one whose prompt goes on later (a session of
    streamed inputs, each with parameters of its own) is computed like any other.
    """
    params = request.sampling_params
    plain = request.lora_request is None and request.prompt_embeds is None
    plain = plain and not request.mm_features and not request.resumable
    if params is None or request.prompt_token_ids is None or not plain:
        return None
    try:
        markers = markers_of(params.extra_args)
        if markers is not None:
            markers.check_within(request.num_prompt_tokens)
    except InvalidArgument:
        return None
    if markers is None or params.prompt_logprobs is not None:
        return None
    return markers
