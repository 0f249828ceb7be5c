"""`CopyMemory`: where exact pages lie on the host until their text is packed finally.

The system gives out memory page by page as it is first written, and a GPU's copies into memory that
is not pinned stop there: a prompt that is copied so waits for them. What is taken here is touched
and pinned once, ahead of who needs it, and used again by later texts.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from kvweave.errors import OutOfMemory
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.host_arena import AHEAD_BYTES, CHUNK_BYTES, HostArena
from kvweave.runner.kv.places import Place, first_fit

_PIECE = 64 << 10


class CopyMemory:
    """At most so many bytes of the host for tensors that come and go.

    It keeps what was needed at once. One thread at a time may ask for something. The bytes of a
    tensor are free again when nobody has it, nor a view of it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._size, self._device = nbytes // _PIECE * _PIECE, device
        # From the first tensor on; none where the process may not have so many addresses.
        self._arena: HostArena | None = None
        # What is taken, and of that what is nobody's again.
        self._places: list[Place] = []
        self._given: deque[Place] = deque()

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Memory for a tensor of this shape and dtype; None where there is none in one piece."""
        while self._given:
            self._places.remove(self._given.popleft())
        if not tensor.nbytes:
            return None
        place = first_fit(self._places, tensor.nbytes, _PIECE, (0, self._size))
        if place is None:
            return None
        try:
            arena = self._reserved(place)
        except OutOfMemory:
            self._places.remove(place)
            return None
        # Whatever is made of it holds these bytes, and is what is waited for.
        room = arena.pages.numpy().reshape(-1)[place.begin : place.end]
        weakref.finalize(room, self._given.append, place)
        return torch.from_numpy(room).view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Gives the system back what nobody has; nothing has room here any more."""
        self._size, self._arena = 0, None

    def _reserved(self, place: Place) -> HostArena:
        """All of it, a place being memory.

        # Errors
        `OutOfMemory`: what there was stays.
        """
        if self._arena is None:
            ahead, pieces = min(self._size, AHEAD_BYTES), self._size // _PIECE
            self._arena = HostArena((pieces, _PIECE), torch.uint8, self._device, ahead)
        first = np.asarray([place.number], np.int32)
        self._arena.reserve(first, -(-place.nbytes // _PIECE))
        return self._arena

    def on_host(self, tensor: torch.Tensor, aside: Aside) -> torch.Tensor:
        """A contiguous tensor on the host, copied aside, when it is there.

        For a thread that waits for it while others go on.
        """
        room = None if aside.stream is None else self.room_for(tensor)
        if aside.stream is None or room is None:
            return aside.on_host(tensor)
        parts = list(self._parts(room, tensor))

        def begin() -> None:
            for target, source in parts:
                target.copy_(source, non_blocking=True)

        aside.made(begin)
        return room

    def _parts(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The bytes of tensors of which the first lies here, part by part as it was pinned."""
        assert self._arena is not None
        flat = [tensor.view(torch.uint8).view(-1) for tensor in tensors]
        first = flat[0].data_ptr() - self._arena.pages.data_ptr()
        begin, count = 0, len(flat[0])
        while begin < count:
            behind = (first + begin) // CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES - first
            end = min(count, behind)
            yield tuple(each[begin:end] for each in flat)
            begin = end
