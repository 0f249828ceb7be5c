"""A server of vLLM in a process of its own, and options of an engine as words of its command."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from kvweave.adapters.vllm.serving import PACKAGE

MIDDLEWARE = ["--middleware", f"{PACKAGE}.server.SegmentMiddleware"]
STOP_S = 60


def words_of(options: dict[str, Any]) -> list[str]:
    """Keyword arguments of `vllm.LLM` as words of the command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        else:
            words += [flag, *(value if isinstance(value, list) else [_word(value)])]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def served(words: list[str], limit_s: float) -> Iterator[int]:
    """The port of a server, once it answers; all that it prints goes to stderr."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.vllm.vllm_command", "server"]
    with subprocess.Popen([*command, *words, "--port", str(port)], stdout=sys.stderr) as process:
        try:
            _wait(process, port, limit_s)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[bytes], port: int, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"server: expected an answer within {limit_s} s, got none")
