"""Cache specs of vLLM, and one of ours: what layers keep, read as what their rows see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from kvweave.adapters.vllm.tables import Span


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """A window, and the first `sink` tokens of a request besides."""

    sink: int = 0

    @property
    def sink_blocks(self) -> int:
        """Blocks at the start of a request that are never given back."""
        return -(-self.sink // int(self.block_size))

    @property
    def num_retained_tokens(self) -> int:
        """Tokens below which vLLM's second model runner (0.33) nulls a request's block table.

        A sink lies there, so none: 0 turns it off.
        """
        stock: Any = super()
        return 0 if self.sink else int(stock.num_retained_tokens)

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that a request holds at a time: what a window holds, and the sink."""
        stock: Any = super()
        window: int = stock.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return window + self.sink_blocks

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether one block table does for all these layers: they keep the same tokens."""
        return all(
            isinstance(spec, SinkWindowSpec)
            and (spec.sliding_window, spec.sink) == (self.sliding_window, self.sink)
            for spec in kv_cache_specs.values()
        )


def span_of(spec: Any) -> Span:
    """What must be listed for layers of a spec.

    A full spec may have layers with windows among others without (vLLM merges them where its
    hybrid cache is off), so all it holds is listed, and each layer's own window hides the rest.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return Span()
    return Span(spec.sliding_window, getattr(spec, "sink", 0))
