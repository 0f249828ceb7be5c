"""Runs a command that ends with whoever asked for it, and takes along all that it has started.

    python benchmarks/vllm/ended_together.py SECONDS WORD…

The command is told to end when standard input closes, which it does when its other end is closed or
dies, however that dies. What is there SECONDS later is killed, and so is, at once, whatever the
command leaves behind: a server of vLLM that is killed while it starts leaves its engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def run(stop_s: float, command: list[str]) -> int:
    """The command's status, or 128 and the signal that ended it."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_behind_input, args=(process, stop_s), daemon=True).start()
    status = process.wait()
    _kill(process.pid)
    return status if status >= 0 else 128 - status


def _end_behind_input(process: subprocess.Popen[bytes], stop_s: float) -> None:
    # Not by a file of Python's: an interpreter that ends may not wait for its lock.
    while os.read(sys.stdin.fileno(), 1):
        pass
    process.terminate()
    try:
        process.wait(stop_s)
    except subprocess.TimeoutExpired:
        _kill(process.pid)


def _kill(group: int) -> None:
    # It may have ended, all of it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
