"""Text packed twice: at once in the basis that there is, and finally in one of its own.

A text's basis is known when all of it is, and by then most of its exact pages are gone. So each
page is packed at once, and copied to the host by a thread, for which a prefill only waits where its
next chunk is done first. A second thread sums up moments as copies come, chooses the basis of every
layer, head and side, and packs the text anew; whoever computes puts those bytes in the place of the
others between two calls (MosaicKV, sections 5.4 and 5.5, whose double buffer this is). Whatever
fails, the first packing stays. With a strategy the thread chooses formats too, and the text lies
beside the pool from then on. Documents are such texts, and so are segments of what requests say.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.errors import InvalidArgument
from kvweave.packed_page import PAGE_TOKENS
from kvweave.plan import Rows
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.exact_firsts import add_without_first
from kvweave.runner.kv.packed_pool import PackedPool, by_themselves
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.pool_bases import OWN_SHARE, basis_bytes, needs_steps
from kvweave.runner.kv.tables import Int32
from kvweave.runner.one_thread import OneThread
from kvweave.runner.report import PackingReport
from kvweave.runner.tiers.chosen_formats import ChosenFormats
from kvweave.runner.tiers.copy_memory import CopyMemory
from kvweave.runner.tiers.packed_losses import (
    Part,
    most_lost,
    part_losses,
    relative,
    sampled,
    text_losses,
)
from kvweave.runner.tiers.staging import Staging
from kvweave.runner.tiers.strategies import Strategies, has_own_basis, shared_basis
from kvweave.runner.worker import Job, Worker

NO_ROOM = "no room for its copy on the host"

Queries = list[tuple[torch.Tensor, int, int]]
"""Queries on the host, as `Moments.add_queries` takes them."""


class FinalPacking:
    """Has texts of a runner packed finally, behind whoever inserts or computes them.

    Everything but the thread's own work is for whoever is `computing`.
    """

    def __init__(self, pool: PackedPool, computing: OneThread) -> None:
        self.pool, self.computing = pool, computing
        self.strategies = None if pool.final is None else Strategies(pool, pool.final)
        self.worker = Worker("kvweave packing", stands_back=True)
        self.copier = Worker("kvweave copying")
        self.aside = Aside(pool.device)
        self.staging = Staging(self.aside)
        on_gpu = pool.device.type == "cuda"
        # A part has a page more than it is reckoned with, and whole pieces of memory.
        self.copies = CopyMemory(pool.packing.copy_bytes // 8 * 9 if on_gpu else 0, pool.device)
        # What follows is read and written by whoever has the worker's `changed`.
        self._copied = 0
        self._check_segments()
        self._ended = {"final": 0, "kept": 0, "failed": 0}

    def _check_segments(self) -> None:
        """Refuses segments that are too short for bases of their own."""
        tokens, of = self.pool.packing.segment_tokens, self.pool.pages.format
        if tokens is None or self.strategies is not None:
            return
        if not has_own_basis(self.pool, of, tokens // PAGE_TOKENS):
            least = OWN_SHARE * basis_bytes(of, self.pool.block_pages) // self.pool.block_bytes
            raise InvalidArgument(
                f"segment_tokens: expected at least {PAGE_TOKENS * (least + 1)} beside kv_dtype="
                f"{self.pool.packing.named} for this model, so that a basis takes an eighth of a "
                f"segment's bytes at most, got {tokens}"
            )

    def begin(self, tokens: Rows, namespace: str, regime: int) -> TextCopy:
        """What keeps the exact pages of a document from now on, if it is to have its own basis."""
        count = len(tokens)
        blocks = -(-count // PAGE_TOKENS)
        report = self.report_of(count)
        size = blocks * self.block_bytes
        if self.strategies is None and not has_own_basis(self.pool, self.pool.pages.format, blocks):
            report.why = "too short for a basis of its own"
        elif self._was_packed(tokens, namespace, regime):
            report.why = "packed before"
        elif not self.reserve(size):
            report.why = NO_ROOM
        else:
            return TextCopy(self, report, size)
        return TextCopy(self, report, 0)

    def report_of(self, tokens: int) -> PackingReport:
        """What is said of a text of so many tokens at first."""
        return PackingReport(tokens, str(self.pool.packing.format))

    @property
    def block_bytes(self) -> int:
        """Bytes of the exact pages of a block."""
        return PAGE_TOKENS * self.pool.token_bytes * self.pool.cache.shape.layers

    def _was_packed(self, tokens: Rows, namespace: str, regime: int) -> bool:
        """Whether all whole pages of a text are there."""
        found = self.pool.cache.match_prefix(tokens, namespace, regime=regime)
        return found >= max(1, len(tokens) - PAGE_TOKENS)

    def reserve(self, size: int) -> bool:
        """Takes so many bytes more for copies, where they are within bounds."""
        with self.worker.changed:
            if self._copied + size > self.pool.packing.copy_bytes:
                return False
            self._copied += size
            return True

    def ended(self, size: int, how: str) -> None:
        """Gives back the room of a copy; `how` it ended is counted."""
        with self.worker.changed:
            self._copied -= size
            self._ended[how] += 1

    def stats(self) -> dict[str, int]:
        """How texts ended that were copied, and bytes of the copies that there are.

        With a strategy also `final_bytes` and `over_bound` of `PackedPool.stats`.
        """
        with self.worker.changed:
            known = {**self._ended, "copied_bytes": self._copied}
        if self.pool.final is not None:
            some = self.pool.stats()
            known |= {name: some[name] for name in ("final_bytes", "over_bound")}
        return known

    def flush(self) -> None:
        """Returns when every text that was copied is packed finally, or stays as it is."""
        self.copier.wait()
        self.worker.wait()

    def close(self, most_s: float | None = None) -> None:
        """Ends the threads after the jobs at hand; what was not packed finally stays as it is."""
        self.copier.close(finish=False, most_s=most_s)
        self.worker.close(finish=False, most_s=most_s)
        self.copies.close()
        self.staging.close()


class TextCopy:
    """The exact pages of one text while it is computed, and what becomes of them.

    `size`: bytes reserved for it; one of `size` 0 keeps nothing, and its `report` says why.
    """

    def __init__(self, of: FinalPacking, report: PackingReport, size: int) -> None:
        self.of, self.report, self.size = of, report, size
        self.parts: list[Part] = []
        # Queries that nobody has told the moments of yet, as these take them.
        self.queries: Queries = []
        pages, form = of.pool.block_pages, of.pool.pages.format
        self.moments = ops.Moments(form if of.strategies is None else of.strategies.widest, pages)
        # Σ |x − x̂|² and Σ |x|² of keys and values by page, as they are packed first.
        self.lost, self.whole = torch.zeros(2, pages, 2, dtype=torch.float64)
        self.failed: BaseException | None = None
        report.waiting = size > 0
        # Once all of it is there: who holds its blocks, these, whether it is a document, and who is
        # told when they stay as they are.
        self._held: KvRequest | None = None
        self._blocks: Int32 = np.zeros(0, np.int32)
        self._named = False
        self._then: Callable[[KvRequest], None] = lambda _: None

    def add(self, exact: torch.Tensor, packs: Int32, left_out: int) -> None:
        """Copies exact pages that have been packed."""
        if self.size:
            # Beside the pages that come a device has room for none that are to be copied yet.
            self.of.copier.wait()
            part = Part(*by_themselves(exact, packs, self.of.pool.block_pages), left_out)
            first = shared_basis(self.of.pool)
            self.of.copier.submit(_Fetch(self, part, first, self.queries))
            self.queries = []

    def take(self, part: Part, basis: torch.Tensor | None, queries: Queries) -> None:
        """Has a copy measured that lies on the host; in the thread that made it."""
        if self.size:
            self.parts.append(part)
            # The copy alone has its parts: whoever ends it gives their memory back, whatever waits.
            self.of.worker.submit(_Measure(self, len(self.parts) - 1, basis, queries))

    def part(self, number: int) -> Part | None:
        """One of the parts that lie on the host; None where the copy has ended."""
        parts = self.parts
        return parts[number] if self.size and number < len(parts) else None

    def fail(self, error: BaseException | None) -> None:
        """Takes note of the first thing that has gone wrong with it, if anything has."""
        if error is not None and self.failed is None:
            # Its frames would keep what they were at.
            self.failed = error.with_traceback(None)

    def add_queries(self, q: torch.Tensor, first: int, kv_heads: int) -> None:
        """Takes note of queries of the text's own rows."""
        if not self.report.why:
            self.queries.append((q, first, kv_heads))

    def grow(self, size: int) -> bool:
        """Makes room for more of it; where there is none the first packing stays."""
        if self.of.reserve(size):
            self.size += size
            self.report.waiting = True
            return True
        self.end(NO_ROOM)
        return False

    def finish(self, packed: PackedPrefix, name: str, then: Callable[[KvRequest], None]) -> None:
        """Has it packed finally, now that it is frozen under a name, and then told of to `then`.

        Where it is not to be packed once more that is at once. Its blocks are held until then.
        """
        if self.of.pool.documents is not None:
            self.of.pool.documents.named(packed.request, name)
        if not self.size:
            then(packed.request)
            return
        held = packed.request.fork()
        self._named, self._then = True, then
        self.finish_blocks(held, held.entries()[:, 0])

    def finish_blocks(self, held: KvRequest, blocks: Int32) -> None:
        """The same of the last blocks of a request, which is released then."""
        self._held, self._blocks = held, blocks
        again = _Repack(self, shared_basis(self.of.pool))
        self.of.copier.submit(_Behind(self.of.worker, again))

    def drop(self) -> None:
        """Forgets it where not all of it is there."""
        if self.size and self._held is None:
            self._end("failed")

    def end(self, why: str, how: str = "kept") -> None:
        """The first packing stays, and why; done while nobody computes."""
        self.report.why = why
        self._end(how)

    def _end(self, how: str) -> None:
        self.parts, self.queries = [], []
        self.report.waiting = False
        self.of.ended(self.size, how)
        self.size, held = 0, self._held
        if held is not None:
            with held:
                self._then(held)

    def switch(self, made: Made) -> None:
        """Puts the final packing in the place of the first; done while nobody computes."""
        pool, bases = self.of.pool, self.of.pool.bases
        assert bases is not None
        number = bases.free()
        if number is None:
            self.end("no room for one more basis")
            return
        blocks = self._blocks
        index = blocks[:, None].astype(np.int64) + np.arange(pool.block_pages)
        try:
            at = torch.from_numpy(index.reshape(-1)).to(pool.device)
            data = made.data.to(pool.device)
            bases.write(number, made.basis)
        except RuntimeError as error:
            self.end(f"failed: {error}", "failed")
            return
        pool.pages.data[at] = data
        bases.assign(blocks, number)
        report = self.report
        report.basis, report.basis_bytes = "own", bases.basis_bytes
        report.lost, report.chosen = made.lost, made.chosen
        self._end("final")

    def place(self, made: ChosenFormats) -> None:
        """Puts a text packed by a strategy in the place of the first; as `switch`."""
        strategies = self.of.strategies
        assert strategies is not None
        assert self._held is not None
        lost = most_lost(self.lost, self.whole)
        try:
            why = strategies.place(self._held, self._blocks, made, lost, named=self._named)
        except RuntimeError as error:
            self.end(f"failed: {error}", "failed")
            return
        if why:
            self.end(why)
            return
        report = self.report
        report.basis = "shared" if made.chosen.keys() <= {"shared", "axes"} else "own"
        report.formats, report.bytes, report.basis_bytes = (
            made.formats,
            made.nbytes,
            made.basis_bytes,
        )
        report.lost, report.chosen = made.lost, made.chosen
        report.most_lost, report.over_bound = made.most_lost, made.over_bound
        self._end("final")


