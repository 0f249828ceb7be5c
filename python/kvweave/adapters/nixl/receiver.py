"""`KvReceiver`: takes what a ticket offers."""

from __future__ import annotations

import hmac
import time
from typing import Any

import torch

from kvweave.adapters.nixl.agent import BACKEND, as_bytes, failing, registered
from kvweave.adapters.nixl.ticket import Ticket, bytes_of, digest_of
from kvweave.adapters.nixl.transfer_end import TransferEnd
from kvweave.arguments import real, whole
from kvweave.errors import CorruptPayload, TransferFailed
from kvweave.payload import KvPayload

_POLL_S = 0.0005


class KvReceiver(TransferEnd):
    """Where answers are decoded. `most_bytes`: a ticket of more is refused.

    # Errors
    As `TransferEnd`.
    """

    def __init__(
        self, secret: bytes, *, most_bytes: int = 1 << 36, timeout_s: float = 30.0
    ) -> None:
        self._most = whole("most_bytes", most_bytes, 1)
        self._timeout = real("timeout_s", timeout_s)
        super().__init__(secret)
        self._used: dict[str, float] = {}

    def take(self, ticket: bytes) -> KvPayload:
        """The payload of a ticket, whole, each part as it was signed; its parts lie on the host.

        # Errors
        `CorruptPayload` for a ticket that was not signed with our secret, has expired or was taken
        here before, sizes that no such payload has, or bytes that are not those of the ticket;
        `TransferFailed` where the sender is gone, or too slow; `InvalidArgument` once it is closed.
        """
        agent = self._agent
        said = Ticket.decode(ticket, self._secret)
        self._expect_unused(said)
        shapes = said.shapes()
        total = sum(bytes_of(*part) for part in shapes.values())
        if total > self._most:
            raise CorruptPayload(f"ticket: expected at most {self._most} bytes, got {total}")
        parts = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        with failing("a sender to be reached"):
            name = agent.add_remote_agent(said.peer)
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._read(said, peer, {name: as_bytes(part) for name, part in parts.items()})
        for name, part in parts.items():
            found = digest_of(self._secret, name, as_bytes(part))
            if not hmac.compare_digest(found, said.places[name].digest):
                raise CorruptPayload(
                    f"payload part {name}: expected the bytes of its ticket, got others"
                )
        return KvPayload(said.header, parts)

    def _expect_unused(self, said: Ticket) -> None:
        """Refuses a ticket that was taken; one that has expired need not be remembered."""
        now = time.time()
        self._used = {name: until for name, until in self._used.items() if until > now}
        if said.name in self._used:
            raise CorruptPayload("ticket: expected one that was not taken before, got one that was")
        self._used[said.name] = said.until

    def _read(self, said: Ticket, peer: str, parts: dict[str, torch.Tensor]) -> None:
        """Reads all parts into u8 memory of theirs, and tells the sender."""
        names = [name for name, part in parts.items() if part.numel()]
        there = [(said.places[name].address, said.places[name].size, 0) for name in names]
        here = [parts[name] for name in names]
        try:
            with registered(self._agent, here):
                handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(here),
                    self._agent.get_xfer_descs(there, "DRAM"),
                    peer,
                    said.name.encode(),
                    backends=[BACKEND],
                )
                try:
                    self._wait(handle)
                finally:
                    self._agent.release_xfer_handle(handle)
        finally:
            self._agent.remove_remote_agent(peer)

    def _wait(self, handle: Any) -> None:
        end, state = time.monotonic() + self._timeout, self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() >= end:
                raise TransferFailed(f"nixl: expected the parts within {self._timeout} s, got none")
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferFailed(f"nixl: expected the parts of a ticket, got {state}")
