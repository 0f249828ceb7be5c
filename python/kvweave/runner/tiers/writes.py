"""`Writes`: documents on their way into a tier, behind those who made them."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.errors import StoreFull
from kvweave.runner.tiers.document_form import StoredDocument
from kvweave.runner.tiers.read_tier import ReadTier
from kvweave.runner.tiers.trouble import Trouble
from kvweave.runner.worker import Job, Worker


class _Write(Job):
    """One change of a tier, in the order in which they were asked for."""

    def __init__(self, work: Callable[[], None], size: int, ended: Callable[..., None]) -> None:
        self.size = size
        self._work = work
        self._ended = ended

    def run(self) -> None:
        self._work()

    def end(self, error: BaseException | None) -> None:
        self._ended(self, error)


class Writes:
    """Writes documents in a thread of its own, in order, with at most `most` bytes waiting.

    Who adds one beyond that waits for the tier, with `patient`; otherwise the document is left out,
    counted as any that could not be written. From any thread.
    """

    def __init__(self, tier: ReadTier, most: int, trouble: Trouble, *, patient: bool) -> None:
        self._to = tier
        self._most = most
        self._trouble = trouble
        self._patient = patient
        self._worker = Worker(f"kvweave {tier.trouble}writes")
        # What follows is read and written by whoever has the worker's `changed`.
        self._bytes = 0
        self._written = 0
        self._failed: BaseException | None = None

    def write(self, payload: StoredDocument, name: str | None) -> None:
        """Has a document kept, under a name if there is one.

        Its parts lie on the host and are left alone.
        """
        size = sum(part.nbytes for part in payload.parts.values())
        self._submit(lambda: self._to.write(payload, name), size)

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

    def _submit(self, work: Callable[[], None], size: int) -> None:
        changed = self._worker.changed
        with changed:
            # One that is larger than all that may wait goes alone.
            if self._patient:
                changed.wait_for(lambda: self._has_room(size))
            if self._has_room(size):
                self._bytes += size
                refused = None
            else:
                refused = StoreFull(
                    f"{self._to.called}: expected {self._most} bytes that wait to be written, "
                    f"got {size} more"
                )
                self._fail(refused)
        if refused is None:
            self._worker.submit(_Write(work, size, self._ended))

    def _has_room(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= self._most

    def _ended(self, job: _Write, error: BaseException | None) -> None:
        with self._worker.changed:
            self._bytes -= job.size
            self._written += error is None and job.size > 0
            if error is not None:
                self._fail(error)
            self._worker.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        # Its traceback would keep the document until somebody asks.
        self._failed = self._failed or error.with_traceback(None)
        kind, where = f"{self._to.trouble}unwritten", self._to.called
        self._trouble.note(kind, f"a document is not kept in {where}: {error}")
