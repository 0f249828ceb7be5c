"""Which requests reuse segments: one answer for all who ask in the scheduler's process."""

from __future__ import annotations

from typing import Any

from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.markers import SECTION, Markers, markers_of
from kvweave.errors import InvalidArgument


def eligible_markers(request: Any) -> Markers | None:
    """The markers of a scheduler's request, if they are to be followed.

    A request without is computed like any other, and so is one whose markers `checked_markers`
    refuses.
    """
    try:
        return checked_markers(request)
    except InvalidArgument:
        return None


def checked_markers(request: Any) -> Markers | None:
    """The markers of a scheduler's request, None where it has none.

    Errors: `InvalidArgument` where they are malformed, name a policy that has nothing to act on or
    reach beyond its prompt, for a request of which tokens do not say everything (adapters, images,
    embeddings), as `check_computed`, and for one whose prompt goes on later (a session of streamed
    inputs, each with parameters of its own).
    """
    params = request.sampling_params
    markers = None if params is None else markers_of(params.extra_args)
    if markers is None:
        return None
    beside = {
        "an adapter": request.lora_request is not None,
        "embeddings": request.prompt_embeds is not None or request.prompt_token_ids is None,
        "images or the like": bool(request.mm_features),
        "inputs that go on": bool(request.resumable),
    }
    given = ", ".join(what for what, is_there in beside.items() if is_there)
    require(SECTION, not given, "a prompt of tokens alone", given, InvalidArgument)
    markers.check_acts()
    markers.check_within(request.num_prompt_tokens)
    check_computed(params)
    return markers


def check_computed(params: Any) -> None:
    """Refuses to follow the markers of a request that wants log-probabilities of its prompt.

    No row of such a prompt may be spared.

    Errors: `InvalidArgument`.
    """
    wanted = params.prompt_logprobs
    expected = "none beside segments or discover, as rows that are reused have none"
    require("prompt_logprobs", wanted is None, expected, str(wanted), InvalidArgument)
