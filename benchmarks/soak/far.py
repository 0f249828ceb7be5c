"""The remote store of a soak: a Redis of its own on the loopback interface, or a folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvweave.remote import RemoteStore

SECRET = b"the secret of a soak's own"
PASSWORD = "the password of a soak"
MOST_MB = 64
"""What the Redis keeps at most; then it gives up what was used least recently."""
_BEGINS_IN_S = 20.0


@contextmanager
def remote_store(folder: Path) -> Iterator[RemoteStore]:
    """A remote store, for as long as it is open: of a `redis-server` where one is installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield RemoteStore("fs", {"root": str(folder / "remote")}, secret=SECRET)
        return
    port = _free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD]
    arguments += ["--dir", str(folder), "--save", "", "--appendonly", "no"]
    arguments += ["--maxmemory", f"{MOST_MB}mb", "--maxmemory-policy", "allkeys-lru"]
    process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        options = {"endpoint": f"redis://127.0.0.1:{port}", "password": PASSWORD}
        yield RemoteStore("redis", options, secret=SECRET)
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int) -> None:
    end = time.monotonic() + _BEGINS_IN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return
