"""Payloads in a store: a part of a shard for each part of the payload, read where it will be used.

Checksums are the store's, so a payload is not wrapped in a file of its own once more. Its header
goes along as JSON, and is checked like any other.
"""

from __future__ import annotations

import json

import numpy as np
import torch

from kvweave.cache import KvCache, KvShape
from kvweave.errors import CorruptPayload, CorruptShard
from kvweave.payload.header import PayloadHeader
from kvweave.payload.header_fields import parsed
from kvweave.payload.payload import PART_DTYPES, TOKENS, KvPayload
from kvweave.remote import RemoteShard, RemoteStore
from kvweave.store import Provenance, Shard, Store

LAYOUT = "payload"
"""How the parts of such a shard are to be read: what its `Provenance` says."""

_HEADER = "payload"
_ALIGNED = 4096


def provenance_of(header: PayloadHeader, heads: str) -> Provenance:
    """What a payload's KV is of; `heads` names the head map, "" where there is none."""
    return _provenance(header, header.fingerprint, header.namespace, header.regime, heads)


def provenance_here(
    cache: KvCache, namespace: str, regime: int, heads: str, *, fingerprint: str | None = None
) -> Provenance:
    """What the KV of a payload of this cache would be of; the cache's weights by default."""
    weights = cache.fingerprint if fingerprint is None else fingerprint
    return _provenance(cache.shape, weights, namespace, regime, heads)


def _provenance(
    shape: PayloadHeader | KvShape, fingerprint: str, namespace: str, regime: int, heads: str
) -> Provenance:
    return Provenance(
        fingerprint,
        dtype=shape.dtype,
        layout=LAYOUT,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        namespace=namespace,
        regime=regime,
        heads=heads,
    )


def store_payload(store: Store, payload: KvPayload, heads: str, *, cost: int | None = None) -> str:
    """Puts a payload into a store; its parts come to the host if they are not there.

    `cost`: FLOPs that its KV took, where they are known. Returns the shard's name. Errors as for
    `Store.put`.
    """
    tokens = payload.tokens.cpu().numpy()
    parts = {_HEADER: _header_text(payload), **_held_parts(payload)}
    return store.put(provenance_of(payload.header, heads), tokens, parts, cost=cost)[0]


def send_payload(store: RemoteStore, payload: KvPayload, heads: str) -> None:
    """As `store_payload`, to a store on another machine."""
    tokens = payload.tokens.cpu().numpy()
    held = _held_parts(payload).items()
    parts = {name: part.reshape(-1).view(torch.uint8).numpy() for name, part in held}
    store.put(
        provenance_of(payload.header, heads), tokens, {_HEADER: _header_text(payload), **parts}
    )


def _header_text(payload: KvPayload) -> bytes:
    return json.dumps(payload.header.to_json(), separators=(",", ":")).encode()


def _held_parts(payload: KvPayload) -> dict[str, torch.Tensor]:
    """A payload's parts but for its tokens, on the host."""
    held = payload.parts.items()
    return {name: part.detach().cpu().contiguous() for name, part in held if name != TOKENS}


def read_payload(shard: Shard | RemoteShard) -> KvPayload:
    """The payload in a shard; its parts lie on the host, K and V where direct reads may go.

    # Errors
    `CorruptShard` for a shard that holds none, or another than it says; `StoreUnavailable`.
    """
    header = header_of(shard)
    parts = {TOKENS: tokens_of(shard)}
    for name, (dtype, shape) in header.part_kinds().items():
        parts[name] = part_of(shard, name, shape, PART_DTYPES[dtype])
    return payload_of(header, parts)


def header_of(shard: Shard | RemoteShard) -> PayloadHeader:
    """The header of the payload in a shard.

    # Errors
    `CorruptShard` for a shard that holds none, or another than it says; `StoreUnavailable`.
    """
    try:
        header = PayloadHeader.from_json(parsed(_text(shard)))
    except CorruptPayload as error:
        raise CorruptShard(f"shard {error}") from error
    if provenance_of(header, shard.provenance.heads) != shard.provenance:
        raise CorruptShard("shard payload: expected one of the shard's model, got another")
    if header.packed is not None:
        raise CorruptShard("shard payload: expected exact pages alone, got packed ones")
    return header


def tokens_of(shard: Shard | RemoteShard) -> torch.Tensor:
    """The token ids of a shard, i32 [T]."""
    return torch.from_numpy(shard.tokens().astype(np.int32))


def payload_of(header: PayloadHeader, parts: dict[str, torch.Tensor]) -> KvPayload:
    """A payload of parts from a shard.

    # Errors
    `CorruptShard` for parts that are not what the header says.
    """
    try:
        return KvPayload(header, parts)
    except CorruptPayload as error:
        raise CorruptShard(f"shard {error}") from error


def _text(shard: Shard | RemoteShard) -> str:
    if _HEADER not in shard.parts:
        raise CorruptShard("shard parts: expected a payload, got none")
    try:
        return shard.read(_HEADER).decode()
    except UnicodeDecodeError as error:
        raise CorruptShard(f"shard payload: expected UTF-8, got {error.reason}") from error


def part_of(
    shard: Shard | RemoteShard, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A part in memory of its own, where direct reads may go; no more than the shard's file has.

    # Errors
    `CorruptShard` for a part of another size; `StoreUnavailable`.
    """
    if isinstance(shard, RemoteShard):
        _expect_size(shard, name, shape, dtype)
        return torch.from_numpy(shard.memory[name]).view(dtype).view(shape)
    held = memory_for(shard, name, shape, dtype)
    shard.read_into(name, held)
    return held.view(dtype).view(shape)


def memory_for(shard: Shard, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a part, u8 [bytes], where direct reads may go; no more than the file has.

    # Errors
    `CorruptShard` for a part of another size.
    """
    size = _expect_size(shard, name, shape, dtype)
    memory = torch.empty(size + _ALIGNED, dtype=torch.uint8)
    begin = -memory.data_ptr() % _ALIGNED
    return memory[begin : begin + size]


def _expect_size(
    shard: Shard | RemoteShard, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    got = shard.parts.get(name)
    if got != size:
        raise CorruptShard(f"shard part {name}: expected {size} bytes, got {got}")
    return size
