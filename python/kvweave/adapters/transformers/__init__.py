"""kvweave under `model.generate` of transformers; `docs/transformers.md` says how it is used.

`PagedCache(model)` is a `transformers.Cache` whose keys and values lie in kvweave's pages. A
forward that is given one passes through these files, in order: `forward_rows` (which tokens the
caller hands over, and where they stand), `live_rows` (a request of the cache for each row of the
batch), `step_rows` (what of them is computed), `paged_step` (its tables, and attention over pages),
`packed_step` (the same where full pages are packed, of `packed_layers`), `attention` (what the
model's layers call), `paged_cache` (the hooks around it all). `cache_pools` makes the pages.
`kv_geometry` and `equality` refuse a model at the start, by what it is and by what it computes.
"""

from kvweave.adapters.transformers.attention import register
from kvweave.adapters.transformers.paged_cache import PagedCache

__all__ = ["PagedCache", "register"]