class Made:
    """A text packed anew: its bytes, the basis, and what the first packing lost and this one does.

    `chosen`: of each layer, KV head and side the basis that loses least, counted by name.
    """

    def __init__(self, copy: TextCopy, shared: torch.Tensor) -> None:
        of = copy.of
        self._form, self._pages = of.pool.pages.format, of.pool.block_pages
        candidates = {
            "own": torch.from_numpy(copy.moments.basis()),
            "own, not centred": torch.from_numpy(copy.moments.basis(centred=False)),
            "shared": shared,
        }
        best = self._best(copy.moments, candidates, sampled(copy.parts, copy.report.tokens))
        counts = torch.bincount(best.reshape(-1), minlength=len(candidates)).tolist()
        self.chosen = dict(zip(candidates, counts, strict=True))
        stacked = torch.stack(list(candidates.values()))
        index = best[None, :, :, None, None].expand(1, *stacked.shape[1:])
        self.basis = stacked.gather(0, index)[0].contiguous()
        blocks = sum(len(part.packs) for part in copy.parts)
        data = torch.empty(blocks, self._pages, self._form.page_bytes, dtype=torch.uint8)
        known = self._form, self._pages, self.basis, copy.parts
        self.lost = relative(*text_losses(*known, packed=data))
        self.data = data.flatten(0, 1)

    def _best(
        self, moments: ops.Moments, candidates: dict[str, torch.Tensor], parts: list[Part]
    ) -> torch.Tensor:
        """Of each page's keys and values the number of the basis that loses least, [pages, 2].

        In planes they share out their bits, so both have the same basis: that by which the output
        of attention moves least, as `Moments.basis` shares them out. An error e of a key moves it
        by E[(q·e)²] / D times the spread of values, one of a value by its own square.
        """
        metric = moments.metric
        roots = None
        if metric is not None:
            roots = torch.linalg.cholesky(torch.from_numpy(metric)).contiguous()
        known = self._form, self._pages
        sums = [text_losses(*known, basis, parts, roots=roots) for basis in candidates.values()]
        losses, whole = torch.stack([lost for lost, _ in sums]), sums[0][1]
        if needs_steps(self._form):
            weights = 1 / whole.clamp_min(torch.finfo(whole.dtype).tiny)
            if roots is not None:
                count = sum(part.tokens for part in parts)
                mean = candidates["own"][:, 1, 0].double()
                spread = (whole[:, 1] / count - mean.square().sum(-1)).clamp_min(0.0)
                weights = torch.stack((spread / mean.shape[-1], torch.ones_like(spread)), 1)
            losses = (losses * weights).sum(-1, keepdim=True).expand_as(losses)
        # Where all are NaN, of pages with a number that is, the first is as good as any.
        return losses.nan_to_num(nan=torch.inf).argmin(0)


