"""`ArrivingPayload`: the payload in a shard, read from its first layer to its last."""

from __future__ import annotations

import numpy as np

from kvweave.payload.header import group_part
from kvweave.payload.payload import TOKENS, TORCH_DTYPES
from kvweave.payload.stored import header_of, memory_for, payload_of, tokens_of
from kvweave.store import Shard

_CHUNK = 1 << 20
"""Bytes that a store reads and hashes at once, see `Shard.read_some`."""


class ArrivingPayload:
    """A payload whose parts are filled layer by layer; its header and its tokens are there.

    The KV of the first `layers` layers is in its parts. That of the last one is not said to be
    there before every part has been held to its checksum: until then nothing of it may be shown to
    anybody. One thread reads; `layers` is for any.

    # Errors
    As `read_payload`.
    """

    def __init__(self, shard: Shard) -> None:
        header = header_of(shard)
        shapes = {name: shape for name, (_, shape) in header.part_kinds().items()}
        dtype = TORCH_DTYPES[header.dtype]
        self.layers = 0
        self._shard = shard
        self._memory = {name: memory_for(shard, name, of, dtype) for name, of in shapes.items()}
        self._hashes: dict[str, list[int]] = {name: [] for name in shapes}
        # KV heads of each group in the layers before each, [groups, L + 1].
        layers, groups = header.layers, len(header.groups)
        named = np.reshape(header.head_groups, (layers, header.kv_heads))
        heads = [(named == group).sum(1) for group in range(groups)]
        self._heads = np.concatenate((np.zeros((groups, 1), int), np.cumsum(heads, 1)), 1)
        parts = {TOKENS: tokens_of(shard)}
        parts |= {name: self._memory[name].view(dtype).view(of) for name, of in shapes.items()}
        self.payload = payload_of(header, parts)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer, on average."""
        return sum(of.nbytes for of in self._memory.values()) // self.payload.header.layers

    def read_to(self, layers: int) -> None:
        """Reads on until so many layers are there.

        # Errors
        `CorruptShard`, `StoreUnavailable`; of what was read nothing is worth anything then.
        """
        last = layers >= self.payload.header.layers
        for group, heads in enumerate(self._heads):
            name = group_part(group)
            size = self._memory[name].nbytes
            self._read(name, size * int(heads[layers]) // int(heads[-1]))
        if last:
            for name, memory in self._memory.items():
                self._read(name, memory.nbytes)
                self._shard.check(name, self._hashes[name])
        self.layers = layers

    def _read(self, name: str, end: int) -> None:
        """Reads a part on up to `end`, in whole chunks."""
        memory, hashes = self._memory[name], self._hashes[name]
        begin = len(hashes) * _CHUNK
        end = min(memory.nbytes, -(-end // _CHUNK) * _CHUNK)
        if begin < end:
            hashes += self._shard.read_some(name, begin, memory[begin:end])
