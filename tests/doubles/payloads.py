"""Caches with local heads, requests whose K and V are known, and payloads of them."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save

from kvweave import CorruptPayload, KvCache, KvShape
from kvweave.payload import KvPayload, export_kv
from local_heads import local_heads

L, G, D, P = 3, 4, 16, 16
SHAPE = KvShape(L, G, D, P)
WINDOW = (5, 40)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def cache_of(blocks: int = 64, local: int = 3, shape: KvShape = SHAPE, **more: Any) -> KvCache:
    """A cache in which `local` heads of each layer keep a window (0: there is no map)."""
    model = more.get("fingerprint") or "m"
    heads = local_heads(shape, local, *WINDOW, model=model) if local else None
    pages = blocks * shape.layers * shape.kv_heads
    return KvCache(shape, arena_bytes=pages * shape.page_bytes, heads=heads, **more)


def pages_of(cache: KvCache) -> torch.Tensor:
    return torch.from_dlpack(cache.arena)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)


def random_kv(tokens: int, dtype: str = "f32", seed: int = 0) -> torch.Tensor:
    """K and V of every head: [L, G, 2, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(L, G, 2, tokens, D, generator=generator).to(DTYPES[dtype])


def heads_by_table(cache: KvCache, request: Any) -> dict[int, list[tuple[int, int, int]]]:
    """The heads that each table serves: (page of a block, layer, head)."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for layer in range(cache.shape.layers):
        for head, (table, rank, _, _) in enumerate(request.head_rows(layer).tolist()):
            found.setdefault(table, []).append((rank, layer, head))
    return found


def fill(cache: KvCache, request: Any, kv: torch.Tensor, positions: range) -> None:
    """Writes K and V of some positions wherever the request keeps them."""
    pages = pages_of(cache)
    for table, heads in heads_by_table(cache, request).items():
        slots = request.slots(np.asarray(positions, np.int32), table).tolist()
        for position, (block, slot) in zip(positions, slots, strict=True):
            for rank, layer, head in heads if block >= 0 else ():
                pages[block + rank, :, slot] = kv[layer, head, :, position]


def read(cache: KvCache, request: Any) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
    """K and V [2, D] that each head reads, by position; keys as they are stored."""
    pages = pages_of(cache)
    found: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    for table, heads in heads_by_table(cache, request).items():
        for block, begin, end, position, _ in request.entries(table).tolist():
            for rank, layer, head in heads:
                held = found.setdefault((layer, head), {})
                for slot in range(begin, end):
                    held[position + slot - begin] = pages[block + rank, :, slot].clone()
    return found


def prefilled(cache: KvCache, tokens: np.ndarray, kv: torch.Tensor, chunk: int = 0, **more: Any):
    """A request that was prefilled, whole or in chunks."""
    request = cache.admit(tokens, reuse="none", chunk_tokens=chunk, **more)
    length = len(tokens)
    for start in range(0, length, chunk or length):
        end = min(start + (chunk or length), length)
        if start:
            request.advance(start, end)
        fill(cache, request, kv, range(start, end))
    request.advance(length, length)
    return request


def expect_what_is_seen(
    cache: KvCache, request: Any, kv: torch.Tensor, tokens: int, exactly: bool = True
) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
    """Each head reads the right K and V of all that the next token sees.

    `exactly`: and of whatever else is kept.
    """
    sink, recent = WINDOW
    seen = read(cache, request)
    for layer in range(L):
        for head, (_, _, window, _) in enumerate(request.head_rows(layer).tolist()):
            held = seen[layer, head]
            near = [p for p in range(tokens) if not window or p < sink or p > tokens - recent]
            assert set(near) <= held.keys()
            for position in held if exactly else near:
                pair = held[position]
                assert torch.equal(pair, kv[layer, head, :, position]), (layer, head, position)
    return seen


def nothing_held(cache: KvCache) -> None:
    cache.check()
    assert cache.stats()["held"] == 0


def sealed(text: str) -> dict[str, str]:
    """Metadata whose checksum is right."""
    return {"kvweave.payload": f"{zlib.crc32(text.encode()):08x} {text}"}


def resealed(payload: KvPayload, header: Any = None, **parts: torch.Tensor | None) -> bytes:
    """Bytes with right checksums whose header or parts were changed: no accident made them."""
    kept = {name: part for name, part in {**payload.parts, **parts}.items() if part is not None}
    fields = payload.header.to_json() if header is None else header
    whole = {**fields, "crc32": checksums_of(kept)} if isinstance(fields, dict) else fields
    return save(kept, sealed(json.dumps(whole)))


class PayloadFile:
    """A payload's bytes, written again and again with other numbers in some parts.

    What stays is neither laid out nor summed a second time.
    """

    def __init__(self, sent: KvPayload) -> None:
        whole = sent.to_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        fields = json.loads(whole[8:end])
        del fields["__metadata__"]
        self._spans = {name: field["data_offsets"] for name, field in fields.items()}
        self._fields, self._data = json.dumps(fields), bytearray(whole[end:])
        self.sums = checksums_of(dict(sent.parts))

    def write(self, name: str, numbers: bytes) -> None:
        """Gives a part other bytes, as many as it has, and says their checksum."""
        first, end = self._spans[name]
        assert len(numbers) == end - first
        self._data[first:end] = numbers
        self.sums[name] = zlib.crc32(numbers)

    def sealed(self, header: str) -> bytes:
        """The file under a header, whose checksum is right."""
        metadata = json.dumps({"__metadata__": sealed(header)})
        text = f"{metadata[:-1]}, {self._fields[1:]}".encode()
        return b"".join((len(text).to_bytes(8, "little"), text, self._data))


def checksums_of(parts: dict[str, torch.Tensor]) -> dict[str, int]:
    """Those that a header says of its parts."""
    bytes_of = {name: part.contiguous().view(torch.uint8) for name, part in parts.items()}
    return {name: zlib.crc32(data.numpy().data) for name, data in bytes_of.items()}


def sample() -> KvPayload:
    """A request of 150 tokens with a promoted head and logits."""
    cache, kv = cache_of(fingerprint="m"), random_kv(150)
    request = cache.admit(prompt(150), reuse="none", namespace="a", regime=7)
    request.promote(1, 0)
    fill(cache, request, kv, range(150))
    request.advance(150, 150)
    return export_kv(cache, pages_of(cache), request, logits=torch.arange(8.0))


def receiver_of(payload: KvPayload, **more: Any) -> KvCache:
    return cache_of(fingerprint=payload.header.fingerprint, **more)


def refused(data: bytes, says: str | None = None) -> None:
    """Bytes that are taken for no payload."""
    with pytest.raises(CorruptPayload, match=says):
        KvPayload.from_bytes(data)


def spoiled_bytes_are_refused(payload: KvPayload, data: st.DataObject) -> None:
    """Nothing but what was sent is ever taken for it, wherever its bytes are spoiled."""
    sent = payload.to_bytes()
    spoiled = bytearray(sent)
    header = int.from_bytes(sent[:8], "little") + 8
    most = st.one_of(st.integers(0, header - 1), st.integers(0, len(sent) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        at, length = data.draw(most), data.draw(st.integers(0, 9))
        spoiled[at : at + length] = data.draw(st.binary(max_size=9))
    try:
        taken = KvPayload.from_bytes(bytes(spoiled))
    except CorruptPayload:
        return
    assert taken.header == payload.header
    assert taken.parts.keys() == payload.parts.keys()
    assert all(torch.equal(taken.parts[name], part) for name, part in payload.parts.items())