class _Fetch(Job):
    """Copies some pages to the host, behind all that the current stream was asked to do by now."""

    def __init__(
        self, copy: TextCopy, part: Part, basis: torch.Tensor | None, queries: Queries
    ) -> None:
        self._copy, self._pages = copy, [part.cache]
        self._packs, self._left_out = part.packs, part.left_out
        self._basis, self._queries = basis, queries
        copy.of.aside.follow()

    def run(self) -> None:
        of, pages = self._copy.of, self._pages.pop()
        if self._copy.size:
            part = Part(of.copies.on_host(pages, of.aside), self._packs, self._left_out)
            self._copy.take(part, self._basis, self._queries)

    def end(self, error: BaseException | None) -> None:
        self._pages.clear()
        self._copy.fail(error)


class _Behind(Job):
    """Leaves a job to a worker, behind all that was asked for before."""

    def __init__(self, worker: Worker, job: Job) -> None:
        self._worker, self._job = worker, job

    def run(self) -> None:
        self._worker.submit(self._job)

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self._job.end(error)


class _Measure(Job):
    """Takes note of some pages: their moments, and what the first packing loses of them."""

    def __init__(
        self,
        copy: TextCopy,
        number: int,
        basis: torch.Tensor | None,
        queries: Queries,
    ) -> None:
        self._copy, self._number, self._basis, self._queries = copy, number, basis, queries

    def run(self) -> None:
        copy, pool = self._copy, self._copy.of.pool
        part = copy.part(self._number)
        if part is None:
            return
        known = part.cache, part.packs, pool.block_pages, part.left_out
        add_without_first(copy.moments, *known)
        for q, first, kv_heads in self._queries:
            copy.moments.add_queries(q, first=first, kv_heads=kv_heads)
        lost = part_losses(pool.pages.format, pool.block_pages, self._basis, part)
        # Not in place: a segment begins within inference mode, which this thread is not in.
        copy.lost = copy.lost + lost[0]
        copy.whole = copy.whole + lost[1]
        copy.report.lost_first = relative(copy.lost, copy.whole)

    def end(self, error: BaseException | None) -> None:
        self._copy.fail(error)


