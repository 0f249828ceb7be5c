"""Servers on the loopback interface that hold shards: Redis, S3, Mooncake, and one that lies."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvweave import RemoteStore

PASSWORD = "the password of these tests"
_S3 = {"bucket": "shards-of-kv", "region": "us-east-1", "disable_config_load": "true"}
_KEYS = {"access_key_id": "key", "secret_access_key": "secret", "disable_ec2_metadata": "true"}


class Redis:
    """A `redis-server` of its own, in a folder of its own, with a password."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        self.folder, self.port = folder, _free_port() if port is None else port
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--requirepass", PASSWORD]
        arguments += ["--dir", str(folder), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
        _wait_for(self.port)

    def store(self, **more: Any) -> RemoteStore:
        password = more.pop("password", PASSWORD)
        endpoint = f"redis://127.0.0.1:{self.port}"
        return RemoteStore("redis", {"endpoint": endpoint, "password": password}, **more)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server(folder: Path) -> Iterator[Redis]:
    server = Redis(folder)
    try:
        yield server
    finally:
        server.kill()


class Mooncake:
    """A Mooncake Store: a master, and a process that lends it memory."""

    LENDS = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
options = dict(pair.split("=", 1) for pair in sys.argv[1:])
print("lends", store.setup({**options, "global_segment_size": str(256 << 20)}), flush=True)
sys.stdin.read()
"""

    def __init__(self) -> None:
        master = Path(_mooncake_package()) / "mooncake_master"
        port = _free_port()
        self.options = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_addr": f"127.0.0.1:{port}",
        }
        said = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={_free_port()}"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.master = subprocess.Popen([master, *said, "--enable_metric_reporting=false"], **quiet)
        _wait_for(port)
        options = [f"{key}={value}" for key, value in self.options.items()]
        self.lender = subprocess.Popen(
            [sys.executable, "-c", self.LENDS, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.lender.stdout is not None
        lines = iter(self.lender.stdout.readline, "")
        assert "lends 0" in (line.strip() for line in lines)

    def store(self, **more: Any) -> RemoteStore:
        return RemoteStore("mooncake", self.options, **more)

    def close(self) -> None:
        for process in (self.lender, self.master):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def mooncake_store() -> Iterator[Mooncake]:
    store = Mooncake()
    try:
        yield store
    finally:
        store.close()


def _mooncake_package() -> str:
    """The folder of Mooncake's package, where its client can be loaded."""
    loaded = pytest.importorskip(
        "mooncake.store",
        reason="mooncake-transfer-engine-non-cuda, or a library it names, is not installed",
        exc_type=ImportError,
    )
    return str(Path(loaded.__file__).parent)


@contextmanager
def service_of(kind: str, folder: Path) -> Iterator[Callable[..., RemoteStore]]:
    """A service, in an empty folder; what is yielded opens the same store as often as called."""
    if kind == "fs":
        yield lambda **more: RemoteStore("fs", {"root": str(folder)}, **more)
    elif kind == "redis":
        with redis_server(folder) as server:
            yield server.store
    elif kind == "mooncake":
        with mooncake_store() as store:
            yield store.store
    else:
        with s3_server() as options:
            yield lambda **more: RemoteStore("s3", options, **more)


SERVICES = ["fs", "redis", "s3", "mooncake"]


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Options of a bucket that moto holds."""
    boto3 = pytest.importorskip("boto3", reason="moto's client is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    threaded = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    try:
        host, port = threaded.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket="shards-of-kv")
        yield {**_S3, **_KEYS, "endpoint": endpoint}
    finally:
        threaded.stop()


class LyingS3:
    """As much of S3 as a shard is read by, answering what `lie` says.

    `lie`: "" for the truth, "denied", "stuck" (no answer), "died" (the connection ends in the
    middle of a body), "huge" (10 GB are announced), "endless" (and sent), "shorter" and "longer"
    (bodies of another size than was asked for). `asked`: GETs so far; `sent`: bytes beyond.
    """

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects, self.lie, self.asked = objects, "", 0
        self.sent = 0
        self.free = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _lying(self))
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def store(self, **more: Any) -> RemoteStore:
        endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"
        return RemoteStore("s3", {**_S3, **_KEYS, "endpoint": endpoint}, **more)

    def close(self) -> None:
        self.free.set()
        self.http.shutdown()
        self.http.server_close()


def _lying(server: LyingS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            held = self.held()
            if held is not None:
                self.send_response(200)
                size = 10**10 if server.lie == "huge" else len(held)
                self.send_header("Content-Length", str(size))
                self.end_headers()

        def do_GET(self) -> None:
            server.asked += 1
            held = self.held()
            if held is None:
                return
            begin, _, end = (
                self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            )
            body = held[int(begin) : int(end) + 1 if end else len(held)]
            if server.lie == "shorter":
                body = body[:-1]
            elif server.lie in ("longer", "endless"):
                body += bytes(1 << 20)
            self.send_response(206)
            size = 10**10 if server.lie == "endless" else len(body)
            self.send_header("Content-Length", str(size))
            told = f"bytes {begin}-{end or len(held) - 1}/{len(held)}"
            self.send_header("Content-Range", told)
            self.end_headers()
            if server.lie == "died":
                body = body[: len(body) // 2]
                self.close_connection = True
            with suppress(OSError):
                self.wfile.write(body)
                while server.lie == "endless" and not server.free.is_set():
                    self.wfile.write(body)
                    server.sent += len(body)

        def held(self) -> bytes | None:
            if server.lie == "stuck":
                server.free.wait(30)
            status = 403 if server.lie == "denied" else 404
            held = server.objects.get(self.path.removeprefix("/shards-of-kv/"))
            if held is not None and status == 404:
                return held
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None

        def log_message(self, *_: Any) -> None:
            """Says nothing on standard error."""

    return Handler


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    pytest.fail(f"no server on port {port}")
