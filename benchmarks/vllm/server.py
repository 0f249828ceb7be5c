"""A server of vLLM in a process of its own, and options of an engine as words of its command."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kvweave.adapters.vllm.serving import PACKAGE

MIDDLEWARE = ["--middleware", f"{PACKAGE}.server.SegmentMiddleware"]
STOP_S = 60
TOGETHER = Path(__file__).with_name("ended_together.py")


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


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def served(words: list[str], limit_s: float) -> Iterator[int]:
    """The port of a server, once it answers; all that it prints goes to stderr."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.vllm.vllm_command", "server"]
    with running([*command, *words, "--port", str(port)], port, limit_s):
        yield port


@contextmanager
def running(
    command: list[str],
    port: int,
    limit_s: float,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    ready: str = "/health",
) -> Iterator[str]:
    """The address of a server that a command starts, once it answers there, at the path `ready`.

    What it prints goes to `log`, or to stderr. It is told to end when this is left, or when we die,
    and is ended where it does not; nothing that it has started outlives it. Raises RuntimeError
    where it does not answer in time.
    """
    with ExitStack() as opened:
        out: Any = sys.stderr if log is None else opened.enter_context(log.open("wb"))
        # It ends as we close its input, which leaving does. Nobody but us tells it to: it is not in
        # the group that a terminal and `timeout` send signals to.
        words = [sys.executable, "-I", str(TOGETHER), str(STOP_S), *command]
        how: Any = {"stdin": subprocess.PIPE, "stdout": out, "stderr": out, "env": env}
        process = opened.enter_context(subprocess.Popen(words, start_new_session=True, **how))
        address = f"http://127.0.0.1:{port}"
        if not _answers(process, address + ready, limit_s):
            said = "" if log is None else f":\n{log.read_text(errors='replace')[-4000:]}"
            ended = process.poll()
            got = "none" if ended is None else f"its end with status {ended}"
            raise RuntimeError(f"server: expected an answer within {limit_s} s, got {got}{said}")
        yield address


def samples(port: int) -> Iterator[Any]:
    """What a server's metrics say by now: each has a name, labels and a value."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        yield from family.samples


def _answers(process: subprocess.Popen[bytes], address: str, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(address, timeout=5):
                return True
        except OSError:
            time.sleep(1)
    return False
