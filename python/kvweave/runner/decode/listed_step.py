"""`ListedStep`: the requests of a decode step, as who chooses pages for them is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvweave.runner.decode.sampling import Int64
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.tables import Int32


@dataclass(frozen=True)
class ListedStep:
    """The requests of a step, and where their entries are.

    Their `rows` [B], the positions of their first new tokens [B] and how long they are at their
    `ends` [B]; their tables lie at `spans` [B, T, 2]. `moved` [M]: places whose entries have
    changed, to `entries` [M, 5]. `growing` [B]: of each table the last entries that have any of the
    new tokens. `hosts` [B]: their pages that may lie in host memory, by head group.
    """

    rows: Int32
    positions: Int32
    ends: Int64
    spans: Int32
    moved: Int64
    entries: Int32
    growing: Int64
    hosts: Sequence[Mapping[int, HostPages]] = ()

    def host(self, number: int, group: int) -> HostPages | None:
        """What may lie in host memory of one of them, of a head group."""
        return self.hosts[number].get(group) if self.hosts else None

    def full_pages(self, number: int, page_tokens: int) -> int:
        """Pages before the newest token's, of one of them."""
        return int(self.positions[number]) // page_tokens
