"""`Tiers`: the documents of a runner beyond its device, in the host's memory and in stores.

A document that is frozen is copied to all: to the host's memory at once, to the stores behind its
caller. So when its blocks leave the device nothing is to be done, and nobody waits for it. A prompt
that marks it finds it there again, where bringing it takes less time than computing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from kvweave.cache import KvRequest
from kvweave.errors import CorruptShard, ForeignShard, KvweaveError, PoolFull
from kvweave.payload.transfer import ComingKv
from kvweave.runner.clock import Clock
from kvweave.runner.prompt import TokenizedPrompt
from kvweave.runner.tiers.arrivals import Arrivals, Coming
from kvweave.runner.tiers.brought import Brought, Carried
from kvweave.runner.tiers.choice import Choice, Tier, choose
from kvweave.runner.tiers.disk_tier import DiskTier
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import DocumentForm
from kvweave.runner.tiers.expected import Expected
from kvweave.runner.tiers.host_documents import HostDocuments
from kvweave.runner.tiers.host_tier import FetchedKv, HostTier
from kvweave.runner.tiers.keeping import Keeping
from kvweave.runner.tiers.loads import NEEDED, PREFETCHED, Wanted
from kvweave.runner.tiers.measured import Measured
from kvweave.runner.tiers.reads import Reads
from kvweave.runner.tiers.remote_tier import RemoteTier
from kvweave.runner.tiers.trouble import Trouble
from kvweave.runner.tiers.writes import Writes

FLIGHT_BYTES = 1 << 30
PATIENCE_S = 10.0


class Tiers:
    """A host tier, a store, a remote store, or several, beside the pages of a cache.

    Documents have a form there.

    At most `flight_bytes` are read from a store and not on the device yet, or the documents of one
    prompt where these are more; as many wait to be written, or one document. `patience_s`: a prompt
    waits so long for its reads once its turn has come, and is computed then.

    `expect` is for any thread; what brings or keeps is for the one that computes.
    """

    def __init__(
        self,
        form: DocumentForm,
        clock: Clock,
        host: HostTier | HostDocuments | None,
        disk: DiskTier | None,
        remote: RemoteTier | None = None,
        *,
        flight_bytes: int = FLIGHT_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.host = host
        self.disk = disk
        self.remote = remote
        self.measured = Measured()
        self.patience_s = patience_s
        # Whether a prompt's prefill may begin while KV of its documents is still read.
        self.overlaps = True
        self._form, self._cache = form, form.cache
        self._clock = clock
        self._closed = False
        self._trouble = Trouble()
        stores = [tier for tier in (disk, remote) if tier is not None]
        self.reads = {tier.source: Reads(tier, flight_bytes, self._trouble) for tier in stores}
        self._keeping = None if disk is None else Keeping(disk, flight_bytes, self._trouble)
        # Whoever freezes a document does not wait for another machine.
        how = (flight_bytes, self._trouble)
        self._sending = None if remote is None else Writes(remote, *how, patient=False)
        sources = ("device", "host", *self.reads, "computed", "not on host")
        self._counts = dict.fromkeys(sources, 0)

    # ---- what a prompt takes --------------------------------------------------------------

    def expect(
        self,
        prompt: TokenizedPrompt,
        namespace: str,
        regime: int,
        *,
        urgency: tuple[int, int] = (PREFETCHED, 0),
    ) -> Expected:
        """Decides where a prompt's documents come from, and begins to read. From any thread."""
        prefix = self._cache.match_prefix(prompt.tokens, namespace, regime=regime)
        wanted = []
        beside = self._beside(prompt, prefix)
        for start, end, whose in prompt.segments:
            document = Document(prompt.tokens[start:end], whose, regime)
            choice = self._choice(document, start, self._is_here(document, end, prefix), beside)
            wanted.append(Wanted(start, end, document, choice))
        return self._expected(wanted, urgency)

    def _expected(self, wanted: list[Wanted], urgency: tuple[int, int]) -> Expected:
        """Has the stores' documents of a prompt read."""
        loads = [reads.load(wanted, self._size, urgency) for reads in self.reads.values()]
        return Expected(wanted, [load for load in loads if load is not None], self.patience_s)

    def bring(
        self, expected: Expected, prompt: TokenizedPrompt, namespace: str, *, arrives: bool = False
    ) -> Brought:
        """Waits for what is expected, and brings it to the device.

        What cannot be had, or finds no room, is left to be computed. `arrives`: the prompt is
        prefilled at once, so what is read layer by layer need only be begun.
        """
        arrives = arrives and self.overlaps
        with self._bringing(expected, arrives) as brought:
            here, absent = [], []
            prefix = self._prefix(expected.wanted, prompt, namespace)
            for want in expected.wanted:
                if self._is_here(want.document, want.end, prefix):
                    want.take_here()
                    here.append(want)
                else:
                    absent.append(want)
            for want in here if absent else ():
                self._hold(want.document, brought)
            for want in absent:
                # The same text may stand in a prompt twice.
                if want.document.is_in(self._cache):
                    want.take_here()
                else:
                    self._bring(want, brought)
            if brought.arrivals is not None and not brought.arrivals.coming:
                brought.arrivals = None
        coming = [] if brought.arrivals is None else brought.arrivals.coming
        for want in expected.wanted:
            # What is on its way may be refused meanwhile; whoever then begins anew counts it so.
            tier = next((one.tier for one in coming if one.want is want), None)
            self._counts[tier or want.choice.source] += 1
        self.tell()
        return brought

    def _prefix(self, wanted: list[Wanted], prompt: TokenizedPrompt, namespace: str) -> int:
        """Tokens of a prompt's beginning that are on the device. Its documents share a regime."""
        if not wanted:
            return 0
        return self._cache.match_prefix(prompt.tokens, namespace, regime=wanted[0].document.regime)

    def _arrivals(self, expected: Expected) -> Arrivals:
        return Arrivals(expected, self._cache.shape.layers, self._clock)

    def finish(self, brought: Brought) -> None:
        """Takes note of a prompt's documents of which all has come, and lets them go."""
        arrivals, brought.arrivals = brought.arrivals, None
        if arrivals is None:
            return
        try:
            for one in arrivals.coming:
                self._came(one, brought)
        finally:
            arrivals.release()

    def _came(self, one: Coming, brought: Brought) -> None:
        kv, document = one.kv, one.want.document
        begin, end = (kv.begin, kv.end) if isinstance(kv, FetchedKv) else (None, None)
        size = self._size(document)
        brought.carried.append(Carried(one.tier, size, begin, end, one.want.seconds, beside=True))
        one.want.drop()
        self.copy_to_host(kv.request, document.regime)

    def bring_again(self, brought: Brought) -> Brought:
        """What there is of a prompt's documents once some have not come; the others are computed.

        The prompt holds nothing any more.
        """
        arrivals = brought.arrivals
        assert arrivals is not None
        lost = arrivals.bring_rest()
        if any(one.want.choice.source != "computed" for one in lost):
            for reads in self.reads.values():
                reads.note_late([one.want for one in lost], self.patience_s)
        for one in lost:
            self._counts[one.tier] -= 1
            self._counts["computed"] += 1
        again = Brought(brought.wanted, waited_s=brought.waited_s, measured=self.measured)
        again.carried = brought.carried
        try:
            for want in again.wanted:
                if want.document.is_in(self._cache):
                    self._hold(want.document, again)
                elif want.choice.source != "computed":
                    want.compute("it has just left the device")
            arrivals.coming = [one for one in arrivals.coming if one not in lost]
            self.finish(brought)
        except BaseException:
            again.release()
            brought.give_up()
            raise
        self.tell()
        return again

    @contextmanager
    def _bringing(self, expected: Expected, arrives: bool = False) -> Iterator[Brought]:
        """Waits for what is expected; what has been brought of it is let go after an error."""
        waited_s = expected.wait(begun=arrives)
        arrivals = self._arrivals(expected) if arrives else None
        brought = Brought(
            expected.wanted, waited_s=waited_s, measured=self.measured, arrivals=arrivals
        )
        if expected.is_late:
            for reads in self.reads.values():
                reads.note_late(expected.wanted, self.patience_s)
        try:
            yield brought
        except BaseException:
            brought.give_up()
            raise
        finally:
            if brought.arrivals is None:
                expected.release()

    def end_step(self) -> None:
        """Hears that a step of an engine has ended, which could take what was read for prompts."""
        for reads in self.reads.values():
            reads.end_step()

    def document(self, document: Document) -> Brought:
        """A document that shall be frozen, brought from the host or the store if one has it."""
        choice = self._choice(document, 0, here=False)
        want = Wanted(0, document.length, document, choice)
        expected = self._expected([want], (NEEDED, 0))
        with self._bringing(expected) as brought:
            self._bring(want, brought)
        self.tell()
        return brought

    def _bring(self, want: Wanted, brought: Brought) -> None:
        """Brings one document to the device, or says why not."""
        document, source = want.document, want.choice.source
        if source == "device":
            # It has left since it was looked for; what is nearest is the host.
            source = "host" if self.host is not None and self.host.has(document) else "computed"
            want.choice = Choice(source, "it has just left the device")
        if source == "computed":
            return
        if source in self.reads and want.payload is None and want.arriving is None:
            if want.choice.source != "computed":
                want.compute("the store did not give it")
            return
        try:
            request = self._carried(want, source, brought)
        except PoolFull:
            want.compute("there was no room for it on the device")
        except KvweaveError as error:
            self._trouble.note("refused", f"a document is computed: it is refused: {error}")
            want.compute(f"it is refused: {error}")
        else:
            if request is None:
                want.compute("it has just left the host")

    def _hold(self, document: Document, brought: Brought) -> None:
        """Keeps a document that is on the device from being evicted for others of its prompt."""
        with suppress(PoolFull):
            request = self._cache.admit(
                document.tokens,
                namespace=document.namespace,
                regime=document.regime,
                reuse="prefix",
            )
            self._form.hold(request)
            brought.requests.append(request)

    def _carried(self, want: Wanted, tier: Tier, brought: Brought) -> KvRequest | None:
        """A request that has a document alone, its KV being brought; None if it is not there."""
        document, payload, begin = want.document, want.payload, self._clock.mark()
        arriving = want.arriving
        if payload is None and arriving is not None and brought.arrivals is not None:
            kv = ComingKv(self._cache, self._form.arena, arriving.payload, document.namespace)
            brought.arrivals.coming.append(Coming(want, tier, kv))
            kv.commit()
            return kv.request
        if payload is None:
            request = self._from_host(want, brought.arrivals)
        else:
            request = self._form.admit(payload, document.namespace)
        if request is None or brought.is_coming(request):
            return request
        brought.requests.append(request)
        carried = Carried(tier, self._size(document), begin, self._clock.mark(), want.seconds)
        brought.carried.append(carried)
        if payload is not None:
            want.drop()
            self.copy_to_host(request, document.regime)
            if tier == "remote" and self._keeping is not None:
                # Nearer from now on; without a name it goes where the disk wants room.
                self._keeping.write(payload, None)
        return request

    def _from_host(self, want: Wanted, arrivals: Arrivals | None) -> KvRequest | None:
        """A document from the host's memory; of a GPU that reads it there it may be on its way."""
        assert self.host is not None
        document, host = want.document, self.host
        if arrivals is None or not isinstance(host, HostTier) or not host.pinned:
            return host.admit(document)
        request = self._cache.admit(
            document.tokens, namespace=document.namespace, regime=document.regime, reuse="none"
        )
        try:
            fetched = host.fetch_aside(document, request)
            if fetched is None:
                request.release()
                return None
            arrivals.coming.append(Coming(want, "host", fetched))
            request.commit(document.length, document.length)
        except BaseException:
            request.release()
            raise
        return request

    # ---- what is kept ---------------------------------------------------------------------

    def keep(self, request: KvRequest, regime: int, name: str) -> None:
        """Copies a document that a request has alone to the host, and has it kept in the store."""
        self.copy_to_host(request, regime)
        writes = [each for each in (self._keeping, self._sending) if each is not None]
        if writes:
            payload = self._form.export(request).on_host()
            for each in writes:
                each.write(payload, name)
        self.tell()

    def forget(self, name: str, namespace: str) -> None:
        """Has a document's name taken out of the store."""
        if self._keeping is not None:
            self._keeping.forget(name, namespace)

    def name(self, document: Document, request: KvRequest, name: str) -> None:
        """As `keep`, of a document that came from a tier: what the store has is only named."""
        if self.disk is None:
            return
        try:
            there = self.disk.has(document)
        except KvweaveError:
            there = False
        if there and self._keeping is not None:
            self._keeping.name(document, name)
        else:
            self.keep(request, document.regime, name)

    def copy_to_host(self, request: KvRequest, regime: int) -> None:
        """Copies a document that a request has alone to the host, if there is room for it."""
        if self.host is None:
            return
        document = Document(request.tokens, request.namespace, regime)
        if not self.host.keep(document, request):
            self._counts["not on host"] += 1

    # ---- all of it ------------------------------------------------------------------------

    def tell(self) -> None:
        """Warns the caller of what went wrong meanwhile, the first time that it does."""
        self._trouble.tell()

    def flush(self) -> None:
        """Returns when every document that was frozen survives this process.

        # Errors
        What a store raised for the first since the last call that does not: `StoreFull`,
        `QuotaExceeded`, `StoreUnavailable`. The store on disk is waited for first.
        """
        try:
            for writes in (self._keeping, self._sending):
                if writes is not None:
                    writes.flush()
        finally:
            self.tell()

    def close(self, most_s: float | None = None) -> None:
        """Waits for what is being written, so long at most, and ends the threads.

        A read that goes on is left alone. Safe to call twice.
        """
        self._closed = True
        for reads in self.reads.values():
            reads.close()
        for writes in (self._keeping, self._sending):
            if writes is not None:
                writes.close(most_s)
        self.tell()

    def set_quota(self, namespace: str = "", *, bytes: int | None = None) -> None:
        """Bytes of host memory and of the store that a namespace may keep; None: no quota any more.

        # Errors
        `InvalidArgument` for a name or a number that cannot be.
        """
        if self.host is not None:
            self.host.cache.set_quota(namespace, bytes=bytes)
        if self.disk is not None:
            self.disk.store.set_quota(namespace, bytes=bytes)

    def stats(self) -> dict[str, Any]:
        """Documents of prompts by where they came from, bytes in flight, speeds, and troubles."""
        speeds = self.measured.speeds
        return {
            "documents": dict(self._counts),
            "reading_bytes": sum(reads.flight.used for reads in self.reads.values()),
            **({} if self._keeping is None else self._keeping.stats()),
            "speeds": asdict(speeds),
            "remote": self._remote_stats(),
            "troubles": self._trouble.counts,
            "host": None if self.host is None else self.host.stats(),
        }

    def _remote_stats(self) -> dict[str, Any] | None:
        if self.remote is None or self._sending is None:
            return None
        reading = self.reads["remote"].flight.used
        resting = self.remote.is_resting
        return {**self._sending.stats(), "reading_bytes": reading, "resting": resting}

    def _is_here(self, document: Document, end: int, prefix: int) -> bool:
        """Whether a document, or the prompt up to its end, is on the device."""
        return prefix >= end or document.is_in(self._cache)

    def _beside(self, prompt: TokenizedPrompt, prefix: int) -> int:
        """FLOPs of a prompt's rows behind its cached prefix that are of no document.

        The last row is always computed, of which the logits are.
        """
        total = len(prompt.tokens)
        ranges = [(max(start, prefix), max(end, prefix)) for start, end, _ in prompt.segments]
        marked = sum(self._form.flops(start, end) for start, end in ranges)
        last = self._form.flops(total - 1, total)
        return max(self._form.flops(min(prefix, total), total) - marked, last)

    def _choice(self, document: Document, start: int, here: bool, beside: int = 0) -> Choice:
        if here:
            return Choice("device", "it is on the device")
        there: list[Tier] = []
        if self.host is not None and self.host.has(document):
            there.append("host")
        for tier, reads in self.reads.items():
            if not self._closed and reads.may_be_asked(self.patience_s):
                there.append(tier)
        if "disk" in there and "remote" in there:
            # What one document is read from is decided before, so that no tier waits for another.
            there.remove("remote" if self._is_on_disk(document) else "disk")
        if not there:
            return Choice("computed", "no tier has it")
        flops = self._form.flops(start, start + document.length)
        size = self._size(document)
        choice = choose(there, size, flops, self.measured.speeds_for(size, flops, beside))
        if choice.source == "computed":
            for tier in there:
                self.measured.decline(tier, size)
        return choice

    def _is_on_disk(self, document: Document) -> bool:
        """Whether the disk says that it has a document; what is wrong with it there is noted."""
        assert self.disk is not None
        try:
            return self.disk.has(document)
        except (CorruptShard, ForeignShard) as error:
            self._trouble.note("refused", f"the store's document is refused: {error}")
        except KvweaveError as error:
            self._trouble.note("unread", f"the store cannot be read: {error}")
        return False

    def _size(self, document: Document) -> int:
        """Bytes of a document's KV: every token in every head."""
        return document.length * self._form.token_bytes
