"""Selected pages into the slots of seats that requests have, by the entries that are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave import _native
from kvweave.device_memory import needs_memory
from kvweave.ops.dispatch import Backend, cuda_device, expect_tensors, invalid, stream_of
from kvweave.ops.recycle_pages import Recycled, recycle_pages
from kvweave.ops.workspace import Workspace, launch


@dataclass(frozen=True)
class Seats:
    """Slots that N seats of requests have on a device for pages that lie elsewhere.

    `held` i32 [N, H, S]: the page that each slot of a head holds, −1 for none, no page twice.
    `blocks` i32 [N, S]: what entries call slots. `away` i32 [N]: how many of a request's pages lie
    elsewhere, its first ones.
    """

    held: torch.Tensor
    blocks: torch.Tensor
    away: torch.Tensor


@dataclass(frozen=True)
class SeatedHeads:
    """Heads of B requests, and the seats that these have.

    `of` i32 [B]: a seat for each; several may have one of which nothing lies elsewhere. `heads` i32
    [n]: which of those that pages are chosen for; they are heads `rank` to rank + n of a seat.
    """

    of: torch.Tensor
    heads: torch.Tensor
    rank: int = 0


@needs_memory("recycle_seats")
def recycle_seats(
    pages: torch.Tensor,
    entries: torch.Tensor,
    seats: Seats,
    rows: SeatedHeads,
    *,
    limit: int,
    by_seat: bool = False,
    workspace: Workspace | None = None,
    backend: Backend = None,
) -> Recycled:
    """As `recycle_pages`, for some heads of requests whose slots outlast a step.

    pages i32 [B, G, K]: what requests chose, ascending, −1 behind them; with `by_seat` [N, G, K],
    a request's being its seat's, as `KeptPages` has them. Of these a row, which is one of `rows`'
    heads of a request, selects those that lie elsewhere. `seats.held` is written in place, and so
    are entries i32 [B, G, K, 5], which are of the requests' pages: those of selected ones name
    their slots (FlexiCache, section 3.4). Others stay as they are.

    Results are of B · n rows, but for moves: these say seat · n + head, so that `RowPages` with
    `ranks` n and a row for each seat carry them. Pages are below `limit`, and a row selects at most
    S of them, else it is `InvalidArgument` on the CPU; on CUDA such a row is left as it is and
    `refused`, as is one of a seat or head that there is none of. There all tables lie on the
    device, and this is one launch.
    """
    tensors = {"entries": entries, "blocks": seats.blocks, "away": seats.away, "of": rows.of}
    expect_tensors(pages=pages, held=seats.held, heads=rows.heads, **tensors)
    device = cuda_device("held", seats.held, backend)
    if pages.ndim != 3 or seats.held.ndim != 3:
        what, tensor = ("held", seats.held) if pages.ndim == 3 else ("pages", pages)
        raise invalid(what, "3 axes", str(tensor.ndim))
    if device is None:
        return _in_turns(pages, entries, seats, rows, limit, by_seat, backend)
    count, most, width = len(rows.of) * len(rows.heads), pages.shape[2], seats.held.shape[2]
    results = Recycled.room(count, most, width, device)
    chosen, of_seats = (pages, by_seat, entries), (seats.held, seats.blocks, seats.away)
    of_rows, stream = (rows.of, rows.heads, rows.rank, limit), stream_of(device)
    launch(
        workspace or Workspace(device),
        lambda space: _native.recycle_seats_cuda(
            chosen, of_seats, of_rows, results.parts, space, stream
        ),
    )
    return results


def _in_turns(
    pages: torch.Tensor,
    entries: torch.Tensor,
    seats: Seats,
    rows: SeatedHeads,
    limit: int,
    by_seat: bool,
    backend: Backend,
) -> Recycled:
    """The definition: slots are taken from their seats, recycled, and put back."""
    of, heads, ranks = rows.of.long(), rows.heads.long(), len(rows.heads)
    chosen = (pages.index_select(0, of) if by_seat else pages).index_select(1, heads)
    of_heads = seats.held[:, rows.rank : rows.rank + ranks]
    held = of_heads.index_select(0, of)
    away = seats.away.index_select(0, of)[:, None, None]
    selected = ((chosen >= 0) & (chosen < away)).sum(-1, dtype=torch.int32)
    listed, slots = chosen.flatten(0, 1), held.view(-1, held.shape[-1])
    found = recycle_pages(listed, selected.flatten(), slots, limit=limit, backend=backend)
    of_heads.index_copy_(0, of, held)
    at = found.places.view(chosen.shape)
    blocks = seats.blocks.index_select(0, of)[:, None].expand(-1, ranks, -1)
    named = entries.index_select(1, heads)
    names = blocks.gather(2, at.clamp_min(0).long())
    named[..., 0] = torch.where(at >= 0, names, named[..., 0])
    entries.index_copy_(1, heads, named)
    moved = found.moves[: int(found.count)]
    of_row = of.int()[:, None] * ranks + torch.arange(ranks, dtype=torch.int32)
    moved[:, 0] = of_row.flatten()[moved[:, 0].long()]
    return found
