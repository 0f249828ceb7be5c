"""Exact pages on the host packed in a format, and what that loses of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvweave import ops
from kvweave.runner.kv.tables import Int32


@dataclass(frozen=True, eq=False)
class Part:
    """Exact pages `cache` [·, 2, P, D] on the host, and the packs that name them.

    So many tokens of the first pack, `left_out`, are read from elsewhere: what they lose does not
    count.
    """

    cache: torch.Tensor
    packs: Int32
    left_out: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return int(self.packs[:, 1].sum()) - self.left_out


SAMPLED_TOKENS = 4096
"""Bases and formats are tried on about so many tokens of a text, evenly spread."""


def sampled(parts: list[Part], tokens: int) -> list[Part]:
    """Of the parts of a text of so many tokens those that are tried."""
    every = -(-tokens // SAMPLED_TOKENS)
    return [replace(part, packs=part.packs[::every]) for part in parts]


def part_losses(
    form: ops.PackedFormat,
    pages: int,
    basis: torch.Tensor | None,
    part: Part,
    *,
    ranks: Int32 | None = None,
    roots: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """What exact pages lose in a format, in a basis if there is one: as `ops.pack_losses`."""
    return ops.pack_losses(
        part.cache,
        part.packs,
        form,
        pages=pages,
        basis=basis,
        ranks=ranks,
        roots=roots,
        left_out=part.left_out,
        packed=packed,
    )


def text_losses(
    form: ops.PackedFormat,
    pages: int,
    basis: torch.Tensor | None,
    parts: list[Part],
    *,
    ranks: Int32 | None = None,
    roots: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same of all parts of a text, whose blocks lie one behind the other in `packed`."""
    count = pages if ranks is None else len(ranks)
    total, begin = torch.zeros(2, count, 2, dtype=torch.float64), 0
    for part in parts:
        end = begin + len(part.packs)
        into = None if packed is None else packed[begin:end]
        total += part_losses(form, pages, basis, part, ranks=ranks, roots=roots, packed=into)
        begin = end
    return total


def relative(lost: torch.Tensor, whole: torch.Tensor) -> tuple[float, float]:
    """Of keys and of values the share of Σ |x|² that is lost."""
    keys, values = (lost.sum(0) / whole.sum(0).clamp_min(torch.finfo().tiny)).tolist()
    return keys, values


def share(lost: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What is lost of Σ |x|², 0 of nothing, as `ops.top_r_losses` has it."""
    return torch.where(lost == 0.0, 0.0, lost / whole)


def most_lost(lost: torch.Tensor, whole: torch.Tensor) -> float:
    """The most that any page's keys or values [pages, 2] lose; infinite where one is not finite."""
    return float(share(lost, whole).nan_to_num(nan=torch.inf).max())
