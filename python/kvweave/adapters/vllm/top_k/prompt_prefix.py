"""What decode steps wrote by few pages never enters vLLM's prefix cache: a spec, and its manager.

Keys and values of a prompt are exact, and so are those of an answer while no head chooses. Later
ones come of rows that read few pages in the layers below: a request that went on from them would
answer otherwise than one whose prompt they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec


@dataclass(frozen=True, kw_only=True)
class PromptPrefixSpec(FullAttentionSpec):
    """All tokens are kept; those of prompts, and the first `exact_tokens`, may be found again."""

    exact_tokens: int

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> Any:
        """One spec for equal layers; keys and bounds are unlike, and vLLM has the spec of each."""
        assert all(spec == specs[0] for spec in specs), "expected layers of one spec"
        return specs[0]


class PromptPrefixManager(FullAttentionManager):
    """Stops caching a request's blocks where decode steps may have read few pages."""

    def cache_blocks(self, request: Any, num_tokens: int, *others: Any, **named: Any) -> None:
        """Lets later requests find the blocks of exact tokens alone."""
        exact = exact_tokens_of(request, self.kv_cache_spec.exact_tokens)
        super().cache_blocks(request, min(num_tokens, exact), *others, **named)


def exact_tokens_of(request: Any, least: int) -> int:
    """Tokens at a request's start of which no head chose: of its prompt, and at least so many.

    To vLLM what a session of streamed inputs was answered is part of its prompt.
    """
    streams = getattr(request, "resumable", False)
    return least if streams else max(int(request.num_prompt_tokens), least)
