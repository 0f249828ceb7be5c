"""`KvSender`: offers payloads to whoever has a ticket."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack

import torch

from kvweave.adapters.nixl.agent import as_bytes, by_device, device_of, registered
from kvweave.adapters.nixl.part_digest import digest_of
from kvweave.adapters.nixl.ticket import PartPlace, Ticket
from kvweave.adapters.nixl.transfer_end import TransferEnd
from kvweave.arguments import flag, real, shown
from kvweave.closing import Ending
from kvweave.errors import InvalidArgument
from kvweave.payload import KvPayload

_POLL_S = 0.001


class KvSender(TransferEnd):
    """Where prompts are prefilled.

    # Errors
    As `TransferEnd`.
    """

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._taken: set[str] = set()

    def offer(
        self, payload: KvPayload, *, valid_s: float = 60.0, on_device: bool = False
    ) -> KvOffer:
        """Offers a payload until the offer is left; its ticket may be used for `valid_s` seconds.

        Parts come to the host if they are not there, which any receiver reaches. `on_device`: they
        stay where they lie; from a GPU a receiver with a GPU reads them, if UCX finds a way between
        the two: NVLink within a host, or RDMA of GPUs.

        # Errors
        `InvalidArgument` for what is no payload, or once this end is closed; `TransferFailed`.
        """
        if not isinstance(payload, KvPayload):
            raise InvalidArgument(f"payload: expected a KvPayload, got {shown(payload)}")
        if not flag("on_device", on_device):
            payload = payload.on_host()
        return KvOffer(self, payload, real("valid_s", valid_s))

    def _hear(self) -> set[str]:
        """Names of the offers that were taken."""
        for said in self._agent.get_new_notifs().values():
            self._taken |= {name.decode(errors="replace") for name in said}
        return self._taken


class KvOffer(Ending):
    """A payload that lies ready: `ticket` is for the receiver. A context manager."""

    def __init__(self, sender: KvSender, payload: KvPayload, valid_s: float) -> None:
        self._sender, self._name = sender, secrets.token_hex(16)
        self._parts = {n: as_bytes(p.contiguous()) for n, p in payload.parts.items()}
        agent = sender._agent
        self._held = ExitStack()
        for parts in by_device(self._parts).values():
            self._held.enter_context(registered(agent, list(parts.values())))
        places = {name: _place(sender._secret, name, part) for name, part in self._parts.items()}
        peer, until = agent.get_agent_metadata(), time.time() + valid_s
        ticket = Ticket(self._name, peer, until, payload.header, places)
        self.ticket = ticket.encode(sender._secret)

    def wait(self, timeout_s: float) -> bool:
        """Waits until it was taken, so long at most: whether it was."""
        end = time.monotonic() + timeout_s
        while self._name not in self._sender._hear():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    def _end_of_block(self) -> None:
        self._held.close()


def _place(secret: bytes, name: str, part: torch.Tensor) -> PartPlace:
    """Where a part u8 [n] lies; what is still being written of it has been by then."""
    digest = digest_of(secret, name, part)
    return PartPlace(part.data_ptr(), part.numel(), digest, device_of(part))
