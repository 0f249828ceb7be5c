"""Servers of benchmarks and tests end with whoever started them, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.vllm import server

ROOT = Path(__file__).parents[2]
SOON_S = 60.0
CHILD = 'trap "" TERM; echo $$ > child; while :; do sleep 1; done'
"""What a server starts and does not end, and what is deaf by itself."""
STARTS = f"sh -c '{CHILD}' & echo $$ > parent; "
SERVES = "exec {python} -m http.server {port} --bind 127.0.0.1"


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def pids(folder: Path) -> list[int]:
    """Of a server and of what it has started."""
    paths = [folder / "parent", folder / "child"]
    until(lambda: all(path.exists() and path.read_text().strip() for path in paths))
    return [int(path.read_text()) for path in paths]


def command(folder: Path, then: str) -> list[str]:
    return ["sh", "-c", f"cd {folder}; {STARTS}{then}"]


@pytest.mark.parametrize("deaf", [False, True])
def test_a_start_that_takes_too_long_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, deaf: bool
) -> None:
    """Whether or not the server ends when it is told to."""
    monkeypatch.setattr(server, "STOP_S", 1)
    waits = "while :; do sleep 1; done"
    then = f'trap "" TERM; {waits}' if deaf else waits

    def never(process: object, address: str, limit_s: float) -> bool:
        pids(tmp_path)
        return False

    monkeypatch.setattr(server, "_answers", never)
    with (
        pytest.raises(RuntimeError, match="expected an answer within 5 s, got none"),
        server.running(command(tmp_path, then), server.free_port(), 5),
    ):
        pass
    assert not any(map(is_there, pids(tmp_path)))


def test_a_server_that_is_left_leaves_nothing(tmp_path: Path) -> None:
    port = server.free_port()
    then = SERVES.format(python=sys.executable, port=port)
    log = tmp_path / "log.txt"
    with server.running(command(tmp_path, then), port, SOON_S, log, ready="/") as address:
        assert address == f"http://127.0.0.1:{port}"
        assert all(map(is_there, pids(tmp_path)))
    assert not any(map(is_there, pids(tmp_path)))
    assert "GET / " in log.read_text()


def test_a_server_that_ends_by_itself_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    # It ends once what it has started is there.
    then = "while [ ! -s child ]; do sleep 1; done; exit 3"
    with (
        pytest.raises(RuntimeError, match="got its end with status 3"),
        server.running(command(tmp_path, then), server.free_port(), SOON_S),
    ):
        pass
    until(lambda: not any(map(is_there, pids(tmp_path))))


def test_whoever_is_killed_takes_the_server_along(tmp_path: Path) -> None:
    port = server.free_port()
    words = command(tmp_path, SERVES.format(python=sys.executable, port=port))
    text = (
        "from benchmarks.vllm.server import running\n"
        f"with running({words!r}, {port}, {SOON_S}, ready='/'):\n"
        "    print('there', flush=True)\n"
        "    input()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    asking = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
    )
    with asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"there\n"
        started = pids(tmp_path)
        assert all(map(is_there, started))
        asking.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_there, started)))
