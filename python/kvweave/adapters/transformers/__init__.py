"""kvweave under `model.generate` of transformers; `docs/transformers.md` says how it is used.

`PagedCache(model)` is a `transformers.Cache` whose keys and values lie in kvweave's pages. A
forward that is given one passes through these files, in order: `forward_rows` (which tokens the
caller hands over, and where they stand), `live_rows` (a request of the cache for each row of the
batch), `paged_step` (what of them is computed, and its tables), `attention` (what the model's
layers call), `paged_cache` (the hooks around it all). `kv_geometry` and `equality` refuse a model
at the start, by what it is and by what it computes.
"""

from kvweave.adapters.transformers.attention import register
from kvweave.adapters.transformers.paged_cache import PagedCache

__all__ = ["PagedCache", "register"]
