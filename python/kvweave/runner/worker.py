"""`Worker`: a thread that does jobs, the most urgent first, while others compute."""

from __future__ import annotations

import atexit
import heapq
import threading
from contextlib import suppress

from kvweave import _native
from kvweave.errors import KvweaveError

AT_EXIT_S = 30.0
"""How long the end of the interpreter waits for the job at hand, at most."""


class Job:
    """Something that a worker does. `urgency`: of two jobs the lower one goes first."""

    urgency: tuple[int, ...] = ()

    def may_begin(self) -> bool:
        """Whether there is room for it now. Asked, and taken, by whoever has `Worker.changed`."""
        return True

    def run(self) -> None:
        """Does it, in the worker's thread."""
        raise KvweaveError("job: expected one that says what it does")

    def end(self, error: BaseException | None) -> None:
        """Told once that it was done, or why not."""


class Worker:
    """Does jobs one by one in a thread of its own, which begins with the first.

    What a job raises is told to that job, and the next one goes on. What ends the thread itself is
    told to all that wait; the next job has another thread begun. Everything here is for any thread.

    Where nobody closes it the end of the interpreter does: a thread that were in native code then
    would end the whole process when it came back.

    `stands_back`: native work of the thread keeps half of the processors free, and gives way on the
    others (`_native.stand_back`).
    """

    def __init__(self, name: str, *, stands_back: bool = False) -> None:
        self.changed = threading.Condition()
        # What follows is read and written by whoever has `changed`.
        self.running: Job | None = None
        self._name, self._stands_back = name, stands_back
        self._waiting: list[tuple[tuple[int, ...], int, Job]] = []
        self._submitted = 0
        # How many are telling jobs that nobody will do them: a job has ended when it knows.
        self._telling = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Job) -> None:
        """Has a job done; one of a worker that was closed, or gets no thread, ends with that."""
        with self.changed:
            refused = self._is_closed() if self._closed else self._begun()
            if refused is None:
                heapq.heappush(self._waiting, (job.urgency, self._submitted, job))
                self._submitted += 1
                self.changed.notify_all()
        if refused is not None:
            job.end(refused)

    def _begun(self) -> KvweaveError | None:
        """Has a thread begun where there is none; why not, if it cannot."""
        if self._thread is not None:
            return None
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            return KvweaveError(f"{self._name}: expected a thread to begin, got: {error}")
        self._thread = thread
        atexit.unregister(self._end)
        atexit.register(self._end)
        return None

    def _end(self) -> None:
        self.close(finish=False, most_s=AT_EXIT_S)

    def drop(self, job: Job) -> None:
        """Leaves a job out that has not begun."""
        with self.changed:
            self._waiting = [entry for entry in self._waiting if entry[2] is not job]
            heapq.heapify(self._waiting)
            self.changed.notify_all()

    def hurry(self, job: Job, urgency: tuple[int, ...]) -> None:
        """Gives a job another urgency."""
        with self.changed:
            # Also of one that has begun: others may look at it.
            job.urgency = urgency
            self._waiting = [
                (urgency if entry[2] is job else entry[0], *entry[1:]) for entry in self._waiting
            ]
            heapq.heapify(self._waiting)
            self.changed.notify_all()

    def wait(self) -> None:
        """Returns when every job that was submitted has ended, and was told how."""
        with self.changed:
            self.changed.wait_for(self._is_idle)

    def close(self, *, finish: bool, most_s: float | None = None) -> None:
        """Ends the thread, when it has done all that was submitted or the job at hand alone.

        That is waited for, so long at most. Safe to call twice.
        """
        with self.changed:
            self._closed = True
            left = None if finish else self._give_up()
            self.changed.notify_all()
            thread = self._thread
        atexit.unregister(self._end)
        if left is not None:
            self._tell(left, self._is_closed())
        if thread is not None and thread is not threading.current_thread():
            thread.join(most_s)

    def _is_closed(self) -> KvweaveError:
        return KvweaveError(f"{self._name}: expected one that is open, got a closed one")

    def _is_idle(self) -> bool:
        return not self._waiting and self.running is None and not self._telling

    def _next(self) -> Job | None:
        """The next job; None when there will be none any more."""
        with self.changed:
            self.running = None
            self.changed.notify_all()
            while self._waiting or not self._closed:
                job = self._waiting[0][2] if self._waiting else None
                if job is not None and job.may_begin():
                    # To make its room others may have come to wait, and be the first.
                    self.drop(job)
                    self.running = job
                    return job
                self.changed.wait()
            return None

    def _work(self) -> None:
        if self._stands_back:
            # Where no more threads are to be had the work is done as everybody's.
            with suppress(KvweaveError):
                _native.stand_back()
        try:
            while (job := self._next()) is not None:
                self._do(job)
                # A job may have much in hand: it is not kept until the next one comes.
                del job
        except BaseException as error:
            self._died(error)
        finally:
            with self.changed:
                # Who submits behind a death has begun another.
                if self._thread is threading.current_thread():
                    self._thread = None
                self.changed.notify_all()

    @staticmethod
    def _do(job: Job) -> None:
        try:
            job.run()
        except Exception as error:
            job.end(error)
        else:
            job.end(None)

    def _died(self, error: BaseException) -> None:
        """Tells all that wait, and who was at it, that nobody will do it."""
        with self.changed:
            left = self._give_up()
            if self.running is not None:
                left.insert(0, self.running)
            self.running, self._thread = None, None
            self.changed.notify_all()
        text = f"{self._name}: expected its thread to go on, got {type(error).__name__}: {error}"
        self._tell(left, KvweaveError(text))

    def _give_up(self) -> list[Job]:
        """Jobs that wait, which nobody will do; who has `changed` takes them, to `_tell` them."""
        left = [job for _, _, job in self._waiting]
        self._waiting = []
        self._telling += 1
        return left

    def _tell(self, left: list[Job], error: KvweaveError) -> None:
        try:
            for job in left:
                job.end(error)
        finally:
            with self.changed:
                self._telling -= 1
                self.changed.notify_all()
