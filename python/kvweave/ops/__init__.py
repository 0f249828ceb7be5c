"""The ops on paged KV: torch tensors in, torch tensors out, no copies of K or V.

Shapes: R rows, H query heads, G KV heads, D head dim, P tokens a page, B requests, L layers.
`cache` is always the whole arena [pages, 2, P, D] (f32, bf16, f16 or float8_e4m3fn): K of a page,
then V. Rows have its dtype; over float8_e4m3fn they are f32, bf16 or f16, and a layer's keys and
values are the stored numbers times `kv_scales` (key, value), finite and above 0.
Tables are int32, C-contiguous, numpy or torch: entries [N, 5] (block, begin, end, position,
delta), copies [C, 6] (src_block, src_slot, dst_block, dst_slot, count, delta), slots [R, 2]
(block, slot), as `KvRequest` makes them, or of an engine's batch `step_tables`.

Pages that a decode step chose come into slots by `recycle_pages`, or `recycle_seats`, and
`move_pages`, whose arenas are any tensors of equal pages.

Every op takes `backend`: None picks the fast version for the cache's device, "reference" the
definition in plain loops, which every other version is checked against. Ops are not
differentiable. While an op runs, other threads must not write to its tensors.

On CUDA an op runs on torch's current stream of the cache's device and waits for nothing. Tables
may lie on either side. On the host they are checked like those of the CPU and go over in one copy.
On the device (int32) they are used as they are, what points outside the cache being skipped and
offsets trusted; a call whose tables all lie on the device may be captured in a CUDA graph.

Errors: `InvalidArgument` for a wrong dtype, shape, stride, device, alignment, range or overlap,
naming what was expected and what came; `Unsupported` for what a device does not do; `OutOfMemory`
for results or tables that find no room, nothing having been written.
"""

from kvweave._native import Moments, PackedFormat, Reach, RopeTable
from kvweave.ops.attend_decode import attend_decode
from kvweave.ops.attend_packed import attend_packed
from kvweave.ops.attend_prefill import attend_prefill
from kvweave.ops.bound_packed import bound_packed
from kvweave.ops.bounded_pages import BoundedPages
from kvweave.ops.copy_rerotate import copy_rerotate
from kvweave.ops.dispatch import Backend, Pages, Table
from kvweave.ops.estimate_pages import estimate_pages
from kvweave.ops.gather_entries import KeptPages, gather_entries
from kvweave.ops.merge_states import merge_states
from kvweave.ops.move_pages import RowPages, move_pages
from kvweave.ops.pack_losses import pack_losses
from kvweave.ops.pack_pages import pack_pages, unpack_pages
from kvweave.ops.packed_kv import PackedBases, PackedKv, PackedPages, packed_format
from kvweave.ops.page_means import PageMeans, ReadEntries
from kvweave.ops.reading import PagedKv
from kvweave.ops.recycle_pages import Recycled, recycle_pages
from kvweave.ops.recycle_seats import SeatedHeads, Seats, recycle_seats
from kvweave.ops.rotate_rows import Pairing, rotate_rows
from kvweave.ops.score_pages import score_pages
from kvweave.ops.score_tokens import EdgeMass, score_tokens
from kvweave.ops.select_pages import select_pages
from kvweave.ops.step_tables import StepTables, step_tables
from kvweave.ops.top_r_choice import choose_top_r, top_r_candidates, top_r_losses
from kvweave.ops.workspace import Workspace
from kvweave.ops.write_pages import PageBounds, bound_pages, write_pages

__all__ = [
    "Backend",
    "BoundedPages",
    "EdgeMass",
    "KeptPages",
    "Moments",
    "PackedBases",
    "PackedFormat",
    "PackedKv",
    "PackedPages",
    "PageBounds",
    "PageMeans",
    "PagedKv",
    "Pages",
    "Pairing",
    "Reach",
    "ReadEntries",
    "Recycled",
    "RopeTable",
    "RowPages",
    "SeatedHeads",
    "Seats",
    "StepTables",
    "Table",
    "Workspace",
    "attend_decode",
    "attend_packed",
    "attend_prefill",
    "bound_packed",
    "bound_pages",
    "choose_top_r",
    "copy_rerotate",
    "estimate_pages",
    "gather_entries",
    "merge_states",
    "move_pages",
    "pack_losses",
    "pack_pages",
    "packed_format",
    "recycle_pages",
    "recycle_seats",
    "rotate_rows",
    "score_pages",
    "score_tokens",
    "select_pages",
    "step_tables",
    "top_r_candidates",
    "top_r_losses",
    "unpack_pages",
    "write_pages",
]
