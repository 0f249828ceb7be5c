"""`Exposition`: a runner's metrics over HTTP, for a Prometheus server or `kvweave stats`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvweave.arguments import whole, word
from kvweave.closing import Closing
from kvweave.errors import InvalidArgument
from kvweave.runner.engine.metrics import CONTENT_TYPE

PATH = "/metrics"


class Exposition(Closing):
    """Answers `GET /metrics` in threads of its own until it is closed; a context manager.

    `told` makes the text anew for each request. It listens on the loopback interface unless it is
    told of another: the counts are those of all tenants together. `port` 0: any that is free.

    # Errors
    `InvalidArgument` for an address that cannot be listened on.
    """

    def __init__(self, told: Callable[[], str], port: int = 0, host: str = "127.0.0.1") -> None:
        where = (word("host", host), whole("port", port, 0, 65535))
        try:
            self._server = ThreadingHTTPServer(where, _handler(told))
        except OSError as error:
            text = f"port: expected one to listen on, got {host}:{port}: {error}"
            raise InvalidArgument(text) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvweave metrics", daemon=True
        )
        self._thread.start()
        self._closed = False

    @property
    def url(self) -> str:
        """What to scrape."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}{PATH}"

    def close(self) -> None:
        """Answers no more. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _handler(told: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            """Says what is asked for, or that there is nothing else."""
            if self.path != PATH:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            body = told().encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Says nothing on standard error."""

    return Handler
