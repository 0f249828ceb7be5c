"""`Keeping`: documents on their way into a store, behind those who made them."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.runner.tiers.disk_tier import DiskTier
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import StoredDocument
from kvweave.runner.tiers.trouble import Trouble
from kvweave.runner.tiers.worker import Job, Worker


class _Write(Job):
    """One change of a store, in the order in which they were asked for."""

    def __init__(self, work: Callable[[], None], size: int, ended: Callable[..., None]) -> None:
        self.size = size
        self._work = work
        self._ended = ended

    def run(self) -> None:
        self._work()

    def end(self, error: BaseException | None) -> None:
        self._ended(self, error)


class Keeping:
    """Writes documents in a thread of its own, in order, with at most `most` bytes waiting.

    Who adds one beyond that waits for the disk. From any thread.
    """

    def __init__(self, tier: DiskTier, most: int, trouble: Trouble) -> None:
        self._tier = tier
        self._most = most
        self._trouble = trouble
        self._worker = Worker("kvweave writes")
        # What follows is read and written by whoever has the worker's `changed`.
        self._bytes = 0
        self._written = 0
        self._failed: BaseException | None = None

    def write(self, payload: StoredDocument, name: str) -> None:
        """Has a document kept under a name. Its parts lie on the host and are left alone."""
        size = sum(part.nbytes for part in payload.parts.values())
        self._submit(lambda: self._tier.write(payload, name), size)

    def name(self, document: Document, name: str) -> None:
        """Has a document that the store gave kept under another name too."""
        self._submit(lambda: self._tier.name(document, name), 0)

    def forget(self, name: str, namespace: str) -> None:
        """Has a name taken away, behind all that was asked for before."""
        self._submit(lambda: self._forget(name, namespace), 0)

    def flush(self) -> None:
        """Returns when all that was asked for is done and survives.

        # Errors
        What the first that failed since the last call raised; the others were done.
        """
        self._worker.wait()
        with self._worker.changed:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self, most_s: float | None) -> None:
        """Does what was asked for, waited for so long at most, and ends the thread.

        Safe to call twice.
        """
        self._worker.close(finish=True, most_s=most_s)

    def stats(self) -> dict[str, int]:
        """Documents that were written, and bytes that wait."""
        with self._worker.changed:
            return {"written": self._written, "writing_bytes": self._bytes}

    def _forget(self, name: str, namespace: str) -> None:
        self._tier.store.forget(name, namespace)

    def _submit(self, work: Callable[[], None], size: int) -> None:
        changed = self._worker.changed
        with changed:
            # One that is larger than all that may wait goes alone.
            changed.wait_for(lambda: not self._bytes or self._bytes + size <= self._most)
            self._bytes += size
        self._worker.submit(_Write(work, size, self._ended))

    def _ended(self, job: _Write, error: BaseException | None) -> None:
        with self._worker.changed:
            self._bytes -= job.size
            self._written += error is None and job.size > 0
            if error is not None:
                self._failed = self._failed or error
                self._trouble.note("unwritten", f"a document is not kept in the store: {error}")
            self._worker.changed.notify_all()
