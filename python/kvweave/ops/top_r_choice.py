"""How much of a text's vectors to keep: the smallest top-r pages whose loss stays below a bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from kvweave._native import PackedFormat
from kvweave.ops.dispatch import Table, counted, invalid
from kvweave.ops.pack_losses import pack_losses


def top_r_candidates(
    head_dim: int, page_tokens: int = 64, scales: str = "bf16", *, numbers: str = "bf16"
) -> tuple[PackedFormat, ...]:
    """MosaicKV's candidates (section 5.5), the smallest first.

    An eighth, a quarter or three eighths of the channels in groups of 1, 2 or 4, each also without
    the last quarter of the basis (section 5.2).

    # Errors
    `InvalidArgument` for sizes that a format has not.
    """
    made = [
        PackedFormat(
            "top-r",
            head_dim,
            page_tokens,
            scales,
            kept=eighths * head_dim // 32 * 4,
            group=group,
            channels=quarters * head_dim // 4,
            numbers=numbers,
        )
        for eighths, group, quarters in product((1, 2, 3), (1, 2, 4), (3, 4))
    ]
    return tuple(sorted(made, key=_size))


def top_r_losses(
    cache: torch.Tensor,
    packs: Table,
    basis: torch.Tensor,
    formats: Sequence[PackedFormat],
    *,
    pages: int,
) -> torch.Tensor:
    """What each format loses of exact pages: Σ |x − x̂|² / Σ |x|², f64 [formats, pages, 2].

    cache [·, 2, P', D] on the host, packs as for `pack_pages`, whose packed blocks count for
    nothing; basis f32 [pages, 2, D + 1, D] as `Moments.basis` makes it of all D channels. Of keys,
    then of values; 0 where they are all 0, NaN where one is NaN or infinite.

    # Errors
    `InvalidArgument` as `pack_pages`.
    """
    losses = torch.zeros(len(formats), counted("pages", pages), 2, dtype=torch.float64)
    for loss, of in zip(losses, formats, strict=True):
        within = basis[..., : of.channels + 1, :].contiguous()
        lost, size = pack_losses(cache, packs, of, pages=pages, basis=within)
        loss.copy_(torch.where(lost == 0.0, 0.0, lost / size))
    return losses


def choose_top_r(
    losses: torch.Tensor, formats: Sequence[PackedFormat], bound: float
) -> list[PackedFormat]:
    """For each page of a block (layer and KV head) the smallest format that loses little enough.

    That of the fewest bytes whose loss of keys and of values is at most `bound`; where none is, the
    one that loses least. losses [formats, pages, 2] as `top_r_losses` measures them. A page whose
    losses are all NaN gets the format of the most bytes. Pages of one pool have one format: a text
    that is packed as a whole takes the largest of these.

    # Errors
    `InvalidArgument` for no formats, other losses than of these, or a bound that is below 0 or NaN.
    """
    if not formats or losses.ndim != 3 or len(losses) != len(formats):
        raise invalid("losses", f"those of {len(formats)} formats", str(tuple(losses.shape)))
    if not bound >= 0.0:
        raise invalid("bound", "a loss from 0 on", str(bound))
    order = sorted(range(len(formats)), key=lambda i: _size(formats[i]))
    chosen = []
    for page in losses.amax(-1).T[:, order].tolist():
        below = (i for i, loss in enumerate(page) if loss <= bound)
        known = [loss for loss in page if loss == loss]
        least = page.index(min(known)) if known else len(page) - 1
        chosen.append(formats[order[next(below, least)]])
    return chosen


def _size(of: PackedFormat) -> tuple[int, ...]:
    """By bytes; of as many bytes that format first which can only lose less."""
    return of.page_bytes, -of.kept, of.group, -of.channels
