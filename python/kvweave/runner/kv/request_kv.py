"""The KV of one request while it is prefilled: its tables, and what is copied or owned first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.errors import InvalidArgument, OutOfMemory, PoolFull
from kvweave.ops import Reach
from kvweave.plan import Rows
from kvweave.runner.kv.gathered_reads import GatheredReads, is_worth_gathering
from kvweave.runner.kv.gathered_tokens import GatheredTokens
from kvweave.runner.kv.heads import HeadReads, LayerHeads
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.states import States
from kvweave.runner.kv.tables import Int32, KvTable, RowMemo, RowTable, send
from kvweave.runner.kv.token_places import places_of
from kvweave.runner.kv.whole_layers import WholeLayers
from kvweave.runner.model.rope import PositionTable

if TYPE_CHECKING:
    from kvweave.runner.tiers.arrivals import Arrivals


@dataclass(frozen=True)
class LayerLook:
    """A layer of a request as probes see it: where all of its tokens lie in pages of one kind.

    `paged` reads `pages`. `entries` gives those of a table, as `table` has them of all.
    """

    pages: torch.Tensor
    paged: ops.PagedKv
    table: KvTable
    entries: Callable[[int], Int32]


class RequestKv:
    """Tables of one request, made anew when they change and sent over once.

    `rotates` False copies reused keys without turning them to their new position. `packed`: what
    lies in packed pages, where the runner has any. `host`: what may lie in host memory while the
    request decodes, by head group; nothing does yet where it is not given.
    """

    def __init__(
        self,
        heads: HeadReads,
        pages: torch.Tensor,
        request: KvRequest,
        positions: PositionTable,
        rotates: bool = True,
        packed: PackedPrefix | None = None,
        host: Mapping[int, HostPages] | None = None,
    ) -> None:
        self.heads = heads
        self.pages = pages
        self.request = request
        self.positions = positions
        self.rotates = rotates
        self.packed = packed
        if host is None:
            host = {group: HostPages(pool, request) for group, pool in heads.host.items()}
        self.host = host
        self.spec = heads.spec
        self._table: KvTable | None = None
        self._rows: RowTable | None = None
        self._asking = RowMemo[ops.Table](1)
        self._gap_end: int | None = None
        self._whole: WholeLayers | None = None
        self.gathered = GatheredReads(self.gathering)
        # What comes while the prompt is prefilled, if anything does.
        self.arrivals: Arrivals | None = None

    def fork(self) -> RequestKv:
        """The KV of a fork of the request, which shares all of its blocks, packed ones too.

        # Errors
        As `KvRequest.fork`.
        """
        packed = None if self.packed is None else self.packed.fork()
        try:
            fork = self.request.fork()
        except BaseException:
            if packed is not None:
                packed.release()
            raise
        known = self.heads, self.pages, fork, self.positions, self.rotates
        return RequestKv(*known, packed)

    def forked(self, fork: KvRequest) -> RequestKv:
        """The KV of a fork that a draft was decoded in, of exact pages alone."""
        return RequestKv(self.heads, self.pages, fork, self.positions, self.rotates)

    def newest(self, tokens: int) -> Rows:
        """The positions of the last tokens."""
        length = self.request.length
        return np.arange(length - tokens, length, dtype=np.int32)

    @property
    def table(self) -> KvTable:
        """Where all KV of the request lies now."""
        if self._table is None:
            self._table = KvTable.of(self.request, self.spec.device)
            self.gathered.forget()
        return self._table

    def copy(self) -> None:
        """Carries out the copies that the cache asks for, turning keys on the way."""
        copied = 0
        for group in range(len(self.heads.windows)):
            copies = self.request.take_copies(group)
            if not self.rotates:
                copies[:, 5] = 0
            copied += len(copies)
            if self.arrivals is not None:
                copies = self.arrivals.defer(group, copies, self.bring_layers)
            self.bring(copies, self.heads.page_layers(group))
        self.request.finish_copies()
        if copied:
            self._table = None

    def bring(self, copies: Int32, layers: ops.Table | None) -> None:
        """Copies i32 [C, 6] between blocks; `layers`: of each page of a block, see `HeadReads`."""
        if len(copies):
            ops.copy_rerotate(
                self.pages,
                copies,
                self.positions.rope,
                kv_heads=self.spec.kv_heads,
                layers=layers,
            )

    def bring_layers(self, group: int, copies: Int32, first: int, end: int) -> None:
        """Copies i32 [C, 6] of a group's blocks, in the layers [first, end) alone."""
        layers = self.heads.cache.page_layers(group)
        begin, behind = np.searchsorted(layers, (first, end)).tolist()
        if begin < behind:
            # The pages of some layers follow each other, as those of a block of fewer do.
            moved = copies.copy()
            moved[:, [0, 2]] += begin
            self.bring(moved, np.ascontiguousarray(layers[begin:behind]))

    def arrive(self, layer: int) -> None:
        """Returns when the KV of a layer is there that the prompt reuses.

        # Errors
        `NotArrivedError` where some will not come.
        """
        if self.arrivals is not None:
            self.arrivals.need(layer, self.bring_layers)

    def rows(self, rows: Rows, local_rows: Rows | None) -> RowTable:
        """The tables of rows to be written, after `own`.

        The last ones are kept, for most layers compute the same.
        """
        if self._rows is None or not self._rows.same(rows, local_rows):
            slots = self._slots(rows, local_rows)
            self._rows = RowTable.of(slots, rows, local_rows, self.positions, self.spec.device)
        return self._rows

    def probe_positions(self, rows: Rows) -> ops.Table:
        """The positions of rows that ask what matters."""
        return self._asking.get(rows, lambda kept: send(self.spec.device, kept)[0])

    def _slots(self, rows: Rows, local_rows: Rows | None) -> Int32:
        """Where K, V of rows go: [R, 2], or [tables, R, 2] with (−1, −1) where they do not."""
        if self.heads.uniform:
            return self.request.slots(rows)
        slots = np.full((self.request.tables, len(rows), 2), -1, np.int32)
        for table, places in enumerate(slots):
            if local_rows is None or not self.heads.is_window(table):
                places[:] = self.request.slots(rows, table)
            elif len(local_rows):
                places[np.searchsorted(rows, local_rows)] = self.request.slots(local_rows, table)
        return slots

    def own(self, rows: Rows, local_rows: Rows | None) -> None:
        """Copy-on-write of blocks that rows will be written to and that are still shared.

        # Errors
        `InvalidArgument` for local rows that are not among the rows; `PoolFull` without room.
        """
        if self._rows is not None and self._rows.same(rows, local_rows):
            return
        if local_rows is None or self.heads.uniform:
            self.request.make_writable(rows)
        else:
            if not np.isin(local_rows, rows).all():
                raise InvalidArgument("local_rows: expected some of the plan's rows, got others")
            for group, window in enumerate(self.heads.windows):
                self.request.make_writable(rows if window is None else local_rows, group)
        self.copy()

    def advance(self, start: int, end: int) -> None:
        """Rows before `start` are done and [start, end) come next: windows move on.

        What full pages hold is packed first.
        """
        if self.heads.uniform:
            return
        if self.packed is not None:
            self.packed.pack(self.request, start)
        self.request.advance(start, end)
        self._table = self._rows = self._gap_end = None
        self.copy()

    def expect(self, start: int, end: int) -> None:
        """The rows of positions [start, end) come next: what they fill is packed on the way."""
        if self.packed is not None:
            self.packed.expect(start, end)

    def take_packed(self, exact: int, rows: int) -> int:
        """Goes on behind what packed pages have; the first position that is to be computed.

        `exact`: tokens of the prefix in exact pages. The next `rows` come then, or all for 0.
        """
        if self.packed is None or (start := self.packed.reused(exact)) == exact:
            return exact
        end = min(start + rows, self.request.length) if rows else self.request.length
        self.request.advance(start, end)
        self.packed.unpack_newest(self.request)
        self._table = self._rows = self._gap_end = None
        return start

    def commit(self, computed: int, exact: int) -> None:
        """Says what later prompts may find: see `KvCache`.

        Of packed text that is the sink and packed pages, but for those that find no room. Where
        pages lie in host memory it is nothing more than was said before they did.
        """
        if self.is_spilled:
            return
        if self.packed is None:
            self.request.commit(computed, exact)
            return
        self.packed.commit_text(self.request, computed)

    @property
    def is_spilled(self) -> bool:
        """Whether any of it lies in host memory."""
        return any(pages.count for pages in self.host.values())

    def bring_back(self) -> bool:
        """Has all KV lie on the device, for what reads or writes more than a decode step.

        Whether any of it has been rounded in host memory, from its first tokens on.

        # Errors
        `PoolFull` without room; what is still in host memory stays there.
        """
        rounded = any(pages.count and pages.pool.scales is not None for pages in self.host.values())
        if self.is_spilled:
            for pages in self.host.values():
                pages.bring_back()
            self._table = self._rows = self._whole = None
        return rounded

    def forget_copies(self) -> None:
        """Lets go of what host memory has of pages on the device, which are to be written anew."""
        for pages in self.host.values():
            pages.forget_copies()

    def release(self) -> None:
        """Gives all blocks back; safe to call twice."""
        for pages in self.host.values():
            pages.release()
        self.request.release()
        if self.packed is not None:
            self.packed.release()

    def promote(self, layer: int, head: int) -> bool:
        """Makes a head full for this request from now on.

        False when there is no room for it, or some of what it needs was not kept.

        # Errors
        `InvalidArgument` for a head that is full already.
        """
        if not self._is_whole(layer, head):
            return False
        try:
            copies = self.request.promote(layer, head)
        except PoolFull:
            return False
        self.bring(copies, np.asarray([layer], np.int32))
        self._table = self._rows = None
        return True

    def _is_whole(self, layer: int, head: int) -> bool:
        """Whether the group of a head keeps every position; true for one that does not exist."""
        rows = self.request.head_rows(layer)
        if not 0 <= head < len(rows):
            return True
        entries = self.request.entries(int(rows[head, 0]))
        return int((entries[:, 2] - entries[:, 1]).sum()) == self.request.length

    def computable(self) -> npt.NDArray[np.bool_]:
        """For each position whether all that its row sees is still kept, bool [T].

        Window groups let go of what no coming row sees; what lies behind cannot be computed again.
        """
        length = self.request.length
        at, whole = np.arange(length), np.ones(length, bool)
        for group, window in enumerate(self.heads.windows):
            if window is None:
                continue
            recent, sink = window
            gone = np.ones(length, bool)
            for _, begin, end, position, _ in self.request.entries(group).tolist():
                gone[position : position + end - begin] = False
            lost = np.concatenate(([0], np.cumsum(gone)))
            near = lost[at + 1] == lost[np.maximum(at + 1 - recent, 0)]
            whole &= near & (lost[np.minimum(at + 1, sink)] == 0)
        return whole

    def reach(self, layer: int) -> Reach | None:
        """What the heads of a layer read; None when they read all, or all the same."""
        reaches = self.heads.reaches(self.request)
        return None if reaches is None else reaches[layer]

    def layer_heads(self, layer: int) -> LayerHeads:
        """What the heads of a layer see, and which of them lie in a window group."""
        return self.heads.of_layer(self.request, layer)

    def paged(self, layer: int) -> ops.PagedKv:
        """A layer's KV as rows of the request read it."""
        spec, reach = self.spec.layers[layer], self.reach(layer)
        return ops.PagedKv(
            self.pages,
            layer,
            self.spec.kv_heads,
            spec.scale,
            self.positions.rope,
            spec.window if reach is None else None,
            spec.softcap,
            reach,
        )

    def whole_reach(self, layer: int) -> Reach | None:
        """What the heads of a layer could read of what is kept; None as for `reach`."""
        return self.heads.whole(self.request, layer)

    def look(self, layer: int) -> LayerLook:
        """A layer as probes see it, brought together where some of it lies in host memory.

        # Errors
        `TransferFailed` where that cannot be had.
        """
        if not self.is_spilled:
            return LayerLook(self.pages, self.paged(layer), self.table, self.request.entries)
        if self._whole is None:
            parts = [self.request.entries(table) for table in range(self.request.tables)]
            lengths = np.asarray([list(map(len, parts))])
            self._whole = WholeLayers(self.heads, self.pages, np.concatenate(parts), lengths)
        whole = self._whole.layer(self.heads.prompt_rows(self.request, layer))
        for error in self._whole.failed.values():
            raise error
        paged = replace(self.paged(layer), cache=whole.pages, window=None, reach=whole.reach)
        return LayerLook(whole.pages, paged, KvTable(whole.entries, whole.offsets), whole.table)

    @property
    def keeps_drafts(self) -> bool:
        """Whether all that the tokens of a draft see is kept until its last."""
        return self.heads.uniform

    def drafted(self, tokens: int) -> tuple[KvRequest, PackedPrefix | None]:
        """A fork of the request to draft so many tokens in, and what it reads packed."""
        return self.request.fork(), None

    def attend(self, layer: int, q: torch.Tensor, rows: RowTable) -> States:
        """Attention and lse of rows q [R, H, D] over all KV up to their positions."""
        if self.is_gathered(len(rows.rows)):
            try:
                return self.gathered.attend(layer, q, rows, self.paged(layer))
            except OutOfMemory:
                # What is packed has to be unpacked, exact pages may be read where they lie.
                if self.packed is not None:
                    raise
        exact = ops.attend_prefill(
            q,
            rows.positions,
            self.table.entries,
            self.paged(layer),
            row_offsets=rows.offsets,
            entry_offsets=self.table.offsets,
        )
        return self.with_packed(layer, q, rows.positions, exact)

    def with_packed(
        self, layer: int, q: torch.Tensor, positions: ops.Table, exact: States
    ) -> States:
        """Attention and lse of rows q [R, H, D] over all; `exact` is that over exact pages."""
        if self.packed is None:
            return exact
        if self._gap_end is None:
            self._gap_end = self.packed.end_of_gap(self.request)
        of, rope = self.spec.layers[layer], self.positions.rope
        return self.packed.merged(layer, of, rope, (q, positions), self._gap_end, exact)

    def take_queries(self, layer: int, q: torch.Tensor, rows: Rows) -> None:
        """Takes note of the queries [R, H, D] of a prompt's rows where pages are packed by them."""
        if self.packed is not None:
            self.packed.take_queries(layer, q, rows)

    def is_gathered(self, rows: int) -> bool:
        """Whether so many rows read a layer whose tokens have been brought together."""
        if not self.heads.uniform or self.packed is not None or self.is_spilled:
            return False
        return is_worth_gathering(self.table, rows, self.spec.device)

    def gathering(self, first: int, end: int) -> GatheredTokens:
        """How the tokens [first, end) of any layer are brought together."""
        places = places_of(self.request.entries(), end)[first:]
        return GatheredTokens.of(self.pages, self.spec.kv_heads, first, places)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, table: RowTable) -> None:
        """Writes K, V [R, G, D] of a layer's rows."""
        self.gathered.written()
        ops.write_pages(self.pages, layer, k, v, table.slots, reach=self.reach(layer))
        if self.packed is not None:
            self.packed.written(self.request, layer, table)
