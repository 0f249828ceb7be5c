"""`KvReceiver`: takes what a ticket offers."""

from __future__ import annotations

import hmac
import time
from typing import Any

import torch

from kvweave.adapters.nixl.agent import BACKEND, as_bytes, device_of, failing, registered
from kvweave.adapters.nixl.part_digest import digest_of
from kvweave.adapters.nixl.ticket import PartPlace, Ticket, bytes_of
from kvweave.adapters.nixl.transfer_end import TransferEnd
from kvweave.arguments import real, shown, whole
from kvweave.device_memory import needs_memory
from kvweave.errors import CorruptPayload, InvalidArgument, TransferFailed, Unsupported
from kvweave.payload import KvPayload

_POLL_S = 0.0005


class KvReceiver(TransferEnd):
    """Where answers are decoded. `most_bytes`: a ticket of more is refused.

    `device`: where parts come that are offered on a device, as "cuda:1"; None: the current CUDA
    device. It may be "cpu", which few ways between machines do fast. Other parts come to the host.

    # Errors
    As `TransferEnd`; `InvalidArgument` for what is no device.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        device: torch.device | str | None = None,
        most_bytes: int = 1 << 36,
        timeout_s: float = 30.0,
    ) -> None:
        self._device = None if device is None else _device(device)
        self._most = whole("most_bytes", most_bytes, 1)
        self._timeout = real("timeout_s", timeout_s)
        super().__init__(secret)
        self._used: dict[str, float] = {}

    def take(self, ticket: bytes) -> KvPayload:
        """The payload of a ticket, whole, each part as it was signed.

        # Errors
        `CorruptPayload` for a ticket that was not signed with our secret, has expired or was taken
        here before, sizes that no such payload has, or bytes that are not those of the ticket;
        `TransferFailed` where the sender is gone, or too slow; `Unsupported` for parts on a device
        where there is none; `OutOfMemory`; `InvalidArgument` once it is closed.
        """
        agent = self._agent
        said = Ticket.decode(ticket, self._secret)
        shapes = said.shapes()
        total = sum(bytes_of(*part) for part in shapes.values())
        if total > self._most:
            raise CorruptPayload(f"ticket: expected at most {self._most} bytes, got {total}")
        homes = {name: self._home(place) for name, place in said.places.items()}
        empty = needs_memory("ticket", f"{total} bytes of memory")(torch.empty)
        parts = {
            name: empty(shape, dtype=dtype, device=homes[name])
            for name, (dtype, shape) in shapes.items()
        }
        self._expect_unused(said)
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

    def _home(self, place: PartPlace) -> torch.device:
        """Where a part comes."""
        if place.device is None:
            return torch.device("cpu")
        if self._device is not None:
            return self._device
        if not torch.cuda.is_available():
            raise Unsupported(
                "ticket: expected parts on the host, as there is no CUDA device here, got one on a "
                "device; offer it with on_device=False"
            )
        return torch.device("cuda", torch.cuda.current_device())

    def _expect_unused(self, said: Ticket) -> None:
        """Refuses a ticket that was taken; one that has expired need not be remembered."""
        now = time.time()
        self._used = {name: until for name, until in self._used.items() if until > now}
        if said.name in self._used:
            raise CorruptPayload("ticket: expected one that was not taken before, got one that was")
        self._used[said.name] = said.until

    def _read(self, said: Ticket, peer: str, parts: dict[str, torch.Tensor]) -> None:
        """Reads all parts into u8 memory of theirs, and tells the sender."""
        ways: dict[tuple[int | None, int | None], dict[str, torch.Tensor]] = {}
        for name, part in parts.items():
            if part.numel():
                way = device_of(part), said.places[name].device
                ways.setdefault(way, {})[name] = part
        try:
            for (_, device), some in ways.items():
                self._read_from(said, peer, device, some)
            self._agent.send_notif(peer, said.name.encode())
        finally:
            self._agent.remove_remote_agent(peer)

    def _read_from(
        self, said: Ticket, peer: str, device: int | None, parts: dict[str, torch.Tensor]
    ) -> None:
        """Reads parts that lie on one device of the sender's into memory of one of ours."""
        here = list(parts.values())
        places = [said.places[name] for name in parts]
        there = [(place.address, place.size, device or 0) for place in places]
        memory = "DRAM" if device is None else "VRAM"
        if here[0].is_cuda:
            # What used the memory before may still be under way.
            torch.cuda.current_stream(here[0].device).synchronize()
        with registered(self._agent, here):
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(here),
                self._agent.get_xfer_descs(there, memory),
                peer,
                backends=[BACKEND],
            )
            try:
                self._wait(handle)
            finally:
                self._agent.release_xfer_handle(handle)

    def _wait(self, handle: Any) -> None:
        end, state = time.monotonic() + self._timeout, self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() >= end:
                raise TransferFailed(f"nixl: expected the parts within {self._timeout} s, got none")
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferFailed(f"nixl: expected the parts of a ticket, got {state}")


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"device: expected one of torch's, got {shown(device)}") from error
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device: expected a CUDA device or cpu, got {found}")
    return found