class _Repack(Job):
    """Packs a whole text anew, and leaves the switch to whoever computes.

    `shared`: the basis on the host that it may have with other text.
    """

    def __init__(self, copy: TextCopy, shared: torch.Tensor | None) -> None:
        self._copy, self._shared = copy, shared
        self._made: Made | ChosenFormats | None = None

    def run(self) -> None:
        if self._copy.failed is not None:
            raise self._copy.failed
        copy, strategies = self._copy, self._copy.of.strategies
        if strategies is not None:
            known = copy.parts, copy.report.tokens, copy.moments, self._shared
            made = strategies.chosen(*known)
            made.made = [each.sent(copy.of.staging.sent) for each in made.made]
            self._made = made
            return
        assert self._shared is not None
        packed, send = Made(copy, self._shared), copy.of.staging.sent
        packed.data, packed.basis = send(packed.data), send(packed.basis)
        self._made = packed

    def end(self, error: BaseException | None) -> None:
        self._copy.of.computing.soon(lambda: self._ended(error))

    def _ended(self, error: BaseException | None) -> None:
        # This thread need not be the one that computes, whose stream may be another.
        device = self._copy.of.pool.device
        _settle(device)
        self._decide(error)
        _settle(device)

    def _decide(self, error: BaseException | None) -> None:
        copy, made = self._copy, self._made
        if error is not None or made is None:
            copy.end(f"failed: {error}", "failed")
        elif isinstance(made, ChosenFormats):
            copy.place(made)
        elif {name for name, count in made.chosen.items() if count} == {"shared"}:
            copy.end("no basis of its own loses less than the shared one")
        else:
            copy.switch(made)


def _settle(device: torch.device) -> None:
    """Waits for all that a device was asked to do, by whichever stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
