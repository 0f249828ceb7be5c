"""Threads that keep out of the way: by whom their native work is done, and that it is the same."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvweave import KvweaveError, ops
from kvweave.runner import worker
from kvweave.runner.worker import Job, Worker

NAME = "kvweave backgro"
"""What Linux keeps of the name of such a thread."""
TASKS = Path("/proc/self/task")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are listed by Linux alone")


class Call(Job):
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.result = work, None

    def run(self) -> None:
        self.result = self.work()


def background() -> set[int]:
    """The threads that do work in the background."""
    found = set()
    for task in TASKS.iterdir():
        # Others may end meanwhile.
        with suppress(OSError):
            if (task / "comm").read_text().strip() == NAME:
                found.add(int(task.name))
    return found


def losses() -> torch.Tensor:
    cache = torch.randn(1 + 64, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    packs = np.asarray([[1, 64, 1], [1, 33, 33]], np.int32)
    return ops.pack_losses(cache, packs, ops.PackedFormat("int4", 64), pages=32)


def done_by(stands_back: bool, *calls: Callable[[], Any]) -> list[Any]:
    with_thread, jobs = Worker("a thread", stands_back=stands_back), [Call(call) for call in calls]
    for job in jobs:
        with_thread.submit(job)
    with_thread.wait()
    with_thread.close(finish=True)
    return [job.result for job in jobs]


@on_linux
def test_half_of_the_processors_do_its_work_and_give_way() -> None:
    before = background()

    def at_work() -> list[int]:
        return [os.getpriority(os.PRIO_PROCESS, one) for one in background() - before]

    result, nice, own = done_by(True, losses, at_work, lambda: os.getpriority(os.PRIO_PROCESS, 0))
    assert torch.equal(result, losses())
    assert len(nice) == -(-len(os.sched_getaffinity(0)) // 2)
    assert set(nice) == {max(5, own)}
    until = time.monotonic() + 60
    while not background() <= before and time.monotonic() < until:
        time.sleep(0.01)
    assert background() <= before, "they end with the thread"


@on_linux
def test_others_are_not_concerned() -> None:
    before = background()
    done_by(False, losses)
    threading.Thread(target=losses).start()
    losses()
    assert background() == before


def test_refusals_are_raised_as_ever() -> None:
    def too_far() -> str:
        packs, of = np.asarray([[1, 64, 9]], np.int32), ops.PackedFormat("int4", 64)
        with pytest.raises(KvweaveError) as raised:
            ops.pack_losses(torch.zeros(3, 2, 64, 64), packs, of, pages=1)
        return str(raised.value)

    assert done_by(True, too_far) == done_by(False, too_far) == [too_far()]


def test_without_more_threads_the_work_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoThreads:
        @staticmethod
        def stand_back() -> None:
            raise KvweaveError("threads: expected 1, got: resource temporarily unavailable")

    monkeypatch.setattr(worker, "_native", NoThreads)
    assert torch.equal(done_by(True, losses)[0], losses())
