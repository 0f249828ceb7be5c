"""Bytes by head class: sessions that fit, and what a prefill machine sends a decode machine.

Nothing here is timed. Sessions are admitted for real by the allocator, in an arena without memory,
until one is refused; payloads are exported from requests in pages. *times* counts whole sessions,
*bytes ÷* divides what one of them takes or sends. One KV head in eight is full, the others keep a
window of 256 tokens and a sink of 16. RedKnot reports 4.7 to 7.8 times as many sessions, and 4.3 to
6.3 times fewer bytes sent (section 5.5).

One H200 leaves what 90 % of its memory is beside the weights: of Qwen3-32B in bf16, of
Llama-3.3-70B in eight bits, since sixteen would leave nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch

from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.cli.capacity_count import Sessions, count_sessions
from kvweave.cli.capacity_plan import ModelShape, capacity_of, shape_of
from kvweave.lab.bench.rows import Row, expect
from kvweave.payload import KvPayload, export_kv

PAGE, CHUNK = 16, 512
SINK, RECENT, HEADS_A_GLOBAL = 16, 256, 8
H200_BYTES = int(0.9 * 143_771 * 2**20)
ARENA_BYTES = 80 * 10**9

# What the design asks for.
LEAST_SESSIONS = {32768: 7.0}
LEAST_SAVING = 4.3


@dataclass(frozen=True)
class Model:
    """A model's preset, and the bytes of its weights on one H200."""

    name: str
    weights_bytes: int

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.name.lower())


MODELS = (Model("Qwen3-32B", 2 * 32_762_123_264), Model("Llama-3.3-70B", 70_553_706_496))


def run(quick: bool) -> list[Row]:
    models = MODELS[:1] if quick else MODELS
    rows = []
    for model in models:
        arenas = {"80 GB": ARENA_BYTES, "beside the weights": H200_BYTES - model.weights_bytes}
        for name, size in arenas.items():
            lengths = (32768,) if quick else (32768, 65536)
            rows += [sessions(model, name, size, length) for length in lengths]
    for model in models:
        rows += [payload(model, length) for length in ((2048,) if quick else (8192, 16384))]
    return rows


def eighth(shape: ModelShape) -> HeadClassMap:
    """One full head in eight; which one changes from layer to layer."""
    window = {"kind": "window", "sink": SINK, "recent": RECENT}
    heads = []
    for place in range(shape.layers * shape.kv_heads):
        layer, head = divmod(place, shape.kv_heads)
        is_full = (head - layer) % HEADS_A_GLOBAL == 0
        labels = {"reach": "global" if is_full else "local", "stability": "stable"}
        kind = {"kind": "full"} if is_full else window
        heads.append({"layer": layer, "head": head, "class": kind, **labels})
    made = {
        "schema_version": 1,
        "model_fingerprint": "head_memory",
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "heads": heads,
    }
    return HeadClassMap.from_json(json.dumps(made))


def sessions(model: Model, arena: str, size: int, length: int) -> Row:
    """Sessions with the map, beside those without it in the same memory."""
    shape = model.shape
    dense = count_sessions(shape, length, PAGE, size)
    mapped = count_sessions(shape, length, PAGE, size, eighth(shape), CHUNK)
    for name, found in (("dense", dense), ("with the map", mapped)):
        inside = 0 < found.fit * found.session_bytes <= size
        expect(inside, f"{model.name} {name}: expected sessions within {size} bytes, got {found}")
    beside = {
        "dense": dense.fit,
        "times": mapped.fit / dense.fit,
        "bytes ÷": dense.session_bytes / mapped.session_bytes,
        "MB": mapped.session_bytes / 1e6,
        "dense MB": dense.session_bytes / 1e6,
        "arena GB": size / 1e9,
        "filled": _filled(mapped, size),
    }
    if length in LEAST_SESSIONS:
        beside["limit"] = LEAST_SESSIONS[length]
    name = f"{model.name}, {length} tokens, {arena}"
    return Row(name, float(mapped.fit), "sessions", None, beside)


def _filled(found: Sessions, size: int) -> float:
    return found.fit * found.session_bytes / size


def payload(model: Model, length: int) -> Row:
    """Bytes that are sent for one request, beside all tokens of all heads."""
    sent = exported(model.shape, eighth(model.shape), length)
    few = exported(model.shape, None, 64)
    for what, header in (("dense", few), ("with the map", sent)):
        wanted, dense = header.sizes().total, header.header.dense_bytes
        right = wanted == dense if what == "dense" else wanted < dense
        expect(right, f"{model.name} {what}: expected {dense} bytes dense, got {wanted}")
    size, dense = len(sent.to_bytes()), sent.sizes().dense
    beside = {
        "bytes ÷": dense / size,
        "MB": size / 1e6,
        "dense MB": dense / 1e6,
        "limit": LEAST_SAVING,
    }
    name = f"{model.name}, payload of {length} tokens"
    return Row(name, size / 1e6, "MB", None, beside)


def exported(shape: ModelShape, heads: HeadClassMap | None, length: int) -> KvPayload:
    """The payload of a request prefilled in chunks; what its pages hold does not matter."""
    geometry = KvShape(shape.layers, shape.kv_heads, shape.head_dim, PAGE, shape.dtype)
    one = capacity_of(shape, length, PAGE, 1 << 40, heads).request_bytes
    windows = capacity_of(shape, CHUNK, PAGE, 1 << 40).request_bytes
    cache = KvCache(geometry, arena_bytes=int(1.2 * one) + 3 * windows, heads=heads)
    chunk = CHUNK if heads is not None else 0
    with cache.admit(np.zeros(length, np.int32), reuse="none", chunk_tokens=chunk) as request:
        for start in range(chunk, length, chunk) if chunk else ():
            request.advance(start, min(start + chunk, length))
        request.advance(length, length)
        return export_kv(cache, torch.from_dlpack(cache.arena), request)
