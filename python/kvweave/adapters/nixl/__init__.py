"""Prefill on one machine, decode on another: a payload's bytes carried by NIXL.

    # where prompts are read
    with KvSender(secret) as sender:
        with sender.offer(runner.export(done)) as offer:
            send(offer.ticket)            # by whatever channel the two have
            offer.wait(10)                # until it was taken

    # where answers are made
    with KvReceiver(secret) as receiver:
        answer = runner.resume(receiver.take(ticket), max_new_tokens=200)

The extra `kvweave[nixl]`. Between machines NIXL goes over RDMA where there is some, or TCP. Parts
go through the host's memory on both sides; offered with `on_device=True` they go from GPU to GPU,
as UCX finds a way between the two.
"""

from kvweave.adapters.nixl.receiver import KvReceiver
from kvweave.adapters.nixl.sender import KvOffer, KvSender

__all__ = ["KvOffer", "KvReceiver", "KvSender"]
