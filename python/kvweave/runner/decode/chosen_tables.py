"""Which pages the top-K heads of a decode step read (FlexiCache, section 3.2): the device's part.

Nothing here waits, or looks at a number that lies on the device: a step that is captured on a GPU
ranks, and reads what was chosen, as one that runs on the CPU does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave import ops
from kvweave.always_read import RECENT_PAGES, SINK_PAGES
from kvweave.ops import ReadEntries, RopeTable, Table, Workspace
from kvweave.runner.decode.chosen_step import (
    APART,
    BROUGHT,
    DUE,
    DUE_BEGIN,
    DUE_END,
    FIRST,
    KEPT,
    LEFT_BEGIN,
    LEFT_END,
    LENGTH,
    NEWEST,
    ChosenRoom,
)
from kvweave.runner.decode.late_pages import LateRoom
from kvweave.runner.decode.reads import HeadChoice
from kvweave.runner.model.model_spec import ModelSpec


@dataclass(frozen=True)
class _Ranking:
    """The requests that one budget ranks in a step, of B: those that it does not rank list nothing.

    `lists` i64 [B]: of `ChosenRoom.chosen`, where what is chosen goes. `brought` i32 [B]: rows of
    host memory, into whose slots it is brought now. `offsets` i32 [2 · B + 1]:
    where a request's entries begin and end. `budgets` i32 [B · heads]. Scores have so much `width`.
    """

    lists: torch.Tensor
    brought: torch.Tensor
    offsets: torch.Tensor
    budgets: torch.Tensor
    width: int

    @staticmethod
    def of(room: ChosenRoom, plan: torch.Tensor, width: int) -> _Ranking:
        spans = plan[:, DUE_BEGIN : DUE_END + 1].reshape(-1)
        offsets = torch.nn.functional.pad(spans, (0, 1))
        rows = len(plan) * room.budget.heads
        budgets = torch.full((rows,), room.budget.pages, dtype=torch.int32, device=plan.device)
        lists, brought = plan[:, DUE].long(), plan[:, BROUGHT].contiguous()
        return _Ranking(lists, brought, offsets, budgets, width)


@dataclass(frozen=True)
class _Join:
    """The pages that one budget's requests wait for, B of them, which join when they come over.

    `lists` i64 [B] of `room`; `spans` i32 [B, heads, 2]: where their entries begin and how far they
    have come over. They begin at `begin` i32 [B, heads], and `coming` i32 [B, heads] are so many.
    """

    room: LateRoom
    lists: torch.Tensor
    spans: torch.Tensor
    begin: torch.Tensor
    coming: torch.Tensor


class ChosenTables:
    """The tables that the heads of one step read, of B requests.

    `entries` i32 [N, 5]: those of all tables. `offsets` i32 [B · tables + 1]: of a request first
    those of its own tables, then two for each head that chooses, budget by budget in the order of
    ranks: where its table begins and where it ends. `late`, of the same form: where pages begin
    that are on their way, and how far they have come over; None where none are to be joined. `left`
    i32 [3 · B + 1] of each budget: of a request its entries at the ranking, then none, then what
    nobody reads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rope: RopeTable,
        page_tokens: int,
        rooms: Sequence[ChosenRoom],
        entries: torch.Tensor,
        choices: Sequence[Sequence[HeadChoice]],
    ) -> None:
        self.spec = spec
        self.rope = rope
        self.page_tokens = page_tokens
        self.rooms = rooms
        self.entries = entries
        self.choices = choices
        self.offsets: torch.Tensor
        self.late: torch.Tensor | None = None
        self._joins: list[_Join] = []
        self.rankings: list[_Ranking | None] = []
        self.left: list[torch.Tensor] = []

    def begin(
        self,
        spans: torch.Tensor,
        plans: Sequence[torch.Tensor],
        widths: Sequence[int],
        joins: Sequence[bool],
    ) -> None:
        """Brings what was chosen before up to date.

        spans i32 [B, 2 · T] of the requests' own tables; the others as `ChosenStep` has them.
        """
        columns = spans.shape[1] + 2 * sum(room.budget.heads for room in self.rooms)
        self.offsets = spans.new_zeros(len(spans) * columns + 1)
        table = self.offsets[:-1].view(len(spans), columns)
        at = spans.shape[1]
        table[:, :at] = spans
        self.rankings, self.left, self._joins = [], [], []
        self.late = torch.zeros_like(self.offsets) if any(joins) else None
        for room, plan, width, join in zip(self.rooms, plans, widths, joins, strict=True):
            heads = room.budget.heads
            self._go_on(room, plan)
            ends = table[:, at : at + 2 * heads].view(-1, heads, 2)
            numbers = torch.arange(heads, dtype=torch.int32, device=plan.device)
            begin = plan[:, FIRST, None] + plan[:, APART, None] * numbers
            ends[:, :, 0] = begin
            ends[:, :, 1] = begin + plan[:, LENGTH, None]
            some, at = slice(at, at + 2 * heads), at + 2 * heads
            ranking = _Ranking.of(room, plan, width) if width else None
            self.rankings.append(ranking)
            if room.late is not None:
                if ranking is not None:
                    room.late.begin(ranking.lists)
                lists = plan[:, KEPT].long()
                coming = room.late.waits_for(lists)
                ends[:, :, 0] += coming
                if join and self.late is not None:
                    both = self.late[:-1].view(len(spans), columns)[:, some].view(-1, heads, 2)
                    both[:] = begin[:, :, None]
                    self._joins.append(_Join(room.late, lists, both, begin, coming))
            left = plan[:, LEFT_BEGIN : LEFT_END + 1]
            left = torch.cat((left, left[:, 1:]), 1).reshape(-1)
            self.left.append(torch.nn.functional.pad(left, (0, 1)))

    def _go_on(self, room: ChosenRoom, plan: torch.Tensor) -> None:
        """The newest entry of those that were chosen grows, and others have been begun."""
        places = plan[:, NEWEST:]
        newest = self.entries.index_select(0, places.reshape(-1)).view(*places.shape, 5)
        newest = newest[:, None].expand(-1, room.budget.heads, -1, -1)
        behind = room.chosen[:, :, room.budget.pages - 1 :]
        behind.index_copy_(0, plan[:, KEPT].long(), newest)

    def read(self, layer: int, q: torch.Tensor, workspace: Workspace | None) -> tuple[Table, Table]:
        """The entries and offsets by which rows of queries q [B, H, D] read a layer.

        For requests that are due its heads first choose anew.
        """
        for choice in self.choices[layer]:
            ranking = self.rankings[choice.budget]
            if ranking is not None:
                self._rank(layer, q, choice, ranking, workspace)
        return self.entries, self.offsets

    def arrived(self) -> tuple[Table, Table] | None:
        """The entries and offsets of pages that were on their way and have come over by now.

        None where nobody waits for any. Rows read these beside what `read` says.
        """
        if self.late is None:
            return None
        for join in self._joins:
            there = join.room.is_there(join.lists)[:, None]
            torch.addcmul(join.begin, join.coming, there, out=join.spans[:, :, 1])
        return self.entries, self.late

    def estimated(
        self,
        layer: int,
        q: torch.Tensor,
        attended: tuple[torch.Tensor, torch.Tensor],
        read: ReadEntries,
        workspace: Workspace | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of queries q [B, H, D] with an estimate of what was left out of a layer.

        `attended` out [B, H, D] and lse [B, H] over what was `read`: they are the result but for
        heads whose budget has means.
        """
        for choice in self.choices[layer]:
            room, of_layer = self.rooms[choice.budget], self.spec.layers[layer]
            if room.means is None:
                continue
            pages = ops.PageMeans(
                room.means,
                self.page_tokens,
                layer,
                self.spec.kv_heads,
                of_layer.scale,
                self.rope,
                of_layer.softcap,
                choice.left,
            )
            attended = ops.estimate_pages(
                q,
                attended,
                room.ranked,
                pages,
                entry_offsets=self.left[choice.budget],
                read=read,
                workspace=workspace,
            )
        return attended

    def _rank(
        self,
        layer: int,
        q: torch.Tensor,
        choice: HeadChoice,
        ranking: _Ranking,
        workspace: Workspace | None,
    ) -> None:
        room = self.rooms[choice.budget]
        scores, counts = self._score(layer, q, choice, ranking)
        rows = *counts.shape, room.budget.pages
        chosen, selected = ops.select_pages(
            scores.flatten(0, 1),
            counts.flatten(),
            ranking.budgets[: counts.numel()],
            sink=SINK_PAGES,
            recent=RECENT_PAGES,
            most=room.budget.pages,
        )
        entries, _ = ops.gather_entries(
            chosen.view(rows),
            selected.view(counts.shape),
            self.entries,
            entry_offsets=ranking.offsets,
            reach=choice.listed,
        )
        entries = entries.view(*rows, 5)
        if room.host is not None:
            seated = ops.SeatedHeads(ranking.brought, choice.numbers, choice.ranks[0])
            room.host.bring(seated, chosen.view(rows), entries, workspace=workspace)
        if room.late is not None:
            room.late.note(choice.ranks, ranking.lists, chosen.view(rows))
        to = room.chosen[:, choice.ranks[0] : choice.ranks[1], : room.budget.pages]
        to.index_copy_(0, ranking.lists, entries)

    def _score(
        self, layer: int, q: torch.Tensor, choice: HeadChoice, ranking: _Ranking
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores f32 [B, heads, width] of what is listed, and how much that is, i32 [B, heads]."""
        of_layer, room = self.spec.layers[layer], self.rooms[choice.budget]
        asking = q
        if choice.heads is not None:
            of_kv = q.view(len(q), self.spec.kv_heads, -1, q.shape[-1])
            asking = of_kv.index_select(1, choice.heads).flatten(1, 2)
        pages = ops.BoundedPages(
            room.bounds,
            self.page_tokens,
            layer,
            choice.ranks[1] - choice.ranks[0],
            of_layer.scale,
            self.rope,
            of_layer.softcap,
            choice.bounds,
            room.budget.score,
            scales=room.scales,
        )
        ends, width = ranking.offsets, ranking.width
        return ops.score_pages(asking, room.ranked, pages, entry_offsets=ends, width=width)
