"""The end of a process whose worker is in native code: it ends as it was asked to."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import torch
from kvweave.runner.worker import Job, Worker

begun = threading.Event()

class Long(Job):
    def run(self):
        torch.set_num_threads(1)
        some = torch.rand(500, 500, dtype=torch.float64)
        begun.set()
        for _ in range(6):
            torch.linalg.eigh(some + some.T)

    def end(self, error):
        print("ended", error)

worker = Worker("long")
worker.submit(Long())
begun.wait()
{close}
raise SystemExit(3)
"""


@pytest.mark.parametrize("close", ["", "worker.close(finish=False)", "worker.close(finish=True)"])
def test_a_process_ends_behind_the_job_at_hand(close: str) -> None:
    program = PROGRAM.format(close=close)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr[-2000:]
    assert done.stdout == "ended None\n"
